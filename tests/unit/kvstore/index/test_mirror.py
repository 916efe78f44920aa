"""The router's mirror: bits, epochs, gaps, and a random walk beside a naive model."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index import Applied, BlockEvent, CountingMirror, Mirror, Op, Owners, Position

if TYPE_CHECKING:
    from collections.abc import Sequence


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in numbers)


def replace(mirror: Mirror, worker_id: str, epoch: int, seq: int, owned: Sequence[bytes]) -> None:
    """Sets a worker's blocks, with nobody else between two parts."""
    for _ in mirror.replacing(worker_id, epoch, seq, owned):
        pass


class Worker:
    """Numbers the events of one epoch."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker_id, self.epoch, self.seq = worker_id, epoch, 0

    def event(self, op: Op, *numbers: int, num_keys: int = 0) -> BlockEvent:
        self.seq += 1
        return BlockEvent(
            worker_id=self.worker_id, epoch=self.epoch, seq=self.seq, op=op, keys=keys(*numbers), num_keys=num_keys
        )

    def snapshot(self, *numbers: int) -> list[BlockEvent]:
        middle = len(numbers) // 2
        return [
            self.event(Op.SNAPSHOT_BEGIN),
            self.event(Op.SNAPSHOT_PART, *numbers[:middle]),
            self.event(Op.SNAPSHOT_PART, *numbers[middle:]),
            self.event(Op.SNAPSHOT_END, num_keys=len(numbers)),
        ]


def apply(mirror: Mirror, *events: BlockEvent) -> list[Applied]:
    outcomes = []
    for event in events:
        outcomes.append(mirror.apply(event))
        mirror.check()
    return outcomes


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


def test_lookup_counts_leading_blocks_per_worker(mirror: Mirror) -> None:
    a, b, c = Worker("a", 1), Worker("b", 1), Worker("c", 1)
    apply(mirror, a.event(Op.STORED, 1, 2, 3, 4), b.event(Op.STORED, 1, 2), c.event(Op.STORED, 2, 3))
    assert mirror.lookup(keys(1, 2, 3, 9, 4)) == {"a": 3, "b": 2}
    assert mirror.lookup(keys(2, 3, 4)) == {"a": 3, "b": 1, "c": 2}
    assert mirror.lookup(keys(9)) == {}
    assert mirror.lookup(()) == {}
    apply(mirror, a.event(Op.REMOVED, 2, 9))
    assert mirror.lookup(keys(1, 2, 3)) == {"a": 1, "b": 2}
    assert mirror.workers() == {"a": 3, "b": 2, "c": 2}


def test_where_workers_own_resume_points_the_last_one_counts(mirror: Mirror) -> None:
    a, b, c = Worker("a", 1), Worker("b", 1), Worker("c", 1)
    apply(mirror, a.event(Op.STORED, 2, 4, 9), b.event(Op.STORED, 3), c.event(Op.STORED, 8))

    def lookup(*numbers: int) -> dict[str, int]:
        return dict(mirror.lookup(keys(*numbers), resumes_anywhere=False))

    assert lookup(1, 2, 3, 4, 5) == {"a": 4, "b": 3}
    assert lookup(1, 2, 3) == {"a": 2, "b": 3}
    assert lookup(1, 7) == lookup() == {}
    mirror.disbelieve("a", mirror.position("a"), keys(3, 4, 5))
    assert lookup(1, 2, 3, 4, 5) == {"a": 2, "b": 3}
    mirror.set_leased({"a": 1})
    assert lookup(1, 2, 3, 4, 5) == {"a": 2}, "the dead are not looked for"


def test_an_event_seen_twice_changes_nothing(mirror: Mirror) -> None:
    a = Worker("a", 1)
    stored, removed = a.event(Op.STORED, 1), a.event(Op.REMOVED, 1)
    assert apply(mirror, stored, removed, stored, removed) == [Applied.DONE] * 2 + [Applied.STALE] * 2
    assert mirror.lookup(keys(1)) == {}


def test_restarted_worker_with_the_same_name_is_cold(mirror: Mirror) -> None:
    """Regression, kthena#1463: a restarted pod that keeps its name was scored as warm."""
    old, new = Worker("a", 1), Worker("a", 2)
    apply(mirror, old.event(Op.STORED, 1, 2))
    apply(mirror, new.event(Op.STORED, 1))
    assert mirror.lookup(keys(1, 2)) == {"a": 1}
    assert apply(mirror, old.event(Op.STORED, 2)) == [Applied.STALE]
    assert mirror.lookup(keys(1, 2)) == {"a": 1}


def test_a_new_lease_alone_makes_the_worker_cold(mirror: Mirror) -> None:
    apply(mirror, Worker("a", 1).event(Op.STORED, 1))
    mirror.set_leased({"a": 2})
    mirror.check()
    assert mirror.lookup(keys(1)) == {}
    assert mirror.position("a") == Position(2, 0)


def test_events_from_before_a_clear_do_not_resurrect(mirror: Mirror) -> None:
    """Regression, llm-d-router#1738: events in flight added entries again after Clear."""
    a = Worker("a", 1)
    stored, cleared = a.event(Op.STORED, 1), a.event(Op.CLEARED)
    assert apply(mirror, stored, cleared, stored) == [Applied.DONE, Applied.DONE, Applied.STALE]
    assert mirror.lookup(keys(1)) == {}
    apply(mirror, a.event(Op.STORED, 2))
    assert (mirror.lookup(keys(1)), mirror.lookup(keys(2))) == ({}, {"a": 1})


def test_a_gap_stops_only_this_worker_until_it_is_replaced(mirror: Mirror) -> None:
    a, b = Worker("a", 1), Worker("b", 1)
    apply(mirror, a.event(Op.STORED, 1))
    a.event(Op.REMOVED, 1)  # lost
    later = a.event(Op.STORED, 2)
    assert apply(mirror, later, b.event(Op.STORED, 2), later) == [Applied.GAP, Applied.DONE, Applied.GAP]
    replace(mirror, "a", 1, 3, keys(2))
    assert apply(mirror, later, a.event(Op.STORED, 3)) == [Applied.STALE, Applied.DONE]
    assert mirror.lookup(keys(2, 3)) == {"a": 2, "b": 1}
    assert mirror.lookup(keys(1)) == {}


def test_a_snapshot_replaces_all_at_once_and_heals_a_gap(mirror: Mirror) -> None:
    a = Worker("a", 1)
    apply(mirror, a.event(Op.STORED, 1, 2))
    a.event(Op.STORED, 8)  # lost
    *parts, end = a.snapshot(2, 3, 4, 5)
    assert apply(mirror, *parts) == [Applied.DONE] * 3
    assert mirror.lookup(keys(1, 2)) == {"a": 2}
    assert apply(mirror, end) == [Applied.DONE]
    assert (mirror.lookup(keys(1)), mirror.lookup(keys(2, 3, 4, 5))) == ({}, {"a": 4})


def test_a_snapshot_that_was_joined_in_its_middle_is_a_gap(mirror: Mirror) -> None:
    a = Worker("a", 1)
    _, _, part, end = a.snapshot(1, 2, 3, 4)
    replace(mirror, "a", 1, 2, ())
    assert apply(mirror, part, end) == [Applied.DONE, Applied.GAP]
    replace(mirror, "a", 1, 4, keys(1, 2, 3, 4))
    assert mirror.lookup(keys(1, 2, 3, 4)) == {"a": 4}


def test_a_snapshot_whose_count_is_wrong_is_a_gap(mirror: Mirror) -> None:
    a = Worker("a", 1)
    apply(mirror, a.event(Op.SNAPSHOT_BEGIN), a.event(Op.SNAPSHOT_PART, 1, 2))
    assert apply(mirror, a.event(Op.SNAPSHOT_END, num_keys=3)) == [Applied.GAP]
    assert mirror.lookup(keys(1)) == {}


def test_an_empty_snapshot_empties(mirror: Mirror) -> None:
    a = Worker("a", 1)
    apply(mirror, a.event(Op.STORED, 1), a.event(Op.SNAPSHOT_BEGIN), a.event(Op.SNAPSHOT_END))
    assert mirror.lookup(keys(1)) == {}


def test_an_unfinished_snapshot_is_dropped_by_the_next(mirror: Mirror) -> None:
    a = Worker("a", 1)
    apply(mirror, *a.snapshot(1, 2)[:2], *a.snapshot(3, 4))
    assert mirror.lookup(keys(1)) == {}
    assert mirror.lookup(keys(3, 4)) == {"a": 2}


def test_a_dead_worker_vanishes_at_once_and_comes_back_whole(mirror: Mirror) -> None:
    a, b = Worker("a", 1), Worker("b", 1)
    apply(mirror, a.event(Op.STORED, 1, 2), b.event(Op.STORED, 1))
    mirror.set_leased({"b": 1})
    mirror.check()
    assert mirror.lookup(keys(1, 2)) == {"b": 1}
    apply(mirror, a.event(Op.STORED, 3))  # in flight: must not revive it
    assert mirror.lookup(keys(1, 2, 3)) == {"b": 1}
    mirror.set_leased({"a": 1, "b": 1})
    assert mirror.lookup(keys(1, 2, 3)) == {"a": 3, "b": 1}


def test_sweeping_frees_keys_and_bits(mirror: Mirror) -> None:
    for epoch in range(1, 40):
        a = Worker("a", epoch)
        apply(mirror, a.event(Op.STORED, *range(10)))
        mirror.forget("a" if epoch % 3 == 0 else "nobody")
        while mirror.sweep(3):
            mirror.check()
    mirror.forget("a")
    while mirror.sweep(3):
        mirror.check()
    assert (len(mirror), mirror._used) == (0, 0)


def test_check_finds_a_miscount(mirror: Mirror) -> None:
    apply(mirror, Worker("a", 1).event(Op.STORED, 1))
    mirror._masks[keys(7)[0]] = 1
    with pytest.raises(AssertionError, match="miscounted"):
        mirror.check()


class Naive:
    """What the mirror should say, said slowly: one set a worker."""

    def __init__(self) -> None:
        self.epoch: dict[str, int] = {}
        self.seq: dict[str, int] = {}
        self.owned: dict[str, set[bytes]] = {}
        self.parts: dict[str, set[bytes] | None] = {}
        self.dead: set[str] = set()

    def start(self, worker_id: str, epoch: int) -> None:
        self.epoch[worker_id], self.seq[worker_id] = epoch, 0
        self.owned[worker_id], self.parts[worker_id] = set(), None
        self.dead.discard(worker_id)

    def apply(self, event: BlockEvent) -> Applied:
        worker_id = event.worker_id
        if event.epoch > self.epoch.get(worker_id, 0):
            self.start(worker_id, event.epoch)
        if (event.epoch, event.seq) <= (self.epoch[worker_id], self.seq[worker_id]):
            return Applied.STALE
        parts = self.parts[worker_id]
        if event.op is not Op.SNAPSHOT_BEGIN and event.seq != self.seq[worker_id] + 1:
            return Applied.GAP
        if event.op is Op.SNAPSHOT_END and (parts is None or len(parts) != event.num_keys):
            return Applied.GAP
        self.seq[worker_id] = event.seq
        if event.op is Op.STORED:
            self.owned[worker_id] |= set(event.keys)
        elif event.op is Op.REMOVED:
            self.owned[worker_id] -= set(event.keys)
        elif event.op is Op.CLEARED:
            self.owned[worker_id] = set()
        elif event.op is Op.SNAPSHOT_BEGIN:
            self.parts[worker_id] = set()
        elif event.op is Op.SNAPSHOT_PART and parts is not None:
            parts.update(event.keys)
        elif event.op is Op.SNAPSHOT_END and parts is not None:
            self.owned[worker_id], self.parts[worker_id] = parts, None
        return Applied.DONE

    def set_leased(self, epochs: dict[str, int]) -> None:
        for worker_id, epoch in epochs.items():
            if epoch > self.epoch.get(worker_id, 0):
                self.start(worker_id, epoch)
        self.dead = {worker_id for worker_id, epoch in self.epoch.items() if epochs.get(worker_id) != epoch}

    def num_alone(self) -> dict[str, int]:
        all_owned = [key for owned in self.owned.values() for key in owned]
        return {
            worker_id: sum(all_owned.count(key) == 1 for key in self.owned[worker_id])
            for worker_id in self.owned.keys() - self.dead
        }

    def lookup(self, wanted: Sequence[bytes]) -> dict[str, int]:
        found = {}
        for worker_id in self.owned.keys() - self.dead:
            num_blocks = next((n for n, key in enumerate(wanted) if key not in self.owned[worker_id]), len(wanted))
            if num_blocks:
                found[worker_id] = num_blocks
        return found

    def last_owned(self, wanted: Sequence[bytes]) -> dict[str, int]:
        live = self.owned.keys() - self.dead
        found = {
            each: max((n for n, key in enumerate(wanted, 1) if key in self.owned[each]), default=0) for each in live
        }
        return {worker_id: number for worker_id, number in found.items() if number}


workers = st.sampled_from("abc")
numbers = st.lists(st.integers(0, 7), max_size=5, unique=True)
# Sequence numbers mostly follow, so that histories get long; sometimes they repeat or jump.
events = st.tuples(
    workers,
    st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1]),
    st.sampled_from([1, 1, 1, 1, 1, 0, 2]),
    st.sampled_from([*Op, Op.STORED, Op.STORED, Op.SNAPSHOT_PART]),
    numbers,
)
steps = st.lists(
    st.one_of(
        events,
        events,
        events,
        st.dictionaries(workers, st.integers(1, 4)),
        st.tuples(workers, numbers),
        st.integers(1, 5),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(steps, st.integers(0, 3))
def test_random_events_give_what_a_naive_model_gives(
    history: list[tuple[str, int, int, Op, list[int]] | dict[str, int] | tuple[str, list[int]] | int],
    few_owners: int,
) -> None:
    """The answers are the same whether a lookup names its workers or returns masks."""
    mirror, naive = CountingMirror(few_owners), Naive()
    for step in history:
        if isinstance(step, dict):
            mirror.set_leased(step)
            naive.set_leased(step)
        elif isinstance(step, int):
            mirror.sweep(step)
        elif len(step) == 2:
            worker_id, owned = step
            epoch, seq = naive.epoch.get(worker_id, 1), naive.seq.get(worker_id, 0) + 1
            replace(mirror, worker_id, epoch, seq, keys(*owned))
            if worker_id not in naive.epoch:
                naive.start(worker_id, epoch)
            naive.owned[worker_id], naive.parts[worker_id], naive.seq[worker_id] = set(keys(*owned)), None, seq
        else:
            worker_id, epochs_on, seqs_on, op, touched = step
            epoch = max(naive.epoch.get(worker_id, 1) + epochs_on, 1)
            seq = (0 if epochs_on > 0 else naive.seq.get(worker_id, 0)) + seqs_on
            num_keys = len(naive.parts.get(worker_id) or ()) + len(touched) // 5  # seldom wrong
            event = BlockEvent(worker_id=worker_id, epoch=epoch, seq=seq, op=op, keys=keys(*touched), num_keys=num_keys)
            assert mirror.apply(event) is naive.apply(event)
        mirror.check()
        for start in range(8):
            wanted = keys(*range(start, 8))
            assert mirror.lookup(wanted) == naive.lookup(wanted)
            assert mirror.lookup(wanted, resumes_anywhere=False) == naive.last_owned(wanted)
            found = mirror.lookup(wanted)
            assert all(found.get(worker_id, 0) == naive.lookup(wanted).get(worker_id, 0) for worker_id in "abcx")
    while mirror.sweep():
        pass
    if not any(naive.parts.values()):
        assert mirror.unique_blocks() == naive.num_alone()


@pytest.mark.parametrize("seed", range(20))
def test_late_answers_leave_nothing_wrong(seed: int) -> None:
    """A worker whose events travel, and questions about blocks 0 to 2 that it answers at some time. Whatever the mirror
    takes back meanwhile: once all events have arrived, it has what the worker holds.
    """
    rng = Random(seed)
    for _ in range(50):
        mirror, worker = Mirror(), Worker("a", 1)
        mirror.set_leased({"a": 1})
        owned: set[int] = set()
        on_the_way: list[BlockEvent] = []
        asked: list[Position | None] = []
        answers: list[tuple[Position | None, tuple[bytes, ...]]] = []
        steps = ["store", "evict", "ask", "look", "answer", "deliver", "deliver"]
        for step in rng.choices([*steps, "lose", "rescan"], [4] * len(steps) + [1, 1], k=40):
            touched = rng.sample(range(3), rng.randint(1, 3))
            match step:
                case "store":
                    owned.update(touched)
                    on_the_way.append(worker.event(Op.STORED, *touched))
                case "evict":
                    owned.difference_update(touched)
                    on_the_way.append(worker.event(Op.REMOVED, *touched))
                case "ask":
                    asked.append(mirror.position("a"))
                case "look" if asked:
                    answers.append((asked.pop(0), keys(*(n for n in range(3) if n not in owned))))
                case "answer" if answers:
                    mirror.disbelieve("a", *answers.pop(0))
                case "deliver" if on_the_way:
                    mirror.apply(on_the_way.pop(0))
                case "lose":
                    on_the_way = worker.snapshot(*owned)
                case "rescan":
                    on_the_way = []
                    replace(mirror, "a", 1, worker.seq, keys(*owned))
            mirror.check()
        apply(mirror, *on_the_way)
        assert {n for n in range(3) if mirror.lookup(keys(n))} == owned


def test_unique_blocks_are_those_that_no_other_worker_has() -> None:
    mirror = CountingMirror()
    a, b, c = Worker("a", 1), Worker("b", 1), Worker("c", 1)
    apply(mirror, a.event(Op.STORED, 1, 2, 3, 4), b.event(Op.STORED, 1, 2), c.event(Op.STORED, 2, 3, 9))
    assert mirror.unique_blocks() == {"a": 1, "b": 0, "c": 1}
    mirror.set_leased({"a": 1, "b": 1})
    assert mirror.unique_blocks() == {"a": 1, "b": 0}, "what the dead held may come back with them"
    mirror.forget("c")
    while mirror.sweep(1):
        mirror.check()
    assert mirror.unique_blocks() == {"a": 2, "b": 0}
    apply(mirror, b.event(Op.CLEARED))
    while mirror.sweep(1):
        mirror.check()
    assert mirror.unique_blocks() == {"a": 4, "b": 0}
    apply(mirror, b.event(Op.STORED, 4), a.event(Op.REMOVED, 4, 3))
    assert mirror.unique_blocks() == {"a": 2, "b": 1}


@pytest.fixture
def crowd(mirror: Mirror) -> Mirror:
    """300 workers: all own block 1, those from 100 on block 2, the last three block 3."""
    for number in range(300):
        owned = 1 + (number >= 100) + (number >= 297)
        apply(mirror, Worker(f"w{number}", 1).event(Op.STORED, *range(1, owned + 1)))
    return mirror


def test_a_lookup_with_many_owners_names_those_that_are_asked_for(crowd: Mirror) -> None:
    found = crowd.lookup(keys(1, 2, 3, 4))
    assert isinstance(found, Owners)
    assert [found.get(f"w{number}", 0) for number in (0, 99, 100, 296, 297, 299, 300)] == [1, 1, 2, 2, 3, 3, 0]
    assert (found["w299"], found.number("w300"), "w300" in found, len(found)) == (3, 0, False, 300)
    assert found == {f"w{n}": 1 + (n >= 100) + (n >= 297) for n in range(300)}
    crowd.set_leased({"w0": 1, "w299": 1})
    assert crowd.lookup(keys(1, 2, 3, 4)) == {"w0": 1, "w299": 3}


def test_the_longest_of_many_owners_come_first_and_the_others_are_drawn(crowd: Mirror) -> None:
    found = crowd.lookup(keys(1, 2, 3))
    assert isinstance(found, Owners)
    assert found.longest(2, 7).keys() < {"w297", "w298", "w299"}
    sample = found.longest(40, 7)
    assert sample == found.longest(40, 7)
    assert {"w297", "w298", "w299"} < sample.keys()
    assert 20 < len(sample) <= 40
    assert set(sample.values()) == {2, 3}, "of those that own less there is no room"
    assert found.longest(40, 8).keys() != sample.keys(), "other seeds draw others"
    assert found.longest(300, 7) == found, "all of them, if there is room"
    numbers = sorted(int(worker_id[1:]) for worker_id in sample)
    assert numbers[1] < 140 and numbers[-4] > 250, "they come from everywhere"  # noqa: PT018
    crowd.forget(next(worker_id for worker_id, number in sample.items() if number == 2))
    after = crowd.lookup(keys(1, 2, 3))
    assert isinstance(after, Owners)
    assert len(after.longest(40, 7).keys() - sample.keys()) <= 1, "a departure changes one of them"
