"""Locks on one GPU ("turns"): one NCCL transfer in each direction at a time, and none during an opening.

Kernels of several communicators may wait for GPU resources that none of them releases, and a communicator that is
created while another one's transfer runs can wait for it forever (nccl#1082). So a GPU has one receive lock and one
send lock, first come first served, and a queue of senders and openings: an opening waits for the senders before it, and
the senders after it wait for the opening. Each transport follows the same two orders:

    transfer   the sender, when no opening is before it in its GPU's queue, signals that its chunk is staged; the
               receiver, which holds a slot, takes its GPU's receive lock and signals that; the sender takes its GPU's
               send lock; the bytes are transferred
    opening    the GPU with the lower id enters its queue, when no other opening is in it, and signals that; the other
               one does so, too, waits until it is the first in its queue, and signals that; the lower one waits until
               it is the first, takes its receive lock, and signals that; the other one takes its own, and signals
               that; the lower one confirms it; the communicator is created

Why no cycle of waits is possible, for any number of processes: an announced chunk waits for a receive lock, then for a
send lock that only announced chunks hold whose other half runs. An opening that has a receive lock waits at most for
the receive lock of a GPU with a higher id; both its queues are empty. So every receive lock is released, and with it
every wait of an announced chunk ends; so every opening gets to the front of its queue, unless it waits for the queue of
a GPU with a higher id. Ids increase along every chain of waits, so the chain has a last lock, and that one is released.
Staging slots are acquired before any lock, and no thread waits for a slot while it has one.

An opening may take seconds, with a slow peer as long as its limit. So it waits only briefly while others wait for it;
then both sides release everything, and try again. A transfer does not count the time in which an opening holds its
lock, and signals this delay to its other side, which does not count it either. An opening never delays half of a
transfer that is on a GPU already: that half's limit counts everything.

This module has no torch: only the order of the locks.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_SHARE = 1 / 4
"""Share of others' limit for which a wait may keep them waiting; also the interval of reports to a peer."""
WORDS = (_NEXT, _BACK) = ("next", "back")
"""Messages between the sides of an opening: the side has what it needs, or releases what it has."""
_MAX_TRIES = 32
"""Maximum number of attempts of an opening."""


class Direction(enum.Enum):
    """The two locks of a GPU."""

    SEND = "sending"
    RECEIVE = "receiving"


class DeviceTurns:
    """Locks of one GPU in this process. Thread-safe.

    Attributes:
        id: unique among GPUs and processes; openings take their locks in the order of these ids.
        num_stalled: number of transfers that did not end in time, since the start.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.num_stalled = 0
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[TransportTurns]] = {direction: deque() for direction in Direction}
        """Per direction, the transports that hold or await the lock; the first one holds it."""
        self._line: deque[TransportTurns] = deque()
        """Senders and openings, from their arrival until they have ended."""

    def join(self) -> TransportTurns:
        """Return the part of one more transport."""
        return TransportTurns(self)

    def take(
        self, turns: TransportTurns, direction: Direction, timeout_s: float, held_up: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for a lock.

        Args:
            timeout_s: the limit; for a transfer it restarts when an opening has held the lock.
            held_up: called repeatedly while an opening holds the lock.

        Raises:
            TransferTimeout: the lock was not acquired in time.
            TransferError: the transport was aborted.
        """
        queue = self._queues[direction]

        def is_opening() -> bool:
            return queue[0].is_opening and not turns.is_opening

        with self._changed:
            self._require_alive(turns)
            queue.append(turns)
        try:
            while not self._until(turns, lambda: queue[0] is turns, 0.0):
                if self._until(turns, lambda: not is_opening(), 0.0):
                    if not self._until(turns, lambda: queue[0] is turns or is_opening(), timeout_s):
                        kept = f"other transfers held the GPU's {direction.value} lock"
                        raise TransferTimeout(f"{kept} for {timeout_s:g} s")
                else:
                    held_up()
                    self._until(turns, lambda: not is_opening(), timeout_s * HELD_SHARE)
                    held_up()
        except BaseException:
            self.leave(turns, direction)
            raise

    def leave(self, turns: TransportTurns, *directions: Direction) -> None:
        """Release locks, or stop waiting for them. No effect on a transport that does neither."""
        with self._changed:
            for direction in directions:
                if turns in self._queues[direction]:
                    self._queues[direction].remove(turns)
            self._changed.notify_all()

    @contextlib.contextmanager
    def in_line(self, turns: TransportTurns) -> Iterator[None]:
        """Context manager: hold a place in the queue."""
        with self._changed:
            self._require_alive(turns)
            self._line.append(turns)
        try:
            yield
        finally:
            self.leave_line(turns)

    def leave_line(self, turns: TransportTurns) -> None:
        """Leave the queue. No effect on a transport that is not in it."""
        with self._changed:
            if turns in self._line:
                self._line.remove(turns)
            self._changed.notify_all()

    def is_behind_no_opening(self, turns: TransportTurns, timeout_s: float) -> bool:
        """Wait until no opening is before it in the queue, and return whether that happened in time."""

        def openings_before() -> bool:
            return any(other.is_opening for other in itertools.takewhile(lambda other: other is not turns, self._line))

        return self._until(turns, lambda: not openings_before(), timeout_s)

    def is_first_in_line(self, turns: TransportTurns, timeout_s: float) -> bool:
        """Wait until it is the first in the queue, and return whether that happened in time."""
        return self._until(turns, lambda: self._line[0] is turns, timeout_s)

    def pause(self, turns: TransportTurns, pause_s: float) -> None:
        """Pause; raises TransferError once the transport is aborted."""
        self._until(turns, lambda: False, pause_s)

    def _until(self, turns: TransportTurns, is_due: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: turns.is_aborted or is_due(), timeout_s)
            if turns.is_aborted:
                raise TransferError("the transport was aborted while it waited for a GPU lock")
            return is_due()

    @staticmethod
    def _require_alive(turns: TransportTurns) -> None:
        if turns.is_aborted:
            raise TransferError("the transport was aborted")

    def count_stall(self) -> None:
        """Count a transfer that did not end in time."""
        with self._changed:
            self.num_stalled += 1


class OpeningLimits(NamedTuple):
    """Limits of an opening's waits, in seconds."""

    in_queue_s: float
    """Limit while the opening blocks no others: the openings of a GPU are done one after the other."""
    with_turn_s: float
    """Limit of a wait for the peer while others wait for this side.

    After it, the side releases what it has and retries.
    """


class Words(NamedTuple):
    """Channel that carries messages to the other side of an opening, and back."""

    say: Callable[[str], None]
    """Sends one message; returns at once."""
    hear: Callable[[float], str]
    """Waits this many seconds for the peer's next message.

    Raises TransferTimeout if none comes, TransferError if none will.
    """


class TransportTurns:
    """One transport's part. Only the thread that owns the transport may use it, except for `abort`.

    `signal` and `wait` of a transfer carry one signal to the transport's other side and back. `signal` returns at once;
    `wait` raises TransferError if no signal comes in time. `held_up` is called at least four times in `timeout_s` while
    an opening delays the transfer, so that it can report that. All three methods also raise TransferTimeout when a lock
    is not acquired within their limit, and TransferError once the transport is aborted.

    Attributes:
        is_opening: whether it is an opening that holds or awaits locks, not a transfer.
    """

    def __init__(self, device: DeviceTurns) -> None:
        self.device = device
        self.is_aborted = False
        self.is_opening = False

    @contextlib.contextmanager
    def sending(
        self, signal: Callable[[], None], wait: Callable[[], None], held_up: Callable[[], None], timeout_s: float
    ) -> Iterator[None]:
        """Context manager: wait for the send lock of a staged chunk; the caller sends the whole chunk inside it."""
        with self.device.in_line(self):
            while not self.device.is_behind_no_opening(self, timeout_s * HELD_SHARE):
                held_up()
            signal()
            wait()
            with self._turn(Direction.SEND, timeout_s):
                yield

    @contextlib.contextmanager
    def receiving(
        self, wait: Callable[[], None], signal: Callable[[], None], held_up: Callable[[], None], timeout_s: float
    ) -> Iterator[None]:
        """Context manager: wait for the receive lock of a chunk; the caller, which has a slot, receives it inside."""
        wait()
        with self._turn(Direction.RECEIVE, timeout_s, held_up):
            signal()
            yield

    @contextlib.contextmanager
    def opening(self, goes_first: bool, words: Words, limits: OpeningLimits) -> Iterator[None]:
        """Context manager: take both locks; the caller creates the communicator inside it.

        No transfer of this process is on the GPU in the meantime, and none starts.

        Args:
            goes_first: whether this side's GPU has the lower id.
        """
        deadline = time.monotonic() + limits.in_queue_s
        self.is_opening = True
        try:
            with contextlib.ExitStack() as held:
                while not (self._lead(held, words, limits) if goes_first else self._follow(held, words, limits)):
                    held.close()
                    if goes_first:
                        if time.monotonic() > deadline:
                            raise TransferTimeout(
                                f"the locks of both GPUs were not acquired within {limits.in_queue_s:g} s"
                            )
                        self.device.pause(self, max(limits.with_turn_s, limits.in_queue_s / _MAX_TRIES))
                yield
        finally:
            self.is_opening = False

    def _lead(self, held: contextlib.ExitStack, words: Words, limits: OpeningLimits) -> bool:
        """Try to take both locks, as the side that goes first, and return whether both sides have them."""
        held.enter_context(self.device.in_line(self))
        if not self.device.is_behind_no_opening(self, limits.in_queue_s):
            raise TransferTimeout(f"other openings were before this one for {limits.in_queue_s:g} s")
        soon_s = limits.with_turn_s * HELD_SHARE
        if not self._agreed(held, words, limits):
            return False
        if not (self.device.is_first_in_line(self, soon_s) and self._takes(held, soon_s)):
            return self._back(words)
        if not self._agreed(held, words, limits):
            return False
        words.say(_NEXT)
        return True

    def _follow(self, held: contextlib.ExitStack, words: Words, limits: OpeningLimits) -> bool:
        """Try to take both locks, as the side that goes second, and return whether both sides have them."""
        words.hear(limits.in_queue_s)
        soon_s = limits.with_turn_s * HELD_SHARE
        held.enter_context(self.device.in_line(self))
        if not (self.device.is_behind_no_opening(self, soon_s) and self.device.is_first_in_line(self, soon_s)):
            return self._back(words)
        if not self._agreed(held, words, limits):
            return False
        if not self._takes(held, soon_s):
            return self._back(words)
        return self._agreed(held, words, limits)

    @staticmethod
    def _back(words: Words) -> bool:
        """Report that this side releases what it has."""
        words.say(_BACK)
        return False

    def _agreed(self, held: contextlib.ExitStack, words: Words, limits: OpeningLimits) -> bool:
        """Report that this side has what it needs, and return whether the peer has, too.

        If the peer does not report so soon, this side releases what it has before it continues to wait.
        """
        words.say(_NEXT)
        try:
            return words.hear(limits.with_turn_s) == _NEXT
        except TransferTimeout:
            held.close()
            if words.hear(limits.in_queue_s) == _NEXT:
                words.say(_BACK)
            return False

    def _takes(self, held: contextlib.ExitStack, timeout_s: float) -> bool:
        try:
            held.enter_context(self._turn(Direction.RECEIVE, timeout_s))
        except TransferTimeout:
            return False
        return True

    def abort(self) -> None:
        """Release its locks and end its waits permanently; called by any thread. Idempotent.

        Its kernel may stay on the GPU for a moment; it ends with its communicator, without a lock.
        """
        self.is_aborted = True
        self.device.leave_line(self)
        self.device.leave(self, *Direction)

    def stall(self) -> None:
        """Count a transfer that did not end in time, and abort."""
        self.device.count_stall()
        self.abort()

    @contextlib.contextmanager
    def _turn(
        self, direction: Direction, timeout_s: float, held_up: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        self.device.take(self, direction, timeout_s, held_up)
        try:
            yield
        finally:
            self.device.leave(self, direction)
