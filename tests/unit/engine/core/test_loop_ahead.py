"""The engine's loop with steps that are planned while the one before runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from baton.costs import StepCosts
from baton.errors import TooLarge, WorkerFailed
from baton.messages import SequenceSpec
from engine.core.engine import Engine
from engine.core.loop import EngineLoop, SequenceHandle
from engine.core.outputs import Generated, KvProgress, Output, Preempted, Reserved
from engine.core.runner import UNKNOWN_TOKEN, ComputedStep, OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.scheduler import Schedule, SchedulerLimits
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner, expected_tokens
from tests.support.builders import step_costs
from tests.unit.engine.core.test_engine import is_empty, make_spec, numbers, write_prompt_kv
from tests.unit.engine.core.test_loop import GatedRunner, read_all, rest, running, sequence_of

pytestmark = pytest.mark.timeout(60)
VOCAB_SIZE = 1009
BEAMS = {"use_beam_search": True, "beam_width": 2, "temperature": 0.0}


class CountingRunner(ArithmeticRunner):
    """Keeps the steps that it was given."""

    def __init__(self, num_blocks: int = 64, layer_s: float = 0.001, **values: Any) -> None:
        super().__init__(num_blocks, layer_s=layer_s, **values)
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.steps.append(step)
        return super().execute(step, on_layer_done)

    @property
    def num_ahead(self) -> int:
        """Steps with tokens that were not known when they were planned."""
        return sum(any(UNKNOWN_TOKEN in part.token_ids for part in step.parts) for step in self.steps)


class Launched:
    def __init__(self, output: Future[StepOutput]) -> None:
        self._output = output

    def collect(self) -> StepOutput:
        return self._output.result(timeout=30)


class DeviceRunner(CountingRunner):
    """Has a device that computes by itself what is launched."""

    runs_ahead = True

    def __init__(self, num_blocks: int = 64, layer_s: float = 0.001, **values: Any) -> None:
        super().__init__(num_blocks, layer_s, **values)
        self._device = ThreadPoolExecutor(1)
        self.num_launched = 0

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> Any:
        self.num_launched += 1
        return Launched(self._device.submit(self.execute, step, on_layer_done))


def loop_of(runner: ArithmeticRunner, *, plans_ahead: bool = True, max_draft_tokens: int = 0) -> EngineLoop:
    limits = SchedulerLimits(
        max_num_seqs=6, max_num_batched_tokens=48, output_reservation=4, max_draft_tokens=max_draft_tokens
    )
    return EngineLoop(Engine(runner, limits), 64, plans_ahead=plans_ahead)


@contextlib.asynccontextmanager
async def taking(loop: EngineLoop, costs: StepCosts) -> AsyncIterator[None]:
    """The loop expects its steps to take so long, and learns nothing else."""
    loop.engine._fit.costs = loop.engine.scheduler.costs = costs
    loop.engine.learn = lambda size, took_s, proposing_s=0.0: None  # type: ignore[method-assign]
    async with running(loop):
        yield


def questions(seed: int) -> list[SequenceSpec]:
    """Greedy and drawn answers, of which some stop early, and some need to see their tokens."""
    draw = random.Random(seed)
    asked = []
    for index in range(16):
        prompt = [token % VOCAB_SIZE for token in numbers(index % 4, draw.randrange(1, 60))]
        values: dict[str, Any] = {"temperature": draw.choice([0.0, 0.0, 1.0]), "seed": index}
        if draw.random() < 0.3:
            values["stop_token_ids"] = tuple(expected_tokens(prompt, draw.randrange(1, 9), VOCAB_SIZE)[-1:])
        if draw.random() < 0.2:
            values |= draw.choice([{"repetition_penalty": 2.0}, {"min_tokens": 3}, {"logprobs": 2}, BEAMS])
        elif seed % 2:
            values["allowed_token_ids"] = (5, 6)  # what is guessed proves right
        asked.append(make_spec(prompt, draw.randrange(1, 25), name=f"r{index}", **values))
    return asked


async def answers(loop: EngineLoop, asked: list[SequenceSpec], costs: StepCosts | None = None) -> list[tuple[Any, ...]]:
    """What each gets when they come one shortly after the other. With `costs` steps are expected to take so long."""

    async def ask(spec: SequenceSpec) -> tuple[Any, ...]:
        tokens, scores = list[int](), list[Any]()
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            while True:
                output = await handle.next()
                if isinstance(output, Preempted):
                    continue
                assert isinstance(output, Generated)
                tokens += output.token_ids
                scores += output.scores.logprobs
                if output.finish_reason is not None:
                    return tokens, scores, output.finish_reason, output.beams

    tasks = []
    serving = taking(loop, costs) if costs else running(loop)
    async with serving, asyncio.timeout(50), asyncio.TaskGroup() as group:
        for spec in asked:
            tasks.append(group.create_task(ask(spec)))
            await asyncio.sleep(0.002)
    return [task.result() for task in tasks]


@pytest.mark.parametrize("seed", range(4))
async def test_answers_are_the_same(seed: int) -> None:
    """Few blocks: sequences wait, and are preempted. Without drafts each step that can be is planned ahead; with them
    the loop plans by what it learns, and guesses worth drafts may keep every step from it.
    """
    asked = questions(seed)
    costs = None if seed % 2 else step_costs(s_overhead=0.0)
    expected = await answers(loop_of(ArithmeticRunner(12, vocab_size=VOCAB_SIZE), plans_ahead=False), asked)
    for runner_type in (CountingRunner, DeviceRunner):
        runner = runner_type(12, vocab_size=VOCAB_SIZE)
        loop = loop_of(runner, max_draft_tokens=4 * (seed % 2))
        assert await answers(loop, asked, costs) == expected
        if costs is not None:
            assert runner.num_ahead > 0
        if isinstance(runner, DeviceRunner):
            assert runner.num_launched == len(runner.steps)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"


@pytest.mark.parametrize("runner_type", [CountingRunner, DeviceRunner])
@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_and_transferred_at_any_moment(runner_type: type[CountingRunner], seed: int) -> None:
    draw = random.Random(seed)
    runner = runner_type(14)
    loop = loop_of(runner)
    async with taking(loop, step_costs(s_overhead=0.0)):

        async def ask(index: int) -> None:
            purpose = draw.choice(list(Purpose))
            prompt = numbers(index % 3, draw.randrange(1, 100))
            async with loop.sequence(make_spec(prompt, 30, name=f"r{index}"), purpose) as handle:
                tokens = list[int]()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(0, 0.2)):
                        while len(tokens) < 30:
                            output = await handle.next()
                            if isinstance(output, Generated):
                                tokens += output.token_ids
                            if isinstance(output, Reserved):
                                sequence = sequence_of(handle)
                                write_prompt_kv(runner.caches[0], sequence, (output.num_cached_tokens,))
                                tokens += expected_tokens(prompt, 1)
                                handle.insert(tokens[0])
                            if isinstance(output, Generated) and purpose is Purpose.PREFILL:
                                break
                assert tokens == expected_tokens(prompt, len(tokens))

        async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
            asked = []
            for index in range(40):
                asked.append(tasks.create_task(ask(index)))
                await asyncio.sleep(draw.uniform(0, 0.01))
                if draw.random() < 0.3:
                    draw.choice(asked).cancel()
        await rest(loop)
        assert runner.num_ahead > 0
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"
        assert loop._outputs == {}


async def begun(handle: SequenceHandle) -> list[int]:
    output = await handle.next()
    assert isinstance(output, Generated)
    return list(output.token_ids)


async def until_unknown(loop: EngineLoop) -> None:
    """Waits until a step is planned behind the one that runs."""
    async with asyncio.timeout(10):
        while not any(sequence.has_unknown for sequence in loop.engine.scheduler.running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_the_next_step_begins_without_the_event_loop() -> None:
    runner = GatedRunner()
    loop = loop_of(runner)
    async with (
        taking(loop, step_costs(s_overhead=0.0)),
        loop.sequence(make_spec(numbers(1, 20), 8), Purpose.GENERATE) as handle,
    ):
        await runner.wait_started()
        await until_unknown(loop)
        runner.allowed.release()
        assert runner.started.acquire(timeout=10), "the second step waits for the books of the first"
        runner.allowed.release(20)
        assert await read_all(handle) == expected_tokens(numbers(1, 20), 8)


@pytest.mark.parametrize(("expected_s", "num_parts"), [(60.0, [1, 2, 2]), (0.0, [1, 1, 2])])
async def test_who_comes_before_a_step_is_planned_is_in_it(expected_s: float, num_parts: list[int]) -> None:
    """A step is planned shortly before the one that runs should end, and not when it begins."""
    runner = GatedRunner()
    loop = loop_of(runner)
    steps = list[StepInput]()
    planned = loop.engine._scheduled

    def noted(schedule: Schedule) -> tuple[StepInput, list[Output]]:
        steps.append(schedule.step)
        return planned(schedule)

    loop.engine._scheduled = noted  # type: ignore[method-assign]
    async with (
        taking(loop, step_costs(s_overhead=expected_s)),
        loop.sequence(make_spec(numbers(1, 20), 8), Purpose.GENERATE) as first,
    ):
        await runner.wait_started()
        if not expected_s:
            await until_unknown(loop)
        async with loop.sequence(make_spec(numbers(2, 20), 3, name="second"), Purpose.GENERATE) as second:
            await asyncio.sleep(0.05)
            runner.allowed.release(20)
            assert await read_all(second) == expected_tokens(numbers(2, 20), 3)
        assert await read_all(first) == expected_tokens(numbers(1, 20), 8)
    assert [len(step.parts) for step in steps if step][:3] == num_parts


async def test_a_stop_is_noticed_one_step_late_and_its_extra_token_dropped() -> None:
    expected = expected_tokens(numbers(1, 20), 3)
    runner = GatedRunner()
    loop = loop_of(runner)
    async with taking(loop, step_costs(s_overhead=0.0)):
        spec = make_spec(numbers(1, 20), 50, stop_token_ids=(expected[-1],))
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            for _ in range(3):
                await runner.wait_started()
                await until_unknown(loop)
                runner.allowed.release()
            assert await read_all(handle) == expected
        assert loop.engine.pool.counts().in_use > 0, "the step that was planned ahead still writes to its blocks"
        await runner.wait_started()
        runner.allowed.release()
        await rest(loop)
        assert is_empty(loop.engine)
        assert not runner.started.acquire(blocking=False), "it takes part in no further step"


async def test_an_answer_that_ends_by_its_length_has_no_extra_step() -> None:
    runner = CountingRunner(layer_s=0.005)
    loop = loop_of(runner)
    async with taking(loop, step_costs(s_overhead=0.0)):
        async with loop.sequence(make_spec(numbers(1, 20), 6), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(numbers(1, 20), 6)
        await rest(loop)
        assert (len(runner.steps), runner.num_ahead) == (6, 5)


class BreakingRunner(CountingRunner):
    """One of its steps fails once it is allowed to."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.allowed = threading.Event()
        self._fail_at = fail_at

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        if len(self.steps) == self._fail_at:
            self.steps.append(step)
            assert self.allowed.wait(10)
            raise RuntimeError("out of memory")
        return super().execute(step, on_layer_done)


async def test_with_a_step_that_fails_the_one_behind_it_does(caplog: pytest.LogCaptureFixture) -> None:
    runner = BreakingRunner(2)
    loop = loop_of(runner)
    async with taking(loop, step_costs(s_overhead=0.5)):
        async with loop.sequence(make_spec(numbers(1, 40), 10), Purpose.GENERATE) as unlucky:
            assert await begun(unlucky) + await begun(unlucky) == expected_tokens(numbers(1, 40), 2)
            async with asyncio.timeout(10):
                while len(runner.steps) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                async with loop.sequence(make_spec(numbers(2, 20), name="behind"), Purpose.GENERATE) as behind:
                    while sequence_of(unlucky).in_flight != 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    assert sequence_of(behind).in_flight == 1
                    runner.allowed.set()
                    for handle in (unlucky, behind):
                        with pytest.raises(WorkerFailed, match="out of memory"):
                            await handle.next()
        assert len(runner.steps) == 3, "the step behind it is not computed"
        async with loop.sequence(make_spec(numbers(1, 40), 10), Purpose.GENERATE) as handle:
            assert await read_all(handle) == expected_tokens(numbers(1, 40), 10)
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"
    assert "a step failed" in caplog.text


class FullRunner(GatedRunner):
    """Its device has no room for the prompt that begins with `too_large`."""

    too_large: tuple[int, ...] = ()

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        output = super().execute(step, on_layer_done)
        found = frozenset(
            index for index, part in enumerate(step.parts) if self.too_large and part.token_ids == self.too_large
        )
        sampled = tuple(() if index in found else ids for index, ids in enumerate(output.sampled_token_ids))
        output = replace(output, sampled_token_ids=sampled, too_large=found)
        self._last_tokens.keep(step, ComputedStep(output))
        return output


async def test_the_step_behind_one_that_ended_a_too_large_part_goes_on_without_it() -> None:
    """It is computed in that step all the same, in its own blocks, which are free only then."""
    runner = FullRunner()
    runner.too_large = tuple(numbers(2, 20))
    loop = loop_of(runner)
    async with (
        taking(loop, step_costs(s_overhead=0.0)),
        loop.sequence(make_spec(numbers(1, 20), 8), Purpose.GENERATE) as other,
        loop.sequence(make_spec(numbers(2, 20), 8, name="large"), Purpose.GENERATE) as large,
    ):
        await runner.wait_started()
        await until_unknown(loop)
        if not sequence_of(large).has_unknown:  # it came a step later
            runner.allowed.release()
            await runner.wait_started()
            await until_unknown(loop)
        blocks = sequence_of(large).block_ids
        runner.allowed.release()
        with pytest.raises(TooLarge):
            await large.next()
        assert sequence_of(large).in_flight == 1
        assert sequence_of(large).block_ids == blocks != ((),), "the step that was planned ahead writes to them"
        runner.allowed.release(20)
        assert await read_all(other) == expected_tokens(numbers(1, 20), 8)
        await rest(loop)
        assert is_empty(loop.engine)
        assert loop.self_check == "ok"


async def test_what_is_only_being_computed_is_not_reported() -> None:
    runner = GatedRunner()
    loop = loop_of(runner)
    prompt = numbers(1, 140)
    async with (
        taking(loop, step_costs(s_overhead=0.0)),
        loop.sequence(make_spec(prompt), Purpose.PREFILL) as handle,
    ):
        for num_computed in (0, 48):
            await runner.wait_started()
            async with asyncio.timeout(10):
                while sequence_of(handle).num_computed_tokens != num_computed + 48:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            told = list[KvProgress]()
            handle.watch(told.append)
            assert told == [KvProgress(num_computed, 2)]
            runner.allowed.release()
        runner.allowed.release(4)
        await handle.next()
        assert await begun(handle) == expected_tokens(prompt, 1)


async def test_who_needs_its_last_tokens_is_planned_when_they_are_there() -> None:
    runner = CountingRunner(layer_s=0.002)
    loop = loop_of(runner)
    spec = make_spec(numbers(1, 20), 6)
    async with taking(loop, step_costs(s_overhead=0.0)):
        for values in ({"repetition_penalty": 2.0}, {"dry_multiplier": 1.0}, {"bad_word_ids": ((1, 2),)}):
            asked = replace(spec, sampling=replace(spec.sampling, **values))
            async with loop.sequence(asked, Purpose.GENERATE) as handle:
                assert len(await read_all(handle)) == 6
            await rest(loop)
    assert runner.num_ahead == 0
