"""Pool of the KV blocks of one layer group: free, cached or in use.

A block is in exactly one of three places: the free list, the cache (no sequence uses it, and its content is known under
a key) or in use (reference count > 0; it may have a key as well and then be shared). `engine.core.eviction` selects the
cached block to evict. A sequence returns its blocks tail first, so a prefix outlives the blocks built on it, and the
whole prefix of a cached block is cached too, as in vLLM's automatic prefix caching. Layers with a window are different:
they return leading blocks first.

Pure accounting: no tensors, no clock. Changes of the cached content come out as events for the prefix index.
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
        ValueError: `num_blocks` is less than 1.
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
        """Blocks that `allocate` could return now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of `keys`. They are not acquired yet."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, key: bytes) -> bool:
        """Return whether content with this key is cached or in use."""
        return key in self._block_of

    def has_key(self, block: int) -> bool:
        """Return whether a block is registered."""
        return block in self._key_of

    def is_exclusive(self, block: int) -> bool:
        """Return whether a block in use has one user and no key: only then may its user write it."""
        return self._refs[block] == 1 and block not in self._key_of

    def num_matching(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks `match` would find, by binary search: a cached block's prefix is cached too."""
        return bisect_left(keys, True, key=lambda key: key not in self._block_of)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one reference on each block, all of them cached or in use. Empty places are skipped."""
        for block in blocks:
            if block == EMPTY_PLACE:
                continue
            if self._refs[block] == 0:
                self._cached.remove(self._key_of[block])
            self._refs[block] += 1

    def fits(self, blocks: Sequence[int], num_fresh: int) -> bool:
        """Return whether `num_fresh` blocks are available in addition to `blocks`, which `match` has found."""
        num_cached = sum(block != EMPTY_PLACE and not self._refs[block] for block in blocks)
        return num_cached + num_fresh <= self.num_available

    def touch(self, blocks: Sequence[int]) -> None:
        """Mark blocks as used now, which keeps them in the cache for longer."""
        self.acquire(blocks)
        self.release(blocks)

    def reuse(self, blocks: Sequence[int], num_fresh: int) -> list[int] | None:
        """Acquire the blocks that `match` has found for a sequence and allocate fresh ones after them, all or nothing.

        Returns:
            None if fewer than `num_fresh` blocks are available in addition. The found blocks are then kept for the next
            attempt: they are marked as used, but not as found.
        """
        if not self.fits(blocks, num_fresh):
            self.touch(blocks)
            return None
        self._find(blocks)
        fresh = self.allocate(num_fresh)
        assert fresh is not None
        return [*blocks, *fresh]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Allocate blocks with one reference each, all or nothing; evict cached blocks as needed.

        Returns:
            None if fewer than `num_blocks` are available.
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
        """Take blocks for a second sequence that continues from the computed tokens of a first one (copy on write).

        Args:
            shared: full blocks that are not written any more. Both sequences read them.
            copied: blocks that the first sequence still writes. Each gets a fresh counterpart, and the caller must copy
                the content into it. One reference on the source is held until the caller has done so.
            num_more: further fresh blocks that the second sequence needs.

        Returns:
            The fresh blocks, starting with one for each of `copied`; None, with nothing taken, if too few are
            available.
        """
        fresh = self.allocate(len(copied) + num_more)
        if fresh is not None:
            self.acquire(shared)
            self.acquire(copied)
        return fresh

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of one sequence, given in sequence order. Empty places are skipped."""
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
        """Register a full block in use under the key of its content.

        Returns:
            The block to use from now on. If another block already holds this content, it is that one, and the caller's
            reference has moved to it. Two sequences that computed one prefix at the same time thus share it, and
            neither builds on blocks that no look-up finds.
        """
        assert self._refs[block] > 0, f"block {block} is registered without a reference on it"
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

    def forget(self, key: bytes) -> None:
        """Free the block of a key, unless it is in use or no longer there."""
        block = self._block_of.get(key)
        if block is None or self._refs[block]:
            return
        self._cached.drop(key)
        self._drop(key)
        self._free.append(block)

    def references(self) -> dict[int, int]:
        """Return the reference counts of the blocks in use."""
        return {block: refs for block, refs in enumerate(self._refs) if refs}

    def keys(self) -> list[bytes]:
        """Return every key whose content is readable here."""
        return list(self._block_of)

    def take_events(self) -> list[BlockChange]:
        """Return the changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each place."""
        in_use = self.num_blocks - self.num_available
        return BlockCounts(self.num_blocks, free=len(self._free), cached=len(self._cached), in_use=in_use)

    def check(self) -> None:
        """Assert that every block is in exactly one place and that the two key maps mirror each other."""
        in_use = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert all(refs >= 0 for refs in self._refs), "negative reference count"
        assert set(self._cached) <= set(self._block_of), "cached content that no block holds"
        places = [*self._free, *(self._block_of[key] for key in self._cached), *in_use]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert not set(self._free) & set(self._key_of), "a free block with a key"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "key maps differ"

    def _find(self, blocks: Sequence[int]) -> None:
        blocks = [block for block in blocks if block != EMPTY_PLACE]
        self._cached.find([self._key_of[block] for block in blocks])
        for block in blocks:
            self._refs[block] += 1

    def _evict(self) -> int:
        return self._drop(self._cached.evict())

    def _drop(self, key: bytes) -> int:
        """Remove a key and return its block."""
        block = self._block_of.pop(key)
        del self._key_of[block]
        self._events.append(Removed(key))
        return block
