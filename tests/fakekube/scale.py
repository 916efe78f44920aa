"""The `/scale` of an object: how many replicas it should have, in one form for every kind."""

from __future__ import annotations

import copy

from tests.fakekube import fields
from tests.fakekube.kinds import Kind
from tests.fakekube.selectors import selector_text
from tests.fakekube.status import Refused, invalid
from tests.fakekube.store import Object


def scale_of(kind: Kind, value: Object) -> Object:
    """The object's `/scale`."""
    assert kind.scale is not None
    metadata = value["metadata"]
    selector = fields.at(value, kind.scale.selector) if kind.scale.selector else None
    status: Object = {"replicas": fields.at(value, kind.scale.status_replicas) or 0}
    if selector:
        status["selector"] = selector_text(selector)
    shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in shown if name in metadata},
        "spec": {"replicas": fields.at(value, kind.scale.replicas) or 0},
        "status": status,
    }


def scaled(kind: Kind, live: Object, scale: Object) -> Object:
    """The object with what a client wrote to its `/scale`. Raises Refused."""
    assert kind.scale is not None
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        why = f"Invalid value: {replicas}: must be greater than or equal to 0"
        raise invalid(kind, live["metadata"]["name"], [("FieldValueInvalid", why, "spec.replicas")])
    changed = copy.deepcopy(live)
    fields.put(changed, kind.scale.replicas, replicas)
    if version := (scale.get("metadata") or {}).get("resourceVersion"):
        changed["metadata"]["resourceVersion"] = version
    return changed


def check_readable(kind: Kind, value: Object) -> None:
    """Raises Refused: nobody has set the replicas yet."""
    assert kind.scale is not None
    if fields.at(value, kind.scale.replicas) is None:
        why = f'Internal error occurred: the spec replicas field "{kind.scale.replicas}" does not exist'
        raise Refused(500, "InternalError", why)
