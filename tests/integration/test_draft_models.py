"""Draft models on real runners: tiny random models, and what is refused at start."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config import ModelConfig, load
from baton.errors import BatonError, ConfigError, ModelLoadError
from baton.messages import SequenceSpec
from deploy.models import cache_dir
from engine.core.draft_runner import DraftedRunner
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS
from engine.core.runner import Runner
from engine.core.sequence import Purpose
from engine.runners import make_runner
from tests.integration.test_engine_models import ENGINE, VOCAB_SIZE, drafted_and_plain, engine_of, save_tiny
from tests.support.builders import sequence_spec
from tests.support.guessing import FREE, Told, run

pytestmark = pytest.mark.integration

RUNNERS = ("native", "transformers")


def made(folder: Path, draft: Path | str, runner: str = "native", cache: Path | None = None, **settings: Any) -> Runner:
    engine = replace(ENGINE, runner=runner, draft_model=str(draft), draft_kv_cache_gib=0.01, **settings)
    model = ModelConfig(path=str(folder), device="cpu")
    return make_runner(model, engine, cache or cache_dir(load().cluster))


def engine_with(runner: Runner) -> Engine:
    engine = engine_of(runner, ENGINE)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    assert drafter.model is not None
    drafter._looked_up = lambda sequence, most: NO_GUESS  # type: ignore[method-assign]
    drafter.price = FREE
    drafter.model.draft_s = lambda sequence, num_decoding: 0.0  # type: ignore[method-assign]
    drafter.model.catching_up_s = lambda sequence: 0.0  # type: ignore[method-assign]
    return engine


def specs_of(draw: random.Random) -> list[SequenceSpec]:
    values: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.2, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2, "seed": 4},
    ]
    return [
        sequence_spec(
            [draw.randrange(VOCAB_SIZE) for _ in range(length)], f"{place}", max_tokens=40, choice_index=choice, **one
        )
        for place, (length, one) in enumerate(zip((30, 75, 9), values, strict=True))
        for choice in range(2)
    ]


def values_of(told: list[Told]) -> list[Any]:
    return [one.token_ids for one in told]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_draft_model_changes_no_answer(runner: str, tmp_path: Path) -> None:
    """Choices are compared at any temperature, with what looks at the tokens before. A model that is the target itself
    is right all the time; another one hardly ever, and its KV does not disturb.
    """
    target, smaller = tmp_path / "target", tmp_path / "smaller"
    save_tiny("llama", {}, target)
    save_tiny("llama", {"num_hidden_layers": 1}, smaller)
    specs = specs_of(random.Random(5))
    plain = values_of(run(engine_of(made(target, "", runner), replace(ENGINE, speculation="off")), specs)[0])
    for folder in (target, smaller):
        made_runner = made(target, folder, runner)
        assert isinstance(made_runner, DraftedRunner)
        assert {made_runner.target.name, made_runner.draft.name, made_runner.name} == {runner}
        engine = engine_with(made_runner)
        assert values_of(run(engine, specs)[0]) == plain
        drafted = engine.load().model_drafted_tokens
        assert drafted == engine.load().drafted_tokens
        if folder is target:
            assert engine.load().model_accepted_tokens == drafted > 60
        else:
            assert engine.load().model_accepted_tokens < drafted / 2
        assert engine.scheduler.drafter is not None
        assert engine.scheduler.drafter.model is not None
        assert engine.scheduler.drafter.model.pool.counts().in_use == 0
        made_runner.close()


def test_look_up_and_a_draft_model_together_change_no_answer(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    plain = engine_of(made(tmp_path, ""), replace(ENGINE, speculation="off"))
    drafted, told = drafted_and_plain(engine_of(made(tmp_path, tmp_path), ENGINE), plain)
    assert drafted == told


def test_its_steps_are_timed_apart(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    engine = engine_with(made(tmp_path, tmp_path))
    engine.add(specs_of(random.Random(1))[0], Purpose.GENERATE, 0.0)
    proposing_s = []
    while batch := engine.schedule(0.0)[0]:
        output = engine.runner.execute(batch)
        engine.commit(batch, output, 0.0)
        engine.learn(batch.size(), 1.0, output.proposing_s)
        assert (output.proposing_s > 0) == any(part.proposal for part in batch.parts)
        proposing_s.append(output.proposing_s)
    assert any(proposing_s)


def refused(folder: Path, draft: Path | str, **settings: Any) -> BatonError:
    with pytest.raises((ConfigError, ModelLoadError)) as refusal:
        made(folder, draft, **settings)
    return refusal.value


def test_what_does_not_suit_is_refused_at_start(tmp_path: Path) -> None:
    target, other, texts = tmp_path / "target", tmp_path / "other", tmp_path / "texts"
    save_tiny("llama", {"num_hidden_layers": 1}, target)
    save_tiny("llama", {"num_hidden_layers": 1, "vocab_size": VOCAB_SIZE + 16}, other)
    save_tiny("llama", {"num_hidden_layers": 1}, texts)
    error = refused(target, other)
    assert isinstance(error, ModelLoadError)
    assert f"{other} has {VOCAB_SIZE + 16} tokens, and the model {VOCAB_SIZE}: drafts need the same" in str(error)
    for folder, second in ((target, "b"), (texts, "c")):
        words = {"vocab": {"a": 0, second: 1}, "type": "WordLevel", "unk_token": "a"}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    differs = "has another tokenizer: its token 1 is 'c', and the model's is 'b'; drafts need the same one"
    assert f"{texts} {differs}" in str(refused(target, texts))
    (texts / "tokenizer.json").unlink()
    assert "its token 0 is none, and the model's is 'a'" in str(refused(target, texts))
    assert "names a folder that does not exist: /nowhere" in str(refused(target, "/nowhere"))
    assert "engine.draft_model needs engine.tensor_parallel 1" in str(
        refused(target, target, runner="transformers", tensor_parallel=2)
    )
    (other / "config.json").write_text("{}")
    assert str(refused(target, other)).startswith(f"engine.draft_model {other}: ")
