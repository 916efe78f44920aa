"""The controller: keeps the pools at their desired sizes, and executes commands that change them.

process           starts and stops the controller: `python -m deploy.controller`
controller        observes, reconciles, records decisions
reconcile         computes the next actions from the desired sizes and the workers; pure
state             the persistent state, in a file
worker_life       starts, follows, drains and stops workers, which are Ray actors (`deploy.ray_pools`)
lease_watch       exchanges leases and sizes with Redis
serving_pools     the sizes requested by ServingPools
kubernetes_side   follows ServingPools and keeps worker nodes (`deploy.kubernetes`)
room              checks that more workers fit, if all workers are on one machine
orders            scale a pool, drain a worker, change a worker's role
service           the gRPC service through which routers forward commands
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
