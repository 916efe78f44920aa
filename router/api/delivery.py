"""Delivers an answer to a client that may read slowly or not at all.

Each piece is written as it comes. If a write waits because the client does not read, the answer is read ahead into
memory. So its resources in the cluster are free once its last token is computed, whenever the client reads it. The
memory for reading ahead is bounded for all clients together; beyond the bound an answer proceeds only as fast as its
client reads. If a write waits too long, the answer is ended. The limit is shorter while other requests need its slot
and the answer is still being computed.

Padding detects early that a client has stopped reading, so that its slot can be reused while other requests wait. A
write blocks only once every buffer between router and client is full: over gRPC a window of 64 KiB by default, over
HTTP the client's socket buffer and ours. An answer of small messages would need hundreds of tokens to fill them. So,
while the router is crowded, its messages are padded until the answer has reached that size, and not beyond. A client
that reads receives at most that much padding, in small parts, and none if its answer is already longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import NotRead
from baton.tasks import Flag, cancel_and_wait, seen_through

T = TypeVar("T")
LOOK_S = 1.0
"""Time between two checks of whether a client reads."""
MAX_AHEAD_BYTES = 32 * 2**20
CROWDED_STALL_S = 5.0
"""Longest time that a write may take while the answer occupies a slot that other requests need."""


class ReadAhead:
    """Bytes that are read ahead for all clients of one server.

    Args:
        max_bytes: above this total an answer proceeds only as far as its client has read.
        is_crowded: returns whether requests are refused or wait because too many answers are being computed.
    """

    def __init__(self, max_bytes: int = MAX_AHEAD_BYTES, *, is_crowded: Callable[[], bool] = lambda: False) -> None:
        self.num_bytes = 0
        self.is_crowded = is_crowded
        self._max_bytes = max_bytes
        self._waiting: set[Flag] = set()

    def add(self, num_bytes: int) -> None:
        """Add bytes that are kept; a negative number removes them."""
        self.num_bytes += num_bytes
        if not self.is_full:
            for each in self._waiting:
                each.set()

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self._max_bytes

    async def changes(self, flag: Flag) -> None:
        """Wait until there is room for more, or the flag is set, whichever comes first."""
        self._waiting.add(flag)
        try:
            flag.clear()
            await flag.wait()
        finally:
            self._waiting.discard(flag)


async def deliver(
    items: AsyncGenerator[T],
    write: Callable[[T], Awaitable[None]],
    *,
    size: Callable[[T], int],
    ahead: ReadAhead,
    stall_s: float = math.inf,
) -> None:
    """Write all items in order. The items are closed whenever this ends, even in a cancelled scope.

    Args:
        write: returns once the client, or a buffer on the way, has accepted an item.
        size: returns the size of an item in memory, in bytes.
        ahead: counts the bytes that are read ahead.
        stall_s: longest time that a write may take; see also CROWDED_STALL_S.

    Raises:
        NotRead: a write took longer. By then the items are closed, and `write` was cancelled and has ended.
    """
    delivery = _Delivery(items, size, ahead, stall_s)
    try:
        while (item := await delivery.next()) is not None:
            delivery.begins_to_write()
            await write(item)
            delivery.has_written()
    except asyncio.CancelledError:
        if delivery.reason:
            _current_task().uncancel()
            raise NotRead(delivery.reason) from None
        raise
    finally:
        await delivery.close()


class _Delivery(Generic[T]):
    """State of one delivery. Only one task at a time asks the items for the next one."""

    def __init__(self, items: AsyncGenerator[T], size: Callable[[T], int], ahead: ReadAhead, stall_s: float) -> None:
        self.reason = ""
        """Why the delivery was given up; empty: it was not."""
        self._items = items
        self._has_ended = False
        self._size = size
        self._ahead = ahead
        self._stall_s = stall_s
        self._writer = _current_task()
        self._loop = asyncio.get_running_loop()
        self._waits_since_s = math.inf
        """Start of the write in progress, on the loop's clock; infinite: no write is in progress."""
        self._reading: asyncio.Task[None] | None = None
        """The task that reads ahead; None: that was not necessary so far."""
        self._kept: deque[T] = deque()
        self._has_none = Flag()
        """Set when the client has taken all kept items."""
        self._has_more = Flag()
        """Set while items are kept, or after the reading has ended."""
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self._closing: asyncio.Task[None] | None = None

    async def next(self) -> T | None:
        """Return the next item; None: there are no more. Raises the errors of the items."""
        if self._reading is None:
            item = await anext(self._items, None)
            self._has_ended = item is None
            return item
        await self._has_more.wait()
        if self._kept:
            item = self._kept.popleft()
            self._ahead.add(-self._size(item))
            if not self._kept and not self._reading.done():
                self._has_more.clear()
                self._has_none.set()
            return item
        self._reading.result()
        return None

    def begins_to_write(self) -> None:
        self._waits_since_s = self._loop.time()

    def has_written(self) -> None:
        self._waits_since_s = math.inf

    async def close(self) -> None:
        """Stop reading ahead, and close the items. Idempotent."""
        self._timer.cancel()
        if self._has_ended and self._reading is None:
            return
        self._closing = self._closing or asyncio.create_task(self._close())
        await seen_through(self._closing)

    async def _close(self) -> None:
        if self._reading is not None:
            await cancel_and_wait((self._reading,))
        self._ahead.add(-sum(map(self._size, self._kept)))
        self._kept.clear()
        await self._items.aclose()

    def _look(self) -> None:
        waited_s = self._loop.time() - self._waits_since_s
        self.reason = self._why_not_longer(waited_s)
        if self.reason:
            # The write may take time to be cancelled. The resources of the answer must not wait for that.
            self._closing = self._closing or asyncio.create_task(self._close())
            self._writer.cancel()
            return
        if waited_s >= LOOK_S and self._reading is None:
            self._reading = asyncio.create_task(self._read_ahead())
        self._timer = self._loop.call_later(min(LOOK_S, self._stall_s), self._look)

    def _why_not_longer(self, waited_s: float) -> str:
        """Return why a write that has waited for this time is given up; empty: it is not."""
        if waited_s >= self._stall_s:
            return f"the client has not read for {self._stall_s:g} s"
        is_computed = self._has_ended or (self._reading is not None and self._reading.done())
        if waited_s >= CROWDED_STALL_S and not is_computed and self._ahead.is_crowded():
            return f"the client has not read for {CROWDED_STALL_S:g} s while other requests wait for its slot"
        return ""

    async def _read_ahead(self) -> None:
        try:
            async with contextlib.aclosing(self._items):
                async for item in self._items:
                    self._kept.append(item)
                    self._ahead.add(self._size(item))
                    self._has_more.set()
                    while self._kept and self._ahead.is_full:
                        await self._ahead.changes(self._has_none)
        finally:
            self._has_more.set()


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(frozen=True, slots=True)
class Unread:
    """Default buffer size of a transport. A client may have larger buffers, which the router cannot know.

    Attributes:
        num_bytes: bytes of an unread answer that the buffers take before a write blocks.
        part_bytes: maximum padding of one message: small enough to arrive over a slow line long before the write has
            waited too long.
    """

    num_bytes: int
    part_bytes: int


GRPC = Unread(64 * 2**10 - 1, 4 * 2**10)
HTTP = Unread(256 * 2**10, 8 * 2**10)
FRAME_BYTES = 10
"""Maximum overhead of a message, in bytes: the frame of gRPC or HTTP, and the marker of the padding."""


class AnswerPadding:
    """Computes the padding of one answer's messages.

    Args:
        is_crowded: returns whether requests are refused or wait because too many answers are being computed.
    """

    def __init__(self, unread: Unread, is_crowded: Callable[[], bool]) -> None:
        self._unread = unread
        self._is_crowded = is_crowded
        self._num_bytes = 0
        """Total length of the messages so far, with their frames and padding."""

    def of_next(self, num_bytes: int) -> int:
        """Return the padding of the next message, in bytes.

        Args:
            num_bytes: length of the message.
        """
        self._num_bytes += num_bytes + FRAME_BYTES
        left = self._unread.num_bytes - self._num_bytes
        if left <= 0 or not self._is_crowded():
            return 0
        padding = min(self._unread.part_bytes, left)
        self._num_bytes += padding
        return padding
