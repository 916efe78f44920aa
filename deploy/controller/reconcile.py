"""Compares the pools as they should be with the workers as they are, and returns what to do. Pure.

    DOWN ── Start ──> STARTING ──> READY ── Leave ──> LEAVING ──> gone
      └───── Forget ─────> gone

A worker that dies is DOWN, and is started again under its id. One that must leave is marked as retiring: it no longer
counts for its pool, and leaves once another worker is ready to serve in its place. When many workers must leave, they
do so gradually: at most one of the desired number is missing at any time. A worker that drains without an order from
the controller must leave, too; since it serves nobody, it leaves at once.

While a newer version is rolled out (`GivingWay.room`), its pod has room for one worker more: one is started there, and
when it serves, one on an older pod leaves. A version in which no worker starts takes nobody's place. Where there is no
room for both (`GivingWay.in_place`), a worker leaves to those that stay, in either pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from baton.cluster import Role

MAX_STARTING = 4
"""Workers that may start at a time: after the death of many, loading all models at once would exhaust the machines."""


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
    """Whether the worker's role is being changed: it serves nobody now, and no action may touch it."""
    is_silent: bool = False
    """READY, but without a lease for long: it hangs, or is cut off, and serves nobody."""
    is_draining: bool = False
    """READY, but it drains without an order from the controller. Never while `is_held`."""
    is_outdated: bool = False
    """READY, in a pod of an older version."""
    waits_for_room: bool = False
    """STARTING, but no node has had the resources for it for a while, so that it uses none."""
    start_at_s: float = 0.0
    """DOWN: the earliest time of its next start."""
    num_neighbours: int = 0
    """Workers beside it in its pod that do not have to leave."""
    num_requests: int = 0
    """Sequences that run or wait on it."""
    num_unique_blocks: int = 0
    """Blocks that it caches and no other worker does."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker: one that is DOWN, or a new one."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """Mark the worker as one that must leave: its pool is too large, or it drains without an order."""

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
    """How workers give way to others."""

    in_place: bool = False
    """Whether the room of one that leaves is needed for the one in its place."""
    room: Collection[Role] = ()
    """Pools of which a pod of a newer version has room for a worker that begins in them."""


Action = StartWorker | RetireWorker | EndWorker | ForgetWorker


def reconcile(
    desired: Mapping[Role, int], workers: Sequence[ObservedWorker], now_s: float, giving_way: GivingWay = GivingWay()
) -> list[Action]:
    """The actions to take now. Repeated with the workers that result, it returns no action twice.

    Args:
        workers: all known workers, whatever their phase.
        now_s: the time, on the clock of `ObservedWorker.start_at_s`.
    """
    surge = {role: _surge(desired[role], workers, role, giving_way) for role in Role}
    victims = {worker.id for role in Role for worker in _victims(desired[role], workers, role, surge[role])}
    victims |= _strays(workers, giving_way)
    victims |= {worker.id for worker in workers if worker.is_draining and not worker.is_retiring}
    retiring = victims | {worker.id for worker in workers if worker.is_retiring}
    actions: list[Action] = [RetireWorker(worker_id) for worker_id in sorted(victims)]
    ready = {role: [w for w in workers if w.role is role and is_serving(w) and w.id not in retiring] for role in Role}
    starting = [w for w in workers if w.phase is WorkerPhase.STARTING and not w.waits_for_room and w.id not in retiring]
    wanted = {role: desired[role] + surge[role] for role in Role}
    starts = _starts(wanted, [w for w in workers if w.id not in retiring], {w.id for w in workers}, now_s)
    starts.sort(key=lambda start: bool(ready[start.role]))  # first where nobody serves
    coming = {worker.role for worker in starting} | {start.role for start in starts}
    may_leave = {role: _num_to_spare(desired[role], workers, role, role in coming) for role in Role}
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
    return actions + starts[: max(MAX_STARTING - len(starting), 0)]


def is_serving(worker: ObservedWorker) -> bool:
    """Whether the worker takes requests of its role, and is meant to continue."""
    return _takes_requests(worker) and not worker.is_retiring


def num_serving(workers: Iterable[ObservedWorker], role: Role) -> int:
    return sum(is_serving(worker) and worker.role is role for worker in workers)


def _takes_requests(worker: ObservedWorker) -> bool:
    """Retiring workers take requests until they leave."""
    return worker.phase is WorkerPhase.READY and not (worker.is_held or worker.is_silent or worker.is_draining)


def _num_to_spare(desired: int, workers: Sequence[ObservedWorker], role: Role, is_any_coming: bool) -> int:
    """How many workers that take requests may leave now: at most one of the `desired` may be missing.

    Where more are missing anyway, and none is about to be ready, they leave one at a time: they may occupy the room
    that the new ones wait for.
    """
    pool = [worker for worker in workers if worker.role is role]
    num_serving = sum(map(_takes_requests, pool))
    is_any_leaving = any(worker.phase is WorkerPhase.LEAVING for worker in pool)
    return max(num_serving - desired + 1, int(not is_any_coming and not is_any_leaving))


def _victims(desired: int, workers: Sequence[ObservedWorker], role: Role, surge: int) -> list[ObservedWorker]:
    """The workers by which the pool is too large: those with the fewest requests and the fewest blocks of their own.

    Workers that do not serve yet go first, so that the last ready one stays while the pool should have any; then those
    of an older version, then those in the emptiest pods, so that pods come free.

    Args:
        surge: how many more there may be while they do not serve yet.
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


def _surge(desired: int, workers: Sequence[ObservedWorker], role: Role, giving_way: GivingWay) -> int:
    """The number of workers that the pool may have more, as a newer version's pod has room: only while it is whole."""
    serving = [worker for worker in workers if worker.role is role and is_serving(worker)]
    is_rolling = any(worker.is_outdated and worker.pool is role for worker in serving)
    return int(is_rolling and not giving_way.in_place and role in giving_way.room and len(serving) >= desired)


def _strays(workers: Sequence[ObservedWorker], giving_way: GivingWay) -> set[str]:
    """Workers on older pods of the pool from which they changed their role: none that begins there replaces them.

    They are drained, one at a time, when all others on older pods have given way.
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
    """Whether the last worker of a pool leaves to the other pool: decode workers also compute prompts, and the last of
    them waits until prompts are computed elsewhere, so that never both pools are empty.
    """
    if role is Role.PREFILL:
        return any(worker.role is Role.DECODE and _takes_requests(worker) for worker in workers)
    return bool(ready[Role.PREFILL]) or not desired[Role.PREFILL]


def _is_member(worker: ObservedWorker) -> bool:
    return not worker.is_retiring and not worker.is_draining and worker.phase is not WorkerPhase.LEAVING


def _starts(
    desired: Mapping[Role, int], staying: Sequence[ObservedWorker], known: set[str], now_s: float
) -> list[StartWorker]:
    """Starts of workers that died, then of new ones."""
    starts = [StartWorker(w.id, w.role) for w in staying if w.phase is WorkerPhase.DOWN and w.start_at_s <= now_s]
    ids = _free_ids(known)
    for role in Role:
        num_members = sum(worker.role is role and _is_member(worker) for worker in staying)
        starts += [StartWorker(next(ids), role) for _ in range(desired[role] - num_members)]
    return starts


def _free_ids(known: set[str]) -> Iterator[str]:
    """Unused ids, the smallest number first. They name no role, since a worker keeps its id when its role changes."""
    return (worker_id for number in count() if (worker_id := f"worker-{number}") not in known)


def _number(worker_id: str) -> int:
    number = worker_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
