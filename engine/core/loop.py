"""Runs an engine inside an asyncio process: steps in threads, everything else on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, NoReturn

from baton.adapters import AdapterFacts
from baton.cluster import Computes
from baton.errors import BatonError, DeviceLost, InvalidRequest, LostInStep, Overloaded, WorkerFailed, in_one_line
from baton.hypotheses import Hypotheses
from baton.messages import SeenImage, SequenceSpec
from baton.tasks import seen_through
from baton.turns import Turns
from engine.core.adapters import AdapterLoader, needs_adapter, refuse_without_slots
from engine.core.engine import Engine, images_of, require_computable
from engine.core.faults import Fault, fault_of
from engine.core.outputs import (
    EngineLoad,
    Generated,
    Idle,
    KvProgress,
    OnEngineEvent,
    OnProgress,
    Output,
    OutputQueue,
    Pin,
    Refused,
    ignore_event,
)
from engine.core.runner import (
    BlockTables,
    Fence,
    KVSpec,
    OnLayerDone,
    StepInput,
    StepPart,
    ignore_layer,
)
from engine.core.sequence import Purpose, Sequence, Status
from engine.core.step_threads import FORGETTING, RunningStep, StepThreads

logger = logging.getLogger(__name__)
LEAST_LEAD_S = 0.001
"""Minimum time before the end of a step at which the next one is planned: timers have this resolution."""
NUM_PREPARING, MAX_PREPARING = 4, 4096
"""Limits on structures that are compiled at a time (one less for one cache scope) and on those that wait for it."""
MAX_LOOKING = 128
"""Limit on images that wait to be decoded, one at a time; one cache scope may have half of it."""
MARGIN = 2.0
"""Factor on the recent time of planning and launching that gives the lead for the next step."""


class EngineLoop:
    """Baton's engine as a `serving.ServingEngine`: owns the step threads and every sequence's output queue.

    No step waits until other workers know of an eviction: a worker that is asked for an evicted prefix finds nothing in
    its own table.

    With `plans_ahead` a step is planned shortly before the step before it ends, if possible (`can_plan_ahead`). A
    sequence that arrives before that moment joins the step as usual; a later one waits for one more step. If a step
    does not end in time (`StepThreads`), the device counts as lost.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        *,
        plans_ahead: bool = False,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.engine = engine
        self.self_check = "ok"
        self._max_waiting = max_waiting
        self._step_timeout_s = step_timeout_s
        self._on_event: OnEngineEvent = ignore_event
        """Set while it runs."""
        self._plans_ahead = plans_ahead
        self._plan_s = 0.0
        """Recent duration of planning a step ahead, in seconds."""
        self._outputs: dict[int, asyncio.Queue[Output | BatonError]] = {}
        """Unread outputs, by sequence key."""
        self._watchers: dict[int, tuple[OnProgress, ...]] = {}
        """Changed on the event loop and read by the step threads: values are replaced, never changed in place."""
        self._num_layers = engine.runner.spec.num_layers
        self._preparing = Turns(NUM_PREPARING, MAX_PREPARING)
        self._adapters = AdapterLoader(engine.adapters, engine.runner.read_adapter)
        self._checking = asyncio.Lock()
        self._decoding, self._encoding = Turns(1, MAX_LOOKING), Turns(1, MAX_PREPARING)
        self._wake = asyncio.Event()
        self._was_idle = False
        self._lost: DeviceLost | None = None
        """Error of a lost device; None: steps are computed."""

    # -- properties of the engine --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.engine.runner.name

    @property
    def sampler(self) -> str:
        return self.engine.runner.sampler

    @property
    def computes(self) -> Computes:
        return replace(self.engine.runner.computes, plans_ahead=self._plans_ahead)

    @property
    def spec(self) -> KVSpec:
        return self.engine.runner.spec

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self.engine.runner.num_blocks

    @property
    def caches(self) -> SequenceOf[Any]:
        return self.engine.runner.caches

    @property
    def vocab_size(self) -> int:
        return self.engine.runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engine.runner.max_model_len

    @property
    def max_step_tokens(self) -> int:
        return self.engine.scheduler.limits.max_num_batched_tokens

    @property
    def max_adapters(self) -> int:
        return self.engine.runner.max_adapters

    def load(self) -> EngineLoad:
        """See `ServingEngine.load`."""
        load = self.engine.load()
        if not self.max_adapters:
            return load
        return replace(load, waiting=load.waiting + self._adapters.num_waiting, adapter_load_s=self._adapters.load_s)

    def keys(self) -> list[bytes]:
        """See `ServingEngine.keys`."""
        return self.engine.pool.keys()

    def max_waiting(self, spec: SequenceSpec) -> float:
        """See `ServingEngine.max_waiting`. A continued response was admitted when it started: refusing it would end a
        stream.
        """
        return math.inf if spec.is_continued else self._max_waiting

    # -- images --------------------------------------------------------------------------------------------------------

    @property
    def takes_images(self) -> bool:
        """See `ServingEngine.takes_images`."""
        return not isinstance(self.engine.runner.images, str)

    @property
    def image_placeholder(self) -> int | None:
        """See `ServingEngine.image_placeholder`."""
        store = self.engine.runner.images
        return None if isinstance(store, str) else store.placeholder

    async def look(self, images: SequenceOf[bytes], cache_seed: bytes) -> tuple[SeenImage, ...]:
        """See `ServingEngine.look`. One cache scope cannot block the others."""
        store, found = images_of(self.engine.runner), list[SeenImage]()
        for encoded in images:
            async with self._decoding.turn(cache_seed.hex(), 1):
                looking = asyncio.ensure_future(asyncio.to_thread(store.look, encoded, cache_seed))
                await seen_through(looking)
            found.append(looking.result())
        return tuple(found)

    async def keep_images(self, images: SequenceOf[bytes], cache_seed: bytes) -> None:
        """See `ServingEngine.keep_images`."""
        await self.look(images, cache_seed)

    @contextlib.asynccontextmanager
    async def _with_images(self, spec: SequenceSpec, purpose: Purpose) -> AsyncIterator[None]:
        """Context manager: keeps the images of a sequence, whose embeddings are computed on entry.

        Encoding an image takes up to seconds, for which no step should wait. Images in the prefix cache are not
        encoded; if they are evicted before the sequence is admitted, its step does it.
        """
        if not spec.images:
            yield
            return
        store = images_of(self.engine.runner)
        store.require_placed(spec)
        with store.pinned(spec.images):
            if purpose is not Purpose.RECEIVE:
                num_cached = 0
                if spec.sampling.prompt_logprobs is None:
                    keys = spec.block_keys(spec.token_ids, block_size=self.engine.pool.key_tokens)
                    num_cached = self.engine.num_cached_tokens(keys)
                async with self._encoding.turn(spec.cache_seed.hex(), 1):
                    new = [image for image in spec.images if image.end > num_cached]
                    encoding = asyncio.ensure_future(asyncio.to_thread(store.prepare, new))
                    await seen_through(encoding)
                try:
                    encoding.result()
                except BatonError:
                    raise
                except Exception as error:  # the model's own code
                    logger.exception("an image could not be encoded")
                    raise _encoder_error(error) from error
            yield

    # -- sequences -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AsyncIterator[SequenceHandle]:
        """See `ServingEngine.sequence`."""
        if self._lost is not None:
            raise self._lost
        num_loading = self._adapters.num_waiting if self.max_adapters else 0
        if self.engine.num_waiting + num_loading >= self.max_waiting(spec):
            raise Overloaded("the worker's queue is full; try again later")
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        if spec.sampling.is_structured:
            await self._prepare(spec)
        async with self._with_images(spec, purpose):
            sequence = await self._added(spec, purpose, arrived_s)
            self._was_idle = False
            queue = self._outputs[sequence.key] = asyncio.Queue()
            self._wake.set()
            try:
                yield SequenceHandle(self, sequence, queue)
            finally:
                del self._outputs[sequence.key]
                self._watchers.pop(sequence.key, None)
                self.engine.end(sequence)
                self._adapters.advance()
                self._wake.set()

    async def _added(self, spec: SequenceSpec, purpose: Purpose, arrived_s: float) -> Sequence:
        """Add a sequence to the engine, once its adapter is loaded."""
        slot = await self._slot_of(spec, purpose)
        try:
            if (lost := self._lost) is not None:  # since it has begun to wait
                raise lost
            return self.engine.add(spec, purpose, arrived_s, slot)
        except BaseException:
            if slot:
                self.engine.adapters.unpin(slot)
                self._adapters.advance()
            raise

    async def _slot_of(self, spec: SequenceSpec, purpose: Purpose) -> int:
        """Wait until a sequence's adapter is loaded. Return its slot, pinned; 0: it needs none."""
        if spec.adapter is None or not needs_adapter(spec, purpose):
            return 0
        refuse_without_slots(self.max_adapters)
        require_computable(spec, self.engine.runner)
        return await self._adapters.slot_of(spec.adapter)

    async def check_adapter(self, path: str) -> AdapterFacts:
        """See `ServingEngine.check_adapter`."""
        refuse_without_slots(self.max_adapters)
        async with self._checking:
            checking = asyncio.ensure_future(asyncio.to_thread(self.engine.runner.check_adapter, path))
            await seen_through(checking)
        try:
            return checking.result()
        except OSError as error:
            raise InvalidRequest(f"this worker cannot read the adapter in {path}: {error}") from error

    async def _prepare(self, spec: SequenceSpec) -> None:
        """Compile a sequence's structure, which may take a second. One cache scope cannot block the others."""
        async with self._preparing.turn(spec.cache_seed.hex(), 1):
            preparing = asyncio.ensure_future(asyncio.to_thread(self.engine.runner.prepare, spec.sampling))
            await seen_through(preparing)
        preparing.result()

    def hand_back(self, reason: BatonError) -> None:
        """See `ServingEngine.hand_back`."""
        self._adapters.hand_back(reason)
        for sequence in self.engine.scheduler.waiting:
            if not sequence.was_admitted and sequence.key in self._outputs:
                self._outputs[sequence.key].put_nowait(reason)

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        """See `ServingEngine.hypotheses`."""
        return self.engine.hypotheses(spec)

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

    async def run(self, on_event: OnEngineEvent = ignore_event) -> None:
        """See `ServingEngine.run`. Waits for a step in progress, so that no thread outlives this call, unless it
        hangs.
        """
        self._on_event = on_event
        threads = StepThreads(self.engine.runner, self._step_timeout_s, plans_ahead=self._plans_ahead)
        try:
            await self._steps(threads)
        finally:
            leaving = asyncio.ensure_future(self._leave(threads))
            await seen_through(leaving)
            leaving.result()

    async def _steps(self, threads: StepThreads) -> NoReturn:
        running: RunningStep | None = None
        while True:
            running = running or self._begin(threads, self.engine.schedule(time.monotonic()))
            if running is None:
                self._note_idleness()
                self._wake.clear()
                await self._wake.wait()
                continue
            following = await self._begin_next(threads, running) if self._plans_ahead else None
            running = following if await self._end(threads, running, following) else None

    async def _leave(self, threads: StepThreads) -> None:
        """Stop the threads. Those of a lost device are not waited for.

        Raises:
            DeviceLost: the last step hangs.
        """
        await self._adapters.close(self._step_timeout_s)
        last = threads.last
        is_over = self._lost is None and (last is None or await last.has_ended())
        threads.close(waits=is_over)
        if last is not None and self._lost is None and not is_over:
            self._lose_hung(last)

    def _begin(
        self, threads: StepThreads, scheduled: tuple[StepInput, list[Output]], before: RunningStep | None = None
    ) -> RunningStep | None:
        """Give the runner a scheduled step and deliver the schedule's outputs. Return None if there is no step."""
        step, outputs = scheduled  # evictions are published before those blocks are overwritten
        for change in self.engine.take_block_events():
            self._on_event(change)
        self._deliver(outputs)
        if not step:
            return None
        return threads.execute(step, self._layer_reporter(step), time.monotonic(), self.engine.costs, before)

    async def _begin_next(self, threads: StepThreads, running: RunningStep) -> RunningStep | None:
        """Start the next step shortly before the running one is expected to end, if it still runs then."""
        ends_s = running.began_s + running.expected_s
        lead_s = LEAST_LEAD_S + MARGIN * (self._plan_s + threads.launch_s)
        if (wait_s := ends_s - lead_s - time.monotonic()) > 0:
            await asyncio.wait((running.output,), timeout=wait_s)
        if running.output.done():
            return None
        began_s = time.monotonic()
        scheduled = self.engine.schedule_ahead(running.step, max(began_s, ends_s))
        if scheduled is None:
            return None
        following = self._begin(threads, scheduled, running)
        self._plan_s = FORGETTING * self._plan_s + (1 - FORGETTING) * (time.monotonic() - began_s)
        return following

    async def _end(self, threads: StepThreads, running: RunningStep, following: RunningStep | None) -> bool:
        """Record the result of a step. Return False if it has failed, and with it the one started after it.

        Raises:
            DeviceLost: no other step can be computed.
        """
        begun = [running] if following is None else [running, following]
        if not await running.has_ended():
            self._lose_hung(*begun)
        try:
            output = running.output.result()
        except Exception as error:  # the model's own code: any failure ends this batch
            logger.exception("a step failed")
            if following is not None:
                if not await following.has_ended():
                    self._lose_hung(*begun)
                following.output.exception()  # it is the same error, or a consequence
            steps = [each.step for each in begun]
            if await threads.have_lost_device(error):
                self.lose(error, *steps)
            failure = WorkerFailed(f"the engine could not compute a step: {error}")
            for sequence in self.engine.abandon(*steps):
                self._outputs[sequence.key].put_nowait(failure)
            self._adapters.advance()
            return False
        ended_s = time.monotonic()
        outputs = self.engine.commit(running.step, output, ended_s)
        self._adapters.advance()
        # At least one report per step, for runners that report no layers and for watchers that came after the layers.
        for part, num_tokens in zip(running.step.parts, output.num_computed_tokens, strict=True):
            self._report(part.sequence_key, min(num_tokens, part.end), self._num_layers, None, self._held(part))
        self._deliver(outputs)
        self.engine.learn(running.size, ended_s - running.began_s, output.proposing_s)
        if following is not None:
            following.began_s = max(following.began_s, ended_s)
        return True

    def _lose_hung(self, *begun: RunningStep) -> NoReturn:
        limit_s = max(each.limit_s for each in begun)
        self.lose(f"a step has not ended within {limit_s:g} s (engine.step_timeout_s)", *[each.step for each in begun])

    def lose(self, reason: Exception | str, *steps: StepInput) -> NoReturn:
        """See `ServingEngine.lose`.

        Args:
            steps: the steps in which it was lost; their sequences get LostInStep.
        """
        self._lost = DeviceLost(f"the device of the engine has failed: {reason}")
        in_step = LostInStep(f"the device of the engine has failed in a step of this request: {reason}")
        logger.critical("%s", self._lost)
        suspects = {sequence.key for sequence in self.engine.abandon(*steps)}
        for key, queue in self._outputs.items():
            queue.put_nowait(in_step if key in suspects else self._lost)
        self._adapters.hand_back(self._lost)
        raise self._lost from (reason if isinstance(reason, Exception) else None)

    def close(self) -> None:
        """See `ServingEngine.close`."""
        self.engine.runner.close()

    def _layer_reporter(self, step: StepInput) -> OnLayerDone:
        if not any(self._may_be_watched(part.sequence_key) for part in step.parts):
            return ignore_layer

        def on_layer_done(layer: int, fence: Fence | None) -> None:
            for part in step.parts:
                self._report(part.sequence_key, part.known_end, layer + 1, fence)

        return on_layer_done

    def _may_be_watched(self, sequence_key: int) -> bool:
        """Return whether a step reports a sequence's layers, each of which costs an event on a GPU.

        It reports those of prompts that it prefills for other workers, whose senders attach while the first step runs.
        A watcher of any other sequence receives a report at the step's end.
        """
        sequence = self.engine.sequences.get(sequence_key)
        return sequence_key in self._watchers or (sequence is not None and sequence.purpose is Purpose.PREFILL)

    def _held(self, part: StepPart) -> BlockTables | None:
        """Return the block tables of a HELD sequence with states, whose final row is known only now; else None."""
        sequence = self.engine.sequences.get(part.sequence_key) if self.spec.states else None
        return sequence.block_ids if sequence is not None and sequence.status is Status.HELD else None

    def _report(
        self,
        sequence_key: int,
        num_tokens: int,
        num_layers: int,
        fence: Fence | None,
        block_ids: BlockTables | None = None,
    ) -> None:
        for on_progress in self._watchers.get(sequence_key, ()):
            on_progress(KvProgress(num_tokens, num_layers, fence, block_ids))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._outputs.get(output.sequence_key)
            if queue is not None:  # else its owner has just left, and `end` frees it
                queue.put_nowait(output.error if isinstance(output, Refused) else output)

    def _note_idleness(self) -> None:
        """Run the engine's self-check and publish that it is idle, once each time that nothing is held any more."""
        if self._was_idle or not self.engine.is_idle:
            return
        self._was_idle = True
        try:
            self.engine.check()
        except AssertionError as error:
            self.self_check = str(error)
            logger.error("self-check failed: %s", error)
        self._on_event(Idle())

    # -- calls of the handle -------------------------------------------------------------------------------------------

    def watch(self, sequence: Sequence, on_progress: OnProgress) -> None:
        """See `ServedSequence.watch`."""
        on_progress(KvProgress(sequence.num_written_tokens, self._num_layers))
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


class SequenceHandle(OutputQueue):
    """A sequence of an `EngineLoop` (`serving.ServedSequence`)."""

    def __init__(self, loop: EngineLoop, sequence: Sequence, queue: asyncio.Queue[Output | BatonError]) -> None:
        super().__init__(queue)
        self._loop = loop
        self._sequence = sequence

    @property
    def key(self) -> int:
        """Identifies the sequence in the engine's outputs."""
        return self._sequence.key

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


def _encoder_error(error: Exception) -> BatonError:
    """Return the error of a request whose images could not be encoded. Other requests are not affected.

    After a lack of memory the allocator can use again what the encoder had. `Runner.recover` is not called: a step may
    be running.
    """
    traceback.clear_frames(error.__traceback__)  # they hold the encoder's tensors
    match fault_of(error):
        case Fault.OUT_OF_MEMORY:
            return Overloaded("the device has too little free memory to encode an image of this request; try again")
        case Fault.DEVICE_LOST:
            return DeviceLost(f"the device of the engine has failed: {in_one_line(error)}")
    return InvalidRequest(f"the model's encoder cannot encode an image of this request: {in_one_line(error)}")
