"""Pool of the KV blocks of one layer group: free, cached or in use.

A block is in exactly one of three places: the free list, the cache (no sequence uses it, and its content is known under
a key) or in use (reference count > 0; it may have a key as well and then be shared). `EvictionOrder` selects the
cached block to evict. A sequence returns its blocks tail first, so a prefix outlives the blocks built on it, and the
whole prefix of a cached block is cached too, as in vLLM's automatic prefix caching. Layers with a window are different:
they return leading blocks first.

Pure accounting: no tensors, no clock. Changes of the cached content come out as events for the prefix index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from baton.cluster import BlockCounts
from engine.core.runner import EMPTY_PLACE

MAX_MARGIN = 2.0
"""Largest margin, as a multiple of the cache size."""
STEP = 6.0
"""Change of the margin by one ghost, in blocks. It is larger if its kind has fewer ghosts than the other."""
NEARLY = 0.25
"""Content found within this time before its eviction counts like a ghost; as a multiple of the cache size."""


class EvictionOrder:
    """Keys of a pool's cached blocks in eviction order: LRU with a learned bonus for content that was found again.

    Content that a second sequence (or a preempted one) has found is *protected*: it counts as used later than it was,
    by a margin. So prompts that come once pass through the cache without evicting ongoing conversations and shared
    prefixes. The best margin depends on the traffic and on the size of the cache, so it is learned, by the idea of ARC
    (Megiddo and Modha, FAST 2003). The keys of recently evicted content are remembered as *ghosts*. If the ghost of
    protected content comes again, a larger margin would have kept it, and the margin grows; if another ghost does, it
    shrinks. If one kind has fewer ghosts, each of them changes the margin by proportionally more. The router sends
    prompts to the workers that cache them now, not to those that did before, so content that is found shortly before
    its eviction counts like a ghost. The margin starts at 0, which is plain LRU, except for the order of content that
    was returned at the same time.

    The margin is never negative, as its counterpart in ARC may be. A sequence that uses a block uses the block's whole
    prefix. The prefix is thus protected at least as much and returned no earlier, and so never evicted before the
    blocks built on it.

    Time is counted in allocated blocks. A ghost is remembered for as many allocations as the pool has blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.margin = 0.0
        """Bonus of protected content, in allocated blocks: it counts as used this much later than it was."""
        self._num_blocks = num_blocks
        self._now = 0
        self._protected: set[bytes] = set()
        # Index 0 is not protected, index 1 protected: keys with the time of their return or eviction, in order.
        self._cached: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        return len(self._cached[0]) + len(self._cached[1])

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over every key that could be evicted now, in no order."""
        return chain(*self._cached)

    def allocated(self, num_blocks: int) -> None:
        """Advance the time by a number of allocated blocks."""
        self._now += num_blocks
        for ghosts in self._ghosts:
            while ghosts and _oldest(ghosts) < self._now - self._num_blocks:
                ghosts.popitem(last=False)

    def stored(self, key: bytes) -> None:
        """Add new content, in use. If it has a ghost, it counts as found a second time."""
        once, again = self._ghosts
        if key in again:
            self.margin = min(self.margin + self._step(True), MAX_MARGIN * self._num_blocks)
            del again[key]
        elif key in once:
            self.margin = max(self.margin - self._step(False), 0.0)
            del once[key]
        else:
            return
        self._protected.add(key)

    def find(self, keys: Iterable[bytes]) -> None:
        """Mark content, cached or in use, as found by a second sequence, which uses it from now on."""
        once, again = self._cached
        num_blocks, margin = self._num_blocks, self.margin
        nearly = (self._first()[1] if once or again else 0.0) + NEARLY * num_blocks
        shrink, grow = self._step(False), self._step(True)
        for key in keys:
            if key in self._protected:
                time = again.pop(key, None)
                if time is not None and time + margin < nearly:
                    margin = min(margin + grow, MAX_MARGIN * num_blocks)
            else:
                time = once.pop(key, None)
                if time is not None and time < nearly:
                    margin = max(margin - shrink, 0.0)
                self._protected.add(key)
        self.margin = margin

    def add(self, key: bytes) -> None:
        """Add content that its last user has returned."""
        self._cached[key in self._protected][key] = self._now

    def remove(self, key: bytes) -> None:
        """Remove cached content that is in use again without being found: a reader pins it, or a sequence waits for
        room.
        """
        del self._cached[key in self._protected][key]

    def drop(self, key: bytes) -> None:
        """Remove cached content that is no longer needed. It leaves no ghost."""
        self.remove(key)
        self._protected.discard(key)

    def evict(self) -> bytes:
        """Remove and return the key to evict; it becomes a ghost."""
        is_protected, _ = self._first()
        key, _ = self._cached[is_protected].popitem(last=False)
        self._protected.discard(key)
        self._ghosts[is_protected][key] = self._now
        return key

    def _first(self) -> tuple[bool, float]:
        """Return whether the next content to evict is protected, and when it counts as used."""
        once, again = self._cached
        if not again or (once and _oldest(once) <= _oldest(again) + self.margin):
            return False, _oldest(once)
        return True, _oldest(again) + self.margin

    def _step(self, is_protected: bool) -> float:
        """Return the margin's change for one returning ghost of a kind; 0 if nothing of that kind was evicted
        lately.
        """
        num_same, num_others = len(self._ghosts[is_protected]), len(self._ghosts[not is_protected])
        return STEP * max(1.0, num_others / num_same) if num_same else 0.0


def _oldest(times: OrderedDict[bytes, int]) -> int:
    return next(iter(times.values()))


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
