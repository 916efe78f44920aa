"""Runs an engine inside an asyncio process: steps in one thread, everything else on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from baton.engine.block_pool import Removed, Stored
from baton.engine.engine import Engine, Output
from baton.engine.sequence import Purpose, Sequence
from baton.errors import Overloaded, WorkerFailed
from baton.messages import SequenceSpec
from baton.sampling import FinishReason

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the engine's thread and the queue of every sequence's outputs.

    `on_block_events` is called on the event loop after each step with what became cached and what was evicted;
    `on_idle` when the last sequence has gone.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        on_block_events: Callable[[list[Stored | Removed]], None] = lambda events: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.self_check = "ok"
        self._max_waiting = max_waiting
        self._on_block_events = on_block_events
        self._on_idle = on_idle
        self._outputs: dict[Sequence, asyncio.Queue[Output | WorkerFailed]] = {}
        self._wake = asyncio.Event()
        self._was_idle = False

    async def run(self) -> None:
        """Steps until cancelled. A step in progress is waited for, so no thread outlives this call."""
        with ThreadPoolExecutor(1, "engine") as thread:
            while True:
                batch, outputs = self.engine.schedule(time.monotonic())
                self._deliver(outputs)
                if not batch:
                    self._publish_block_events()
                    self._note_idleness()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                step = asyncio.get_running_loop().run_in_executor(thread, self.engine.runner.execute, batch)
                try:
                    sampled = await step
                except Exception as error:  # the model's own code: any failure ends this batch, not the worker
                    logger.exception("a step failed")
                    failure = WorkerFailed(f"the engine could not compute a step: {error}")
                    for sequence in self.engine.abandon(batch):
                        self._outputs[sequence].put_nowait(failure)
                else:
                    self._deliver(self.engine.commit(batch, sampled, time.monotonic()))
                self._publish_block_events()

    @contextlib.asynccontextmanager
    async def sequence(self, spec: SequenceSpec, purpose: Purpose) -> AsyncIterator[SequenceHandle]:
        """A sequence in the engine for as long as the block is entered; leaving it frees all it holds.

        Raises:
            Overloaded: too many sequences wait already.
            InvalidRequest: see `Engine.add`.
        """
        if len(self.engine.scheduler.waiting) >= self._max_waiting:
            raise Overloaded("the worker's queue is full; try again later")
        sequence = self.engine.add(spec, purpose, time.monotonic())
        self._was_idle = False
        queue = self._outputs[sequence] = asyncio.Queue()
        self._wake.set()
        try:
            yield SequenceHandle(self, sequence, queue)
        finally:
            del self._outputs[sequence]
            self.engine.end(sequence)
            self._wake.set()

    def insert(self, sequence: Sequence, first_token: int) -> FinishReason | None:
        """See `Engine.insert`."""
        finish_reason = self.engine.insert(sequence, first_token, time.monotonic())
        self._wake.set()
        return finish_reason

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._outputs.get(output.sequence)
            if queue is not None:  # else its owner has just left, and `end` frees it
                queue.put_nowait(output)

    def _publish_block_events(self) -> None:
        if events := self.engine.take_block_events():
            self._on_block_events(events)

    def _note_idleness(self) -> None:
        """Once each time the last sequence has gone: the engine checks itself and says that it is idle."""
        if self.engine.is_idle and not self._was_idle:
            self._was_idle = True
            self._check()
            self._on_idle()

    def _check(self) -> None:
        try:
            self.engine.check()
        except AssertionError as error:
            self.self_check = str(error)
            logger.error("self-check failed: %s", error)


class SequenceHandle:
    """A sequence's outputs, in order."""

    def __init__(self, loop: EngineLoop, sequence: Sequence, queue: asyncio.Queue[Output | WorkerFailed]) -> None:
        self.loop = loop
        self.sequence = sequence
        self._queue = queue

    async def next(self) -> Output:
        """The next output.

        Raises:
            WorkerFailed: the step that would have made it failed.
        """
        output = await self._queue.get()
        if isinstance(output, WorkerFailed):
            raise output
        return output

    def take_ready(self) -> list[Output]:
        """Outputs that are there already, so that a slow reader gets several tokens at once."""
        ready: list[Output] = []
        while not self._queue.empty():
            output = self._queue.get_nowait()
            if isinstance(output, WorkerFailed):
                self._queue.put_nowait(output)  # the last one there is; `next` raises it
                break
            ready.append(output)
        return ready
