"""The controller: keeps the pools at their desired sizes, and executes commands that change them.

process           starts and stops the controller: `python -m deploy.controller`
controller        observes, reconciles, records decisions
reconcile         computes the next actions from the desired sizes and the workers; pure
state             the persistent state, in a file
worker_life       starts, follows, drains and stops workers, which are Ray actors (`deploy.ray_pools`)
lease_watch       exchanges leases and sizes with Redis
announcement      announces the model to the routers of its endpoint
model_copy        copies the model's files, for routers that start while it sleeps
claim             ensures that no other cluster serves the same model in the same Redis
sleeping          transitions of a model that sleeps and wakes; pure
serving_pools     the sizes requested by ServingPools
kubernetes_side   follows ServingPools and keeps worker nodes (`deploy.kubernetes`)
room              checks that more workers fit, if all workers are on one machine
orders            scale a pool, drain a worker, change a worker's role, wake the model
service           the gRPC service through which routers forward commands
"""

__all__ = [
    "announcement",
    "claim",
    "controller",
    "kubernetes_side",
    "lease_watch",
    "model_copy",
    "orders",
    "process",
    "reconcile",
    "room",
    "service",
    "serving_pools",
    "sleeping",
    "state",
    "worker_life",
]
