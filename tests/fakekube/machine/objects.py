"""The kinds that the machine reads and writes, and what is read off any object of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from tests.fakekube.selectors import selector_matches
from tests.fakekube.store import Key, Object, Resource, now

POD = Resource("", "pods")
SERVICE = Resource("", "services")
ENDPOINTS = Resource("", "endpoints")
ENDPOINT_SLICE = Resource("discovery.k8s.io", "endpointslices")
CONFIG_MAP = Resource("", "configmaps")
SECRET = Resource("", "secrets")
SERVICE_ACCOUNT = Resource("", "serviceaccounts")
CLAIM = Resource("", "persistentvolumeclaims")
NODE = Resource("", "nodes")
EVENT = Resource("", "events")
DEPLOYMENT = Resource("apps", "deployments")
REPLICA_SET = Resource("apps", "replicasets")
JOB = Resource("batch", "jobs")
BUDGET = Resource("policy", "poddisruptionbudgets")

DEFAULT_GRACE_S = 30
GPU = "nvidia.com/gpu"


def key_of(resource: Resource, value: Object) -> Key:
    return Key(resource, value["metadata"].get("namespace", ""), value["metadata"]["name"])


def name_of(value: Object) -> str:
    return str(value["metadata"]["name"])


def labels_of(value: Object) -> dict[str, str]:
    return value["metadata"].get("labels") or {}


def annotations_of(value: Object) -> dict[str, str]:
    return value["metadata"].get("annotations") or {}


def is_deleted(value: Object) -> bool:
    """Somebody wants it gone; it may take its time."""
    return "deletionTimestamp" in value["metadata"]


def owner_reference(api_version: str, kind: str, owner: Object) -> Object:
    named = {"apiVersion": api_version, "kind": kind, "name": name_of(owner), "uid": owner["metadata"]["uid"]}
    return named | {"controller": True, "blockOwnerDeletion": True}


def owner_uid(value: Object) -> str | None:
    """The uid of the controller it belongs to."""
    for reference in value["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            return str(reference["uid"])
    return None


def owned(owner: Object, values: Iterable[Object]) -> list[Object]:
    return [value for value in values if owner_uid(value) == owner["metadata"]["uid"]]


def matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector takes these labels. None takes nothing."""
    return selector is not None and selector_matches(selector, labels)


def condition(value: Object, kind: str) -> Object | None:
    for found in (value.get("status") or {}).get("conditions") or []:
        if found["type"] == kind:
            return dict(found)
    return None


def is_true(value: Object, kind: str) -> bool:
    found = condition(value, kind)
    return found is not None and found["status"] == "True"


def new_condition(value: Object, kind: str, fulfilled: bool, reason: str = "", message: str = "") -> Object:
    """A condition as it is now. It keeps the time of its last change when it has not changed."""
    old = condition(value, kind)
    status = "True" if fulfilled else "False"
    since = old["lastTransitionTime"] if old is not None and old["status"] == status else now()
    found = {"type": kind, "status": status, "lastTransitionTime": since}
    return found | {name: text for name, text in (("reason", reason), ("message", message)) if text}


def phase_of(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_active(pod: Object) -> bool:
    return not is_deleted(pod) and phase_of(pod) not in ("Succeeded", "Failed")


def is_available(pod: Object, min_ready_s: float, at: datetime) -> bool:
    """Ready for that long."""
    ready = condition(pod, "Ready")
    if ready is None or ready["status"] != "True":
        return False
    return (at - parsed(ready["lastTransitionTime"])).total_seconds() >= min_ready_s


def parsed(timestamp: str) -> datetime:
    return datetime.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def digest(value: Any, length: int = 10) -> str:
    """Equal values have equal ones; fit for names and labels."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


UNITS = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)}
UNITS |= {unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)}


def quantity(text: str | int | float) -> Fraction:
    """500m, 2, 1.5Gi. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    if found is None or found[2] not in UNITS:
        raise ValueError(f"not a quantity: {text!r}")
    return Fraction(found[1]) * UNITS[found[2]]
