from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.cluster import BlockCounts
from engine.core.block_pool import BlockPool, Removed, Stored

NUM_BLOCKS = 12


def filled(pool: BlockPool, *keys: bytes) -> list[int]:
    """Blocks of one sequence whose contents are known under `keys`."""
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        assert pool.register(block, key) == block
    return blocks


def test_a_block_goes_from_free_to_in_use_to_cached_and_back() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, b"a", b"b")
    assert pool.counts() == BlockCounts(4, free=2, cached=0, in_use=2)
    pool.release(blocks)
    assert pool.counts() == BlockCounts(4, free=2, cached=2, in_use=0)
    assert pool.match([b"a", b"b", b"c"]) == blocks
    pool.acquire(blocks)
    assert pool.counts() == BlockCounts(4, free=2, cached=0, in_use=2)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.counts().free == 4
    held = pool.allocate(3)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.counts().free == 1
    assert pool.allocate(0) == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    pool.release(filled(pool, b"a"))
    assert pool.allocate(2) is not None
    assert pool.keys() == [b"a"]
    assert pool.allocate(1) is not None
    assert pool.keys() == []


def test_the_least_recently_used_goes_first_and_a_tail_before_its_prefix() -> None:
    pool = BlockPool(6)
    first = filled(pool, b"a0", b"a1", b"a2")
    second = filled(pool, b"b0", b"b1", b"b2")
    pool.release(first)
    pool.release(second)
    pool.acquire(pool.match([b"a0", b"a1"]))  # used again, so only a2 is older than b
    pool.release(pool.match([b"a0", b"a1"]))
    pool.take_events()
    removed = []
    for _ in range(6):
        assert pool.allocate(1) is not None
        removed += pool.take_events()
    assert removed == [Removed(key) for key in (b"a2", b"b2", b"b1", b"b0", b"a1", b"a0")]


def test_what_a_second_sequence_has_found_goes_after_what_came_once() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, b"a", b"b"))
    found = pool.reuse(pool.match([b"a"]), 0)
    assert found is not None
    pool.release(found)
    pool.release(filled(pool, b"c", b"d"))
    pool._cached.margin = 4.0  # as if learned
    pool.take_events()
    assert pool.allocate(4) is not None
    assert pool.take_events() == [Removed(key) for key in (b"b", b"d", b"c", b"a")]


def test_who_only_reads_or_finds_no_room_protects_nothing() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, b"a"))
    blocks = pool.match([b"a"])
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.reuse(blocks, 2) is None
    assert pool.counts() == BlockCounts(2, free=1, cached=1)
    pool.release(filled(pool, b"b"))
    pool._cached.margin = 4.0
    pool.take_events()
    assert pool.allocate(2) is not None
    assert pool.take_events() == [Removed(b"a"), Removed(b"b")]


def test_who_waits_for_room_teaches_nothing_and_finds_its_prefix_when_there_is_some() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, b"a", b"b", b"c"))
    held = pool.allocate(3)  # evicts b and c
    assert held is not None
    for _ in range(3):
        assert pool.reuse(pool.match([b"a"]), 1) is None
    assert pool._cached.margin == 0
    pool._cached.margin = 10.0
    for _ in range(3):
        assert pool.reuse(pool.match([b"a"]), 1) is None
    assert pool._cached.margin == 10
    pool.release(held[:1])
    assert pool.reuse(pool.match([b"a"]), 1) is not None
    assert pool._cached.margin < 10, "it would soon have gone"


def test_a_block_may_be_read_twice_at_once() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, b"a"))
    blocks = pool.match([b"a", b"a"])
    pool.acquire(blocks)
    pool.check()
    assert pool.references() == {blocks[0]: 2}


def test_a_shared_block_stays_until_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, b"a")
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.counts().in_use == 1
    assert pool.allocate(2) is None
    pool.release(blocks)
    assert pool.counts().cached == 1


def test_a_block_without_a_key_is_free_once_released() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    assert pool.counts() == BlockCounts(2, free=2)
    assert pool.take_events() == []


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    filled(pool, b"a", b"b", b"c")
    assert pool.match([b"a", b"x", b"c"]) == pool.match([b"a"])
    assert pool.match([b"x", b"a"]) == []
    assert pool.match([]) == []


def test_the_second_block_of_the_same_content_is_given_up_for_the_first() -> None:
    pool = BlockPool(4)
    first = filled(pool, b"a")
    second = pool.allocate(1)
    assert second is not None
    pool.take_events()
    assert pool.register(second[0], b"a") == first[0]
    assert pool.take_events() == []
    assert pool.counts() == BlockCounts(4, free=3, in_use=1)
    pool.release(first)
    assert pool.counts().in_use == 1, "two users"
    pool.release(first)
    assert pool.counts() == BlockCounts(4, free=3, cached=1)


def test_events_are_told_once_and_in_order() -> None:
    pool = BlockPool(1)
    pool.release(filled(pool, b"a"))
    pool.release(filled(pool, b"b"))
    assert pool.take_events() == [Stored(b"a"), Removed(b"a"), Stored(b"b")]
    assert pool.take_events() == []


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0)


def test_misuse_is_asserted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than acquired"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="without a reference on it"):
        pool.register(blocks[0], b"a")


def test_check_sees_every_kind_of_damage() -> None:
    def damaged(how: str) -> BlockPool:
        pool = BlockPool(3)
        pool.release(filled(pool, b"a"))
        pool.check()
        cached = pool._block_of[next(iter(pool._cached))]
        match how:
            case "lost":
                pool._free.pop()
            case "twice":
                pool._free.append(cached)
            case "negative":
                pool._refs[0] = -1
            case "nameless":
                del pool._block_of[pool._key_of.pop(cached)]
            case "one-way":
                pool._block_of[b"z"] = cached
            case "free with key":
                pool._key_of[pool._free[0]] = b"z"
                pool._block_of[b"z"] = pool._free[0]
        return pool

    for how in ("lost", "twice", "negative", "nameless", "one-way", "free with key"):
        with pytest.raises(AssertionError):
            damaged(how).check()


Chain = tuple[int, ...]


class PoolMachine(RuleBasedStateMachine):
    """Sequences over chained keys against a naive model: who references what, and what each block holds.

    A key is a path of letters; the key of a prefix is a prefix of the path, as with chained hashes.
    """

    holders: Bundle[list[int]] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.references: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}
        self.num_allocated = 0
        self.num_returned = 0
        self.returned: dict[int, tuple[int, int]] = {}
        """When, in blocks allocated, and as which one."""
        self.found: set[bytes] = set()
        """By a second sequence."""
        self.evicted: dict[bytes, int] = {}
        """When, in blocks allocated."""
        self.replayed: set[bytes] = set()

    def note_returned(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if not self.references[block]:
                self.num_returned += 1
                self.returned[block] = self.num_allocated, self.num_returned

    def note_stored(self, block: int, key: bytes) -> None:
        self.content[block] = key
        if self.evicted.pop(key, -NUM_BLOCKS) >= self.num_allocated - NUM_BLOCKS:
            self.found.add(key)

    def goes(self, block: int) -> tuple[float, bool, int]:
        """The least goes first."""
        time, number = self.returned[block]
        is_found = self.content[block] in self.found
        return time + is_found * self.pool._cached.margin, is_found, number

    @rule(margin=st.floats(0, 2 * NUM_BLOCKS))
    def learn(self, margin: float) -> None:
        self.pool._cached.margin = margin

    def take_fresh(self, num_blocks: int, found: Sequence[int] = ()) -> list[int] | None:
        """Takes blocks beside those found, and checks that those were evicted which the model would evict."""
        unused = [block for block in self.content if not self.references[block]]
        cached = [block for block in unused if block not in found]
        num_free = NUM_BLOCKS - len(unused) - len(+self.references)
        blocks = self.pool.reuse(found, num_blocks) if found else self.pool.allocate(num_blocks)
        if num_blocks > num_free + len(cached):
            assert blocks is None
            self.note_returned(found)
            return None
        assert blocks is not None
        assert blocks[: len(found)] == list(found)
        self.references.update(found)
        self.found.update(self.content[block] for block in found)
        blocks = blocks[len(found) :]
        assert len(set(blocks)) == num_blocks
        assert not any(self.references[block] for block in blocks)
        first = sorted(cached, key=self.goes)[: max(0, num_blocks - num_free)]
        assert {block for block in blocks if block in self.content} == set(first)
        for block in first:
            key = self.content.pop(block)
            self.found.discard(key)
            self.evicted[key] = self.num_allocated
        self.num_allocated += num_blocks
        self.references.update(blocks)
        return blocks

    @rule(target=holders, path=st.lists(st.sampled_from(b"ab"), min_size=1, max_size=6), num_open=st.integers(0, 2))
    def run_a_sequence(self, path: list[int], num_open: int) -> list[int]:
        """A sequence takes its cached prefix, fills the rest, and has some blocks that are not full yet."""
        keys = [bytes(path[: n + 1]) for n in range(len(path))]
        blocks = self.pool.match(keys)
        assert [self.content[block] for block in blocks] == keys[: len(blocks)]
        assert self.pool.num_matching(keys) == len(blocks)
        assert len(blocks) == len(keys) or keys[len(blocks)] not in self.content.values()
        fresh = self.take_fresh(len(keys) - len(blocks) + num_open, blocks)
        if fresh is None:
            return []
        for block, key in zip(fresh, keys[len(blocks) :], strict=False):
            assert self.pool.register(block, key) == block
            self.note_stored(block, key)
        return blocks + fresh

    @rule(target=holders, path=st.lists(st.sampled_from(b"ab"), min_size=1, max_size=4))
    def run_without_looking(self, path: list[int]) -> list[int]:
        """Computes everything anew, as two sequences of one prompt do when they start in the same step."""
        fresh = self.take_fresh(len(path))
        if fresh is None:
            return []
        blocks = []
        for index, block in enumerate(fresh):
            key = bytes(path[: index + 1])
            known = next((b for b, content in self.content.items() if content == key), None)
            assert self.pool.register(block, key) == (block if known is None else known)
            if known is None:
                self.note_stored(block, key)
            else:
                self.found.add(key)
                self.references[known] += 1
                self.references[block] -= 1
            blocks.append(block if known is None else known)
        return blocks

    @rule(blocks=consumes(holders))
    def give_back(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self.references.subtract(blocks)
        self.note_returned(blocks)

    @rule()
    def follow_events(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, Stored):
                assert event.key not in self.replayed
                self.replayed.add(event.key)
            else:
                self.replayed.remove(event.key)
        assert self.replayed == set(self.pool.keys())

    @invariant()
    def same_as_the_model(self) -> None:
        self.pool.check()
        in_use = len(+self.references)
        cached = sum(not self.references[block] for block in self.content)
        assert self.pool.counts() == BlockCounts(NUM_BLOCKS, NUM_BLOCKS - in_use - cached, cached, in_use)
        assert self.pool.references() == +self.references
        assert sorted(self.pool.keys()) == sorted(self.content.values())

    @invariant()
    def the_prefix_of_all_content_is_there(self) -> None:
        known = set(self.content.values())
        assert all(key[:-1] in known for key in known if len(key) > 1)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40)
