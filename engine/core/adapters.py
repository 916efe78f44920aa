"""A worker's LoRA adapters: slots, and the loader that fills them.

A slot holds an adapter: `AdapterSlots` knows which one, how many sequences pin it, and which is replaced.

    slot   | 1: pinned by 3 sequences | 2: unpinned, used longest ago | 3: is being loaded |       0: no adapter

A sequence pins its adapter's slot until it ends, because each of its steps reads the slot. A new adapter takes a free
slot, or the least recently used one that is not pinned. If all are pinned, one slot takes no new sequences (`leaving`),
so that sequences of resident adapters cannot block a waiting adapter forever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from baton.errors import AdapterUnreadable, BatonError, Unsupported, WorkerFailed, in_one_line
from baton.messages import Adapter, SequenceSpec
from baton.registered_adapters import CHECK_S
from baton.tasks import seen_through
from engine.core.sequence import Purpose

logger = logging.getLogger(__name__)
LATEST = 0.3
"""Weight of the latest load in the mean load time."""
LOAD_S = CHECK_S
"""Time after which a load counts as hanging, in seconds."""
FAILED_S = 5.0
"""Time for which an adapter that could not be loaded is refused without another attempt, in seconds."""
MAX_FAILED = 1024
"""Maximum number of such adapters that are remembered."""
_Key = tuple[str, str]
"""Digest and path of an adapter: the same content may have been registered in a folder that is now gone."""
_Put = Callable[[int], None]
A = TypeVar("A")
R = TypeVar("R")


@dataclass(slots=True)
class _Slot:
    number: int
    num_pins: int = 0
    is_loaded: bool = False


class AdapterSlots:
    """Slots 1 to `num_slots`. Pure: no tensors and no I/O.

    Attributes:
        leaving: digest of the adapter whose slot takes no new sequences; None: all slots take some.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.leaving: str | None = None
        self._slots: dict[str, _Slot] = {}
        """Slots by digest, the least recently used one first."""
        self._digests: dict[int, str] = {}
        """Number of a slot -> digest of the adapter that has it."""
        self._free = list(range(num_slots, 0, -1))

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of the loaded adapters, the least recently used one first."""
        return tuple(digest for digest, slot in self._slots.items() if slot.is_loaded)

    @property
    def is_pinned(self) -> bool:
        """True if a slot is pinned."""
        return any(slot.num_pins for slot in self._slots.values())

    def is_loaded(self, digest: str) -> bool:
        """Return whether an adapter is loaded into a slot."""
        return digest in self._slots and self._slots[digest].is_loaded

    def pin(self, digest: str) -> int | None:
        """Pin the slot of a loaded adapter and return its number; None: it is not loaded, or its slot is leaving."""
        if digest == self.leaving or not self.is_loaded(digest):
            return None
        number = self._slots[digest].number
        self.pin_again(number)
        return number

    def pin_again(self, number: int) -> None:
        """Pin a slot for another sequence, forked from one that has pinned it."""
        digest = self._digests[number]
        slot = self._slots[digest] = self._slots.pop(digest)
        slot.num_pins += 1

    def unpin(self, number: int) -> None:
        """Drop one pin of a slot."""
        slot = self._slots[self._digests[number]]
        assert slot.num_pins > 0, f"slot {number} is unpinned more often than pinned"
        slot.num_pins -= 1

    def reserve(self, digest: str) -> int | None:
        """Take a slot for an adapter that will be loaded, and return the slot's number.

        Return None if all slots are pinned or being loaded. The loaded slot with the fewest sequences is then leaving.
        """
        assert digest not in self._slots, f"adapter {digest} has a slot already"
        loaded = [each for each, slot in self._slots.items() if slot.is_loaded]
        if not self._free:
            victim = next((each for each in loaded if not self._slots[each].num_pins), None)
            if victim is None:
                if self.leaving is None and loaded:
                    self.leaving = min(loaded, key=lambda each: self._slots[each].num_pins)
                return None
            self._remove(victim)
        self.leaving = None
        number = self._free.pop()
        self._slots[digest] = _Slot(number)
        self._digests[number] = digest
        return number

    def stay(self) -> None:
        """Let the leaving slot take new sequences again, because no adapter waits for it."""
        self.leaving = None

    def loaded(self, digest: str) -> None:
        """Record that an adapter is in its slot."""
        self._slots[digest].is_loaded = True

    def failed(self, digest: str) -> None:
        """Free the slot of an adapter that could not be loaded."""
        assert not self.is_loaded(digest), f"adapter {digest} is loaded"
        self._remove(digest)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the number of pins of each slot is the number of sequences that have the slot.

        Args:
            held: slot of each sequence that has one.
        """
        pins = {slot.number: slot.num_pins for slot in self._slots.values() if slot.num_pins}
        assert pins == Counter(held), f"slots are pinned {pins}, and sequences hold {Counter(held)}"
        assert len(self._free) + len(self._slots) == self.num_slots, "a slot is lost"

    def _remove(self, digest: str) -> None:
        number = self._slots.pop(digest).number
        del self._digests[number]
        self._free.append(number)


def needs_adapter(spec: SequenceSpec, purpose: Purpose) -> bool:
    """Return whether this worker computes a sequence with an adapter. A prefix that it only receives needs none."""
    return spec.adapter is not None and not (purpose is Purpose.RECEIVE and not spec.max_tokens)


def refuse_without_slots(num_slots: int) -> None:
    """Raise Unsupported if a worker holds no adapters."""
    if not num_slots:
        raise Unsupported("this worker holds no adapters; set engine.max_adapters to how many it may hold at a time")


@dataclass(slots=True)
class _Wanted:
    """An adapter that sequences wait for."""

    adapter: Adapter
    waiting: list[asyncio.Future[int]] = field(default_factory=list)
    """One future per sequence; its result is the slot."""
    put: _Put | None = None
    """Puts the adapter into a slot; None: it is not read yet."""
    read_s: float = 0.0
    """Time to read it, in seconds."""


class AdapterLoader:
    """Loads adapters into slots for the sequences that wait for them, one at a time, in a thread.

        read and check the folder ──> wait for a slot ──> put the adapter into the slot

    An adapter gets a slot only once it is read, so one that cannot be read takes no slot from another.

    A sequence waits here before it is added to the engine, so it holds no blocks while it waits. A sequence that holds
    blocks never waits here. So these two kinds of sequences cannot deadlock. Adapters are loaded in the order in which
    they were first requested. All sequences of one adapter wait for the same load.

    Args:
        slots: the slots.
        read: reads an adapter and returns a function that puts it into a slot; see `Runner.read_adapter`. Both are
            called in a thread, possibly during a step that does not use the slot.

    Attributes:
        load_s: recent mean time to load an adapter, in seconds; 0: none was loaded yet.
    """

    def __init__(self, slots: AdapterSlots, read: Callable[[Adapter], _Put]) -> None:
        self.load_s = 0.0
        self._slots = slots
        self._read = read
        self._thread: ThreadPoolExecutor | None = None
        self._wanted: dict[_Key, _Wanted] = {}
        """Adapters in the order in which they are loaded."""
        self._failed: dict[_Key, tuple[float, BatonError]] = {}
        """Adapters that could not be loaded, each with the time until which it is refused; the next to end is first."""
        self._is_stuck = False
        """True if the load in progress hangs."""
        self._loading: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for an adapter."""
        return sum(len(wanted.waiting) for wanted in self._wanted.values())

    async def slot_of(self, adapter: Adapter) -> int:
        """Wait until an adapter is loaded, pin its slot, and return the slot. The caller must unpin it.

        Raises:
            AdapterUnreadable: this worker cannot read the adapter, or a load hangs.
            InvalidRequest: the folder no longer holds the content that was registered.
            BatonError: `hand_back` was called with this error.
        """
        key = adapter.digest, adapter.path
        if key not in self._wanted and (slot := self._slots.pin(adapter.digest)) is not None:
            return slot
        if (refusal := self._refusal(key)) is not None:
            raise refusal
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = self._wanted.setdefault(key, _Wanted(adapter))
        wanted.waiting.append(future)
        self.advance()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._slots.unpin(future.result())
            elif future in wanted.waiting:
                wanted.waiting.remove(future)
            self.advance()
            raise

    def advance(self) -> None:
        """Give slots to sequences and start the next load, if possible. Call this after each unpinning of a slot."""
        while self._wanted and self._loading is None:
            key, wanted = next(iter(self._wanted.items()))
            if not wanted.waiting:
                del self._wanted[key]
                self._slots.stay()
            elif self._slots.is_loaded(wanted.adapter.digest):
                self._slots.stay()
                self._give(key)
            elif wanted.put is None:
                self._loading = asyncio.create_task(self._is_read(wanted), name="adapter")
            elif (slot := self._slots.reserve(wanted.adapter.digest)) is not None:
                self._loading = asyncio.create_task(self._loaded(wanted, wanted.put, slot), name="adapter")
            else:
                return

    def hand_back(self, reason: BatonError) -> None:
        """Make `slot_of` raise `reason` for all sequences that wait now."""
        for wanted in self._wanted.values():
            _fail(wanted, reason)
        self.advance()

    async def close(self, limit_s: float) -> None:
        """Hand back all waiting sequences. Wait at most `limit_s` for the load in progress, because it may hang."""
        self.hand_back(WorkerFailed("the worker stops"))
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=limit_s)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _is_read(self, wanted: _Wanted) -> None:
        reading, wanted.read_s = await self._in_thread(self._read, wanted.adapter)
        if (error := reading.exception()) is None:
            wanted.put = reading.result()
        else:
            self._give_up(wanted.adapter, error)
        self.advance()

    async def _loaded(self, wanted: _Wanted, put: _Put, slot: int) -> None:
        adapter = wanted.adapter
        putting, took_s = await self._in_thread(put, slot)
        if (error := putting.exception()) is None:
            took_s += wanted.read_s
            self.load_s += LATEST * (took_s - self.load_s) if self.load_s else took_s
            self._slots.loaded(adapter.digest)
            logger.info("adapter %s is loaded into slot %d in %.3f s", adapter.name, slot, took_s)
            self._give((adapter.digest, adapter.path))
        else:
            self._slots.failed(adapter.digest)
            self._give_up(adapter, error)
        self.advance()

    async def _in_thread(self, call: Callable[[A], R], given: A) -> tuple[asyncio.Future[R], float]:
        """Call a function in the thread. Return its future, which is done, and how many seconds it took.

        If it hangs, all waiting sequences are handed back: the thread cannot be interrupted, and loads nothing else.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapters")
        began_s = time.monotonic()
        running = asyncio.wrap_future(self._thread.submit(call, given))
        limit = asyncio.get_running_loop().call_later(LOAD_S, self._hangs)
        try:
            await seen_through(running)
        finally:
            limit.cancel()
        self._loading, self._is_stuck = None, False
        return running, time.monotonic() - began_s

    def _hangs(self) -> None:
        self._is_stuck = True
        logger.error("an adapter is not loaded after %g s; check the file system that holds it", LOAD_S)
        self.hand_back(_stuck())

    def _refusal(self, key: _Key) -> BatonError | None:
        """Return why an adapter that is not loaded is refused at once; None: sequences may wait for it."""
        if self._is_stuck:
            return _stuck()
        until_s, error = self._failed.get(key, (0.0, None))
        if error is None or time.monotonic() >= until_s:
            return None
        return type(error)(str(error))  # each has a traceback of its own

    def _give_up(self, adapter: Adapter, error: BaseException) -> None:
        """Fail the sequences that wait for an adapter, and refuse others for a while: it may take long to read."""
        reason = error.__cause__ or error
        logger.warning("adapter %s in %s cannot be loaded: %s", adapter.name, adapter.path, reason)
        if not isinstance(error, BatonError):  # an error of the device, or a defect
            text = in_one_line(error) if isinstance(error, Exception) else repr(error)
            error = WorkerFailed(f"the worker could not load adapter {adapter.name}: {text}")
        key = adapter.digest, adapter.path
        _fail(self._wanted.pop(key), error)
        self._failed.pop(key, None)
        self._failed[key] = time.monotonic() + FAILED_S, type(error)(str(error))  # without the frames of the other
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _give(self, key: _Key) -> None:
        """Pin the slot of a loaded adapter for each sequence that waits for it, and wake these sequences."""
        for future in self._wanted.pop(key).waiting:
            if not future.done() and (slot := self._slots.pin(key[0])) is not None:
                future.set_result(slot)


def _stuck() -> AdapterUnreadable:
    return AdapterUnreadable("this worker reads no adapters now, because one takes too long; try again later")


def _fail(wanted: _Wanted, reason: BatonError) -> None:
    for future in wanted.waiting:
        if not future.done():
            future.set_exception(reason)
    wanted.waiting.clear()
