"""The controller: keeps the pools as they should be, and takes orders to change them.

state       what should be, in a file of its own: it outlives this process
reconcile   from what should be and what is to what has to be done; pure
controller  observes, reconciles, acts; workers are actors of Ray (`deploy.ray_pools`)
kubernetes_side  ServingPools and worker nodes (`deploy.kubernetes`), as the controller runs them
orders      scale a pool, drain a worker, change a worker's role
__main__    the process, and the gRPC service on which routers pass orders on
"""
