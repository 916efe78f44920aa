"""The defaults of Kubernetes' own kinds that clients and controllers rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fakekube.store import Object

PODS: Object = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "terminationGracePeriodSeconds": 30,
    "schedulerName": "default-scheduler",
    "securityContext": {},
}
CONTAINERS: Object = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "resources": {},
}
PROBES: Object = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
ROLLING: Object = {"maxSurge": "25%", "maxUnavailable": "25%"}


def fill(value: Object) -> None:
    """Sets the defaults of an object of any of those kinds."""
    if value["kind"] in BY_KIND:
        BY_KIND[value["kind"]](value)
    for spec in pod_specs(value):
        _pod(spec)


def pod_specs(value: Object) -> Iterator[Object]:
    """The pods an object describes."""
    spec = value.get("spec") or {}
    if value["kind"] == "Pod":
        yield spec
    elif value["kind"] == "CronJob":
        yield from _template(spec.get("jobTemplate", {}).get("spec", {}))
    elif value["kind"] in ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job"):
        yield from _template(spec)


def _template(spec: Object) -> Iterator[Object]:
    template = spec.get("template") or {}
    if "spec" in template:
        yield template["spec"]


def _pod(spec: Object) -> None:
    _set(spec, PODS)
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        _set(container, CONTAINERS)
        image = container.get("image", "")
        latest = image.endswith(":latest") or (":" not in image.rpartition("/")[2] and "@" not in image)
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")
        for variable in container.get("env") or ():
            if reference := (variable.get("valueFrom") or {}).get("fieldRef"):
                reference.setdefault("apiVersion", "v1")
        _resources(container["resources"])
        for name in ("livenessProbe", "readinessProbe", "startupProbe"):
            if name in container:
                _set(container[name], PROBES)
                _probe(container[name])
        for hook in (container.get("lifecycle") or {}).values():
            if "httpGet" in hook:
                _set(hook["httpGet"], {"scheme": "HTTP", "path": "/"})
    for volume in spec.get("volumes") or ():
        for name in ("configMap", "secret", "projected", "downwardAPI"):
            if name in volume:
                volume[name].setdefault("defaultMode", 0o644)


def _probe(probe: Object) -> None:
    if "httpGet" in probe:
        _set(probe["httpGet"], {"scheme": "HTTP", "path": "/"})
    if "grpc" in probe:
        probe["grpc"].setdefault("service", "")


def _resources(resources: Object) -> None:
    """What is limited and not asked for is asked for. Quantities are text, also those that were written as numbers."""
    for name in ("limits", "requests"):
        if name in resources:
            resources[name] = {resource: str(quantity) for resource, quantity in resources[name].items()}
    if "limits" in resources:
        resources["requests"] = resources["limits"] | (resources.get("requests") or {})


def _deployment(value: Object) -> None:
    spec = value["spec"]
    _set(spec, {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600, "strategy": {}})
    strategy = spec["strategy"]
    strategy.setdefault("type", "RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        strategy["rollingUpdate"] = ROLLING | (strategy.get("rollingUpdate") or {})


def _replica_set(value: Object) -> None:
    value["spec"].setdefault("replicas", 1)


def _stateful_set(value: Object) -> None:
    spec = value["spec"]
    _set(spec, {"replicas": 1, "revisionHistoryLimit": 10, "podManagementPolicy": "OrderedReady", "updateStrategy": {}})
    spec["updateStrategy"].setdefault("type", "RollingUpdate")


def _job(value: Object) -> None:
    _set(value["spec"], {"backoffLimit": 6, "completions": 1, "parallelism": 1, "completionMode": "NonIndexed"})
    value["spec"].setdefault("suspend", False)


def _service(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(spec, {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"})
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        if "port" in port:
            port.setdefault("targetPort", port["port"])


def _secret(value: Object) -> None:
    value.setdefault("type", "Opaque")


def _claim(value: Object) -> None:
    value.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")


def _autoscaler(value: Object) -> None:
    value["spec"].setdefault("minReplicas", 1)


def _binding(value: Object) -> None:
    for subject in value.get("subjects") or ():
        if subject.get("kind") in ("User", "Group"):
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")


def _crd(value: Object) -> None:
    spec = value["spec"]
    spec.setdefault("conversion", {"strategy": "None"})
    names = spec.get("names") or {}
    if "kind" in names:
        _set(names, {"singular": names["kind"].lower(), "listKind": f"{names['kind']}List"})


BY_KIND: dict[str, Callable[[Object], None]] = {
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "StatefulSet": _stateful_set,
    "Job": _job,
    "Service": _service,
    "Secret": _secret,
    "PersistentVolumeClaim": _claim,
    "HorizontalPodAutoscaler": _autoscaler,
    "RoleBinding": _binding,
    "ClusterRoleBinding": _binding,
    "CustomResourceDefinition": _crd,
}


def _set(value: Object, defaults: Object) -> None:
    for name, default in defaults.items():
        value.setdefault(name, dict(default) if isinstance(default, dict) else default)
