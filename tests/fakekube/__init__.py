"""A Kubernetes of one process, for the chart's tests: no cluster, no root, no container.

    helm, kubectl, lightkube ──HTTP──> apiserver ──> Store <── machine: controllers, kubelet ──> processes

The clients are the real binaries and libraries. `Store` holds the objects; `apiserver` speaks the API and refuses what
a real one refuses; `machine` does what a cluster's controller manager, its scheduler and one kubelet do, with each
container a process on a loopback address of its own.

It knows nothing of Baton: what it imports is the standard library, kept libraries and itself. Its scope stands in
README.md.
"""
