"""The controller's access to Kubernetes, where the cluster runs in it. No other code calls its API.

    kubectl scale, HPA, KEDA ──> ServingPool.spec.replicas ──> pools ──> controller: desired sizes
    baton scale, autoscaler ───> orders ─> pools ─────┘          └────── ServingPool.status
    controller: workers and their pods ──> nodes ──> Deployment.spec.replicas, and which pod is missed least

serving_pool  the specification and the status of a ServingPool
definition    brings the definition of ServingPools up to date, by itself
pools         reads, follows and writes the ServingPools of both roles
node_plan     how many pods should be Ray nodes, where plain Deployments make them
nodes         reads and changes those Deployments
"""

__all__ = ["definition", "node_plan", "nodes", "pools", "serving_pool"]
