"""Which pods a ReplicaSet or a Job wants and which it can do without: values in, values out."""

from __future__ import annotations

import copy
import random
from datetime import datetime

from tests.fakekube.machine.objects import (
    annotations_of,
    condition,
    is_active,
    is_available,
    is_true,
    labels_of,
    matches,
    name_of,
    new_condition,
    owner_reference,
    parsed,
    phase_of,
)
from tests.fakekube.store import Object, now

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
"""The letters of random names: no vowels, no look-alikes."""


def num_missing(replica_set: Object, pods: list[Object]) -> int:
    """How many more active pods there should be; negative: fewer."""
    return int(replica_set["spec"].get("replicas", 1)) - sum(is_active(pod) for pod in pods)


def victims(pods: list[Object], count: int) -> list[Object]:
    """The pods to do without, in Kubernetes' order.

    Those not assigned, not running and not ready go first; then the lowest deletion cost, the shortest time ready, the
    most restarts and the youngest.
    """
    return sorted(filter(is_active, pods), key=_worth)[:count]


def status(replica_set: Object, pods: list[Object], at: datetime) -> Object:
    """A ReplicaSet's `status`."""
    active = [pod for pod in pods if is_active(pod)]
    ready = [pod for pod in active if is_true(pod, "Ready")]
    min_ready_s = replica_set["spec"].get("minReadySeconds", 0)
    labels = labels_of(replica_set["spec"]["template"])
    counts = {
        "readyReplicas": len(ready),
        "availableReplicas": sum(is_available(pod, min_ready_s, at) for pod in active),
        "fullyLabeledReplicas": sum(matches({"matchLabels": labels}, labels_of(pod)) for pod in active),
    }
    found: Object = {"replicas": len(active), "observedGeneration": replica_set["metadata"]["generation"]}
    return found | {name: count for name, count in counts.items() if count}


def pod_from(owner: Object, api_version: str, kind: str, rng: random.Random) -> Object:
    """A pod of an owner's template."""
    template = copy.deepcopy(owner["spec"]["template"])
    prefix = f"{name_of(owner)}-"
    metadata = {
        "name": prefix + "".join(rng.choices(SUFFIX, k=5)),
        "generateName": prefix,
        "namespace": owner["metadata"]["namespace"],
        "ownerReferences": [owner_reference(api_version, kind, owner)],
    }
    kept = {name: part for name, part in (template.get("metadata") or {}).items() if name in ("labels", "annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": kept | metadata, "spec": template["spec"]}


def job_status(job: Object, pods: list[Object]) -> Object:
    """A Job's `status`."""
    phases = [phase_of(pod) for pod in pods]
    counts = {
        "active": sum(is_active(pod) for pod in pods),
        "succeeded": phases.count("Succeeded"),
        "failed": phases.count("Failed"),
    }
    found = {"startTime": now()} | (job.get("status") or {}) | counts
    if counts["succeeded"] >= job["spec"].get("completions", 1):
        found["completionTime"] = found.get("completionTime", now())
        found["conditions"] = [new_condition(job, "Complete", True)]
    elif counts["failed"] > job["spec"].get("backoffLimit", 6):
        found["conditions"] = [new_condition(job, "Failed", True, "BackoffLimitExceeded")]
    return found


def num_missing_of_job(job: Object, pods: list[Object]) -> int:
    """Pods to start now."""
    found = job_status(job, pods)
    if "conditions" in found:
        return 0
    left = job["spec"].get("completions", 1) - found["succeeded"]
    return max(0, int(min(left, job["spec"].get("parallelism", 1)) - found["active"]))


def _worth(pod: Object) -> tuple[object, ...]:
    ready = condition(pod, "Ready")
    is_ready = ready is not None and ready["status"] == "True"
    ready_since = parsed(ready["lastTransitionTime"]).timestamp() if ready and is_ready else 0.0
    restarts = [c["restartCount"] for c in (pod.get("status") or {}).get("containerStatuses") or []]
    return (
        bool(pod["spec"].get("nodeName")),
        phase_of(pod) == "Running",
        is_ready,
        int(annotations_of(pod).get(DELETION_COST, 0)),
        -ready_since,
        -max(restarts, default=0),
        -parsed(pod["metadata"]["creationTimestamp"]).timestamp(),
        name_of(pod),
    )
