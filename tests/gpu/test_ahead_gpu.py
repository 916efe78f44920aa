"""Steps that are launched on a GPU behind those that it computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.messages import SequenceSpec
from baton.structure import StructuredOutputs
from engine.core.engine import Engine
from engine.core.runner import LaunchedStep, OnLayerDone, StepInput, ignore_layer
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model.rank_step import DeviceStep
from engine.model.transformers_runner import TransformersRunner
from engine.uploads import StepNumbers, uploaded
from tests.integration.test_engine_models import tokens_of
from tests.integration.test_launches import SAMPLINGS
from tests.support.builders import sequence_spec
from tests.support.guessing import FREE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
CUDA = torch.device("cuda")


class Strict(TransformersRunner):
    """Fails where a launch would wait for the GPU."""

    num_launched = 0

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> LaunchedStep:
        with no_waiting():
            launched = super().launch(step, on_layer_done)
        self.num_launched += isinstance(launched, DeviceStep)
        return launched


@contextmanager
def no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def occupied() -> Any:
    """Gives the GPU something that takes a while, and returns when it is done."""
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream().record_event()


def engine_of(runner: TransformersRunner, max_draft_tokens: int = 0) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=64, max_num_batched_tokens=512, output_reservation=512, max_draft_tokens=max_draft_tokens
    )
    return Engine(runner, limits)


def runner_of(kind: type[TransformersRunner], model_dir: Path) -> TransformersRunner:
    runner = kind(ModelConfig(path=str(model_dir), dtype="float32", device="cuda"), EngineConfig(num_blocks=1024))
    assert runner.runs_ahead
    return runner


def specs_of(asked: dict[str, dict[str, Any]]) -> list[SequenceSpec]:
    generator = torch.Generator().manual_seed(0)
    specs = []
    for index, (name, values) in enumerate(asked.items()):
        length = (1, 16, 17, 100, 700)[index % 5]
        prompt = torch.randint(3, 49000, (length,), generator=generator).tolist()
        specs.append(sequence_spec(prompt, name, **({"max_tokens": 32, "seed": index} | values)))
    return specs


def test_answers_are_the_same_and_no_launch_waits(model_dir: Path) -> None:
    """Greedy and drawn ones, by all that a GPU draws by; of which some stop early, which is seen a step late."""
    asked: dict[str, dict[str, Any]] = {f"greedy {index}": {} for index in range(4)}
    asked |= {name: {"temperature": 1.0} | values for name, values in SAMPLINGS.items()}
    asked["stops"] = {"temperature": 1.0, "stop_token_ids": tuple(range(0, 49000, 12))}
    for name in ("penalties", "dry", "bad words"):  # no step is planned ahead of these: they come last, and are short
        asked[name] = asked.pop(name) | {"max_tokens": 9}
    runner = runner_of(Strict, model_dir)
    engine, specs = engine_of(runner), specs_of(asked)
    (expected, _), (found, num_ahead) = (tokens_of(engine, specs, ahead=ahead) for ahead in (False, True))
    assert found == expected
    assert num_ahead > 20
    assert isinstance(runner, Strict)
    assert runner.num_launched > 2 * num_ahead


def test_beside_scores_structures_and_drafts_answers_are_the_same(model_dir: Path) -> None:
    """Those are computed as without: the host has to see them first."""
    repeated = sequence_spec([7, 8, 9, 10] * 20, "repeated", max_tokens=40)
    structure = StructuredOutputs(regex="(ab|cd){2,4}")
    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"temperature": 1.0},
        "scored": {"max_tokens": 6, "logprobs": 2},
        "structured": {"max_tokens": 12, "structured_outputs": structure, "ignore_eos": False},
    }
    specs = [*specs_of(asked), repeated]
    runner = runner_of(TransformersRunner, model_dir)
    for max_draft_tokens in (0, 8):
        engine = engine_of(runner, max_draft_tokens)
        if engine.scheduler.drafter is not None:
            engine.scheduler.drafter.price = FREE
        (expected, _), (found, num_ahead) = (tokens_of(engine, specs, ahead=ahead) for ahead in (False, True))
        assert found == expected
        assert num_ahead > 5
        assert (engine.load().accepted_tokens > 0) == (max_draft_tokens > 0)


def test_a_launch_returns_while_the_gpu_has_other_things_to_do(model_dir: Path) -> None:
    runner = runner_of(TransformersRunner, model_dir)
    specs = specs_of({"greedy": {}, "drawn": {"temperature": 1.0, "top_p": 0.9}})
    tokens_of(engine_of(runner), specs, ahead=True)  # memory that is taken for the first time is waited for
    engine = engine_of(runner)
    for spec in specs:
        engine.add(spec, Purpose.GENERATE, now=0.0)
    first, _ = engine.schedule(0.0)
    busy = occupied()
    launched = runner.launch(first)
    scheduled = engine.schedule_ahead(first, 0.0)
    assert scheduled is not None
    behind = runner.launch(scheduled[0])
    assert not busy.query(), "a launch has waited for what was asked before"
    engine.commit(first, launched.collect(), 0.0)
    assert busy.query()
    engine.commit(scheduled[0], behind.collect(), 0.0)
    engine.check()


def test_numbers_on_their_way_are_not_written_over() -> None:
    """Many uploads wait behind one thing that takes long, from memory that is given back at once."""
    numbers = StepNumbers(CUDA)
    busy = occupied()
    found = []
    with no_waiting():
        for value in range(50):
            host = torch.full((700,), value)
            there = numbers.put(host)
            numbers.send()
            found.append((value, there, uploaded(host.double(), CUDA)))
            del host
    assert not busy.query()
    for value, whole, share in found:
        assert whole.tolist() == [value] * 700
        assert share.tolist() == [float(value)] * 700
