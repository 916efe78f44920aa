"""The policy arena, `baton simulate`: traces replayed in virtual time, through this router's placement and others'.

    trace          trace_files, generator -> Trace -> trace_shape        requests, and which blocks their prompts share
    cluster        worker: the production engine, scheduler and block pool over `costs`
                   world: arrivals, decisions, steps, transfers and pulls, on one heap
    who decides    policy (what is seen, what is decided), production (router.placement), textbook and baselines
    what comes of  run (a process each), report, command

What it leaves out: the network between router and workers, refusals, and that a real router's picture of the workers is
a moment old. Nothing here is imported by what serves.
"""
