from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.core.block_pool import MAX_MARGIN, NEARLY, STEP, BlockPool, EvictionOrder
from tests.bench.caching_workers import remember

NUM_BLOCKS = 8


def used(order: EvictionOrder, *keys: bytes) -> None:
    """One after the other, each new and returned."""
    for key in keys:
        order.allocated(1)
        order.stored(key)
        order.add(key)


def found(order: EvictionOrder, key: bytes) -> None:
    order.find([key])
    order.add(key)


def evicted(order: EvictionOrder) -> list[bytes]:
    return [order.evict() for _ in range(len(order))]


def test_at_first_the_least_recently_used_goes_first_whatever_was_found() -> None:
    order = EvictionOrder(NUM_BLOCKS)
    used(order, b"a", b"b")
    found(order, b"a")
    used(order, b"c")
    assert list(order) == [b"b", b"c", b"a"], "in no order"
    assert evicted(order) == [b"b", b"a", b"c"]


def test_what_was_found_goes_later_by_the_margin() -> None:
    order = EvictionOrder(NUM_BLOCKS)
    order.margin = 2.0
    used(order, b"a", b"b")
    found(order, b"b")  # at 2, which counts as 4
    used(order, b"c", b"d", b"e")
    assert evicted(order) == [b"a", b"c", b"d", b"b", b"e"]


def test_what_was_evicted_and_comes_anew_has_to_be_found_again() -> None:
    order = EvictionOrder(NUM_BLOCKS)
    order.margin = 4.0
    used(order, b"a")
    found(order, b"a")
    evicted(order)
    order.allocated(NUM_BLOCKS + 1)  # its ghost is gone
    used(order, b"a", b"b")
    assert evicted(order) == [b"a", b"b"]


def test_a_ghost_that_comes_again_is_protected_and_moves_the_margin_its_way() -> None:
    order = EvictionOrder(2 * NUM_BLOCKS)
    used(order, b"a", b"b")
    found(order, b"a")
    evicted(order)
    used(order, b"a")
    assert order.margin == STEP, "it was found before, and would have been had the margin been larger"
    used(order, b"b")
    assert order.margin == 0, "it came once, and would have been found had the margin been smaller"
    used(order, b"c")
    order.margin = 2.0
    assert evicted(order) == [b"c", b"a", b"b"]


def test_a_ghost_of_the_rarer_kind_weighs_more() -> None:
    order = EvictionOrder(100)
    used(order, *(bytes([n]) for n in range(5)))
    found(order, b"\0")
    evicted(order)
    used(order, b"\0")
    assert order.margin == 4 * STEP, "one of one came again, of four there are"
    used(order, b"\1")
    assert order.margin == 3 * STEP


def test_what_is_found_just_in_time_counts_like_a_ghost() -> None:
    order = EvictionOrder(100)
    used(order, b"gone", b"gone too", b"a", b"b")
    found(order, b"gone too")
    assert order.margin == 0, "nothing goes yet"
    order.allocated(30)
    used(order, b"c")
    assert [order.evict(), order.evict()] == [b"gone", b"a"]
    order.margin = 10.0
    found(order, b"c")
    assert order.margin == 10, "it would have stayed for long"
    found(order, b"gone too")
    assert order.margin == 10, "of its kind nothing goes"
    order.remove(b"b")
    order.add(b"b")
    assert order.margin == 10, "nobody has found it"
    order.find([b"a prefix that is in use", b"b"])
    assert order.margin == 10 - STEP


def test_what_the_margin_keeps_for_long_is_not_found_just_in_time() -> None:
    order = EvictionOrder(100)
    used(order, b"a", b"b", b"c", b"d")
    found(order, b"a")
    found(order, b"b")
    assert [order.evict() for _ in range(3)] == [b"c", b"d", b"a"], "so both kinds go"
    used(order, b"e")
    order.margin = 50.0
    found(order, b"b")
    assert order.margin == 50


def test_the_margin_has_bounds() -> None:
    order = EvictionOrder(1)
    used(order, b"a")
    evicted(order)
    used(order, b"a")
    assert order.margin == 0
    evicted(order)
    used(order, b"a")
    assert order.margin == MAX_MARGIN


def test_ghosts_are_remembered_for_as_many_blocks_as_the_pool_has() -> None:
    for num_blocks, is_known in ((NUM_BLOCKS - 1, True), (NUM_BLOCKS, False)):
        order = EvictionOrder(NUM_BLOCKS)
        used(order, b"a")
        found(order, b"a")
        evicted(order)
        order.allocated(num_blocks)
        used(order, b"a")
        assert (order.margin > 0) is is_known
        assert not any(order._ghosts), "an old ghost takes room"


def hits(num_blocks: int, prompts: Iterable[list[bytes]]) -> int:
    """Blocks that were found, of the later half of these prompts. Nothing runs at the same time."""
    pool = BlockPool(num_blocks)
    found = []
    for keys in prompts:
        found.append(remember(pool, keys))
        pool.check()
    return sum(found[len(found) // 2 :])


def least_recently_used(monkeypatch: pytest.MonkeyPatch, num_blocks: int, prompts: list[list[bytes]]) -> int:
    with monkeypatch.context() as patch:
        patch.setattr("engine.core.block_pool.STEP", 0.0)
        return hits(num_blocks, prompts)


def test_conversations_are_kept_from_prompts_that_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve beginnings in turn, with so much between that what is kept in order of its use is gone when it returns."""
    prompts: list[list[bytes]] = []
    for n in range(2_400):
        prompts.append([b"system %d" % (n % 12), b"more %d" % (n % 12)])
        prompts.append([b"once %d" % n, b"and never again %d" % n])
    assert least_recently_used(monkeypatch, 40, prompts) == 0
    assert hits(40, prompts) > 0.9 * 2_400


def test_where_only_the_new_comes_again_it_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt comes twice, some time apart: what was found is not needed any more."""
    rng = random.Random(5)
    at = [(n + again * rng.uniform(10, 45), n) for n in range(4_000) for again in (0, 1)]
    prompts = [[b"%d" % n] for _, n in sorted(at)]
    plain = least_recently_used(monkeypatch, 60, prompts)
    assert 1_000 < plain < 1_900
    assert hits(60, prompts) >= 0.99 * plain


class OrderMachine(RuleBasedStateMachine):
    """Against a model that looks through everything that ever happened."""

    keys = st.integers(0, 11).map(lambda n: b"%d" % n)

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(NUM_BLOCKS)
        self.now = 0
        self.margin = 0.0
        self.in_use: set[bytes] = set()
        self.protected: set[bytes] = set()
        self.returned: list[tuple[bytes, int]] = []
        self.ghosts: list[tuple[bytes, int, bool]] = []

    @rule(num_blocks=st.integers(0, 5))
    def allocated(self, num_blocks: int) -> None:
        self.order.allocated(num_blocks)
        self.now += num_blocks

    @rule(keys=st.lists(keys, max_size=5, unique=True))
    def find(self, keys: list[bytes]) -> None:
        """Those of them that are there."""
        known = [key for key in keys if key in self.in_use or key in dict(self.returned)]
        first = min((self.counts_as(*one) for one in self.returned), default=0.0)
        self.order.find(known)
        for key in known:
            if key in dict(self.returned):
                found = (key, dict(self.returned)[key])
                self.returned.remove(found)
                if self.counts_as(*found) < first + NEARLY * NUM_BLOCKS:
                    self.learn(key in self.protected)
        self.in_use.update(known)
        self.protected.update(known)

    @rule(key=keys)
    def use(self, key: bytes) -> None:
        if key in dict(self.returned):
            self.order.remove(key)
            self.returned.remove((key, dict(self.returned)[key]))
            self.in_use.add(key)
        elif key not in self.in_use:
            self.order.stored(key)
            self.in_use.add(key)
            for _, _, was_protected in [ghost for ghost in self.known_ghosts() if ghost[0] == key]:
                self.learn(was_protected)
                self.protected.add(key)
            self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != key]

    def known_ghosts(self) -> list[tuple[bytes, int, bool]]:
        return [ghost for ghost in self.ghosts if ghost[1] >= self.now - NUM_BLOCKS]

    def counts_as(self, key: bytes, time: int) -> float:
        return time + self.margin * (key in self.protected)

    def learn(self, was_protected: bool) -> None:
        kinds = [ghost[2] for ghost in self.known_ghosts()]
        if was_protected in kinds:
            ratio = kinds.count(not was_protected) / kinds.count(was_protected)
            step = STEP * max(1, ratio) * (1 if was_protected else -1)
            self.margin = min(max(0.0, self.margin + step), MAX_MARGIN * NUM_BLOCKS)

    @rule(key=keys)
    def give_back(self, key: bytes) -> None:
        if key in self.in_use:
            self.order.add(key)
            self.in_use.remove(key)
            self.returned.append((key, self.now))

    @rule()
    def evict(self) -> None:
        if self.returned:
            first = min(self.returned, key=lambda one: (self.counts_as(*one), one[0] in self.protected))
            assert self.order.evict() == first[0]
            self.ghosts.append((first[0], self.now, first[0] in self.protected))
            self.returned.remove(first)
            self.protected.discard(first[0])

    @invariant()
    def same_as_the_model(self) -> None:
        assert self.order.margin == pytest.approx(self.margin)
        assert sorted(self.order) == sorted(key for key, _ in self.returned)
        assert len(self.order) == len(self.returned)


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=80, stateful_step_count=60)
