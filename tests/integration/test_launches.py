"""A step that is launched on a device: the host copies numbers there once, waits for nothing and sees nothing.

The device is none (`tests.support.device_waits`), so what it computes is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.config import ModelConfig
from baton.sampling import SamplingParams
from engine.core.runner import UNKNOWN_TOKEN, OnLayerDone, StepInput, StepPart, ignore_layer
from engine.model import attention
from engine.model.attention_choice import TorchAttention
from engine.model.kv_cache import KVCache
from engine.model.rank_step import DeviceStep
from engine.model.transformers_runner import TransformersRunner
from engine.uploads import StepNumbers
from tests.integration.test_engine_models import ENGINE, WINDOW, save_tiny
from tests.support.device_waits import DEVICE, Waits

pytestmark = pytest.mark.integration
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k, top-p": {"top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.1, "temperature": 0.5},
    "typical": {"typical_p": 0.9},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.1, "stop_token_ids": (3,), "xtc_exempt_token_ids": (5, 9)},
    "bias": {"logit_bias": ((5, 2.0), (7, -1.0))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "allowed": {"allowed_token_ids": (1, 2, 3)},
    "bad words": {"bad_word_ids": ((4,), (7, 8)), "min_tokens": 9, "stop_token_ids": (3,)},
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TransformersRunner:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("mistral", {"sliding_window": WINDOW}, folder)
    runner = TransformersRunner(ModelConfig(path=str(folder), dtype="float32"), ENGINE)
    runner.runs_ahead = True
    runner.rank.model.to(DEVICE)
    cache = KVCache(runner.spec, runner.cache.num_blocks, ENGINE.batch(on_gpu=False).max_num_seqs, DEVICE)
    runner.cache = runner.rank.cache = cache
    runner.rank._attention = TorchAttention(cache)
    runner.rank._numbers = StepNumbers(DEVICE)
    return runner


@contextmanager
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    monkeypatch.setattr(attention, "PADDING_DEVICES", frozenset({DEVICE.type}))
    with Waits(monkeypatch) as waits:
        yield waits


def part(
    key: int, begin: int, token_ids: tuple[int, ...], sampling: SamplingParams = GREEDY, **values: Any
) -> StepPart:
    end = begin + len(token_ids)
    table = tuple(range(8 * key, 8 * key + 8))
    made = StepPart(
        sequence_key=key,
        token_ids=token_ids,
        num_computed_tokens=begin,
        block_ids=(table,),
        num_kv_tokens=(end,),
        sample=True,
        is_decoding=begin > 0,
        sampling=sampling,
        choice_index=0,
        num_prompt_tokens=1,
    )
    return made._replace(**values)


def test_steps_one_behind_the_other_copy_once_and_wait_for_nothing(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, chunks of which nobody samples, and tokens that the host does not know."""
    steps = [
        (part(0, 0, (1, 2, 3)), part(1, 0, tuple(range(40)), sample=False)),
        (part(0, 3, (UNKNOWN_TOKEN,)), part(1, 40, tuple(range(8)))),
        (part(0, 4, (UNKNOWN_TOKEN,)), part(1, 48, (UNKNOWN_TOKEN,)), part(2, 0, (7,))),
        (part(3, 0, tuple(range(16)), sample=False),),
    ]
    with launching(monkeypatch) as waits:
        for number, parts in enumerate(steps, start=1):
            launched = runner.launch(StepInput(parts))
            assert isinstance(launched, DeviceStep)
            assert launched.tokens.device == DEVICE
            assert launched.tokens.shape == (sum(each.sample for each in parts),)
            assert not waits.found
            assert waits.num_copies == number


def test_layers_that_nobody_wants_to_know_of_take_no_fence(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each is an event, which takes as long as a small kernel."""
    heard = list[bool]()

    def report(cache: KVCache, layer: int, on_layer_done: OnLayerDone) -> None:
        heard.append(on_layer_done is not ignore_layer)
        on_layer_done(layer, None)

    monkeypatch.setattr(attention, "report_written", report)
    step, told = StepInput((part(0, 0, (1, 2, 3)),)), list[int]()
    with launching(monkeypatch):
        runner.launch(step)
        assert heard == [False] * runner.spec.num_layers
        runner.launch(step, lambda layer, fence: told.append(layer))
    assert told == list(range(runner.spec.num_layers))


@pytest.mark.parametrize("needs_numbers", [True, False])
def test_blocks_are_zeroed_for_an_attention_that_would_load_them(
    needs_numbers: bool, runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is up to 32 kernels a step."""
    zeroed = list[str]()
    monkeypatch.setattr(TorchAttention, "needs_numbers", needs_numbers)
    for name in ("clear_blocks", "clear_places"):
        monkeypatch.setattr(runner.cache, name, lambda *args, name=name: zeroed.append(name))
    with launching(monkeypatch):
        runner.launch(StepInput((part(0, 0, (1, 2, 3)), part(1, 5, (4,)))))
        runner.launch(StepInput((part(0, 3, (4,)), part(1, 6, (5,)))))
    assert zeroed == (["clear_blocks", "clear_places", "clear_blocks"] if needs_numbers else [])


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.chaos
def test_what_a_token_is_drawn_by_is_copied_without_waiting(
    name: str, runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 3} | SAMPLINGS[name])
    history = (7, 8, 7, 8, 9, 7)
    drawing = [part(key, 5, (7,), sampling, history=history) for key in (0, 2)]
    with launching(monkeypatch) as waits:
        for parts in ([part(1, 5, (4,)), *drawing], [part(1, 5, (4,), SamplingParams(seed=1)), *drawing], drawing):
            launched = runner.launch(StepInput(tuple(parts)))
            assert isinstance(launched, DeviceStep)
    assert not waits.found
    assert waits.num_copies > 3
