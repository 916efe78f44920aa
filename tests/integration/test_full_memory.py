"""A device whose memory is full: steps become smaller, tokens stay the same, and what is alone too large ends."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.errors import BatonError, InvalidRequest, TooLarge
from baton.messages import SequenceSpec
from baton.tasks import cancel_and_wait
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.outputs import Admitted, Generated, KvProgress, Refused
from engine.core.runner import OnLayerDone, StepInput
from engine.core.sequence import Purpose
from engine.model.rank_step import RankStep
from engine.model.transformers_runner import TransformersRunner
from tests.integration.test_engine_models import VOCAB_SIZE, engine_of, make_spec, save_tiny

ENGINE = EngineConfig(runner="transformers", num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
NUM_TOKENS = 12


class Memory:
    """The memory of a device that is full beyond so many sequences, or beyond so many tokens of one.

    Attributes:
        num_sequences: in each step that was computed.
        num_failures: of steps.
        num_recoveries: of the device.
    """

    def __init__(self, runner: TransformersRunner, most: int, *, most_tokens: int = 1000, layers: int = 0) -> None:
        """Args:
        layers: reported before a step fails.
        """
        self.num_sequences: list[int] = []
        self.num_failures = self.num_recoveries = 0
        compute, recover = runner.rank.compute, runner.recover

        def limited(step: RankStep, on_layer_done: OnLayerDone, filling: Any = None) -> torch.Tensor:
            is_too_large = len(step.parts) > most or any(len(part.token_ids) > most_tokens for part in step.parts)

            def report(layer: int, fence: Any) -> None:
                on_layer_done(layer, fence)
                if is_too_large and layer + 1 == layers:
                    self._fail()

            if is_too_large and not layers:
                self._fail()
            self.num_sequences.append(len(step.parts))
            return compute(step, report, filling)

        def recovered() -> None:
            self.num_recoveries += 1
            recover()

        runner.rank.compute = limited  # type: ignore[method-assign]
        runner._steps._recover = recovered

    def _fail(self) -> None:
        self.num_failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.60 GiB.")


def runner_of(folder: Path, **engine: Any) -> TransformersRunner:
    return TransformersRunner(ModelConfig(path=str(folder)), replace(ENGINE, **engine))


def specs() -> list[SequenceSpec]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_logprobs": 1},
    ]
    found = []
    for index, values in zip(range(7), itertools.cycle(kinds)):
        prompt = [(7 * index + 3 * place) % VOCAB_SIZE for place in range(9 + 11 * index)]
        spec = make_spec(f"s{index}", prompt, NUM_TOKENS, ignore_eos=True)
        values = {"seed": 0} | values
        found.append(replace(spec, sampling=replace(spec.sampling, **values)))
    return found


async def answers(engine: Engine, asked: list[SequenceSpec], *, ahead: bool = False) -> list[Any]:
    """Returns the outputs of each, or its error."""
    loop = EngineLoop(engine, 64, plans_ahead=ahead)
    running = asyncio.create_task(loop.run())

    async def read(spec: SequenceSpec) -> Any:
        found: list[Generated] = []
        async with loop.sequence(spec, Purpose.GENERATE) as handle:
            try:
                while not found or found[-1].finish_reason is None:
                    output = await handle.next()
                    assert isinstance(output, Generated)
                    found.append(output)
            except InvalidRequest as error:
                return error
        tokens = [token for output in found for token in output.token_ids]
        ids = [top for output in found for top in output.scores.top_ids]
        report = found[0].report
        return tokens, ids, report and report.prompt_scores.top_ids

    async with asyncio.timeout(120):
        heard = await asyncio.gather(*[read(spec) for spec in asked])
    await cancel_and_wait((running,))
    assert engine.is_idle
    engine.check()
    return heard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", {}, folder)
    return folder


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.chaos
async def test_a_smaller_step_gives_the_same_tokens(model: Path, most: int, layers: int, ahead: bool) -> None:
    alone = await answers(engine_of(runner_of(model), ENGINE), specs())
    assert not any(isinstance(each, Exception) for each in alone)
    runner = runner_of(model)
    memory = Memory(runner, most, layers=layers)
    assert await answers(engine_of(runner, ENGINE), specs(), ahead=ahead) == alone
    assert memory.num_failures == memory.num_recoveries > 0


async def test_what_is_alone_too_large_ends_and_is_tried_nowhere_else(model: Path) -> None:
    asked = specs()
    alone = await answers(engine_of(runner_of(model), ENGINE), asked)
    runner = runner_of(model)
    Memory(runner, 100, most_tokens=40)
    heard = await answers(engine_of(runner, ENGINE), asked)
    for spec, each, wanted in zip(asked, heard, alone, strict=True):
        if spec.num_prompt_tokens <= 32:
            assert each == wanted
    errors = [each for each in heard if isinstance(each, InvalidRequest)]
    assert errors
    assert {type(error) for error in errors} == {TooLarge}
    assert errors[0].http == 413
    again = await answers(engine_of(runner, ENGINE), asked[:2])
    assert again == alone[:2], "the worker goes on"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_step_that_was_planned_behind_one_with_a_too_large_part_gives_the_others_their_tokens(
    model: Path, runs_ahead: bool
) -> None:
    def tokens(asked: list[SequenceSpec], most_tokens: int) -> tuple[list[int], list[type[BatonError]]]:
        """Returns the tokens of the first sequence, of two steps, and the errors of all."""
        runner = runner_of(model)
        runner.runs_ahead = runs_ahead
        Memory(runner, 100, most_tokens=most_tokens)
        engine = engine_of(runner, ENGINE)
        first, *_ = [engine.add(spec, Purpose.GENERATE, 0.0) for spec in asked]
        step, _ = engine.schedule(0.0)
        following, _ = engine.schedule_ahead(step, 0.0) or (StepInput(()), [])
        assert [part.sequence_key for part in following.parts] == [part.sequence_key for part in step.parts]
        launched = runner.launch(step), runner.launch(following)
        found = engine.commit(step, launched[0].collect(), 0.0)
        assert engine.schedule_ahead(following, 0.0) is not None
        found += engine.commit(following, launched[1].collect(), 0.0)
        given = [each.token_ids for each in found if isinstance(each, Generated) and each.sequence_key == first.key]
        errors = [type(each.error) for each in found if isinstance(each, Refused)]
        return [token for token_ids in given for token in token_ids], errors

    asked = [replace(each, sampling=replace(specs()[0].sampling, temperature=0.0)) for each in (specs()[1], specs()[3])]
    alone, none = tokens(asked[:1], 100)
    assert (len(alone), none) == (2, [])
    assert tokens(asked, 40) == (alone, [TooLarge])


async def test_blocks_of_which_a_layer_was_reported_are_never_zeroed_again(model: Path) -> None:
    runner = runner_of(model)
    memory = Memory(runner, 1, layers=1)
    engine = engine_of(runner, ENGINE)
    loop = EngineLoop(engine, 64)
    running = asyncio.create_task(loop.run())
    seen: list[bool] = []
    told: list[KvProgress] = []
    clear = runner.cache.clear_blocks

    def cleared(tables: Any) -> None:
        seen.append(any(len(blocks) for blocks in tables))
        clear(tables)

    runner.cache.clear_blocks = cleared  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        one, other = (make_spec(name, list(range(20)), 1, ignore_eos=True) for name in "ab")
        async with loop.sequence(one, Purpose.PREFILL) as first, loop.sequence(other, Purpose.PREFILL) as second:
            first.watch(told.append)
            for handle in (first, second):
                assert isinstance(await handle.next(), Admitted)
                assert isinstance(await handle.next(), Generated)
    await cancel_and_wait((running,))
    assert memory.num_failures == 1
    assert seen == [True, False, False], "the whole step zeroes, and its halves do not"
    assert told[-1] == KvProgress(20, runner.spec.num_layers)


async def test_other_failures_are_not_tried_again(model: Path) -> None:
    runner = runner_of(model)
    steps = 0

    def failing(*_: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        raise ValueError("a defect")

    runner.rank.compute = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="a defect"):
        runner.execute(engine_step(runner))
    assert steps == 1


def engine_step(runner: TransformersRunner) -> Any:
    engine = engine_of(runner, ENGINE)
    engine.add(make_spec("one", [1, 2, 3], 4, ignore_eos=True), Purpose.GENERATE, 0.0)
    return engine.schedule(0.0)[0]
