"""The order in which cached content is evicted.

Least recently used first, with one exception: what a second sequence has found (or a preempted one again) is
*protected*, it counts as used later than it was, by a margin. So prompts that come once pass through the cache without
pushing out conversations that go on and beginnings that many share. How large a margin pays depends on the traffic and
on the room, so it is learned, by the idea of ARC (Megiddo and Modha, FAST 2003): the keys of what was evicted a short
while ago are remembered, as *ghosts*. When a ghost of something protected comes again, a larger margin would have kept
it, and the margin grows; when another ghost does, it shrinks. Where one kind has fewer ghosts, each of those that come
again moves it as many times more. And as the router sends prompts to where they are cached, not to where they were,
what is found shortly before it would have gone counts like a ghost. At a margin of 0, where it begins, this is plain
LRU, but for what was returned at the same time.

The margin is never negative, as the like of it may be in ARC. Who uses a block uses its whole prefix, which is thus
protected no less and returned no earlier, and so never evicted before what was built on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

MAX_MARGIN = 2.0
"""Largest margin, in sizes of the cache."""
STEP = 6.0
"""What a ghost changes the margin by, in blocks, unless its kind has fewer: then by more."""
NEARLY = 0.25
"""What is found so shortly before it would have gone counts like a ghost, in sizes of the cache."""


class EvictionOrder:
    """The keys of a pool's cached blocks, and the ghosts.

    Time is counted in blocks that were allocated; ghosts are remembered for as many as there are in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.margin = 0.0
        """Bonus of protected content, in allocated blocks: it counts as used so much later than it was."""
        self._num_blocks = num_blocks
        self._now = 0
        self._protected: set[bytes] = set()
        # Each a pair, of what is not protected and of what is: keys, and when they were returned or evicted, in order.
        self._cached: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        return len(self._cached[0]) + len(self._cached[1])

    def __iter__(self) -> Iterator[bytes]:
        """Every key that could be evicted now, in no order."""
        return chain(*self._cached)

    def allocated(self, num_blocks: int) -> None:
        """So much time has passed."""
        self._now += num_blocks
        for ghosts in self._ghosts:
            while ghosts and _oldest(ghosts) < self._now - self._num_blocks:
                ghosts.popitem(last=False)

    def stored(self, key: bytes) -> None:
        """New content, in use. If it has a ghost, it was found a second time, had it only been kept."""
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
        """A second sequence has found this content, cached or in use, and uses it from now on."""
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
        """The last user has returned this content."""
        self._cached[key in self._protected][key] = self._now

    def remove(self, key: bytes) -> None:
        """Cached content is in use again, without that anybody found it: somebody reads it, or waits for room."""
        del self._cached[key in self._protected][key]

    def evict(self) -> bytes:
        """Takes out what is to go first; a ghost stays."""
        is_protected, _ = self._first()
        key, _ = self._cached[is_protected].popitem(last=False)
        self._protected.discard(key)
        self._ghosts[is_protected][key] = self._now
        return key

    def _first(self) -> tuple[bool, float]:
        """Whether what goes first is protected, and when it counts as used."""
        once, again = self._cached
        if not again or (once and _oldest(once) <= _oldest(again) + self.margin):
            return False, _oldest(once)
        return True, _oldest(again) + self.margin

    def _step(self, is_protected: bool) -> float:
        """Returns the margin's change for one ghost of a kind that comes again; 0 if none of it has gone lately."""
        num_same, num_others = len(self._ghosts[is_protected]), len(self._ghosts[not is_protected])
        return STEP * max(1.0, num_others / num_same) if num_same else 0.0


def _oldest(times: OrderedDict[bytes, int]) -> int:
    return next(iter(times.values()))
