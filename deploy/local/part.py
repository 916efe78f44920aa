"""Names of the parts that `baton run` starts."""

from __future__ import annotations

from enum import StrEnum

from baton.errors import InvalidRequest
from baton.spelling import nearest


class ClusterPart(StrEnum):
    MODEL = "model"
    ROUTER = "router"
    CONTROLLER = "controller"


def part_named(name: str) -> ClusterPart:
    """Return the part of this name. Raises InvalidRequest if there is none, with a hint on how to start workers."""
    if name in list(ClusterPart):
        return ClusterPart(name)
    if name == "worker":
        raise InvalidRequest(
            "Ray starts the workers, on any node with room: ray start --address=HEAD:6379 "
            "--resources='{\"baton_worker\": 1}'; `baton run` starts model, router and controller"
        )
    meant = nearest(name, list(ClusterPart)) or ", ".join(ClusterPart)
    raise InvalidRequest(f"{name!r} is not a part of a cluster; did you mean {meant}?")
