"""Turns on one GPU: one NCCL transfer in each direction at a time, and none while a communicator is made.

Kernels of several communicators may wait for room on the GPU that none of them gives up, and a communicator that is
made while another one's transfer runs can wait for it forever (nccl#1082). So a GPU has one receive turn and one send
turn, first come first served, and making a communicator takes both. Each transport follows the same two orders:

    transfer   the sender signals that its chunk is staged; the receiver, which holds a slot, takes its GPU's receive
               turn and signals that; the sender takes its GPU's send turn; the bytes move
    opening    the GPU with the lower id takes its receive turn and signals that; the other one takes its own and
               signals that; each takes its send turn; the communicator is made

Why no cycle of waits is possible, for any number of processes: a transfer that has its send turn waits for no turn,
because the other half has its own and runs. An opening that has its send turn waits at most for the send turn at its
peer, which only such transfers can have, because other openings there still wait for the receive turn. So every send
turn ends. A receive turn waits only for send turns, which always end, or (while opening) for the receive turn of a GPU
with a higher id. Ids increase along every chain of waits, so the chain has a last turn, and that one ends. Staging
slots are taken before any turn, and no thread waits for a slot while it has one.

If each side took its turn by itself, two senders and two receivers could each have what another one needs.
No torch here, and no clock: only whose turn it is.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Direction(enum.Enum):
    """The two turns of a GPU."""

    SEND = "sending"
    RECEIVE = "receiving"


class DeviceTurns:
    """The turns of one GPU in this process. Any thread may use them.

    Attributes:
        id: unique among GPUs and processes; openings take their turns in the order of these ids.
        num_stalled: number of transfers that did not end in time, since the start.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.num_stalled = 0
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[TransportTurns]] = {direction: deque() for direction in Direction}
        """Per direction, the transports that have or await the turn; the first one has it."""

    def join(self) -> TransportTurns:
        """Returns the part of one more transport."""
        return TransportTurns(self)

    def take(self, turns: TransportTurns, direction: Direction, timeout_s: float) -> None:
        """Waits for a turn.

        Raises:
            TransferTimeout: the turn did not come in time.
            TransferError: the transport was aborted.
        """
        queue = self._queues[direction]
        with self._changed:
            if turns.is_aborted:
                raise TransferError("the transport was aborted")
            queue.append(turns)
            self._changed.wait_for(lambda: turns.is_aborted or queue[0] is turns, timeout_s)
            if turns.is_aborted:
                raise TransferError("the transport was aborted while it waited for its turn")
            if queue[0] is not turns:
                queue.remove(turns)
                raise TransferTimeout(f"other transfers kept the GPU's {direction.value} turn for {timeout_s:g} s")

    def leave(self, turns: TransportTurns, *directions: Direction) -> None:
        """Gives up turns, or the wait for them. No effect on a transport that does neither."""
        with self._changed:
            for direction in directions:
                if turns in self._queues[direction]:
                    self._queues[direction].remove(turns)
            self._changed.notify_all()

    def count_stall(self) -> None:
        """Counts a transfer that did not end in time."""
        with self._changed:
            self.num_stalled += 1


class OpeningLimits(NamedTuple):
    """How long an opening waits, in seconds."""

    in_queue_s: float
    """The limit while no turn is kept because of it: those of a GPU come one after the other."""
    with_turn_s: float
    """The limit while a turn is kept, here or at the peer, for which transfers wait."""


class TransportTurns:
    """One transport's part. Only the thread that owns the transport may use it, except for `abort`.

    `signal` and `wait` of each method carry one signal to the transport's other side and back. `signal` returns at
    once; `wait` raises TransferError if no signal comes in time. All three methods also raise TransferTimeout when a
    turn does not come within `timeout_s`, and TransferError once the transport is aborted.
    """

    def __init__(self, device: DeviceTurns) -> None:
        self.device = device
        self.is_aborted = False

    @contextlib.contextmanager
    def sending(self, signal: Callable[[], None], wait: Callable[[], None], timeout_s: float) -> Iterator[None]:
        """Waits for the send turn of a staged chunk; the caller sends the whole chunk within the block."""
        signal()
        wait()
        with self._turn(Direction.SEND, timeout_s):
            yield

    @contextlib.contextmanager
    def receiving(self, wait: Callable[[], None], signal: Callable[[], None], timeout_s: float) -> Iterator[None]:
        """Waits for the receive turn of a chunk; the caller, which has a slot, receives it within the block."""
        wait()
        with self._turn(Direction.RECEIVE, timeout_s):
            signal()
            yield

    @contextlib.contextmanager
    def opening(
        self, goes_first: bool, signal: Callable[[], None], wait: Callable[[float], None], limits: OpeningLimits
    ) -> Iterator[None]:
        """Takes both turns; the caller makes the communicator within the block.

        No transfer of this process is on the GPU meanwhile, and none begins.

        Args:
            goes_first: whether this side's GPU has the lower id.
            wait: takes the time in seconds after which it gives up.
        """
        if not goes_first:
            wait(limits.in_queue_s)
        with self._turn(Direction.RECEIVE, limits.in_queue_s if goes_first else limits.with_turn_s):
            signal()
            if goes_first:
                wait(limits.with_turn_s)
            with self._turn(Direction.SEND, limits.with_turn_s):
                yield

    def abort(self) -> None:
        """Gives up its turns and its waits for good; called by any thread. Idempotent.

        Its kernel may stay on the GPU for a moment; it ends with its communicator, without a turn.
        """
        self.is_aborted = True
        self.device.leave(self, *Direction)

    def stall(self) -> None:
        """Counts a transfer that did not end in time, and aborts."""
        self.device.count_stall()
        self.abort()

    @contextlib.contextmanager
    def _turn(self, direction: Direction, timeout_s: float) -> Iterator[None]:
        self.device.take(self, direction, timeout_s)
        try:
            yield
        finally:
            self.device.leave(self, direction)
