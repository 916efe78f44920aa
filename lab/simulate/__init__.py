"""The policy arena, `baton simulate`: traces replayed in virtual time, through this router's placement and others'.

    trace          lab.traces                                     requests, and which blocks their prompts share
    cluster        worker: the production engine, scheduler and block pool over `costs`
                   costs: of known GPUs, or what `baton bench` has measured
                   world: arrivals, decisions, steps, transfers and pulls, on one heap
    who decides    policy (what is seen, what is decided), production (router.placement), textbook and baselines
    what comes of  run (a process each), report, command

What it leaves out: that a real router's picture of the workers is a moment old, that the routers of others refuse
requests too, and that workers on one machine slow each other down, but for as much as they did when their costs were
measured. Calls between processes are one constant of `costs`. Nothing here is imported by what serves.
"""

__all__ = [
    "baselines",
    "command",
    "costs",
    "flight",
    "grid",
    "members",
    "options",
    "plot",
    "policy",
    "production",
    "report",
    "run",
    "scaler",
    "textbook",
    "worker",
    "world",
]
