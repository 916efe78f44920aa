"""Runs an engine inside an asyncio process: steps in one thread, everything else on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor

from baton.engine.core.block_pool import Removed, Stored
from baton.engine.core.engine import Engine, Output
from baton.engine.core.runner import Fence, LayerDone
from baton.engine.core.scheduler import Batch
from baton.engine.core.sequence import Purpose, Sequence
from baton.engine.core.step_fit import StepSize
from baton.errors import BatonError, Overloaded, WorkerFailed
from baton.messages import SequenceSpec
from baton.sampling import FinishReason

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Fence | None], None]
"""Told `(num_tokens, num_layers, fence)`: see `SequenceHandle.watch`."""


class EngineLoop:
    """Owns the engine's thread and the queue of every sequence's outputs.

    `on_block_events` is called on the event loop between two steps with what became cached and what was evicted, in
    order: an eviction before a step or a transfer can overwrite the block. Nobody waits until others know of it: that
    would hold up the step for a round trip and still be too late for whoever has looked already. A worker that is asked
    for what it has evicted finds nothing in its own table. `on_idle` is called when the last sequence and the last pin
    have gone.
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
        self._outputs: dict[Sequence, asyncio.Queue[Output | BatonError]] = {}
        self._watchers: dict[Sequence, tuple[Progress, ...]] = {}
        """Changed on the event loop and read by the engine's thread: values are replaced, never changed in place."""
        self._num_layers = engine.runner.cache.spec.num_layers
        self._wake = asyncio.Event()
        self._was_idle = False

    async def run(self) -> None:
        """Steps until cancelled. A step in progress is waited for, so no thread outlives this call."""
        with ThreadPoolExecutor(1, "engine") as thread:
            while True:
                batch, outputs = self.engine.schedule(time.monotonic())
                # What the last step stored, and what this one evicted: told before anybody writes to those blocks.
                self._publish_block_events()
                self._deliver(outputs)
                if not batch:
                    self._note_idleness()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                size, began_s = StepSize.of(batch), time.monotonic()
                step = asyncio.get_running_loop().run_in_executor(
                    thread, self.engine.runner.execute, batch, self._teller(batch)
                )
                try:
                    sampled = await step
                except Exception as error:  # the model's own code: any failure ends this batch, not the worker
                    logger.exception("a step failed")
                    failure = WorkerFailed(f"the engine could not compute a step: {error}")
                    for sequence in self.engine.abandon(batch):
                        self._outputs[sequence].put_nowait(failure)
                else:
                    ended_s = time.monotonic()
                    self.engine.learn(size, ended_s - began_s)
                    outputs = self.engine.commit(batch, sampled, ended_s)
                    for part in batch:  # once more: who began to watch after the step's last layer has not been told
                        self._tell(part.sequence, part.end, self._num_layers, None)
                    self._deliver(outputs)

    def max_waiting(self, spec: SequenceSpec) -> float:
        """How many may wait already when this one comes. An answer that goes on was let in when it began: refusing it
        would end a stream."""
        return math.inf if spec.is_continued else self._max_waiting

    @contextlib.asynccontextmanager
    async def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AsyncIterator[SequenceHandle]:
        """A sequence in the engine for as long as the block is entered; leaving it frees all it holds.

        Args:
            arrived_s: when its request came, on the monotonic clock, if that was not just now: its place in the queue.

        Raises:
            Overloaded: too many sequences wait already; see `max_waiting`.
            InvalidRequest: see `Engine.add`.
        """
        if len(self.engine.scheduler.waiting) >= self.max_waiting(spec):
            raise Overloaded("the worker's queue is full; try again later")
        sequence = self.engine.add(spec, purpose, time.monotonic() if arrived_s is None else arrived_s)
        self._was_idle = False
        queue = self._outputs[sequence] = asyncio.Queue()
        self._wake.set()
        try:
            yield SequenceHandle(self, sequence, queue)
        finally:
            del self._outputs[sequence]
            self._watchers.pop(sequence, None)
            self.engine.end(sequence)
            self._wake.set()

    def hand_back(self, reason: BatonError) -> None:
        """Raises `reason` where sequences are waited for that hold nothing yet and have not begun."""
        for sequence in self.engine.scheduler.waiting:
            if not sequence.was_admitted and sequence in self._outputs:
                self._outputs[sequence].put_nowait(reason)

    def insert(self, sequence: Sequence, first_token: int) -> FinishReason | None:
        """See `Engine.insert`."""
        finish_reason = self.engine.insert(sequence, first_token, time.monotonic())
        self._wake.set()
        return finish_reason

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Engine.adopt`."""
        self.engine.adopt(sequence, num_tokens)
        self._wake.set()

    def pin(self, sequence: Sequence) -> tuple[int, ...]:
        """See `Engine.pin`."""
        return self.engine.pin(sequence)

    def pin_prefix(self, keys: SequenceOf[bytes]) -> tuple[int, ...]:
        """See `Engine.pin_prefix`."""
        blocks = self.engine.pin_prefix(keys)
        self._was_idle = self._was_idle and not blocks
        return blocks

    def unpin(self, blocks: SequenceOf[int]) -> None:
        """See `Engine.unpin`. A sequence that waits for blocks may be admitted now."""
        self.engine.unpin(blocks)
        self._wake.set()

    def watch(self, sequence: Sequence, progress: Progress) -> None:
        """See `SequenceHandle.watch`."""
        progress(sequence.num_computed_tokens, self._num_layers, None)
        self._watchers[sequence] = (*self._watchers.get(sequence, ()), progress)

    def _teller(self, batch: Batch) -> LayerDone:
        def layer_done(layer: int, fence: Fence | None) -> None:
            for part in batch:
                self._tell(part.sequence, part.end, layer + 1, fence)

        return layer_done

    def _tell(self, sequence: Sequence, num_tokens: int, num_layers: int, fence: Fence | None) -> None:
        for progress in self._watchers.get(sequence, ()):
            progress(num_tokens, num_layers, fence)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._outputs.get(output.sequence)
            if queue is not None:  # else its owner has just left, and `end` frees it
                queue.put_nowait(output)

    def _publish_block_events(self) -> None:
        if events := self.engine.take_block_events():
            self._on_block_events(events)

    def _note_idleness(self) -> None:
        """Once each time nothing is held any more: the engine checks itself and says that it is idle."""
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

    def __init__(self, loop: EngineLoop, sequence: Sequence, queue: asyncio.Queue[Output | BatonError]) -> None:
        self.loop = loop
        self.sequence = sequence
        self._queue = queue

    async def next(self) -> Output:
        """The next output.

        Raises:
            WorkerFailed: the step that would have made it failed.
            BatonError: it was handed back (`EngineLoop.hand_back`).
        """
        output = await self._queue.get()
        if isinstance(output, BatonError):
            raise output
        return output

    def watch(self, progress: Progress) -> None:
        """Calls `progress(num_tokens, num_layers, fence)` as the sequence's KV comes into its blocks.

        A call says: the KV of the first `num_tokens` tokens is there, in the model's first `num_layers` layers, for a
        reader that has waited for `fence` on its own stream (None: at once). That stays true for as long as the blocks
        are held or pinned. It is called at once with what is computed already, in all layers; then from the engine's
        thread after each layer of each step that computes this sequence; and on the event loop at the step's end, with
        all layers again. A step begins with one layer and more tokens than the step before, which takes nothing back.

        `progress` must be quick, since a step waits for it, must not raise, and must be safe to call in either thread.
        It is called no more once the sequence's context is left, but for a call that is under way at that moment.
        """
        self.loop.watch(self.sequence, progress)

    def take_ready(self) -> list[Output]:
        """Outputs that are there already, so that a slow reader gets several tokens at once."""
        ready: list[Output] = []
        while not self._queue.empty():
            output = self._queue.get_nowait()
            if isinstance(output, BatonError):
                self._queue.put_nowait(output)  # the last one there is; `next` raises it
                break
            ready.append(output)
        return ready
