"""What becomes of a Deployment's ReplicaSets: values in, values out.

A rollout goes as in Kubernetes: the new set grows as far as maxSurge lets it, and each pod of it that is available lets
a pod of an old set go. (One difference: a Deployment scaled in the middle of a rollout grows in its new set alone.)
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from datetime import datetime

from tests.fakekube.machine.objects import (
    annotations_of,
    condition,
    digest,
    labels_of,
    name_of,
    new_condition,
    owner_reference,
    parsed,
)
from tests.fakekube.store import Object, now

HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
NOT_COPIED = ("kubectl.kubernetes.io/last-applied-configuration", REVISION)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one look at a Deployment leads to."""

    revision: int
    """Of its current ReplicaSet."""
    create: Object | None = None
    """A ReplicaSet, with no replicas yet."""
    replicas: dict[str, int] = field(default_factory=dict)
    """By ReplicaSet, where that changes."""
    delete: list[str] = field(default_factory=list)


def plan(deployment: Object, sets: list[Object], is_old_pod_left: bool) -> Rollout:
    """
    Args:
        sets: the Deployment's own.
        is_old_pod_left: some pod of an old set has not ended. Recreate waits for it.
    """
    current = current_set(deployment, sets)
    old = sorted((s for s in sets if s is not current), key=revision_of)
    newest_old = max((revision_of(s) for s in old), default=0)
    if current is None:
        if deployment["spec"].get("paused"):
            active = max((s for s in old if s["spec"]["replicas"]), key=revision_of, default=None)
            return Rollout(newest_old, replicas=_changes(active, _replicas(deployment)) if active else {})
        return Rollout(newest_old + 1, create=_new_set(deployment))
    recreate = (deployment["spec"].get("strategy") or {}).get("type") == "Recreate"
    replicas = _recreated(deployment, current, old, is_old_pod_left) if recreate else _rolled(deployment, current, old)
    keep = deployment["spec"].get("revisionHistoryLimit", 10)
    empty = [s for s in old if not s["spec"]["replicas"] and not (s.get("status") or {}).get("replicas")]
    delete = [name_of(s) for s in empty[: max(0, len(empty) - keep)]]
    return Rollout(max(revision_of(current), newest_old + 1), None, replicas, delete)


def current_set(deployment: Object, sets: list[Object]) -> Object | None:
    """The ReplicaSet with the Deployment's template."""
    wanted = digest(deployment["spec"]["template"])
    return next((s for s in sets if labels_of(s).get(HASH) == wanted), None)


def revision_of(replica_set: Object) -> int:
    return int(annotations_of(replica_set).get(REVISION, 0))


def copied_annotations(deployment: Object) -> dict[str, str]:
    """What a ReplicaSet has of its Deployment: `kubectl rollout history` reads the cause of a change there."""
    return {name: value for name, value in annotations_of(deployment).items() if name not in NOT_COPIED}


def status(deployment: Object, sets: list[Object], at: datetime) -> Object:
    """A Deployment's `status`."""
    current = current_set(deployment, sets)
    counted = {name: sum(_count(s, name) for s in sets) for name in ("replicas", "readyReplicas", "availableReplicas")}
    updated = _count(current, "replicas") if current else 0
    wanted = _replicas(deployment)
    found = {"observedGeneration": deployment["metadata"]["generation"]}
    found |= {name: count for name, count in (counted | {"updatedReplicas": updated}).items() if count}
    if missing := wanted - counted["availableReplicas"]:
        found["unavailableReplicas"] = max(0, missing)
    is_enough = counted["availableReplicas"] >= wanted - _limits(deployment)[1]
    available = new_condition(
        deployment,
        "Available",
        is_enough,
        "MinimumReplicasAvailable" if is_enough else "MinimumReplicasUnavailable",
        f"Deployment {'has' if is_enough else 'does not have'} minimum availability.",
    )
    is_complete = current is not None and updated == wanted == counted["replicas"] == counted["availableReplicas"]
    old = deployment.get("status") or {}
    has_moved = any(old.get(name, 0) != found.get(name, 0) for name in (*counted, "updatedReplicas"))
    has_moved |= old.get("observedGeneration") != found["observedGeneration"]
    progressing = _progressing(deployment, is_complete, has_moved, at)
    return found | {"conditions": [available | {"lastUpdateTime": available["lastTransitionTime"]}, progressing]}


def _progressing(deployment: Object, is_complete: bool, has_moved: bool, at: datetime) -> Object:
    old = condition(deployment, "Progressing")
    last_moved = now() if old is None or has_moved else old["lastUpdateTime"]
    deadline_s = deployment["spec"].get("progressDeadlineSeconds", 600)
    is_late = not is_complete and (at - parsed(last_moved)).total_seconds() > deadline_s
    reason = "NewReplicaSetAvailable" if is_complete else "ReplicaSetUpdated"
    if is_late:
        reason = "ProgressDeadlineExceeded"
    return new_condition(deployment, "Progressing", not is_late, reason, reason) | {"lastUpdateTime": last_moved}


def _new_set(deployment: Object) -> Object:
    template = copy.deepcopy(deployment["spec"]["template"])
    digested = digest(template)
    labels = (template.setdefault("metadata", {}).get("labels") or {}) | {HASH: digested}
    template["metadata"]["labels"] = labels
    selector = copy.deepcopy(deployment["spec"]["selector"])
    selector["matchLabels"] = (selector.get("matchLabels") or {}) | {HASH: digested}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{name_of(deployment)}-{digested}",
            "namespace": deployment["metadata"]["namespace"],
            "labels": labels,
            "ownerReferences": [owner_reference("apps/v1", "Deployment", deployment)],
        },
        "spec": {
            "replicas": 0,
            "selector": selector,
            "template": template,
            "minReadySeconds": deployment["spec"].get("minReadySeconds", 0),
        },
    }


def _recreated(deployment: Object, current: Object, old: list[Object], is_old_pod_left: bool) -> dict[str, int]:
    if stopping := {name_of(s): 0 for s in old if s["spec"]["replicas"]}:
        return stopping
    return {} if is_old_pod_left else _changes(current, _replicas(deployment))


def _rolled(deployment: Object, current: Object, old: list[Object]) -> dict[str, int]:
    """One step of a rolling update: either the new set's, or the old sets'."""
    wanted = _replicas(deployment)
    max_surge, max_unavailable = _limits(deployment)
    num_all = sum(s["spec"]["replicas"] for s in [current, *old])
    num_new = current["spec"]["replicas"]
    if num_new > wanted:
        return _changes(current, wanted)
    if grow := max(0, min(wanted + max_surge - num_all, wanted - num_new)):
        return _changes(current, num_new + grow)
    min_available = wanted - max_unavailable
    num_new_unavailable = num_new - _count(current, "availableReplicas")
    spare = num_all - min_available - num_new_unavailable
    return _shrunk(old, spare, sum(_count(s, "availableReplicas") for s in [current, *old]) - min_available)


def _shrunk(old: list[Object], spare: int, spare_available: int) -> dict[str, int]:
    """The old sets' replicas: first what is not available goes, `spare` at most, then what is, oldest set first."""
    left = {name_of(s): int(s["spec"]["replicas"]) for s in old}
    for replica_set in old:
        broken = max(0, min(left[name_of(replica_set)] - _count(replica_set, "availableReplicas"), spare))
        left[name_of(replica_set)] -= broken
        spare -= broken
    for name in left:
        gone = max(0, min(left[name], spare, spare_available))
        left[name] -= gone
        spare -= gone
        spare_available -= gone
    return {name_of(s): left[name_of(s)] for s in old if left[name_of(s)] != s["spec"]["replicas"]}


def _limits(deployment: Object) -> tuple[int, int]:
    """maxSurge (rounded up) and maxUnavailable (down) as counts; never both 0."""
    strategy = deployment["spec"].get("strategy") or {}
    wanted = _replicas(deployment)
    if strategy.get("type") == "Recreate":
        return 0, 0
    rolling = strategy.get("rollingUpdate") or {}
    max_surge = rounded_up(rolling.get("maxSurge", "25%"), wanted)
    max_unavailable = math.floor(_absolute(rolling.get("maxUnavailable", "25%"), wanted))
    return (max_surge, max_unavailable) if max_surge or max_unavailable else (0, 1)


def rounded_up(limit: int | str, total: int) -> int:
    """A count, or a share in percent."""
    return math.ceil(_absolute(limit, total))


def _absolute(limit: int | str, total: int) -> float:
    return int(limit[:-1]) * total / 100 if isinstance(limit, str) else limit


def _replicas(deployment: Object) -> int:
    return int(deployment["spec"].get("replicas", 1))


def _changes(replica_set: Object, replicas: int) -> dict[str, int]:
    return {} if replica_set["spec"]["replicas"] == replicas else {name_of(replica_set): replicas}


def _count(replica_set: Object, name: str) -> int:
    return int((replica_set.get("status") or {}).get(name, 0))
