"""Turns on one GPU: one NCCL transfer in each direction at a time, and none while a communicator is made.

Kernels of several communicators may wait for room on the GPU that none of them gives up, and a communicator that is
made while another one's transfer runs can wait for it forever (nccl#1082). So a GPU has one receive turn and one send
turn, first come first served, and a line of senders and openings: an opening waits for the senders before it, and the
senders behind it wait for the opening. Each transport follows the same two orders:

    transfer   the sender, when no opening is before it in its GPU's line, signals that its chunk is staged; the
               receiver, which holds a slot, takes its GPU's receive turn and signals that; the sender takes its GPU's
               send turn; the bytes move
    opening    the GPU with the lower id gets into its line, behind no other opening, and signals that; the other one
               does so, too, and waits until it is the first in it, and signals that; the lower one waits until it is
               the first, takes its receive turn, and signals that; the other one takes its own, and signals that; the
               lower one confirms it; the communicator is made

Why no cycle of waits is possible, for any number of processes: an announced chunk waits for a receive turn, then for a
send turn that only announced chunks have whose other half runs. An opening that has a receive turn waits at most for
the receive turn of a GPU with a higher id; both its lines are empty. So every receive turn ends, and with it every wait
of an announced chunk; so every opening gets to the front of its line, unless it waits for the line of a GPU with a
higher id. Ids increase along every chain of waits, so the chain has a last turn, and that one ends. Staging slots are
taken before any turn, and no thread waits for a slot while it has one.

An opening may take seconds, at a peer that is slow as many as its limit has. So it waits only briefly while others wait
for it; then both sides give everything back, and try again. A transfer does not count the time in which an opening has
its turn, and signals to its other side that it is held up, which does not count it either. An opening comes before no
half of a transfer that is on a GPU already: that half's limit counts everything.

No torch here: only whose turn it is.
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
"""A wait that keeps others waiting lasts for such a part of their limit; the same part is between reports to a peer."""
WORDS = (_NEXT, _BACK) = ("next", "back")
"""What the sides of an opening say: that the speaker has what it needs, or gives back what it has."""
_MAX_TRIES = 32
"""The most tries of an opening."""


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
        self._line: deque[TransportTurns] = deque()
        """Senders and openings, from their arrival until they have ended."""

    def join(self) -> TransportTurns:
        """Returns the part of one more transport."""
        return TransportTurns(self)

    def take(
        self, turns: TransportTurns, direction: Direction, timeout_s: float, held_up: Callable[[], None] = lambda: None
    ) -> None:
        """Waits for a turn.

        Args:
            timeout_s: the limit; for a transfer it begins anew when an opening has had the turn.
            held_up: called again and again while an opening has the turn.

        Raises:
            TransferTimeout: the turn did not come in time.
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
                        kept = f"other transfers kept the GPU's {direction.value} turn"
                        raise TransferTimeout(f"{kept} for {timeout_s:g} s")
                else:
                    held_up()
                    self._until(turns, lambda: not is_opening(), timeout_s * HELD_SHARE)
                    held_up()
        except BaseException:
            self.leave(turns, direction)
            raise

    def leave(self, turns: TransportTurns, *directions: Direction) -> None:
        """Gives up turns, or the wait for them. No effect on a transport that does neither."""
        with self._changed:
            for direction in directions:
                if turns in self._queues[direction]:
                    self._queues[direction].remove(turns)
            self._changed.notify_all()

    @contextlib.contextmanager
    def in_line(self, turns: TransportTurns) -> Iterator[None]:
        """Has a place in the line within the block."""
        with self._changed:
            self._require_alive(turns)
            self._line.append(turns)
        try:
            yield
        finally:
            self.leave_line(turns)

    def leave_line(self, turns: TransportTurns) -> None:
        """Gives up the place in the line. No effect on a transport that has none."""
        with self._changed:
            if turns in self._line:
                self._line.remove(turns)
            self._changed.notify_all()

    def is_behind_no_opening(self, turns: TransportTurns, timeout_s: float) -> bool:
        """Waits until no opening is before it in the line, and returns whether that came in time."""

        def openings_before() -> bool:
            return any(other.is_opening for other in itertools.takewhile(lambda other: other is not turns, self._line))

        return self._until(turns, lambda: not openings_before(), timeout_s)

    def is_first_in_line(self, turns: TransportTurns, timeout_s: float) -> bool:
        """Waits until it is the first in the line, and returns whether that came in time."""
        return self._until(turns, lambda: self._line[0] is turns, timeout_s)

    def pause(self, turns: TransportTurns, pause_s: float) -> None:
        """Lets time pass; raises TransferError once the transport is aborted."""
        self._until(turns, lambda: False, pause_s)

    def _until(self, turns: TransportTurns, is_due: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: turns.is_aborted or is_due(), timeout_s)
            if turns.is_aborted:
                raise TransferError("the transport was aborted while it waited for its turn")
            return is_due()

    @staticmethod
    def _require_alive(turns: TransportTurns) -> None:
        if turns.is_aborted:
            raise TransferError("the transport was aborted")

    def count_stall(self) -> None:
        """Counts a transfer that did not end in time."""
        with self._changed:
            self.num_stalled += 1


class OpeningLimits(NamedTuple):
    """How long an opening waits, in seconds."""

    in_queue_s: float
    """The limit while nothing is kept because of it: the openings of a GPU come one after the other."""
    with_turn_s: float
    """The limit of a wait for the peer while others wait for this side; then it gives back what it has, and tries
    again."""


class Words(NamedTuple):
    """What carries one word after the other to the other side of an opening, and back."""

    say: Callable[[str], None]
    """Returns at once."""
    hear: Callable[[float], str]
    """Waits for the peer's next word, so many seconds; raises TransferTimeout if none comes, TransferError if none
    will."""


class TransportTurns:
    """One transport's part. Only the thread that owns the transport may use it, except for `abort`.

    `signal` and `wait` of a transfer carry one signal to the transport's other side and back. `signal` returns at once;
    `wait` raises TransferError if no signal comes in time. `held_up` is called at least four times in `timeout_s` while
    an opening keeps the transfer waiting, so that it can report that. All three methods also raise
    TransferTimeout when a turn does not come within their limit, and TransferError once the transport is aborted.

    Attributes:
        is_opening: whether it is an opening that has or awaits turns, not a transfer.
    """

    def __init__(self, device: DeviceTurns) -> None:
        self.device = device
        self.is_aborted = False
        self.is_opening = False

    @contextlib.contextmanager
    def sending(
        self, signal: Callable[[], None], wait: Callable[[], None], held_up: Callable[[], None], timeout_s: float
    ) -> Iterator[None]:
        """Waits for the send turn of a staged chunk; the caller sends the whole chunk within the block."""
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
        """Waits for the receive turn of a chunk; the caller, which has a slot, receives it within the block."""
        wait()
        with self._turn(Direction.RECEIVE, timeout_s, held_up):
            signal()
            yield

    @contextlib.contextmanager
    def opening(self, goes_first: bool, words: Words, limits: OpeningLimits) -> Iterator[None]:
        """Takes both turns; the caller makes the communicator within the block.

        No transfer of this process is on the GPU meanwhile, and none begins.

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
                            raise TransferTimeout(f"the turns of both GPUs did not come within {limits.in_queue_s:g} s")
                        self.device.pause(self, max(limits.with_turn_s, limits.in_queue_s / _MAX_TRIES))
                yield
        finally:
            self.is_opening = False

    def _lead(self, held: contextlib.ExitStack, words: Words, limits: OpeningLimits) -> bool:
        """Tries to take both turns, as the side that goes first, and returns whether both sides have them."""
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
        """Does so as the other side."""
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
        """Reports that this side gives back what it has."""
        words.say(_BACK)
        return False

    def _agreed(self, held: contextlib.ExitStack, words: Words, limits: OpeningLimits) -> bool:
        """Reports that this side has what it needs, and returns whether the peer has, too.

        If the peer does not say so soon, this side gives back what it has before it waits on.
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
        """Gives up its turns and its waits for good; called by any thread. Idempotent.

        Its kernel may stay on the GPU for a moment; it ends with its communicator, without a turn.
        """
        self.is_aborted = True
        self.device.leave_line(self)
        self.device.leave(self, *Direction)

    def stall(self) -> None:
        """Counts a transfer that did not end in time, and aborts."""
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
