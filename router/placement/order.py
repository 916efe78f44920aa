"""Workers of a large pool in the order of their loads, so that placement examines few of them.

The orders are sorted lists. A worker whose load changes is marked, and takes its new place when the order is read next:
a change costs microseconds, and a decision does not walk over all workers. There is an order by waiting time for every
turn that requests have, and one by KV for workers that decode. Each role and each sampler has its own orders, because a
request may need a worker of one of them.

A wait gets shorter while the worker computes, without any event. So a worker that computes stands in a list of its own
by the time at which its queue will be empty, which does not change. Once the prompt that it computes takes longer than
predicted, the wait no longer falls; the worker is then found among the first and takes its place by its wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter

from baton.cluster import Role
from router.placement.load import LoadTracker, Turn

LEAST_LOADED = 16
"""Number of workers that are examined of each order."""
MAX_TURNS = 8
"""Maximum number of turns with an order of their own. Requests of other turns use the order of the nearest turn."""
TURN_S = 60.0
"""An order by a turn that no request has had for this long is dropped."""
RESORT_SHARE = 0.06
"""If a greater share of the workers has moved, sorting all of them again takes less time than moving each."""

_Entry = tuple[float, int, int, LoadTracker]
"""Load, or time; the worker's place among equals; its identity, so that no two entries are equal; the worker."""
_Load = Callable[[LoadTracker, float], tuple[float, bool]]


class _Order:
    """Workers in the order of one load.

    Args:
        load: worker and time -> its load and False, or the time at which its load will be 0 and True.
    """

    def __init__(self, load: _Load, workers: Iterable[LoadTracker], now: float) -> None:
        self._load = load
        self.used_s = now
        self._places: dict[LoadTracker, tuple[list[_Entry], _Entry]] = {}
        self._steady: list[_Entry] = []
        self._falling: list[_Entry] = []
        self._sort(workers, now)

    def move(self, moved: Collection[LoadTracker], now: float) -> None:
        """Give workers their new places."""
        if len(moved) > RESORT_SHARE * len(self._places) + 1:
            self._sort({**self._places, **dict.fromkeys(moved)}, now)
            return
        for worker in moved:
            self.discard(worker)
            entries, entry = self._places[worker] = self._place(worker, now)
            insort(entries, entry)

    def discard(self, worker: LoadTracker) -> None:
        """Remove a worker, if it is there."""
        if (place := self._places.pop(worker, None)) is not None:
            entries, entry = place
            del entries[bisect_left(entries, entry)]

    def least(self, session: int, now: float) -> Iterator[LoadTracker]:
        """Yield the workers, the least loaded one first. Of equal ones, different sessions begin with different ones.

        A session begins with the same ones while the other workers' loads change, as in consistent hashing.
        """
        self.used_s = now
        while late := [worker for *_, worker in self._falling[:LEAST_LOADED] if not self._load(worker, now)[1]]:
            self.move(late, now)
        steady = _in_turn(self._steady, session)
        if not self._falling:
            return (worker for _, worker in steady)
        falling = ((until_s - now, worker) for until_s, *_, worker in self._falling)
        return (worker for _, worker in heapq.merge(steady, falling, key=itemgetter(0)))

    def _place(self, worker: LoadTracker, now: float) -> tuple[list[_Entry], _Entry]:
        value, is_falling = self._load(worker, now)
        return self._falling if is_falling else self._steady, (value, worker.place, id(worker), worker)

    def _sort(self, workers: Iterable[LoadTracker], now: float) -> None:
        self._steady, self._falling = [], []
        self._places = {worker: self._place(worker, now) for worker in workers}
        for entries, entry in self._places.values():
            entries.append(entry)
        self._steady.sort()
        self._falling.sort()


def _in_turn(entries: list[_Entry], session: int) -> Iterator[tuple[float, LoadTracker]]:
    start = 0
    while start < len(entries):
        load, *_, worker = entries[start]
        end = start + 1
        if end == len(entries) or entries[end][0] != load:
            yield load, worker
        else:
            end = bisect_right(entries, load, start, key=itemgetter(0))
            first = bisect_left(entries, session, start, end, key=itemgetter(1))
            for index in chain(range(first, end), range(start, first)):
                yield load, entries[index][3]
        start = end


class _Group:
    """Orders of the workers of one role and sampler."""

    def __init__(self, role: Role) -> None:
        self.workers: dict[LoadTracker, None] = {}
        self.by_wait: dict[Turn, _Order] = {}
        self.by_kv = _Order(_kv_tokens, (), 0.0) if role is Role.DECODE else None

    @property
    def orders(self) -> Iterator[_Order]:
        yield from self.by_wait.values()
        if self.by_kv is not None:
            yield self.by_kv

    def of_turn(self, turn: Turn, now: float) -> _Order:
        """Return the order by the wait of a request of this turn."""
        if (order := self.by_wait.get(turn)) is None:
            if len(self.by_wait) >= MAX_TURNS:
                return self.by_wait[min(self.by_wait, key=lambda other: abs(other[0] - turn[0]))]
            order = self.by_wait[turn] = _Order(lambda worker, at: worker.standing(turn, at), self.workers, now)
        return order


class LoadOrders:
    """Orders of the workers that take work. Time is an argument."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Role, str], _Group] = {}
        self._group_of: dict[LoadTracker, _Group] = {}
        self._moved: set[LoadTracker] = set()

    def __contains__(self, worker: object) -> bool:
        return worker in self._group_of

    def adopt(self, workers: Collection[LoadTracker], now: float) -> None:
        """Set which workers there are, with their current roles and samplers."""
        for worker in self._group_of.keys() - set(workers):
            self._discard(worker)
            worker.moved = None
        for worker in workers:
            key = worker.candidate.role, worker.sampler
            group = self._groups.get(key) or self._groups.setdefault(key, _Group(worker.candidate.role))
            if self._group_of.get(worker) is not group:
                self._discard(worker)
                self._group_of[worker] = group
                group.workers[worker] = None
                worker.moved = self._moved
                self._moved.add(worker)
        self._groups = {key: group for key, group in self._groups.items() if group.workers}
        for group in self._groups.values():
            for turn in [turn for turn, order in group.by_wait.items() if order.used_s < now - TURN_S]:
                del group.by_wait[turn]

    def close(self) -> None:
        """Let go of all workers."""
        self.adopt((), 0.0)

    def least(
        self, turn: Turn, session: int, now: float, accepts: Callable[[LoadTracker], bool], most: int = LEAST_LOADED
    ) -> Iterator[LoadTracker]:
        """Yield the workers of each role and sampler that have the least load, some of them twice.

        Args:
            turn: that of the request; see `router.placement.Turn`.
            session: number of the request's session, below 2**64.
            accepts: whether the request may go to a worker.
            most: number of workers of each order.
        """
        self._catch_up(now)
        for group in self._groups.values():
            yield from islice(filter(accepts, group.of_turn(turn, now).least(session, now)), most)
            if group.by_kv is not None:
                yield from islice(filter(accepts, group.by_kv.least(session, now)), most)

    def least_kv(self, now: float) -> Iterator[LoadTracker]:
        """Yield the workers that decode, of each sampler those with the least KV first."""
        self._catch_up(now)
        for group in self._groups.values():
            if group.by_kv is not None:
                yield from group.by_kv.least(0, now)

    def _catch_up(self, now: float) -> None:
        if not self._moved:
            return
        moved: defaultdict[_Group, list[LoadTracker]] = defaultdict(list)
        for worker in self._moved:
            moved[self._group_of[worker]].append(worker)
        for group, workers in moved.items():
            for order in group.orders:
                order.move(workers, now)
        self._moved.clear()

    def _discard(self, worker: LoadTracker) -> None:
        self._moved.discard(worker)
        if (group := self._group_of.pop(worker, None)) is not None:
            del group.workers[worker]
            for order in group.orders:
                order.discard(worker)


def _kv_tokens(worker: LoadTracker, now: float) -> tuple[float, bool]:
    return worker.candidate.num_kv_tokens, False
