"""Steps that do not end: who waits for them, for how long, and what becomes of those who were in them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import pytest

from baton.errors import DeviceLost, LostInStep
from baton.tasks import cancel_and_wait
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.core.step_threads import HUNG, LIMIT_PARTS, StepThreads, ends_within
from engine.testing import ArithmeticRunner, expected_tokens
from tests.support.builders import step_costs
from tests.unit.engine.core.test_engine import make_spec, numbers
from tests.unit.engine.core.test_loop import GatedRunner, read_all, running

pytestmark = pytest.mark.timeout(60)
LIMIT_S = 1.0


class Hang(StrEnum):
    """Where a device does not answer any more."""

    EXECUTE = "execute"
    LAUNCH = "launch"
    COLLECT = "collect"
    RECOVER = "recover"
    BEHIND = "behind one that fails"


class HungRunner(ArithmeticRunner):
    """Hangs in its second step, until the test is over."""

    def __init__(self, hang: Hang) -> None:
        super().__init__(64, layer_s=0.001)
        self.runs_ahead = hang is not Hang.EXECUTE and hang is not Hang.RECOVER
        self.hang = hang
        self.num_steps = 0
        self.hangs = threading.Event()
        self.is_over = threading.Event()
        self._device = ThreadPoolExecutor(1)

    def stand(self) -> None:
        self.hangs.set()
        self.is_over.wait()

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.num_steps += 1
        if self.num_steps >= 2 and self.hang is Hang.EXECUTE:
            self.stand()
        if self.num_steps == 2 and self.hang is Hang.RECOVER:
            raise RuntimeError("CUDA error: unknown error")
        return super().execute(step, on_layer_done)

    def recover(self) -> None:
        if self.hang is Hang.RECOVER:
            self.stand()

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> Any:
        self.num_steps += 1
        if self.num_steps >= 2 and self.hang is Hang.LAUNCH:
            self.stand()
        return Launched(self, self.num_steps, self._device.submit(super().execute, step, on_layer_done))


class Launched:
    def __init__(self, runner: HungRunner, number: int, output: Any) -> None:
        self.runner, self.number, self.output = runner, number, output

    def collect(self) -> StepOutput:
        hang = self.runner.hang
        if self.number >= 2 and hang is Hang.COLLECT:
            self.runner.stand()
        if hang is Hang.BEHIND and self.number >= 2:
            time.sleep(0.05)  # so that the next one is begun
            if self.number == 2:
                raise RuntimeError("this step alone")
            self.runner.stand()
        output: StepOutput = self.output.result(timeout=30)
        return output


@pytest.fixture(params=Hang)
def runner(request: pytest.FixtureRequest) -> Iterator[HungRunner]:
    made = HungRunner(request.param)
    yield made
    made.is_over.set()


def loop_of(runner: ArithmeticRunner, *, plans_ahead: bool = False, limit_s: float = LIMIT_S) -> EngineLoop:
    """One sequence runs at a time, and nothing is learned from steps."""
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=48, output_reservation=4)
    loop = EngineLoop(Engine(runner, limits), 64, plans_ahead=plans_ahead, step_timeout_s=limit_s)
    loop.engine._fit.costs = loop.engine.scheduler.costs = step_costs(s_overhead=0.0)
    loop.engine.learn = lambda size, took_s, proposing_s=0.0: None  # type: ignore[method-assign]
    return loop


def contexts_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those while which it was raised."""
    while error is not None:
        yield error
        error = error.__context__


async def test_a_step_that_hangs_is_noticed_and_all_go_on_elsewhere(runner: HungRunner) -> None:
    """Those who were in it are under suspicion, those who waited are not, and nobody else comes."""
    loop = loop_of(runner, plans_ahead=runner.runs_ahead)
    engine = asyncio.create_task(loop.run())
    async with (
        asyncio.timeout(30),
        loop.sequence(make_spec(numbers(1, 20), 200, name="in"), Purpose.GENERATE) as runs,
        loop.sequence(make_spec(numbers(2, 20), name="out"), Purpose.GENERATE) as waits,
    ):
        with pytest.raises(LostInStep, match=r"has not ended within 1 s \(engine.step_timeout_s\)|unknown error"):
            await read_all(runs)
        with pytest.raises(DeviceLost) as failure:
            await waits.next()
        assert type(failure.value) is DeviceLost
        with pytest.raises(DeviceLost) as lost:
            await engine
        assert not any(isinstance(each, asyncio.InvalidStateError) for each in contexts_of(lost.value))
        with pytest.raises(DeviceLost):
            async with loop.sequence(make_spec(numbers(3, 20)), Purpose.GENERATE):
                pass
    assert runner.hangs.is_set()
    assert not runner.is_over.is_set(), "nobody has waited for the device"


@pytest.mark.parametrize("hang", [Hang.EXECUTE, Hang.COLLECT])
async def test_an_engine_that_is_to_end_waits_for_no_step_that_hangs(hang: Hang) -> None:
    """The event loop goes on meanwhile: others' calls are answered."""
    runner = HungRunner(hang)
    loop = loop_of(runner, plans_ahead=runner.runs_ahead)
    engine = asyncio.create_task(loop.run())
    try:
        async with loop.sequence(make_spec(numbers(1, 20), 200), Purpose.GENERATE):
            assert await asyncio.to_thread(runner.hangs.wait, 10)
            ending = asyncio.create_task(cancel_and_wait([engine]))
            beats = 0
            while not ending.done():
                await asyncio.sleep(0.01)
                beats += 1
        assert beats > 3
        with pytest.raises(DeviceLost):
            engine.result()
    finally:
        runner.is_over.set()


async def test_what_finds_the_device_lost_elsewhere_waits_for_no_step() -> None:
    runner = HungRunner(Hang.EXECUTE)
    loop = loop_of(runner, limit_s=60.0)
    engine = asyncio.create_task(loop.run())
    try:
        async with loop.sequence(make_spec(numbers(1, 20), 200), Purpose.GENERATE):
            assert await asyncio.to_thread(runner.hangs.wait, 10)
            with pytest.raises(DeviceLost, match="an illegal memory access"):
                loop.lose("an illegal memory access")
            async with asyncio.timeout(10):  # the step may take a minute
                await cancel_and_wait([engine])
    finally:
        runner.is_over.set()


async def test_an_engine_that_is_to_end_sees_its_step_through() -> None:
    runner = GatedRunner()
    loop = loop_of(runner)
    engine = asyncio.create_task(loop.run())
    async with loop.sequence(make_spec(numbers(1, 20)), Purpose.GENERATE):
        await runner.wait_started()
        ending = asyncio.create_task(cancel_and_wait([engine]))
        await asyncio.sleep(0.05)
        assert not ending.done(), "a thread would outlive it"
        runner.allowed.release()
        await ending
    assert engine.cancelled()


@pytest.mark.parametrize("knows_by", ["its first step", "steps so far", "its canvas"])
async def test_a_slow_step_of_a_healthy_device_is_waited_for(knows_by: str) -> None:
    """Of a model that takes seconds for a prompt, before and after it has computed one."""
    prompt, limit_s, token_s = numbers(1, 40), 0.1, 1.0
    runner = GatedRunner()
    loop = loop_of(runner, limit_s=limit_s)
    if knows_by == "its first step":
        runner.token_s = token_s
    elif knows_by == "its canvas":  # which has more tokens than the prompt
        runner.token_s, runner.canvas_length = limit_s / HUNG / len(prompt), 1000
    else:
        loop.engine._fit.costs = step_costs(s_per_token=token_s)

    async def answer() -> list[int]:
        async with loop.sequence(make_spec(prompt, 1), Purpose.GENERATE) as handle:
            return await read_all(handle)

    async with running(loop):
        answering = asyncio.create_task(answer())
        await runner.wait_started()
        await asyncio.sleep(5 * limit_s)
        runner.token_s = 0.0
        runner.allowed.release()
        assert await asyncio.wait_for(answering, 10) == expected_tokens(prompt, 1)


@pytest.mark.parametrize("canvas_length", [0, 16])
async def test_a_step_of_a_first_canvas_counts_as_decoding(canvas_length: int) -> None:
    runner = ArithmeticRunner(64)
    runner.canvas_length = canvas_length
    engine = loop_of(runner).engine
    engine.add(make_spec([5], 4), Purpose.GENERATE, 0.0)
    threads = StepThreads(runner, LIMIT_S, plans_ahead=False)
    step = threads.execute(engine.schedule(0.0)[0], ignore_layer, 0.0, engine.costs, None)
    assert await step.has_ended()
    threads.close(waits=True)
    assert (step.size.num_new, step.size.num_decoding) == (1, int(canvas_length > 0))


async def test_a_process_that_was_stopped_has_not_waited() -> None:
    """Its steps stood still as well."""
    loop = asyncio.get_running_loop()
    step = loop.create_future()

    def stand_still() -> None:
        time.sleep(2 * LIMIT_S)
        loop.call_later(LIMIT_S / LIMIT_PARTS, step.set_result, None)

    loop.call_soon(stand_still)
    assert await ends_within(LIMIT_S, step)


async def test_a_limit_passes_in_the_end() -> None:
    assert not await ends_within(0.05, asyncio.get_running_loop().create_future())
