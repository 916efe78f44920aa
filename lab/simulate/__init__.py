"""Policy arena, `baton simulate`: replays traces in virtual time with this router's placement and those of others.

    trace          lab.traces                                     requests, and which blocks their prompts share
    cluster        worker: the production engine, scheduler and block pool over `costs`
                   costs: of known GPUs, or what `baton bench` has measured
                   clock: a heap of future events
                   world: arrivals, steps and changes of the pools
                   driver: each request through the router's state machine (router.serve.machine), on these workers
                   flight: the state of a request
                   views: what a policy sees of the workers of a large pool
    policies       policy (inputs and decisions), production (router.placement), textbook and baselines
    results        run (one process per run), report, command

The simulation does not model four effects: a real router's view of the workers is slightly old, other projects' routers
also reject requests, workers on one machine slow each other down beyond what the measured costs include, and a worker
that leaves continues to decode while most of the KV is pulled.
Calls between processes have one constant cost in `costs`. No serving code imports this package.
"""

__all__ = [
    "baselines",
    "clock",
    "command",
    "costs",
    "driver",
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
    "views",
    "worker",
    "world",
]
