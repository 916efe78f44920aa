"""The controller's access to Kubernetes, if the cluster runs in it. No other code calls its API.

    kubectl scale, HPA, KEDA ──> ServingPool.spec.replicas ──> pools ──> controller: desired sizes
    baton scale, autoscaler ───> orders ─> pools ─────┘          └────── ServingPool.status
    controller: workers and their pods ──> nodes ──> Deployment.spec.replicas, deletion costs of pods

serving_pool     the specification and the status of a ServingPool
definition       updates the CustomResourceDefinition of ServingPools; runs on its own
release_secrets  creates the Secrets of a release that are absent; runs on its own
pools            reads, follows and writes the ServingPools of both roles
node_plan        computes how many pods should be Ray nodes, if plain Deployments create them
nodes            reads and changes those Deployments
budgets          keeps the disruption budgets of pods that no Deployment creates
events           posts Events of ServingPools
"""

__all__ = ["budgets", "definition", "events", "node_plan", "nodes", "pools", "release_secrets", "serving_pool"]
