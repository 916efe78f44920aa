"""From the pools as they should be and the workers as they are to what has to be done. Pure.

    DOWN ── Start ──> STARTING ──> READY ── Leave ──> LEAVING ──> gone
      └───── Forget ─────> gone

A worker that dies is DOWN, and is started again under its id. One that has to leave is marked as retiring; it counts
for its pool no more, and leaves once somebody else is ready to serve in its place. Of many that have to leave so many
go at a time that no more than one of those that should serve is missing. One that takes no new work although nobody
here told it so has to leave too, and serves nobody whom that could harm: it goes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from baton.cluster import Role

MAX_STARTING = 4
"""After the death of many they come back a few at a time: loading a model takes a processor, a disk and memory."""


class Phase(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker as the controller sees it."""

    id: str
    role: Role
    phase: Phase
    is_retiring: bool = False
    is_held: bool = False
    """Its role is being changed: it serves nobody now, and is not to be touched."""
    is_silent: bool = False
    """READY, but nobody has heard of it for long: it hangs, or is cut off, and serves nobody."""
    is_draining: bool = False
    """READY, but it takes no new work, and not by an order of the controller's. Never while `is_held`."""
    waits_for_room: bool = False
    """STARTING: no node has had the resources for it for a while, so it keeps nobody busy."""
    start_at_s: float = 0.0
    """DOWN: not before."""
    num_requests: int = 0
    """Sequences that run or wait there."""
    num_unique_blocks: int = 0
    """Cached, and by nobody else."""


@dataclass(frozen=True, slots=True)
class Start:
    """A worker that is DOWN, or a new one."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Retire:
    """From now on it has to leave: the pool is too large, or it drains without an order."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Drain it, where it is READY, then end it."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """It is DOWN, and nobody wants it back."""

    worker_id: str


Action = Start | Retire | Leave | Forget


def reconcile(desired: Mapping[Role, int], workers: Sequence[Seen], now_s: float) -> list[Action]:
    """What to do now. With the workers that result, it asks for nothing twice.

    Args:
        workers: every one that is known, whatever its phase.
        now_s: on the clock of `Seen.start_at_s`.
    """
    victims = {worker.id for role in Role for worker in _victims(desired[role], workers, role)}
    victims |= {worker.id for worker in workers if worker.is_draining and not worker.is_retiring}
    retiring = victims | {worker.id for worker in workers if worker.is_retiring}
    actions: list[Action] = [Retire(worker_id) for worker_id in sorted(victims)]
    ready = {role: [w for w in workers if w.role is role and is_serving(w) and w.id not in retiring] for role in Role}
    starting = [w for w in workers if w.phase is Phase.STARTING and not w.waits_for_room and w.id not in retiring]
    starts = _starts(desired, [w for w in workers if w.id not in retiring], {w.id for w in workers}, now_s)
    starts.sort(key=lambda start: bool(ready[start.role]))  # first where nobody serves
    coming = {worker.role for worker in starting} | {start.role for start in starts}
    may_leave = {role: _num_to_spare(desired[role], workers, role, role in coming) for role in Role}
    for worker in workers:
        if worker.id not in retiring or worker.is_held:
            continue
        if worker.phase is Phase.DOWN:
            actions.append(Forget(worker.id))
        elif worker.phase is Phase.STARTING or worker.is_silent or worker.is_draining:
            actions.append(Leave(worker.id))
        elif worker.phase is Phase.READY and (ready[worker.role] or not desired[worker.role]):
            if may_leave[worker.role] > 0:
                actions.append(Leave(worker.id))
            may_leave[worker.role] -= 1
    return actions + starts[: max(MAX_STARTING - len(starting), 0)]


def is_serving(worker: Seen) -> bool:
    """Whether it takes requests of its role, and is meant to."""
    return _takes_requests(worker) and not worker.is_retiring


def _takes_requests(worker: Seen) -> bool:
    """Those that are to leave do until then."""
    return worker.phase is Phase.READY and not (worker.is_held or worker.is_silent or worker.is_draining)


def _num_to_spare(desired: int, workers: Sequence[Seen], role: Role, is_any_coming: bool) -> int:
    """How many that take requests may leave now: at most one of the `desired` is to be missing.

    Where more are missing anyway, and nobody is about to be ready, they leave one at a time: room for those that are to
    come may be what they take up.
    """
    pool = [worker for worker in workers if worker.role is role]
    num_serving = sum(map(_takes_requests, pool))
    is_any_leaving = any(worker.phase is Phase.LEAVING for worker in pool)
    return max(num_serving - desired + 1, int(not is_any_coming and not is_any_leaving))


def _victims(desired: int, workers: Sequence[Seen], role: Role) -> list[Seen]:
    """The workers by which the pool is too large: those that serve least and whose caches are missed least.

    Those that do not serve yet go first, so the last one that is ready stays while the pool is to have anybody.
    """
    members = [worker for worker in workers if worker.role is role and _is_member(worker)]
    free = [worker for worker in members if not worker.is_held]
    free.sort(key=lambda w: (_takes_requests(w), w.num_requests, w.num_unique_blocks, -_number(w.id), w.id))
    return free[: max(len(members) - desired, 0)]


def _is_member(worker: Seen) -> bool:
    return not worker.is_retiring and not worker.is_draining and worker.phase is not Phase.LEAVING


def _starts(desired: Mapping[Role, int], staying: Sequence[Seen], known: set[str], now_s: float) -> list[Start]:
    """Those that died, then new ones."""
    starts = [Start(w.id, w.role) for w in staying if w.phase is Phase.DOWN and w.start_at_s <= now_s]
    for role in Role:
        num_members = sum(worker.role is role and _is_member(worker) for worker in staying)
        ids = _free_ids(role, known)
        starts += [Start(next(ids), role) for _ in range(desired[role] - num_members)]
    return starts


def _free_ids(role: Role, known: set[str]) -> Iterator[str]:
    """The smallest numbers first. A worker keeps its id when its role changes: `prefill-0` may decode."""
    return (worker_id for number in count() if (worker_id := f"{role.value}-{number}") not in known)


def _number(worker_id: str) -> int:
    number = worker_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
