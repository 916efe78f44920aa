"""Whether the only node takes a pod: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fakekube.machine.objects import GPU, is_active, labels_of, quantity
from tests.fakekube.store import Object


def why_not(pod: Object, node: Object, pods: Iterable[Object]) -> str:
    """Why a pod cannot run on the node beside those that do; empty: it can. Processor and memory are not counted."""
    labels = labels_of(node)
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    used = sum(num_gpus(other) for other in pods if other["spec"].get("nodeName") and is_active(other))
    if num_gpus(pod) and num_gpus(pod) + used > int(node["status"]["allocatable"].get(GPU, 0)):
        return f"0/1 nodes are available: 1 Insufficient {GPU}."
    return ""


def num_gpus(pod: Object) -> int:
    return sum(_num_gpus(container) for container in pod["spec"].get("containers") or [])


def _num_gpus(container: Object) -> int:
    resources = container.get("resources") or {}
    limits = (resources.get("requests") or {}) | (resources.get("limits") or {})
    return int(quantity(limits.get(GPU, 0)))
