"""Decides when a model may sleep: after `autoscale.idle_s` without a request. Pure.

Each observation of the cluster either shows demand, or extends the time without demand. The time starts again if
requests may have arrived unobserved: after the cluster could not be observed, after no router was known, and when a
router has disappeared, because its last counts are unknown. It also starts again when a wake-up is complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.cluster import ClusterStatus, Role, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Demand for the model, as one observation shows it."""

    routers: Mapping[tuple[str, int], int]
    """Requests that each router has completed or refused, by its id and process id."""
    computed: Mapping[tuple[str, int], int]
    """Tokens that each worker has computed, by its id and epoch."""
    num_open: int
    """Requests that a router has in flight or holds, and sequences that a worker runs or has waiting."""
    is_desired: bool
    """True if the model should have a decode worker."""
    is_ready: bool
    """True if a decode worker is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """State between two observations."""

    since_s: float = math.inf
    """Time since which the observations have shown no demand; infinite: the latest one has shown demand, or failed."""
    latest: Activity | None = None
    """None: the cluster could not be observed."""
    has_served: bool = False
    """True if a decode worker has been ready since the model woke."""

    def seconds(self, now_s: float) -> float:
        """Return the time without demand until now; 0: there is demand, or it is unknown."""
        return max(now_s - self.since_s, 0.0)


UNKNOWN = Idleness()
"""State of a new controller, and of one that could not observe the cluster."""


def activity_of(status: ClusterStatus) -> Activity:
    """Return the demand that a status shows. The routers' counts must be those of this model (`window.of_model`)."""
    pool = status.pools.get(Role.DECODE.value)
    in_flight = sum(model.in_flight + model.held for router in status.routers for model in router.models)
    ready = [worker for worker in status.workers if worker.load.state is WorkerState.READY]
    return Activity(
        routers={(each.id, each.pid): each.met + each.missed + each.rejected for each in status.routers},
        computed={(each.info.id, each.info.epoch): each.load.computed_tokens for each in status.workers},
        num_open=in_flight + sum(each.load.running + each.load.waiting for each in status.workers),
        is_desired=pool is not None and pool.desired > 0,
        is_ready=any(worker.info.role is Role.DECODE for worker in ready),
    )


def observed(idleness: Idleness, seen: Activity, now_s: float) -> Idleness:
    """Return the state after another observation."""
    has_served = seen.is_desired and (idleness.has_served or seen.is_ready)
    if seen.num_open or not seen.routers or not seen.is_desired:
        since_s = math.inf
    elif _shows_demand(idleness.latest, seen) or has_served != idleness.has_served:
        since_s = now_s
    else:
        since_s = min(idleness.since_s, now_s)
    return Idleness(since_s=since_s, latest=seen, has_served=has_served)


def _shows_demand(before: Activity | None, seen: Activity) -> bool:
    """Return whether a request may have arrived between two observations."""
    if before is None or not before.routers.keys() <= seen.routers.keys():
        return True
    if any(seen.routers[router] != before.routers.get(router, 0) for router in seen.routers):
        return True
    return any(seen.computed.get(worker, num) != num for worker, num in before.computed.items())
