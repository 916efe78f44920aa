"""What the controller does where the cluster runs in Kubernetes. Nothing else talks to its API.

    kubectl scale, HPA, KEDA ──> ServingPool.spec.replicas ──> pools ──> controller: desired sizes
    baton scale, autoscaler ───> orders ─> pools ─────┘          └────── ServingPool.status
    controller: workers and their pods ──> nodes ──> Deployment.spec.replicas, and which pod is missed least

serving_pool  what a ServingPool says
pools         reads, follows and writes both of them
node_plan     how many pods there should be that are Ray nodes, where plain Deployments make them
nodes         has Kubernetes keep as many
"""
