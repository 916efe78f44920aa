"""What Kubernetes refuses in objects beyond their types: names, labels, sizes, and what must fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tests.fakekube.defaults import pod_specs
from tests.fakekube.fields import at
from tests.fakekube.kinds import CRDS, Kind
from tests.fakekube.selectors import selector_matches
from tests.fakekube.status import Cause
from tests.fakekube.store import Object

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUALIFIED = re.compile(rf"({SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
DATA_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
MAX_DATA_BYTES = 1 << 20
MAX_ANNOTATIONS_BYTES = 256 << 10

ENUMS: dict[str, tuple[str, ...]] = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "protocol": ("SCTP", "TCP", "UDP"),
    "terminationMessagePolicy": ("FallbackToLogsOnError", "File"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
}
IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "ReplicaSet": ("spec.selector",),
    "DaemonSet": ("spec.selector",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.volumeClaimTemplates", "spec.podManagementPolicy"),
    "Job": ("spec.selector", "spec.template", "spec.completions"),
    "Service": ("spec.clusterIP",),
    "Secret": ("type",),
    "RoleBinding": ("roleRef",),
    "ClusterRoleBinding": ("roleRef",),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeMode"),
    "CustomResourceDefinition": ("spec.group", "spec.names.plural", "spec.scope"),
}
QUANTITY = re.compile(r"(?P<number>[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)(?P<suffix>[numkMGTPE]|[KMGTPE]i|)")
SCALES = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1), "k": Decimal(1000)}
SCALES |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", 2)}
SCALES |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}


def broken(kind: Kind, value: Object) -> list[Cause]:
    """Every rule that the object breaks."""
    causes = [*_metadata(kind, value["metadata"]), *_pods(value)]
    if kind.resource == CRDS:
        causes += _crd(value)
    elif not kind.custom:
        causes += CHECKS[kind.name](value) if kind.name in CHECKS else ()
    return causes


def changed(kind: Kind, old: Object, new: Object) -> list[Cause]:
    """What may not change and has."""
    causes = [
        _invalid(path, at(new, path), "field is immutable")
        for path in IMMUTABLE.get("" if kind.custom else kind.name, ())
        if at(old, path) not in (None, at(new, path))
    ]
    if old.get("immutable") and kind.name in ("ConfigMap", "Secret"):
        fields = ("data", "binaryData", "immutable")
        causes += [
            ("FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set", field)
            for field in fields
            if old.get(field) != new.get(field)
        ]
    return causes


def quantity(text: str | float) -> Decimal:
    """Raises ValueError."""
    parts = QUANTITY.fullmatch(str(text))
    if parts is None:
        raise ValueError(f"quantities must match the regular expression of Kubernetes: {text!r}")
    return Decimal(parts["number"]) * SCALES[parts["suffix"]]


def _metadata(kind: Kind, metadata: Object) -> Iterator[Cause]:
    name = metadata.get("name", "")
    if kind.resource.group == "rbac.authorization.k8s.io":
        if name in (".", "..") or set("/%") & set(name):
            yield _invalid("metadata.name", name, "may not contain '/' or '%'")
    elif kind.name == "Service" and not kind.custom:
        if not SERVICE.fullmatch(name) or len(name) > 63:
            yield _invalid("metadata.name", name, "a DNS-1035 label must consist of lower case alphanumeric characters")
    elif kind.name == "Namespace" and not kind.custom:
        if not LABEL.fullmatch(name) or len(name) > 63:
            yield _invalid("metadata.name", name, "a lowercase RFC 1123 label must consist of lower case characters")
    elif not SUBDOMAIN.fullmatch(name) or len(name) > 253:
        said = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        yield _invalid("metadata.name", name, said)
    yield from _labels(metadata.get("labels") or {}, "metadata.labels")
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not QUALIFIED.fullmatch(key.lower()):
            yield _invalid("metadata.annotations", key, "name part must consist of alphanumeric characters")
    if sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        yield _too_long("metadata.annotations", MAX_ANNOTATIONS_BYTES)


def _labels(labels: dict[str, str], path: str) -> Iterator[Cause]:
    for key, text in labels.items():
        if not QUALIFIED.fullmatch(key):
            yield _invalid(path, key, "name part must consist of alphanumeric characters, '-', '_' or '.'")
        if not LABEL_VALUE.fullmatch(text):
            yield _invalid(path, text, "a valid label must be an empty string or at most 63 alphanumeric characters")


def _pods(value: Object) -> Iterator[Cause]:
    path = {"Pod": "spec", "CronJob": "spec.jobTemplate.spec.template.spec"}.get(value["kind"], "spec.template.spec")
    for spec in pod_specs(value):
        yield from _pod(spec, path)


def _pod(spec: Object, path: str) -> Iterator[Cause]:
    if not spec.get("containers"):
        yield _required(f"{path}.containers")
    if spec.get("restartPolicy") not in ("Always", "OnFailure", "Never"):
        yield _unsupported(f"{path}.restartPolicy", spec.get("restartPolicy"), ("Always", "OnFailure", "Never"))
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _duplicates(volumes, f"{path}.volumes", "name")
    groups = [(group, spec.get(group) or []) for group in ("initContainers", "containers")]
    yield from _duplicates([c["name"] for _, group in groups for c in group], f"{path}.containers", "name")
    for group, containers in groups:
        for index, container in enumerate(containers):
            yield from _container(container, volumes, f"{path}.{group}[{index}]")
    yield from _enums(spec, path)


def _container(container: Object, volumes: list[str], path: str) -> Iterator[Cause]:
    if not LABEL.fullmatch(container["name"]) or len(container["name"]) > 63:
        yield _invalid(f"{path}.name", container["name"], "a lowercase RFC 1123 label must consist of lower case")
    if not container.get("image"):
        yield _required(f"{path}.image")
    mounts = container.get("volumeMounts") or []
    for index, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield ("FieldValueNotFound", f'Not found: "{mount["name"]}"', f"{path}.volumeMounts[{index}].name")
    yield from _duplicates([mount["mountPath"] for mount in mounts], f"{path}.volumeMounts", "mountPath")
    ports = container.get("ports") or []
    for index, port in enumerate(ports):
        yield from _port(port, "containerPort", f"{path}.ports[{index}]")
    yield from _duplicates([port["name"] for port in ports if "name" in port], f"{path}.ports", "name")
    for index, variable in enumerate(container.get("env") or ()):
        if not variable["name"]:
            yield _required(f"{path}.env[{index}].name")
        if variable.get("value") and variable.get("valueFrom"):
            yield _invalid(f"{path}.env[{index}].valueFrom", "", "may not be specified when `value` is not empty")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in container and len({"exec", "httpGet", "tcpSocket", "grpc"} & set(container[name])) != 1:
            yield ("FieldValueRequired", "Required value: must specify one handler type", f"{path}.{name}")
    yield from _resources(container.get("resources") or {}, f"{path}.resources")


def _resources(resources: Object, path: str) -> Iterator[Cause]:
    limits = resources.get("limits") or {}
    for group in ("limits", "requests"):
        for name, amount in (resources.get(group) or {}).items():
            try:
                if group == "requests" and name in limits and quantity(amount) > quantity(limits[name]):
                    yield _invalid(f"{path}.requests", amount, f"must be less than or equal to {name} limit")
                quantity(amount)
            except ValueError as error:
                yield _invalid(f"{path}.{group}.{name}", amount, str(error))


def _port(port: Object, number: str, path: str) -> Iterator[Cause]:
    if not 0 < port[number] < 65536:
        yield _invalid(f"{path}.{number}", port[number], "must be between 1 and 65535, inclusive")
    if "name" in port and not PORT_NAME.fullmatch(port["name"]):
        yield _invalid(f"{path}.name", port["name"], "must be no more than 15 characters: a-z, 0-9 and '-'")


def _enums(value: Any, path: str) -> Iterator[Cause]:
    if isinstance(value, dict):
        for name, part in value.items():
            if name in ENUMS and isinstance(part, str) and part not in ENUMS[name]:
                yield _unsupported(f"{path}.{name}", part, ENUMS[name])
            else:
                yield from _enums(part, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _enums(item, f"{path}[{index}]")


def _workload(value: Object) -> Iterator[Cause]:
    spec = value["spec"]
    labels = spec["template"].get("metadata", {}).get("labels") or {}
    selector = spec.get("selector") or {}
    yield from _labels(labels, "spec.template.metadata.labels")
    if not selector:
        yield _required("spec.selector")
    elif not selector_matches(selector, labels):
        yield _invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    if spec.get("replicas", 0) < 0:
        yield _invalid("spec.replicas", spec["replicas"], "must be greater than or equal to 0")
    strategy = spec.get("strategy") or {}
    if strategy.get("type") == "Recreate" and "rollingUpdate" in strategy:
        said = "Forbidden: may not be specified when strategy `type` is 'Recreate'"
        yield ("FieldValueForbidden", said, "spec.strategy.rollingUpdate")
    rolling = strategy.get("rollingUpdate") or {}
    if rolling and str(rolling["maxSurge"]).rstrip("%") == str(rolling["maxUnavailable"]).rstrip("%") == "0":
        yield _invalid("spec.strategy.rollingUpdate.maxUnavailable", 0, "may not be 0 when `maxSurge` is 0")


def _service(value: Object) -> Iterator[Cause]:
    spec = value["spec"]
    ports = spec.get("ports") or []
    if not ports and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        yield _required("spec.ports")
    for index, port in enumerate(ports):
        if len(ports) > 1 and "name" not in port:
            yield _required(f"spec.ports[{index}].name")
        yield from _port(port, "port", f"spec.ports[{index}]")
    yield from _duplicates([port["name"] for port in ports if "name" in port], "spec.ports", "name")
    types = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
    if spec["type"] not in types:
        yield _unsupported("spec.type", spec["type"], types)


def _data(value: Object) -> Iterator[Cause]:
    parts = {**(value.get("data") or {}), **(value.get("binaryData") or {})}
    for key in parts:
        if not DATA_KEY.fullmatch(key):
            yield _invalid(f"data[{key}]", key, "a valid config key must consist of alphanumeric characters")
    if value["kind"] == "Secret":  # base64: 4 characters hold 3 bytes
        size = sum(len(text) * 3 // 4 - text[-2:].count("=") for text in parts.values())
    else:
        size = sum(len(text.encode()) for text in parts.values())
    if size > MAX_DATA_BYTES:
        yield _too_long("data", MAX_DATA_BYTES)


def _autoscaler(value: Object) -> Iterator[Cause]:
    spec = value["spec"]
    if spec["maxReplicas"] < spec["minReplicas"]:
        said = "must be greater than or equal to `minReplicas`"
        yield _invalid("spec.maxReplicas", spec["maxReplicas"], said)


def _budget(value: Object) -> Iterator[Cause]:
    if len({"minAvailable", "maxUnavailable"} & set(value.get("spec") or ())) == 2:
        yield _invalid("spec", "", "minAvailable and maxUnavailable cannot be both set")


def _claim(value: Object) -> Iterator[Cause]:
    if not value["spec"].get("accessModes"):
        yield _required("spec.accessModes")
    if not at(value, "spec.resources.requests.storage"):
        yield _required("spec.resources[storage]")


def _crd(value: Object) -> Iterator[Cause]:
    spec = value["spec"]
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if value["metadata"]["name"] != wanted:
        said = f'must be spec.names.plural+"."+spec.group: {wanted}'
        yield _invalid("metadata.name", value["metadata"]["name"], said)
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        yield _invalid("spec.versions", "", "must have exactly one version marked as storage version")
    for index, version in enumerate(spec["versions"]):
        if "schema" not in version:
            yield ("FieldValueRequired", "Required value: schemas are required", f"spec.versions[{index}].schema")


CHECKS = {
    **dict.fromkeys(("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"), _workload),
    **dict.fromkeys(("ConfigMap", "Secret"), _data),
    "Service": _service,
    "HorizontalPodAutoscaler": _autoscaler,
    "PodDisruptionBudget": _budget,
    "PersistentVolumeClaim": _claim,
}


def _duplicates(names: list[str], path: str, field: str) -> Iterator[Cause]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield ("FieldValueDuplicate", f'Duplicate value: "{name}"', f"{path}[{index}].{field}")


def _invalid(path: str, value: Any, why: str) -> Cause:
    return ("FieldValueInvalid", f"Invalid value: {value!r}: {why}", path)


def _unsupported(path: str, value: Any, values: tuple[str, ...]) -> Cause:
    supported = ", ".join(f'"{one}"' for one in values)
    return ("FieldValueNotSupported", f'Unsupported value: "{value}": supported values: {supported}', path)


def _required(path: str) -> Cause:
    return ("FieldValueRequired", "Required value", path)


def _too_long(path: str, limit: int) -> Cause:
    return ("FieldValueTooLong", f"Too long: may not be more than {limit} bytes", path)
