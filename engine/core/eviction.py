"""Eviction order of cached content: LRU with a learned bonus for content that was found again.

Content that a second sequence (or a preempted one) has found is *protected*: it counts as used later than it was, by a
margin. So prompts that come once pass through the cache without evicting ongoing conversations and shared prefixes. The
best margin depends on the traffic and on the size of the cache, so it is learned, by the idea of ARC (Megiddo and
Modha, FAST 2003). The keys of recently evicted content are remembered as *ghosts*. If the ghost of protected content
comes again, a larger margin would have kept it, and the margin grows; if another ghost does, it shrinks. If one kind
has fewer ghosts, each of them changes the margin by proportionally more. The router sends prompts to the workers that
cache them now, not to those that did before, so content that is found shortly before its eviction counts like a ghost.
The margin starts at 0, which is plain LRU, except for the order of content that was returned at the same time.

The margin is never negative, as its counterpart in ARC may be. A sequence that uses a block uses the block's whole
prefix. The prefix is thus protected at least as much and returned no earlier, and so never evicted before the blocks
built on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

MAX_MARGIN = 2.0
"""Largest margin, as a multiple of the cache size."""
STEP = 6.0
"""Change of the margin by one ghost, in blocks. It is larger if its kind has fewer ghosts than the other."""
NEARLY = 0.25
"""Content found within this time before its eviction counts like a ghost; as a multiple of the cache size."""


class EvictionOrder:
    """Keys of a pool's cached blocks in eviction order, and the ghosts.

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
