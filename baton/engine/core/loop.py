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
from dataclasses import dataclass
from typing import Any

from baton.engine.core.block_pool import BlockChange
from baton.engine.core.engine import Engine
from baton.engine.core.kv_spec import KVSpec
from baton.engine.core.outputs import EngineLoad, Generated, KvProgress, OnProgress, Output, Pin, Refused
from baton.engine.core.runner import Fence, OnLayerDone, StepInput
from baton.engine.core.sequence import Purpose, Sequence
from baton.engine.core.step_fit import StepSize
from baton.errors import BatonError, Overloaded, WorkerFailed
from baton.hypotheses import Hypotheses
from baton.messages import SequenceSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Idle:
    """The last sequence and the last pin have gone."""


EngineEvent = BlockChange | Idle
OnEngineEvent = Callable[[EngineEvent], None]
"""Called on the event loop, between two steps."""


class EngineLoop:
    """Baton's engine behind its face (`serving.ServingEngine`): owns its thread and the queue of every sequence.

    `on_event` is called between two steps with what became cached and what was evicted, in order: an eviction before a
    step or a transfer can overwrite the block. The step does not wait until others know of it: that would cost a round
    trip, and still be too late for those who have looked already. A worker that is asked for what it has evicted finds
    nothing in its own table.
    """

    def __init__(self, engine: Engine, max_waiting: int, on_event: OnEngineEvent = lambda event: None) -> None:
        self.engine = engine
        self.self_check = "ok"
        self._max_waiting = max_waiting
        self._on_event = on_event
        self._outputs: dict[int, asyncio.Queue[Output | BatonError]] = {}
        """Outputs that nobody has read yet, by sequence key."""
        self._watchers: dict[int, tuple[OnProgress, ...]] = {}
        """Changed on the event loop and read by the engine's thread: values are replaced, never changed in place."""
        self._num_layers = engine.runner.spec.num_layers
        self._wake = asyncio.Event()
        self._was_idle = False

    # -- what is known of the engine -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.engine.runner.name

    @property
    def sampler(self) -> str:
        return self.engine.runner.sampler

    @property
    def spec(self) -> KVSpec:
        return self.engine.runner.spec

    @property
    def caches(self) -> SequenceOf[Any]:
        return self.engine.runner.caches

    @property
    def vocab_size(self) -> int:
        return self.engine.runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engine.runner.max_model_len

    def load(self) -> EngineLoad:
        """See `ServingEngine.load`."""
        return self.engine.load()

    def keys(self) -> list[bytes]:
        """See `ServingEngine.keys`."""
        return self.engine.pool.keys()

    def max_waiting(self, spec: SequenceSpec) -> float:
        """See `ServingEngine.max_waiting`. An answer that goes on was let in when it began: refusing it would end a
        stream.
        """
        return math.inf if spec.is_continued else self._max_waiting

    # -- sequences -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AsyncIterator[SequenceHandle]:
        """See `ServingEngine.sequence`."""
        if self.engine.num_waiting >= self.max_waiting(spec):
            raise Overloaded("the worker's queue is full; try again later")
        if spec.sampling.is_structured:
            await asyncio.to_thread(self.engine.runner.prepare, spec.sampling)
        sequence = self.engine.add(spec, purpose, time.monotonic() if arrived_s is None else arrived_s)
        self._was_idle = False
        queue = self._outputs[sequence.key] = asyncio.Queue()
        self._wake.set()
        try:
            yield SequenceHandle(self, sequence, queue)
        finally:
            del self._outputs[sequence.key]
            self._watchers.pop(sequence.key, None)
            self.engine.end(sequence)
            self._wake.set()

    def hand_back(self, reason: BatonError) -> None:
        """See `ServingEngine.hand_back`."""
        for sequence in self.engine.scheduler.waiting:
            if not sequence.was_admitted and sequence.key in self._outputs:
                self._outputs[sequence.key].put_nowait(reason)

    def hypotheses(self, sequence_id: str) -> Hypotheses:
        """See `ServingEngine.hypotheses`."""
        return self.engine.hypotheses(sequence_id)

    async def pin_prefix(self, keys: SequenceOf[bytes]) -> Pin:
        """See `ServingEngine.pin_prefix`."""
        pin = self.engine.pin_prefix(keys)
        self._was_idle = self._was_idle and not any(pin.block_ids)
        return pin

    def unpin(self, pin: Pin) -> None:
        """See `ServingEngine.unpin`. A sequence that waits for blocks may be admitted now."""
        self.engine.unpin(pin)
        self._wake.set()

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps until cancelled. A step in progress is waited for, so no thread outlives this call."""
        with ThreadPoolExecutor(1, "engine") as thread:
            while True:
                step, outputs = self.engine.schedule(time.monotonic())
                # What the last step stored, and what this one evicted: published before those blocks are overwritten.
                self._publish_block_events()
                self._deliver(outputs)
                if not step:
                    self._note_idleness()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._step(step, thread)

    async def _step(self, step: StepInput, thread: ThreadPoolExecutor) -> None:
        began_s = time.monotonic()
        executing = asyncio.get_running_loop().run_in_executor(
            thread, self.engine.runner.execute, step, self._layer_reporter(step)
        )
        try:
            output = await executing
        except Exception as error:  # the model's own code: any failure ends this batch, not the worker
            logger.exception("a step failed")
            failure = WorkerFailed(f"the engine could not compute a step: {error}")
            for sequence in self.engine.abandon(step):
                self._outputs[sequence.key].put_nowait(failure)
            return
        ended_s = time.monotonic()
        outputs = self.engine.commit(step, output, ended_s)
        # The promise of one report per step, for runners that report no layers and for watchers that came after them.
        for part, num_tokens in zip(step.parts, output.num_computed_tokens, strict=True):
            self._report(part.sequence_key, min(num_tokens, part.end), self._num_layers, None)
        self._deliver(outputs)
        self.engine.learn(StepSize.of(step), ended_s - began_s)

    def _layer_reporter(self, step: StepInput) -> OnLayerDone:
        def on_layer_done(layer: int, fence: Fence | None) -> None:
            for part in step.parts:
                self._report(part.sequence_key, part.known_end, layer + 1, fence)

        return on_layer_done

    def _report(self, sequence_key: int, num_tokens: int, num_layers: int, fence: Fence | None) -> None:
        for on_progress in self._watchers.get(sequence_key, ()):
            on_progress(KvProgress(num_tokens, num_layers, fence))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._outputs.get(output.sequence_key)
            if queue is not None:  # else its owner has just left, and `end` frees it
                queue.put_nowait(output.error if isinstance(output, Refused) else output)

    def _publish_block_events(self) -> None:
        for change in self.engine.take_block_events():
            self._on_event(change)

    def _note_idleness(self) -> None:
        """Has the engine check itself and says that it is idle, once each time nothing is held any more."""
        if self.engine.is_idle and not self._was_idle:
            self._was_idle = True
            self._check()
            self._on_event(Idle())

    def _check(self) -> None:
        try:
            self.engine.check()
        except AssertionError as error:
            self.self_check = str(error)
            logger.error("self-check failed: %s", error)

    # -- what a handle asks --------------------------------------------------------------------------------------------

    def watch(self, sequence: Sequence, on_progress: OnProgress) -> None:
        """See `ServedSequence.watch`."""
        on_progress(KvProgress(sequence.num_computed_tokens, self._num_layers))
        self._watchers[sequence.key] = (*self._watchers.get(sequence.key, ()), on_progress)

    def insert(self, sequence: Sequence, first_token: int | None, num_tokens: int | None) -> None:
        """See `ServedSequence.insert`."""
        finish_reason = self.engine.insert(sequence, first_token, time.monotonic(), num_tokens)
        if finish_reason is not None:
            self._deliver([Generated(sequence.key, (), finish_reason)])
        self._wake.set()

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """See `ServedSequence.adopt`."""
        self.engine.adopt(sequence, num_tokens)
        self._wake.set()


class SequenceHandle:
    """A sequence of an `EngineLoop` (`serving.ServedSequence`)."""

    def __init__(self, loop: EngineLoop, sequence: Sequence, queue: asyncio.Queue[Output | BatonError]) -> None:
        self._loop = loop
        self._sequence = sequence
        self._queue = queue

    @property
    def key(self) -> int:
        """Identifies the sequence in the engine's outputs."""
        return self._sequence.key

    async def next(self) -> Output:
        """See `ServedSequence.next`."""
        output = await self._queue.get()
        if isinstance(output, BatonError):
            raise output
        return output

    def take_ready(self) -> list[Output]:
        """See `ServedSequence.take_ready`."""
        ready: list[Output] = []
        while not self._queue.empty():
            output = self._queue.get_nowait()
            if isinstance(output, BatonError):
                self._queue.put_nowait(output)  # the last one there is; `next` raises it
                break
            ready.append(output)
        return ready

    async def pin(self) -> Pin:
        """See `ServedSequence.pin`. A PREFILL sequence gets all its blocks when it is admitted."""
        return self._loop.engine.pin(self._sequence)

    def watch(self, on_progress: OnProgress) -> None:
        """See `ServedSequence.watch`."""
        self._loop.watch(self._sequence, on_progress)

    def insert(self, first_token: int | None, num_tokens: int | None = None) -> None:
        """See `ServedSequence.insert`."""
        self._loop.insert(self._sequence, first_token, num_tokens)

    def adopt(self, num_tokens: int) -> None:
        """See `ServedSequence.adopt`."""
        self._loop.adopt(self._sequence, num_tokens)
