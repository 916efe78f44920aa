"""Starts, places, scales, watches and operates the processes of a cluster. The code that serves is elsewhere.

cli          the `baton` command
operator     what an operator asks a running cluster, and how the answers are shown
controller   keeps the pools at their sizes; Ray (ray_pools) and Kubernetes (kubernetes) are its hands
scaling      the autoscaler: which sizes the load asks for
local        `baton up` and `baton run`: all the parts on one machine, or one of them
models       from a name to a model folder
doctor       checks of a machine and of a cluster
say          how commands write results
terminal     how commands write tables, progress and errors, which may hold others' words
"""

__all__ = [
    "cli",
    "controller",
    "doctor",
    "embedded_redis",
    "extras",
    "kubernetes",
    "local",
    "models",
    "operator",
    "processes",
    "ray_pools",
    "say",
    "scaling",
    "terminal",
]
