"""Reconciliation: compares the desired pools with the observed workers, and returns actions. Pure.

    DOWN ── Start ──> STARTING ──> READY ── Leave ──> LEAVING ──> gone
      └───── Forget ─────> gone

A worker that dies is DOWN, and is restarted under the same id. A worker that must leave is marked as retiring: it no
longer counts for its pool, and leaves once its replacement is ready. If many workers must leave, they do so gradually:
at most `cluster.max_unavailable` of the desired number are missing at any time. A worker that drains without the
controller's command must leave too; it leaves immediately, because it serves no requests.

After many deaths, or at the first start, at most `cluster.starting` workers load their models at the same time; each
node limits its own (`cluster.starting_per_node`, `deploy.ray_pools.actor`).

During a rollout (`GivingWay.room`), the new version's pods have room for additional workers: at most
`cluster.max_surge` start there, and for each that serves, one on an older pod leaves. If no worker of the new version
starts, no old one leaves for it. Kubernetes may delete further old pods (`maxUnavailable`), whose workers leave and are
replaced at the same time. If there is no room for both (`GivingWay.in_place`), a worker leaves first, and the remaining
workers of either pool take over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from baton.cluster import Role
from baton.config import ClusterConfig


class WorkerPhase(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A worker as the controller sees it now."""

    id: str
    pool: Role
    """The pool in which it was started, on whose nodes it runs."""
    role: Role
    phase: WorkerPhase
    is_retiring: bool = False
    is_held: bool = False
    """The worker's role is being changed: it serves no requests, and no action may touch it."""
    is_silent: bool = False
    """READY, but without a lease for a long time: it hangs or is cut off, and serves no requests."""
    is_draining: bool = False
    """READY, but it drains without the controller's command. Never while `is_held`."""
    is_outdated: bool = False
    """READY, in a pod of an older version."""
    waits_for_room: bool = False
    """STARTING, but no node has had the resources for it for a while, so it uses none."""
    waits_for_turn: bool = False
    """STARTING, but its node has not let it load its model for a while, because other workers load theirs."""
    start_at_s: float = 0.0
    """DOWN: the earliest time of its next start."""
    num_neighbours: int = 0
    """Other workers in its pod that are not retiring."""
    num_requests: int = 0
    """Sequences that run or wait on it."""
    num_unique_blocks: int = 0
    """Blocks that only this worker caches."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker: one that is DOWN, or a new one."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """Mark the worker as retiring: its pool is too large, or it drains without a command."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class EndWorker:
    """Drain the worker if it is READY, then end it."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Remove a worker that is DOWN and no longer needed."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class GivingWay:
    """Rules by which old workers are replaced."""

    in_place: bool = False
    """A replacement needs the room of the worker that leaves."""
    room: Mapping[Role, int] = field(default_factory=dict)
    """Number of a pool's workers for which pods of a newer version have room. A worker that starts does not use it
    yet."""


Action = StartWorker | RetireWorker | EndWorker | ForgetWorker


def reconcile(
    desired: Mapping[Role, int],
    workers: Sequence[ObservedWorker],
    now_s: float,
    config: ClusterConfig,
    giving_way: GivingWay = GivingWay(),
) -> list[Action]:
    """Return the actions to take now. A repeated call with the resulting workers returns no action twice.

    Args:
        workers: all known workers, in any phase.
        now_s: the time, on the clock of `ObservedWorker.start_at_s`.
        config: the limits of starts, surge and missing workers.
    """
    surge = {role: _surge(desired[role], workers, role, config, giving_way) for role in Role}
    victims = {worker.id for role in Role for worker in _victims(desired[role], workers, role, surge[role])}
    victims |= _strays(workers, giving_way)
    victims |= {worker.id for worker in workers if worker.is_draining and not worker.is_retiring}
    retiring = victims | {worker.id for worker in workers if worker.is_retiring}
    actions: list[Action] = [RetireWorker(worker_id) for worker_id in sorted(victims)]
    ready = {role: [w for w in workers if w.role is role and is_serving(w) and w.id not in retiring] for role in Role}
    starting = [w for w in workers if w.phase is WorkerPhase.STARTING and not w.waits_for_room and w.id not in retiring]
    num_loading = sum(not worker.waits_for_turn for worker in starting)
    wanted = {role: desired[role] + surge[role] for role in Role}
    starts = _starts(wanted, [w for w in workers if w.id not in retiring], {w.id for w in workers}, now_s)
    starts.sort(key=lambda start: bool(ready[start.role]))  # pools without a ready worker first
    coming = {worker.role for worker in starting} | {start.role for start in starts}
    may_leave = {
        role: _num_to_spare(
            desired[role], workers, role, role in coming, _num_missing_allowed(desired[role], config, giving_way)
        )
        for role in Role
    }
    for worker in workers:
        if worker.id not in retiring or worker.is_held:
            continue
        if worker.phase is WorkerPhase.DOWN:
            actions.append(ForgetWorker(worker.id))
        elif worker.phase is WorkerPhase.STARTING or worker.is_silent or worker.is_draining:
            actions.append(EndWorker(worker.id))
        elif worker.phase is WorkerPhase.READY and (
            ready[worker.role]
            or not desired[worker.role]
            or (giving_way.in_place and _others_stay(worker.role, desired, workers, ready))
        ):
            if may_leave[worker.role] > 0:
                actions.append(EndWorker(worker.id))
            may_leave[worker.role] -= 1
    return actions + starts[: max(config.num_starting(sum(desired.values())) - num_loading, 0)]


def is_serving(worker: ObservedWorker) -> bool:
    """Return whether the worker accepts requests of its role and is not retiring."""
    return _takes_requests(worker) and not worker.is_retiring


def num_serving(workers: Iterable[ObservedWorker], role: Role) -> int:
    return sum(is_serving(worker) and worker.role is role for worker in workers)


def _takes_requests(worker: ObservedWorker) -> bool:
    """Return whether the worker accepts requests; retiring workers do until they leave."""
    return worker.phase is WorkerPhase.READY and not (worker.is_held or worker.is_silent or worker.is_draining)


def _num_missing_allowed(desired: int, config: ClusterConfig, giving_way: GivingWay) -> int:
    """Return how many of the desired workers may be missing; in place there is no other way to replace a worker."""
    return max(config.num_unavailable(desired), int(giving_way.in_place))


def _num_to_spare(
    desired: int, workers: Sequence[ObservedWorker], role: Role, is_any_coming: bool, num_missing_allowed: int
) -> int:
    """Return how many workers that accept requests may leave now, so that not too many of the `desired` are missing.

    If more are missing anyway, and none is starting, they leave one at a time: they may occupy the room that new
    workers wait for.
    """
    pool = [worker for worker in workers if worker.role is role]
    num_serving = sum(map(_takes_requests, pool))
    is_any_leaving = any(worker.phase is WorkerPhase.LEAVING for worker in pool)
    return max(num_serving - desired + num_missing_allowed, int(not is_any_coming and not is_any_leaving))


def _victims(desired: int, workers: Sequence[ObservedWorker], role: Role, surge: int) -> list[ObservedWorker]:
    """Return the surplus workers of a pool: those with the fewest requests and the fewest unique blocks.

    Workers that do not serve yet go first, so that the last ready one stays while the pool should have any. Then come
    workers of an older version, then those in the emptiest pods, so that pods become free.

    Args:
        surge: number of additional workers allowed while they do not serve yet.
    """
    members = [worker for worker in workers if worker.role is role and _is_member(worker)]
    num_coming = sum(not _takes_requests(worker) for worker in members)
    free = [worker for worker in members if not worker.is_held]
    free.sort(
        key=lambda w: (
            *(_takes_requests(w), not w.is_outdated, w.num_neighbours, w.num_requests, w.num_unique_blocks),
            *(-_number(w.id), w.id),
        )
    )
    return free[: max(len(members) - desired - min(surge, num_coming), 0)]


def _surge(
    desired: int, workers: Sequence[ObservedWorker], role: Role, config: ClusterConfig, giving_way: GivingWay
) -> int:
    """Return the number of additional workers for a newer version's pods.

    Workers that the pool lacks need the room of those pods first.
    """
    serving = [worker for worker in workers if worker.role is role and is_serving(worker)]
    if giving_way.in_place or not any(worker.is_outdated and worker.pool is role for worker in serving):
        return 0
    num_lacking = max(desired - len(serving), 0)
    return max(min(config.num_surge(desired), giving_way.room.get(role, 0) - num_lacking), 0)


def _strays(workers: Sequence[ObservedWorker], giving_way: GivingWay) -> set[str]:
    """Return workers on older pods that have changed their role, so that no new worker of that pool replaces them.

    They are drained one at a time, after all other workers on older pods have left.
    """
    found = set()
    for pool in () if giving_way.in_place else giving_way.room:
        older = [worker for worker in workers if worker.is_outdated and worker.pool is pool]
        if older and not any(worker.is_retiring or worker.role is pool for worker in older):
            found.add(min(worker.id for worker in older))
    return found


def _others_stay(
    role: Role,
    desired: Mapping[Role, int],
    workers: Sequence[ObservedWorker],
    ready: Mapping[Role, Sequence[ObservedWorker]],
) -> bool:
    """Return whether the last worker of a pool may leave because the other pool takes over.

    Decode workers also compute prompts. The last decode worker waits until prefill workers are ready, so that both
    pools are never empty at the same time.
    """
    if role is Role.PREFILL:
        return any(worker.role is Role.DECODE and _takes_requests(worker) for worker in workers)
    return bool(ready[Role.PREFILL]) or not desired[Role.PREFILL]


def _is_member(worker: ObservedWorker) -> bool:
    return not worker.is_retiring and not worker.is_draining and worker.phase is not WorkerPhase.LEAVING


def _starts(
    desired: Mapping[Role, int], staying: Sequence[ObservedWorker], known: set[str], now_s: float
) -> list[StartWorker]:
    """Return the starts of dead workers, then of new ones."""
    starts = [StartWorker(w.id, w.role) for w in staying if w.phase is WorkerPhase.DOWN and w.start_at_s <= now_s]
    ids = _free_ids(known)
    for role in Role:
        num_members = sum(worker.role is role and _is_member(worker) for worker in staying)
        starts += [StartWorker(next(ids), role) for _ in range(desired[role] - num_members)]
    return starts


def _free_ids(known: set[str]) -> Iterator[str]:
    """Yield unused ids, smallest number first. They contain no role: a worker keeps its id when its role changes."""
    return (worker_id for number in count() if (worker_id := f"worker-{number}") not in known)


def _number(worker_id: str) -> int:
    number = worker_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
