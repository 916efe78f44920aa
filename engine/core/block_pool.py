"""Which KV blocks of one layer group are free, cached or in use.

A block is in exactly one of three places: the free list, the cache (nobody uses it, its content is known under a key)
or in use (reference count > 0; it may have a key as well and then be shared). Which cached block is evicted,
`engine.core.eviction` says. A sequence returns its blocks tail first, so a prefix outlives what was built on it
and a cached block's whole prefix is cached too, as in vLLM's automatic prefix caching.

Pure bookkeeping: no tensors, no clock. Changes of the cached content come out as events for the prefix index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.cluster import BlockCounts
from engine.core.eviction import EvictionOrder
from engine.core.kv_spec import EMPTY_PLACE


@dataclass(frozen=True, slots=True)
class Stored:
    """A block's content became readable under this key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """No block holds this key's content any more."""

    key: bytes


BlockChange = Stored | Removed


class BlockPool:
    """The blocks of one layer group.

    Raises:
        ValueError: there is no block at all.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder(num_blocks)
        self._refs = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._events: list[BlockChange] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks that hold the longest known prefix of `keys`. They are not acquired yet."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_matching(self, keys: Sequence[bytes]) -> int:
        """Returns how many blocks `match` would find, without a look at each: a cached block's prefix is cached too."""
        return bisect_left(keys, True, key=lambda key: key not in self._block_of)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes one reference on each block, all of them cached or in use. Empty places are passed over."""
        for block in blocks:
            if block == EMPTY_PLACE:
                continue
            if self._refs[block] == 0:
                self._cached.remove(self._key_of[block])
            self._refs[block] += 1

    def fits(self, blocks: Sequence[int], num_fresh: int) -> bool:
        """Returns whether `num_fresh` blocks are available beside `blocks`, which `match` has found."""
        return sum(not self._refs[block] for block in blocks) + num_fresh <= self.num_available

    def touch(self, blocks: Sequence[int]) -> None:
        """Counts blocks as used now, which keeps them in the cache for longer."""
        self.acquire(blocks)
        self.release(blocks)

    def reuse(self, blocks: Sequence[int], num_fresh: int) -> list[int] | None:
        """Takes the blocks that a sequence has found, and fresh ones after them, all or nothing.

        Returns:
            None when fewer than `num_fresh` are available beside those found. They are kept for the next try: they
            count as used, but not as found.
        """
        if not self.fits(blocks, num_fresh):
            self.touch(blocks)
            return None
        self._find(blocks)
        fresh = self.allocate(num_fresh)
        assert fresh is not None
        return [*blocks, *fresh]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Fresh blocks with one reference each, all or nothing; evicts cached blocks as needed.

        Returns:
            None when fewer than `num_blocks` are available.
        """
        if num_blocks > self.num_available:
            return None
        blocks: list[int] = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        self._cached.allocated(num_blocks)
        return blocks

    def fork(self, shared: Sequence[int], copied: Sequence[int], num_more: int = 0) -> list[int] | None:
        """Takes blocks for a second sequence that goes on from what a first one has computed (copy on write).

        Args:
            shared: full blocks, which nobody writes any more: both sequences read them.
            copied: blocks that the first sequence still writes. Each gets a fresh counterpart, into which its content
                must be copied; one reference on it is taken until the caller has seen to that.
            num_more: fresh blocks that the second sequence needs beyond these.

        Returns:
            The fresh blocks, first one for each of `copied`; None, and nothing is taken, when too few are available.
        """
        fresh = self.allocate(len(copied) + num_more)
        if fresh is not None:
            self.acquire(shared)
            self.acquire(copied)
        return fresh

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each block of one sequence, given in sequence order. Empty places are passed over."""
        for block in reversed(blocks):
            if block == EMPTY_PLACE:
                continue
            assert self._refs[block] > 0, f"block {block} released more often than acquired"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if (key := self._key_of.get(block)) is not None:
                    self._cached.add(key)
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> int:
        """Names a full block in use by its content.

        Returns:
            The block to use from now on: another one, if that holds this content already; then the caller's reference
            has moved to it. So two sequences that computed one prefix at the same time end up sharing it, and neither
            builds on blocks that nobody could find.
        """
        assert self._refs[block] > 0, f"block {block} is registered while nobody holds it"
        known = self._block_of.get(key)
        if known is None:
            assert block not in self._key_of, f"block {block} is registered with two contents"
            self._block_of[key] = block
            self._key_of[block] = key
            self._cached.stored(key)
            self._events.append(Stored(key))
            return block
        if known != block:
            self._find([known])
            self.release([block])
        return known

    def references(self) -> dict[int, int]:
        """Returns the reference counts of the blocks in use."""
        return {block: refs for block, refs in enumerate(self._refs) if refs}

    def keys(self) -> list[bytes]:
        """Returns every key whose content is readable here."""
        return list(self._block_of)

    def take_events(self) -> list[BlockChange]:
        """Returns what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def counts(self) -> BlockCounts:
        """Returns how many blocks are in each place."""
        in_use = self.num_blocks - self.num_available
        return BlockCounts(self.num_blocks, free=len(self._free), cached=len(self._cached), in_use=in_use)

    def check(self) -> None:
        """Asserts that every block is in exactly one place and the two key maps mirror each other."""
        in_use = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert all(refs >= 0 for refs in self._refs), "negative reference count"
        assert set(self._cached) <= set(self._block_of), "cached content that no block holds"
        places = [*self._free, *(self._block_of[key] for key in self._cached), *in_use]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert not set(self._free) & set(self._key_of), "a free block with a key"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "key maps differ"

    def _find(self, blocks: Sequence[int]) -> None:
        self._cached.find([self._key_of[block] for block in blocks])
        for block in blocks:
            self._refs[block] += 1

    def _evict(self) -> int:
        key = self._cached.evict()
        block = self._block_of.pop(key)
        del self._key_of[block]
        self._events.append(Removed(key))
        return block
