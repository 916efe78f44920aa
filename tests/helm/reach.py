"""Who reaches whom, by the rendered NetworkPolicies: what a cluster's network makes of them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import NamedTuple

from tests.helm.chart import NAMESPACE, Object, Pod, of_kind, selects

POD_ADDRESS = "10.244.3.7"
"""The address of every pod: no policy of the chart tells two of them apart by it."""


def labels_of(namespace: str) -> dict[str, str]:
    """Labels that Kubernetes gives a namespace."""
    return {"kubernetes.io/metadata.name": namespace}


class Place(NamedTuple):
    """One end of a connection: a pod of the release, of another namespace, or a machine."""

    address: str = POD_ADDRESS
    labels: dict[str, str] | None = None
    """None: no pod."""
    namespace: dict[str, str] = labels_of(NAMESPACE)
    """Labels of its namespace."""
    ports: dict[str, int] = {}  # noqa: RUF012
    """The ports of its containers, by name."""


def place_of(pod: Pod, namespace: str = NAMESPACE) -> Place:
    ports = {port["name"]: port["containerPort"] for container in pod.serving for port in container.get("ports", [])}
    return Place(labels=pod.labels, namespace=labels_of(namespace), ports=ports)


def reaches(objects: tuple[Object, ...], source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection from one place to a port of the other is let out and admitted."""
    return is_let_out(objects, source, target, port, protocol) and is_admitted(objects, source, target, port, protocol)


def is_let_out(objects: tuple[Object, ...], source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies of the source let the connection pass."""
    rules = _rules(objects, source, "Egress")
    return rules is None or any(
        _is_one_of(target, rule.get("to"), source) and _has_port(rule.get("ports"), target, port, protocol)
        for rule in rules
    )


def is_admitted(objects: tuple[Object, ...], source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies of the target let the connection pass."""
    rules = _rules(objects, target, "Ingress")
    return rules is None or any(
        _is_one_of(source, rule.get("from"), target) and _has_port(rule.get("ports"), target, port, protocol)
        for rule in rules
    )


def _rules(objects: tuple[Object, ...], place: Place, way: str) -> list[Object] | None:
    """The rules for a place; None: nothing closes it."""
    closing = [policy["spec"] for policy in _policies_of(objects, place) if way in policy["spec"]["policyTypes"]]
    return [rule for spec in closing for rule in spec.get(way.lower()) or []] if closing else None


def _policies_of(objects: tuple[Object, ...], place: Place) -> Iterator[Object]:
    if place.labels is not None:
        for policy in of_kind(objects, "NetworkPolicy"):
            is_here = labels_of(policy["metadata"]["namespace"]) == place.namespace
            if is_here and selects(policy["spec"]["podSelector"], place.labels):
                yield policy


def _is_one_of(place: Place, peers: list[Object] | None, subject: Place) -> bool:
    return peers is None or any(_is(place, peer, subject) for peer in peers)


def _is(place: Place, peer: Object, subject: Place) -> bool:
    """Whether a place is the peer in a policy of the subject's namespace."""
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(place.address)
        inside = [ipaddress.ip_network(each) for each in block.get("except", [])]
        return address in ipaddress.ip_network(block["cidr"]) and not any(address in each for each in inside)
    if place.labels is None or not selects(peer.get("podSelector", {}), place.labels):
        return False
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], place.namespace)
    return place.namespace == subject.namespace


def _has_port(ports: list[Object] | None, target: Place, port: int, protocol: str) -> bool:
    return not ports or any(each.get("protocol", "TCP") == protocol and _matches(each, target, port) for each in ports)


def _matches(rule: Object, target: Place, port: int) -> bool:
    if "port" not in rule:
        return True
    if isinstance(rule["port"], str):
        return target.ports.get(rule["port"]) == port
    first = int(rule["port"])
    return first <= port <= int(rule.get("endPort") or first)
