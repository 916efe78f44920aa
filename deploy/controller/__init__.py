"""The controller: keeps the pools at their sizes, and takes orders to change them.

process           starts and ends it: `python -m deploy.controller`
controller        observes, reconciles, records decisions
reconcile         what to do, given the desired sizes and the workers; pure
state             the state that outlives the process, in a file
worker_life       starts, follows, drains and ends workers, which are actors of Ray (`deploy.ray_pools`)
lease_watch       exchanges leases and sizes with Redis
serving_pools     the sizes that ServingPools ask for
kubernetes_side   follows ServingPools and keeps worker nodes (`deploy.kubernetes`)
room              whether more workers fit where all of them are on one machine
orders            scale a pool, drain a worker, change a worker's role
service           the gRPC service on which routers pass orders on
"""

__all__ = [
    "controller",
    "kubernetes_side",
    "lease_watch",
    "orders",
    "process",
    "reconcile",
    "room",
    "service",
    "serving_pools",
    "state",
    "worker_life",
]
