"""Turns on one GPU: one NCCL transfer in each direction at a time, and none while a communicator is made.

Kernels of several communicators may wait for room on the GPU that none of them gives up, and a communicator that is
made while another one's transfer runs can wait for it for ever (nccl#1082). So a GPU has one turn for receiving and one
for sending, first come first served, and to make a communicator takes both. Each link follows the same two orders:

    transfer   the sender says that its chunk is staged; the receiver, its slot in hand, takes its GPU's receiving turn
               and says so; the sender takes its GPU's sending turn; the bytes move
    opening    the GPU with the lower id takes its receiving turn and says so; the other one takes its own and says so;
               each takes its sending turn; the communicator is made

Why nobody waits in a circle, however many processes there are. A transfer that has its sending turn waits for nobody:
the other half has its turn, and runs. An opening that has its sending turn waits at most for the one at its peer, which
only such transfers can have, because other openings there still wait for the receiving turn. So every sending turn
ends. Whoever has a receiving turn waits for sending turns, which end, or, in an opening, for the receiving turn of a
GPU with a higher id: along such waits the ids only rise, so there is a last one, and it ends. Staging slots are taken
before any turn, and nobody waits for a slot while having one.

Were each side to take its turn by itself, two senders and two receivers could each have what another one needs.
No torch here, and no clock: only who may go.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING

from baton.errors import TransferError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Direction(enum.Enum):
    SEND = "sending"
    RECEIVE = "receiving"


class DeviceTurns:
    """One GPU in this process. Any thread.

    Attributes:
        id: no other GPU or process has it; the order in which openings take their turns.
        num_stalled: transfers that did not end in time, since the start.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.num_stalled = 0
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[TransportTurns]] = {direction: deque() for direction in Direction}
        """The first in each has the turn."""

    def join(self) -> TransportTurns:
        return TransportTurns(self)

    def take(self, link: TransportTurns, direction: Direction, timeout_s: float) -> None:
        queue = self._queues[direction]
        with self._changed:
            if link.is_aborted:
                raise TransferError("the link was aborted")
            queue.append(link)
            self._changed.wait_for(lambda: link.is_aborted or queue[0] is link, timeout_s)
            if link.is_aborted:
                raise TransferError("the link was aborted while it waited for its turn")
            if queue[0] is not link:
                queue.remove(link)
                raise TransferTimeout(f"other transfers kept the GPU's {direction.value} turn for {timeout_s:g} s")

    def leave(self, link: TransportTurns, *directions: Direction) -> None:
        """No effect where the link neither has the turn nor waits for it."""
        with self._changed:
            for direction in directions:
                if link in self._queues[direction]:
                    self._queues[direction].remove(link)
            self._changed.notify_all()

    def count_stall(self) -> None:
        with self._changed:
            self.num_stalled += 1


class TransportTurns:
    """One link's part. For its owner thread, but for `abort`.

    `tell` and `hear` of each method carry one word to the link's other side and back. `tell` does not wait to be heard;
    `hear` raises TransferError if it hears nothing in time. All three methods also raise TransferTimeout when a turn
    does not come within `timeout_s`, and TransferError once the link is aborted.
    """

    def __init__(self, device: DeviceTurns) -> None:
        self.device = device
        self.is_aborted = False

    @contextlib.contextmanager
    def sending(self, tell: Callable[[], None], hear: Callable[[], None], timeout_s: float) -> Iterator[None]:
        """A chunk is staged; within, it is sent, and sent whole when this is left."""
        tell()
        hear()
        with self._turn(Direction.SEND, timeout_s):
            yield

    @contextlib.contextmanager
    def receiving(self, hear: Callable[[], None], tell: Callable[[], None], timeout_s: float) -> Iterator[None]:
        """A slot is there; within, the chunk is received, and there when this is left."""
        hear()
        with self._turn(Direction.RECEIVE, timeout_s):
            tell()
            yield

    @contextlib.contextmanager
    def opening(
        self, goes_first: bool, tell: Callable[[], None], hear: Callable[[], None], timeout_s: float
    ) -> Iterator[None]:
        """Within, the communicator is made: no transfer of this process is on the GPU, and none begins.

        Args:
            goes_first: this side's GPU has the lower id.
        """
        if not goes_first:
            hear()
        with self._turn(Direction.RECEIVE, timeout_s):
            tell()
            if goes_first:
                hear()
            with self._turn(Direction.SEND, timeout_s):
                yield

    def abort(self) -> None:
        """From any thread: gives up what it has and what it waits for, for good. Idempotent.

        What it had on the GPU may still be there for a moment; it ends with its communicator, without anybody's turn.
        """
        self.is_aborted = True
        self.device.leave(self, *Direction)

    def stall(self) -> None:
        """A transfer did not end in time: counts it, and aborts."""
        self.device.count_stall()
        self.abort()

    @contextlib.contextmanager
    def _turn(self, direction: Direction, timeout_s: float) -> Iterator[None]:
        self.device.take(self, direction, timeout_s)
        try:
            yield
        finally:
            self.device.leave(self, direction)
