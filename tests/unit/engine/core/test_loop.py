from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from baton.blocks import block_keys
from baton.errors import BatonError, DeviceLost, InvalidRequest, LostInStep, Overloaded, WorkerFailed
from baton.messages import PlacedImage, SeenImage, SequenceSpec
from baton.sampling import FinishReason, SamplingParams
from baton.structure import StructuredOutputs
from baton.tasks import cancel_and_wait
from engine.core import loop as loop_module
from engine.core.block_pool import Removed, Stored
from engine.core.engine import Engine
from engine.core.image_store import ImageStore
from engine.core.loop import EngineLoop, SequenceHandle
from engine.core.outputs import Admitted, Generated, KvProgress, OnEngineEvent, Reserved, ignore_event
from engine.core.runner import Fence, OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from engine.testing import ArithmeticReader, ArithmeticRunner, expected_tokens
from tests.support.builders import sequence_spec
from tests.support.event_log import EventLog
from tests.support.eyes import picture
from tests.support.guessing import FREE
from tests.unit.engine.core.test_engine import (
    admitted,
    is_empty,
    make_engine,
    make_spec,
    numbers,
    reserved_for,
    write_prompt_kv,
    written,
)

pytestmark = pytest.mark.timeout(30)

GREEDY = SamplingParams(temperature=0.0)


@contextlib.asynccontextmanager
async def running(loop: EngineLoop, on_event: OnEngineEvent = ignore_event) -> AsyncIterator[EngineLoop]:
    """The loop runs while the block is entered; it must not have ended by itself."""
    task = asyncio.create_task(loop.run(on_event))
    try:
        yield loop
        assert not task.done(), task
    finally:
        await cancel_and_wait((task,))
        assert task.cancelled(), task


def sequence_of(handle: SequenceHandle) -> Sequence:
    """The engine's own object, which services never see."""
    return handle._sequence


async def rest(loop: EngineLoop) -> None:
    """Waits until the loop has nothing to step."""
    async with asyncio.timeout(10):
        while loop._wake.is_set() or loop.engine.scheduler.running or loop.engine.scheduler.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def read_all(handle: SequenceHandle) -> list[int]:
    tokens = list[int]()
    while True:
        output = await handle.next()
        assert isinstance(output, Generated)
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens


class GatedRunner(ArithmeticRunner):
    """Executes a batch only when allowed, so that a test can act while a step is in flight."""

    def __init__(self, num_blocks: int = 64, num_layers: int = 2) -> None:
        super().__init__(num_blocks, num_layers=num_layers)
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.stop()
        return super().execute(step, on_layer_done)

    def stop(self) -> None:
        self.started.release()
        assert self.allowed.acquire(timeout=10)

    async def wait_started(self) -> None:
        assert await asyncio.to_thread(self.started.acquire, timeout=10)


class LayerGatedRunner(GatedRunner):
    """Stops before each step, and again each time that it has told of a layer."""

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        def tell_and_stop(layer: int, fence: Fence | None) -> None:
            on_layer_done(layer, fence)
            self.stop()

        return super().execute(step, tell_and_stop)


class FailingRunner(ArithmeticRunner):
    """Fails in the steps whose numbers it is given, counted from 0."""

    def __init__(self, fail_at: set[int]) -> None:
        super().__init__(64)
        self.fail_at = fail_at
        self.num_steps = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.num_steps += 1
        if self.num_steps - 1 in self.fail_at:
            raise RuntimeError("out of memory")
        return super().execute(step, on_layer_done)


def engine_of(runner: ArithmeticRunner) -> Engine:
    return Engine(
        runner,
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=32),
    )


async def test_many_at_once_get_their_own_tokens() -> None:
    async with running(EngineLoop(make_engine(32), 64)) as loop:

        async def ask(index: int) -> None:
            prompt = numbers(index % 5, 10 + 7 * index)
            async with loop.sequence(make_spec(prompt, 15, name=f"r{index}"), Purpose.GENERATE) as handle:
                assert await read_all(handle) == expected_tokens(prompt, 15)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for index in range(20):
                tasks.create_task(ask(index))
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"


async def test_prefill_and_receive_over_handles() -> None:
    async with running(EngineLoop(make_engine(), 64)) as loop:
        prompt = numbers(1, 40)
        async with loop.sequence(make_spec(prompt, name="p"), Purpose.PREFILL) as handle:
            assert await handle.next() == admitted(sequence_of(handle))
            output = await handle.next()
            assert isinstance(output, Generated)
            await rest(loop)
            assert loop.engine.pool.counts().in_use == 3
        async with loop.sequence(make_spec(prompt, name="d"), Purpose.RECEIVE) as handle:
            reserved = await handle.next()
            assert isinstance(reserved, Reserved)
            assert reserved.num_cached_tokens == 32
            write_prompt_kv(loop.engine.runner.caches[0], sequence_of(handle), (reserved.num_cached_tokens,))
            handle.insert(output.token_ids[0])
            assert [output.token_ids[0], *await read_all(handle)] == expected_tokens(prompt, 8)
        await rest(loop)
        assert is_empty(loop.engine)


@pytest.mark.parametrize("seed", range(5))
async def test_cancelled_at_any_moment_nothing_is_left(seed: int) -> None:
    draw = random.Random(seed)
    async with running(EngineLoop(make_engine(10, output_reservation=0, max_num_seqs=4), 64)) as loop:

        async def ask(index: int) -> None:
            purpose = draw.choice(list(Purpose))
            prompt = numbers(index % 3, draw.randrange(1, 100))
            async with loop.sequence(make_spec(prompt, 30, name=f"r{index}"), purpose) as handle:
                tokens = list[int]()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(0, 0.05)):
                        while len(tokens) < 30:
                            output = await handle.next()
                            if isinstance(output, Generated):
                                tokens += output.token_ids
                assert tokens == expected_tokens(prompt, len(tokens))

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            asked = []
            for index in range(40):
                asked.append(tasks.create_task(ask(index)))
                await asyncio.sleep(draw.uniform(0, 0.003))
                if draw.random() < 0.3:
                    draw.choice(asked).cancel()
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"
        assert loop._outputs == {}
        assert loop._watchers == {}


Told = list[KvProgress]


@pytest.mark.parametrize("num_cached", [0, 32])
async def test_progress_is_told_layer_by_layer_and_is_true(num_cached: int) -> None:
    """With pins taken at admission: exactly what a KV transfer does that follows the computing."""
    runner = ArithmeticRunner(64, num_layers=4, layer_s=0.001)
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        prompt = numbers(1, 150)
        if num_cached:
            async with loop.sequence(make_spec(prompt[:40], 1, name="before"), Purpose.GENERATE) as handle:
                await read_all(handle)
        async with (
            loop.sequence(make_spec(numbers(2, 5), 60, name="other"), Purpose.GENERATE) as other,
            loop.sequence(make_spec(prompt), Purpose.PREFILL) as handle,
        ):
            assert await handle.next() == admitted(sequence_of(handle), num_cached)
            assert sequence_of(handle).num_computed_tokens == num_cached
            pin = await handle.pin()
            told: Told = []

            def on_progress(progress: KvProgress) -> None:
                num_tokens = progress.num_tokens
                for layer in range(progress.num_layers):
                    assert written(runner.caches[0], layer, pin.block_ids[0])[:num_tokens] == prompt[:num_tokens]
                told.append(progress)

            handle.watch(on_progress)
            output = await handle.next()
            assert isinstance(output, Generated)
            assert told[-1] == KvProgress(150, 4)
            assert await read_all(other) == expected_tokens(numbers(2, 5), 60)
        assert told[0] == KvProgress(num_cached, 4)
        layers = [(num_tokens, layer) for num_tokens, layer, *_ in told[1:]]
        assert layers == sorted(layers), "steps in order, and the layers of each"
        assert len({num_tokens for num_tokens, _ in layers}) == 3 - (num_cached > 0), "the budget is 64 tokens a step"
        assert {layer for _, layer in layers} == {1, 2, 3, 4}
        loop.unpin(pin)
        await rest(loop)
        assert is_empty(loop.engine)


@pytest.mark.parametrize("num_stops", range(1, 9))
async def test_who_begins_to_watch_in_the_middle_of_a_step_misses_nothing(num_stops: int) -> None:
    """Two steps of three layers: stops 1 and 5 are before a step, the others after each layer of it."""
    runner = LayerGatedRunner(num_layers=3)
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 100)), Purpose.PREFILL) as handle,
    ):
        for _ in range(num_stops - 1):
            await runner.wait_started()
            runner.allowed.release()
        await runner.wait_started()
        told: Told = []
        handle.watch(told.append)
        runner.allowed.release(8)
        await handle.next()
        await handle.next()
        of_step = [[(tokens, layer) for layer in (1, 2, 3)] for tokens in (64, 100)]
        if num_stops <= 4:
            expected = [(0, 3), *of_step[0][num_stops - 1 :], (64, 3), *of_step[1], (100, 3)]
        else:
            expected = [(64, 3), *of_step[1][num_stops - 5 :], (100, 3)]
        assert [statement[:2] for statement in told] == expected


class AskedRunner(ArithmeticRunner):
    """Notes of each step whether anybody wants to know of its layers."""

    def __init__(self) -> None:
        super().__init__(64)
        self.reports: list[bool] = []

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.reports.append(on_layer_done is not ignore_layer)
        return super().execute(step, on_layer_done)


async def test_a_runner_spares_the_fences_of_layers_that_nobody_watches() -> None:
    """Prompts for other workers are watched as soon as their blocks are known, while their first step runs."""
    runner = AskedRunner()
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        async with loop.sequence(make_spec(numbers(1, 20), 4), Purpose.GENERATE) as handle:
            await read_all(handle)
        assert runner.reports == [False] * 4
        runner.reports.clear()
        async with loop.sequence(make_spec(numbers(2, 20), 4), Purpose.GENERATE) as handle:
            handle.watch(Told().append)
            await read_all(handle)
        async with loop.sequence(make_spec(numbers(3, 20), 4), Purpose.PREFILL) as handle:
            assert [type(await handle.next()) for _ in range(2)] == [Admitted, Generated]
        assert runner.reports == [True] * 5


async def test_a_draft_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a report says stays true: a draft that a step computes may be overwritten by the next."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=32, max_draft_tokens=4)
    engine = Engine(ArithmeticRunner(64), limits)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    monkeypatch.setattr(engine, "learn", lambda *took: None)
    beyond = []
    async with running(EngineLoop(engine, 8)) as loop:
        spec = make_spec([5] * 20, 60, allowed_token_ids=(5,))
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            sequence = sequence_of(handle)
            handle.watch(lambda progress: beyond.append(progress.num_tokens - sequence.num_tokens))
            assert await read_all(handle) == [5] * 60
    assert max(beyond) == 0
    assert engine.load().accepted_tokens > 20


async def test_leaving_ends_the_watching() -> None:
    runner = LayerGatedRunner(num_layers=3)
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        told, told_too = Told(), Told()
        async with loop.sequence(make_spec(numbers(1, 40)), Purpose.PREFILL) as handle:
            handle.watch(told.append)
            handle.watch(told_too.append)
            await runner.wait_started()
            runner.allowed.release()
            await runner.wait_started()
        runner.allowed.release(8)
        await rest(loop)
        assert told == told_too == [KvProgress(0, 3), KvProgress(40, 1)]
        assert loop._watchers == {}
        assert is_empty(loop.engine)


async def test_of_a_failed_step_no_end_is_told() -> None:
    async with (
        running(EngineLoop(engine_of(FailingRunner({1})), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 100)), Purpose.PREFILL) as handle,
    ):
        told: Told = []
        handle.watch(told.append)
        assert await handle.next() == admitted(sequence_of(handle))
        with pytest.raises(WorkerFailed):
            await handle.next()
        assert told[-1] == KvProgress(64, 2)


async def test_admission_is_told_before_the_step_is_over() -> None:
    runner = GatedRunner()
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 40)), Purpose.PREFILL) as handle,
    ):
        async with asyncio.timeout(5):
            assert await handle.next() == admitted(sequence_of(handle))
        assert handle.take_ready() == []
        runner.allowed.release()
        assert isinstance(await handle.next(), Generated)


async def test_unpinning_lets_in_who_waits_for_blocks() -> None:
    async with running(EngineLoop(make_engine(4), 64)) as loop:
        async with loop.sequence(make_spec(numbers(1, 50)), Purpose.PREFILL) as handle:
            await handle.next()
            await handle.next()
            blocks = await handle.pin()
        async with loop.sequence(make_spec(numbers(2, 40), 4, name="waiting"), Purpose.GENERATE) as handle:
            await asyncio.sleep(0.05)
            assert handle.take_ready() == []
            loop.unpin(blocks)
            async with asyncio.timeout(5):
                assert await read_all(handle) == expected_tokens(numbers(2, 40), 4)


async def test_idleness_is_noted_when_the_last_pin_goes() -> None:
    told = EventLog()
    async with running(EngineLoop(make_engine(), 8), told) as loop:
        await asyncio.sleep(0)
        assert told.num_idle == 1, "from the start"
        prompt = numbers(1, 40)
        async with loop.sequence(make_spec(prompt), Purpose.PREFILL) as handle:
            await handle.next()
            await handle.next()
            blocks = await handle.pin()
        await rest(loop)
        assert told.num_idle == 1, "it is pinned"
        loop.unpin(blocks)
        await rest(loop)
        assert told.num_idle == 2
        # An engine at rest is not at rest while its cache is read.
        blocks = await loop.pin_prefix(block_keys(b"tenant", prompt))
        assert len(blocks.block_ids[0]) == 2
        nothing = await loop.pin_prefix(block_keys(b"another", prompt))
        assert nothing.block_ids == ((),)
        await rest(loop)
        assert told.num_idle == 2
        loop.unpin(blocks)
        await rest(loop)
        assert told.num_idle == 3
        nothing = await loop.pin_prefix(block_keys(b"another", prompt))
        assert nothing.block_ids == ((),)
        loop.unpin(nothing)
        await rest(loop)
        assert told.num_idle == 3
        assert loop.self_check == "ok"
        assert is_empty(loop.engine)


async def test_adopted_blocks_are_published_and_stay_in_the_cache() -> None:
    told = EventLog()
    async with running(EngineLoop(make_engine(), 8), told) as loop:
        prompt = numbers(1, 40)
        async with loop.sequence(make_spec(prompt, 0), Purpose.RECEIVE) as handle:
            assert await handle.next() == reserved_for(sequence_of(handle))
            await rest(loop)
            write_prompt_kv(loop.engine.runner.caches[0], sequence_of(handle), (0,))
            handle.adopt(40)
            await rest(loop)
            assert told.changes == [Stored(key) for key in block_keys(b"tenant", prompt)]
        await rest(loop)
        assert is_empty(loop.engine)
        async with loop.sequence(make_spec(prompt, name="after"), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(prompt, 8)
            assert sequence_of(handle).num_cached_tokens == 32


async def test_leaving_while_a_step_is_in_flight_frees_at_its_end() -> None:
    runner = GatedRunner()
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        async with loop.sequence(make_spec(numbers(1, 40)), Purpose.GENERATE):
            await runner.wait_started()
        assert loop.engine.pool.counts().in_use > 0
        runner.allowed.release()
        await rest(loop)
        assert is_empty(loop.engine)


async def test_what_has_not_begun_is_handed_back_and_what_runs_goes_on() -> None:
    """As a worker that leaves does: who waits for it need not wait."""
    runner = GatedRunner()
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 40), 1, name="runs"), Purpose.GENERATE) as runs,
    ):
        await runner.wait_started()
        async with loop.sequence(make_spec(numbers(50, 40), 1, name="waits"), Purpose.GENERATE) as waits:
            loop.hand_back(Overloaded("it leaves"))
            async with asyncio.timeout(10):
                with pytest.raises(Overloaded, match="it leaves"):
                    await waits.next()
        runner.allowed.release()
        assert len(await read_all(runs)) == 1


async def test_a_failed_step_ends_its_batch_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    runner = FailingRunner({2})
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        spec = make_spec(numbers(1, 40), 10, name="unlucky")
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            outputs = [await handle.next() for _ in range(2)]
            with pytest.raises(WorkerFailed, match="could not compute a step: out of memory"):
                await handle.next()
        assert [token for o in outputs if isinstance(o, Generated) for token in o.token_ids] == expected_tokens(
            numbers(1, 40), 2
        )
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(numbers(1, 40), 10)
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"
    assert "a step failed" in caplog.text


class RefusingRunner(ArithmeticRunner):
    """Has no third token for the first sequence of a step, and prepares what it is asked to."""

    def __init__(self) -> None:
        super().__init__(64)
        self.prepared: list[SamplingParams] = []

    def prepare(self, params: SamplingParams) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the event loop goes on"
        self.prepared.append(params)
        if params.structured_outputs == StructuredOutputs(regex="refused"):
            raise InvalidRequest("of no use")

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        output = super().execute(replace(step, parts=tuple(part._replace(sampling=GREEDY) for part in step.parts)))
        is_third = step.parts[0].end == 42
        return replace(output, failures={0: "too complex from here on"}) if is_third else output


async def test_what_a_runner_cannot_go_on_with_ends_alone() -> None:
    runner = RefusingRunner()
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        other = make_spec(numbers(2, 23), 12, name="other")
        async with (
            loop.sequence(make_spec(numbers(1, 40), 10), Purpose.GENERATE) as refused,
            loop.sequence(other, Purpose.GENERATE) as handle,
        ):
            got = [output for _ in range(2) if isinstance(output := await refused.next(), Generated)]
            assert [t for output in got for t in output.token_ids] == expected_tokens(numbers(1, 40), 2)
            with pytest.raises(InvalidRequest, match="too complex from here on"):
                await refused.next()
            assert await read_all(handle) == expected_tokens(numbers(2, 23), 12)
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"


async def test_a_structured_sequence_is_prepared_before_it_waits() -> None:
    runner = RefusingRunner()
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        spec = make_spec(numbers(1, 20), 2)
        for regex in ("served", "refused"):
            params = replace(spec.sampling, structured_outputs=StructuredOutputs(regex=regex), ignore_eos=False)
            served = loop.sequence(replace(spec, sampling=params), Purpose.GENERATE)
            if regex == "served":
                async with served as handle:
                    assert await read_all(handle) == expected_tokens(numbers(1, 20), 2)
            else:
                with pytest.raises(InvalidRequest, match="of no use"):
                    await served.__aenter__()
            assert runner.prepared[-1] == params
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            await read_all(handle)
        assert len(runner.prepared) == 2, "a plain one needs nothing"
        await rest(loop)
        assert is_empty(loop.engine)


class CompilingRunner(ArithmeticRunner):
    """Compiles for as long as it is asked to, unless the structure is a quick one."""

    def __init__(self) -> None:
        super().__init__(64)
        self.is_over = threading.Event()

    def prepare(self, params: SamplingParams) -> None:
        if params.structured_outputs != StructuredOutputs(regex="quick"):
            assert self.is_over.wait(60)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        return super().execute(replace(step, parts=tuple(part._replace(sampling=GREEDY) for part in step.parts)))


async def test_structures_of_one_scope_leave_room_to_compile_those_of_another() -> None:
    runner = CompilingRunner()
    async with running(EngineLoop(engine_of(runner), 64)) as loop, contextlib.AsyncExitStack() as stack:

        def spec_of(scope: bytes, regex: str, number: int) -> SequenceSpec:
            spec = make_spec(numbers(number, 20), 2, name=f"{scope!r}-{number}")
            params = replace(spec.sampling, structured_outputs=StructuredOutputs(regex=regex), ignore_eos=False)
            return replace(spec, sampling=params, cache_seed=scope)

        stack.callback(runner.is_over.set)
        many = [loop.sequence(spec_of(b"a", "costly", i), Purpose.GENERATE) for i in range(40)]
        entering = [asyncio.create_task(stack.enter_async_context(one)) for one in many]
        await asyncio.sleep(0)
        async with loop.sequence(spec_of(b"b", "quick", 50), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(numbers(50, 20), 2)
        assert not any(task.done() for task in entering)
        runner.is_over.set()
        await asyncio.gather(*entering)


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class TimedRunner(ArithmeticRunner):
    """Its steps take 20 ms on a clock that nothing else moves."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(64)
        self._clock = clock

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self._clock.now_s += 0.02
        return super().execute(step, on_layer_done)


async def test_steps_are_timed_and_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step took is reported with the load."""
    clock = Clock()
    monkeypatch.setattr(loop_module, "time", clock)
    runner = TimedRunner(clock)
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        for number in range(3):
            spec = make_spec(numbers(number, 30 + number), 10, name=str(number))
            async with loop.sequence(spec, Purpose.GENERATE) as handle:
                await read_all(handle)
        costs = loop.engine.load().costs
        assert costs.step_s(1, 0, 1, 30) == pytest.approx(0.02, rel=0.05)
        assert costs.step_s(30, 450, 0, 0) == pytest.approx(0.02, rel=0.05)


async def test_nothing_is_learned_from_a_step_that_fails() -> None:
    async with running(EngineLoop(engine_of(FailingRunner({0})), 64)) as loop:
        before = loop.engine.load().costs
        async with loop.sequence(make_spec(numbers(1, 40)), Purpose.GENERATE) as handle:
            with pytest.raises(WorkerFailed):
                await handle.next()
        assert loop.engine.load().costs == before


async def test_who_is_due_first_is_computed_first_whenever_it_came() -> None:
    runner = GatedRunner()
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 64), 1, name="runs"), Purpose.GENERATE),
    ):
        await runner.wait_started()
        patient, urgent = (
            replace(make_spec(numbers(2 + number, 64), 1, name=str(number)), ttft_s=ttft_s)
            for number, ttft_s in enumerate((900.0, 600.0))
        )
        async with (
            loop.sequence(patient, Purpose.GENERATE) as waits,
            loop.sequence(urgent, Purpose.GENERATE) as overtakes,
        ):
            for _ in range(3):
                runner.allowed.release()
            assert isinstance(await overtakes.next(), Generated)
            assert waits.take_ready() == []
            assert isinstance(await waits.next(), Generated)


class BrokenRunner(FailingRunner):
    """Its device fails, and says the same to whoever asks it then."""

    def __init__(self, message: str, *, answers: bool) -> None:
        super().__init__({0})
        self.message = message
        self.answers = answers
        self.freed = list[int]()
        """How many tensors of failed steps are alive when they are freed."""
        self._alive = weakref.WeakSet[torch.Tensor]()

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        scratch = torch.zeros(3)
        self._alive.add(scratch)
        try:
            return super().execute(step, on_layer_done)
        except RuntimeError:
            raise torch.AcceleratorError(self.message) from None

    def recover(self) -> None:
        self.freed.append(len(self._alive))
        if not self.answers:
            raise torch.AcceleratorError("CUDA error: unknown error")


@pytest.mark.parametrize(
    ("message", "num_asked"), [("CUDA error: device-side assert triggered", 0), ("CUDA error: unknown error", 1)]
)
async def test_a_lost_device_ends_the_engine_and_what_it_was_asked_for(message: str, num_asked: int) -> None:
    runner = BrokenRunner(message, answers=False)
    loop = EngineLoop(engine_of(runner), 64)
    running = asyncio.create_task(loop.run())
    async with (
        loop.sequence(make_spec(numbers(1, 64), name="in"), Purpose.GENERATE) as runs,
        loop.sequence(make_spec(numbers(2, 20), name="out"), Purpose.GENERATE) as waits,
        loop.sequence(make_spec(numbers(3, 20), name="last"), Purpose.GENERATE) as waits_too,
    ):
        for handle, kind in ((runs, LostInStep), (waits, DeviceLost), (waits_too, DeviceLost)):
            async with asyncio.timeout(10):
                with pytest.raises(DeviceLost, match=message) as failure:
                    await read_all(handle)
            assert type(failure.value) is kind, "who was in no step is not suspected"
        with pytest.raises(DeviceLost, match=message):
            await running
        assert len(runner.freed) == num_asked
        with pytest.raises(DeviceLost):
            async with loop.sequence(make_spec(numbers(4, 20)), Purpose.GENERATE):
                pass
    assert runner.num_steps == 1


async def test_a_device_that_answers_after_a_failed_step_goes_on() -> None:
    runner = BrokenRunner("CUDA error: invalid argument", answers=True)
    async with running(EngineLoop(engine_of(runner), 64)) as loop:
        async with loop.sequence(make_spec(numbers(1, 20)), Purpose.GENERATE) as handle:
            with pytest.raises(WorkerFailed, match="invalid argument") as failure:
                await handle.next()
            assert not isinstance(failure.value, DeviceLost)
        async with loop.sequence(make_spec(numbers(1, 20)), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(numbers(1, 20), 8)
    assert runner.freed == [0], "a traceback keeps the tensors of the step"


async def test_a_failed_step_spares_who_was_not_in_it() -> None:
    runner = FailingRunner({0})
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 64), name="in"), Purpose.GENERATE) as unlucky,
        loop.sequence(make_spec(numbers(2, 20), name="out"), Purpose.GENERATE) as lucky,
    ):
        with pytest.raises(WorkerFailed):
            await unlucky.next()
        assert await read_all(lucky) == expected_tokens(numbers(2, 20), 8)


async def test_tokens_before_a_failure_are_read_before_it() -> None:
    runner = FailingRunner({3})
    async with (
        running(EngineLoop(engine_of(runner), 64)) as loop,
        loop.sequence(make_spec(numbers(1, 10)), Purpose.GENERATE) as handle,
    ):
        await rest(loop)
        ready = handle.take_ready()
        assert [token for o in ready if isinstance(o, Generated) for token in o.token_ids] == expected_tokens(
            numbers(1, 10), 3
        )
        assert handle.take_ready() == []
        with pytest.raises(WorkerFailed):
            await handle.next()


async def test_a_slow_reader_gets_what_is_ready_in_order() -> None:
    async with running(EngineLoop(make_engine(), 64)) as loop:
        prompt = numbers(3, 20)
        async with loop.sequence(make_spec(prompt, 20), Purpose.GENERATE) as handle:
            assert handle.take_ready() == []
            first = await handle.next()
            await rest(loop)
            outputs = [first, *handle.take_ready()]
            assert handle.take_ready() == []
        tokens = [token for o in outputs if isinstance(o, Generated) for token in o.token_ids]
        assert tokens == expected_tokens(prompt, 20)
        reasons = [o.finish_reason for o in outputs if isinstance(o, Generated)]
        assert reasons == [None] * 19 + [FinishReason.LENGTH]


async def test_beyond_max_waiting_it_refuses_whoever_has_no_token_yet() -> None:
    loop = EngineLoop(make_engine(), 2)  # not running: everybody waits
    async with (
        loop.sequence(make_spec([1], name="a"), Purpose.GENERATE),
        loop.sequence(make_spec([1], name="b"), Purpose.RECEIVE),
    ):
        with pytest.raises(Overloaded, match="the worker's queue is full"):
            async with loop.sequence(make_spec([1], name="c"), Purpose.GENERATE):
                pass
        assert len(loop.engine.scheduler.waiting) == 2
        # Its worker has died: a refusal would end a stream.
        async with loop.sequence(make_spec([1, 2], name="d", num_prompt_tokens=1), Purpose.GENERATE):
            assert len(loop.engine.scheduler.waiting) == 3
    async with loop.sequence(make_spec([1], name="c"), Purpose.GENERATE):
        pass
    assert is_empty(loop.engine)


async def test_idleness_is_noted_once_each_time_the_last_sequence_goes() -> None:
    told = EventLog()
    loop = EngineLoop(make_engine(), 8)
    running = asyncio.create_task(loop.run(told))
    await asyncio.sleep(0)
    assert told.num_idle == 1  # from the start
    for expected in (2, 3):
        async with loop.sequence(make_spec([1, 2, 3], max_tokens=4), Purpose.GENERATE) as handle:
            while True:
                output = await handle.next()
                if isinstance(output, Generated) and output.finish_reason is not None:
                    break
        await asyncio.sleep(0.05)
        assert told.num_idle == expected
    await cancel_and_wait((running,))


async def test_a_refused_sequence_leaves_nothing() -> None:
    loop = EngineLoop(make_engine(4), 8)
    async with loop.sequence(make_spec([1]), Purpose.GENERATE):
        with pytest.raises(InvalidRequest, match="do not fit"):
            async with loop.sequence(make_spec([1] * 64, name="x"), Purpose.GENERATE):
                pass
        assert len(loop._outputs) == 1
    assert is_empty(loop.engine)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("engine")]


async def test_no_thread_outlives_the_loop() -> None:
    runner = GatedRunner()
    loop = EngineLoop(engine_of(runner), 8)
    task = asyncio.create_task(loop.run())
    async with loop.sequence(make_spec(numbers(1, 20)), Purpose.GENERATE):
        await runner.wait_started()
        assert len(engine_threads()) == 1
        task.cancel()
        runner.allowed.release()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert engine_threads() == []


async def test_block_events_and_idleness_are_told() -> None:
    told = EventLog()
    async with running(EngineLoop(make_engine(4), 8), told) as loop:
        for index in range(3):
            async with loop.sequence(make_spec(numbers(index, 40), 2, name=f"r{index}"), Purpose.GENERATE) as handle:
                await read_all(handle)
        await rest(loop)
        assert told.num_idle >= 1
        known = set[bytes]()
        for event in told.changes:
            (known.add if isinstance(event, Stored) else known.remove)(event.key)
        assert known == set(loop.engine.pool.keys())
        assert any(isinstance(event, Removed) for event in told.changes)


async def test_what_a_step_evicts_is_told_before_the_step_overwrites_it() -> None:
    runner = GatedRunner(num_blocks=4)
    told = EventLog()
    async with running(EngineLoop(engine_of(runner), 8), told) as loop:
        prompts = [numbers(1, 40), numbers(2, 40)]
        for prompt in prompts:
            async with loop.sequence(make_spec(prompt, 1), Purpose.GENERATE) as handle:
                await runner.wait_started()
                before_step = list(told.changes)
                runner.allowed.release()
                await read_all(handle)
        kept, evicted = block_keys(b"tenant", prompts[0])
        assert before_step == [Stored(kept), Stored(evicted), Removed(evicted)]  # the tail first


async def test_a_leak_shows_in_the_self_check() -> None:
    async with running(EngineLoop(make_engine(), 8)) as loop:
        assert loop.engine.pool.allocate((2,)) is not None
        async with loop.sequence(make_spec([1, 2], 2), Purpose.GENERATE) as handle:
            await read_all(handle)
        await rest(loop)
        assert loop.self_check == "2 blocks in use, 0 held"


@pytest.mark.parametrize(
    ("failure", "expected", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Overloaded, "too little free memory to encode an image"),
        (
            RuntimeError("shapes\n  differ"),
            InvalidRequest,
            "the model's encoder cannot encode an image of this request: RuntimeError: shapes differ$",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost, "device of the engine"),
        (InvalidRequest("another number of embeddings"), InvalidRequest, "^another number"),
    ],
)
async def test_an_encoders_failure_is_the_requests_own(
    failure: Exception, expected: type[BatonError], sentence: str
) -> None:
    def encode(image: PlacedImage) -> None:
        raise failure

    runner = ArithmeticRunner(64)
    runner.images = ImageStore(ArithmeticReader(7), encode, 2**20)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=8)
    async with running(EngineLoop(Engine(runner, limits), 10)) as loop:
        (seen,) = await loop.look([picture("cat", 8)], b"seed")
        spec = sequence_spec([1, 2, *seen.token_ids, 3], max_tokens=3, images=(seen.placed(2),))
        with pytest.raises(expected, match=sentence):
            async with loop.sequence(spec, Purpose.GENERATE):
                pass
        async with loop.sequence(sequence_spec([1, 2, 3], max_tokens=3), Purpose.GENERATE) as handle:
            assert len(await read_all(handle)) == 3


async def test_one_cache_scope_cannot_keep_the_images_of_others_waiting() -> None:
    """The images of a scope that comes later are decoded in turn with those that wait already."""
    runner, names = ArithmeticRunner(64, image_placeholder=7), dict[bytes, str]()
    loop = EngineLoop(
        Engine(runner, SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=8)), 10
    )
    decoded, look = list[str](), runner.images.look  # type: ignore[union-attr]

    def looked(encoded: bytes, cache_seed: bytes) -> SeenImage:
        decoded.append(names[encoded])
        return look(encoded, cache_seed)

    runner.images.look = looked  # type: ignore[union-attr, method-assign]
    async with asyncio.TaskGroup() as group:
        for name, number in [("a", number) for number in range(8)] + [("b", 0)]:
            image = picture(f"{name}{number}", 8)
            names[image] = name
            group.create_task(loop.look([image], name.encode()))
    assert len(decoded) == 9
    assert decoded.index("b") <= 2
