"""Where a Service leads: values in, values out."""

from __future__ import annotations

from typing import NamedTuple

from tests.fakekube.machine.objects import (
    POD,
    digest,
    is_active,
    is_true,
    key_of,
    labels_of,
    matches,
    name_of,
    owner_reference,
)
from tests.fakekube.store import Object


class Endpoint(NamedTuple):
    """A pod behind a Service, and its port for each of the Service's, in their order."""

    pod: str
    ip: str
    ports: tuple[int, ...]


def endpoints(service: Object, pods: list[Object]) -> list[Endpoint]:
    """The ready pods of a Service. One that is being deleted is none, at once."""
    spec = service["spec"]
    chosen = {"matchLabels": spec["selector"]} if spec.get("selector") else None
    found = []
    for pod in pods:
        ip = (pod.get("status") or {}).get("podIP")
        is_ready = is_true(pod, "Ready") or spec.get("publishNotReadyAddresses", False)
        is_same = key_of(POD, pod).namespace == service["metadata"]["namespace"]
        if ip and is_same and is_active(pod) and is_ready and matches(chosen, labels_of(pod)):
            ports = [_target_port(port, pod) for port in spec.get("ports") or []]
            found.append(Endpoint(name_of(pod), ip, tuple(port for port in ports if port is not None)))
    return [endpoint for endpoint in found if len(endpoint.ports) == len(spec.get("ports") or [])]


def endpoints_object(service: Object, found: list[Endpoint]) -> Object:
    subsets = [
        {
            "addresses": [{"ip": e.ip, "targetRef": _reference(service, e)} for e in same],
            "ports": _numbered(service, ports),
        }
        for ports, same in _by_ports(found).items()
    ]
    return _object(service, "v1", "Endpoints", name_of(service)) | {"subsets": subsets}


def slices(service: Object, found: list[Endpoint]) -> list[Object]:
    """EndpointSlices: one for each set of port numbers; one that is empty where there is no endpoint."""
    made = []
    for ports, same in (_by_ports(found) or {(): []}).items():
        name = f"{name_of(service)}-{digest(ports, 5)}"
        value = _object(service, "discovery.k8s.io/v1", "EndpointSlice", name)
        value["metadata"]["labels"] = {"kubernetes.io/service-name": name_of(service)}
        ready = {"ready": True, "serving": True, "terminating": False}
        value |= {"addressType": "IPv4", "ports": _numbered(service, ports)}
        value["endpoints"] = [
            {"addresses": [e.ip], "conditions": ready, "targetRef": _reference(service, e)} for e in same
        ]
        made.append(value)
    return made


def _by_ports(found: list[Endpoint]) -> dict[tuple[int, ...], list[Endpoint]]:
    groups: dict[tuple[int, ...], list[Endpoint]] = {}
    for endpoint in found:
        groups.setdefault(endpoint.ports, []).append(endpoint)
    return groups


def _numbered(service: Object, ports: tuple[int, ...]) -> list[Object]:
    of_service = service["spec"].get("ports") or []
    return [
        {"name": port.get("name", ""), "port": number, "protocol": port.get("protocol", "TCP")}
        for port, number in zip(of_service, ports, strict=False)
    ]


def _target_port(port: Object, pod: Object) -> int | None:
    """None: the pod has no port of that name."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in [*pod["spec"].get("containers", []), *pod["spec"].get("initContainers", [])]:
        for of_container in container.get("ports") or []:
            if of_container.get("name") == target:
                return int(of_container["containerPort"])
    return None


def _reference(service: Object, endpoint: Endpoint) -> Object:
    return {"kind": "Pod", "name": endpoint.pod, "namespace": service["metadata"]["namespace"]}


def _object(service: Object, api_version: str, kind: str, name: str) -> Object:
    owner = owner_reference("v1", "Service", service)
    metadata = {"name": name, "namespace": service["metadata"]["namespace"], "ownerReferences": [owner]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
