"""Objects as the rows `kubectl get` prints."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.fakekube.fields import at
from tests.fakekube.kinds import Column, Kind
from tests.fakekube.store import Object

Cell = Callable[[Object], Any]


def table(kind: Kind, objects: list[Object], version: str) -> Object:
    """A `Table` of meta.k8s.io/v1."""
    columns = [Column(name="Name", path=".metadata.name"), *kind.columns]
    cells: list[Cell] = [_cell(column) for column in columns]
    if not kind.custom:
        rows = BUILTIN.get(kind.name, [])
        columns = [columns[0], *(Column(name=name, path="", priority=priority) for name, priority, _ in rows), AGE]
        cells = [cells[0], *(cell for _, _, cell in rows), _cell(AGE)]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [
            {
                "name": column.name,
                "type": column.type,
                "format": "name" if column.name == "Name" else "",
                "description": column.description,
                "priority": column.priority,
            }
            for column in columns
        ],
        "rows": [{"cells": [cell(value) for cell in cells], "object": value} for value in objects],
    }


AGE = Column(name="Age", path=".metadata.creationTimestamp", type="date")


def _cell(column: Column) -> Cell:
    def cell(value: Object) -> Any:
        found = at(value, column.path)
        if column.type == "date" and found is not None:
            return age((datetime.now(UTC) - datetime.fromisoformat(found)).total_seconds())
        return found

    return cell


def age(seconds: float) -> str:
    """As kubectl writes durations: two units where the first alone would be coarse."""
    left = max(int(seconds), 0)
    minutes, hours, days = left // 60, left // 3600, left // 86400
    if left < 120:
        return f"{left}s"
    if minutes < 10:
        return f"{minutes}m{left % 60}s" if left % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


def _path(path: str, default: Any = "") -> Cell:
    def cell(value: Object) -> Any:
        found = at(value, path)
        return default if found is None else found

    return cell


def _ready(ready: str, wanted: str) -> Cell:
    return lambda value: f"{at(value, ready) or 0}/{at(value, wanted) or 0}"


def _containers(pod: Object) -> str:
    statuses = at(pod, ".status.containerStatuses") or []
    return f"{sum(bool(one.get('ready')) for one in statuses)}/{len(pod['spec'].get('containers') or ())}"


def _phase(pod: Object) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    for status in at(pod, ".status.containerStatuses") or ():
        state = status.get("state") or {}
        reason = (state.get("waiting") or state.get("terminated") or {}).get("reason")
        if reason:
            return str(reason)
    return str(at(pod, ".status.phase") or "Unknown")


def _restarts(pod: Object) -> int:
    return sum(one.get("restartCount", 0) for one in at(pod, ".status.containerStatuses") or ())


def _ports(service: Object) -> str:
    return ",".join(f"{port['port']}/{port['protocol']}" for port in service["spec"].get("ports") or ()) or "<none>"


def _data(value: Object) -> int:
    return len(value.get("data") or {}) + len(value.get("binaryData") or {})


BUILTIN: dict[str, list[tuple[str, int, Cell]]] = {
    "Pod": [
        ("Ready", 0, _containers),
        ("Status", 0, _phase),
        ("Restarts", 0, _restarts),
        ("IP", 1, _path(".status.podIP", "<none>")),
        ("Node", 1, _path(".spec.nodeName", "<none>")),
    ],
    "Deployment": [
        ("Ready", 0, _ready(".status.readyReplicas", ".spec.replicas")),
        ("Up-to-date", 0, _path(".status.updatedReplicas", 0)),
        ("Available", 0, _path(".status.availableReplicas", 0)),
    ],
    "ReplicaSet": [
        ("Desired", 0, _path(".spec.replicas", 0)),
        ("Current", 0, _path(".status.replicas", 0)),
        ("Ready", 0, _path(".status.readyReplicas", 0)),
    ],
    "StatefulSet": [("Ready", 0, _ready(".status.readyReplicas", ".spec.replicas"))],
    "Service": [
        ("Type", 0, _path(".spec.type")),
        ("Cluster-IP", 0, _path(".spec.clusterIP", "<none>")),
        ("Port(s)", 0, _ports),
    ],
    "ConfigMap": [("Data", 0, _data)],
    "Secret": [("Type", 0, _path(".type")), ("Data", 0, _data)],
    "Namespace": [("Status", 0, _path(".status.phase"))],
    "PersistentVolumeClaim": [("Status", 0, _path(".status.phase")), ("Volume", 0, _path(".spec.volumeName"))],
    "HorizontalPodAutoscaler": [
        ("Reference", 0, _path(".spec.scaleTargetRef.name")),
        ("MinPods", 0, _path(".spec.minReplicas")),
        ("MaxPods", 0, _path(".spec.maxReplicas")),
        ("Replicas", 0, _path(".status.currentReplicas", 0)),
    ],
}
