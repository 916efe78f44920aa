"""Loads adapters for the sequences that wait for them, one at a time, in a thread.

A sequence waits here before it is added to the engine, so it holds no blocks while it waits. A sequence that holds
blocks never waits here. So these two kinds of sequences cannot deadlock. Adapters are loaded in the order in which they
were first requested. All sequences of one adapter wait for the same load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from baton.errors import BatonError, WorkerFailed, in_one_line
from baton.messages import Adapter
from baton.tasks import seen_through
from engine.core.adapters import AdapterSlots

logger = logging.getLogger(__name__)
LATEST = 0.3
"""Weight of the latest load in the mean load time."""


@dataclass(slots=True)
class _Wanted:
    """An adapter that sequences wait for."""

    adapter: Adapter
    waiting: list[asyncio.Future[int]] = field(default_factory=list)
    """One future per sequence; its result is the slot."""


class AdapterLoader:
    """Loads adapters into slots, and pins the slots for the sequences that wait.

    Args:
        slots: the slots.
        load: reads an adapter and loads it into a slot. It is called in a thread, possibly during a step that does not
            use the slot.

    Attributes:
        load_s: recent mean time to load an adapter, in seconds; 0: none was loaded yet.
    """

    def __init__(self, slots: AdapterSlots, load: Callable[[Adapter, int], None]) -> None:
        self.load_s = 0.0
        self._slots = slots
        self._load = load
        self._thread: ThreadPoolExecutor | None = None
        self._wanted: dict[str, _Wanted] = {}
        """Adapters by digest, in the order in which they are loaded."""
        self._loading: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for an adapter."""
        return sum(len(wanted.waiting) for wanted in self._wanted.values())

    async def slot_of(self, adapter: Adapter) -> int:
        """Wait until an adapter is loaded, pin its slot, and return the slot. The caller must unpin it.

        Raises:
            AdapterUnreadable: this worker cannot read the adapter.
            InvalidRequest: the folder no longer holds the content that was registered.
            BatonError: `hand_back` was called with this error.
        """
        if adapter.digest not in self._wanted and (slot := self._slots.pin(adapter.digest)) is not None:
            return slot
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = self._wanted.setdefault(adapter.digest, _Wanted(adapter))
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
            digest, wanted = next(iter(self._wanted.items()))
            if not wanted.waiting:
                del self._wanted[digest]
                self._slots.stay()
            elif self._slots.is_loaded(digest):
                self._slots.stay()
                self._give(digest)
            elif (slot := self._slots.reserve(digest)) is not None:
                self._loading = asyncio.create_task(self._loaded(wanted.adapter, slot), name="adapter")
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

    async def _loaded(self, adapter: Adapter, slot: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapters")
        began_s = time.monotonic()
        loading = asyncio.wrap_future(self._thread.submit(self._load, adapter, slot))
        await seen_through(loading)
        self._loading = None
        if (error := loading.exception()) is None:
            took_s = time.monotonic() - began_s
            self.load_s += LATEST * (took_s - self.load_s) if self.load_s else took_s
            self._slots.loaded(adapter.digest)
            logger.info("adapter %s is loaded into slot %d in %.3f s", adapter.name, slot, took_s)
            self._give(adapter.digest)
        else:
            self._slots.failed(adapter.digest)
            logger.warning(
                "adapter %s in %s cannot be loaded: %s", adapter.name, adapter.path, error.__cause__ or error
            )
            if not isinstance(error, BatonError):  # an error of the device, or a defect
                text = in_one_line(error) if isinstance(error, Exception) else repr(error)
                error = WorkerFailed(f"the worker could not load adapter {adapter.name}: {text}")
            _fail(self._wanted.pop(adapter.digest), error)
        self.advance()

    def _give(self, digest: str) -> None:
        """Pin the slot of a loaded adapter for each sequence that waits for it, and wake these sequences."""
        for future in self._wanted.pop(digest).waiting:
            if not future.done() and (slot := self._slots.pin(digest)) is not None:
                future.set_result(slot)


def _fail(wanted: _Wanted, reason: BatonError) -> None:
    for future in wanted.waiting:
        if not future.done():
            future.set_exception(reason)
    wanted.waiting.clear()
