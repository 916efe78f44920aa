"""A beam search finds what transformers' own finds, for every width, length penalty and way to end."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from baton.api import GenerateRequest, TokenIds
from baton.config import EngineConfig
from baton.hypotheses import Beam
from baton.messages import SequenceSpec
from engine.core.beams import BeamSearch
from engine.core.engine import Engine
from engine.core.outputs import Generated
from engine.core.sequence import Purpose
from tests.chaos import asks
from tests.integration.cluster import running_cluster
from tests.integration.test_engine_models import NEAR_TIE, load_reference, make_engine, save_tiny
from tests.support.builders import sequence_spec

pytestmark = pytest.mark.integration

NUM_PROMPTS = 20
VOCAB_SIZE = 96
ENDS = (1, 2, 3, 4)
MAX_TOKENS = 14
WIDTHS, PENALTIES = (2, 4), (0.5, 1.0, 2.0)
ENGINE = EngineConfig(num_blocks=96, max_num_seqs=12, max_num_batched_tokens=48)
TEXTS = (
    "The capital of France is", "def fibonacci(n):", "1 + 1 =", "Once upon a time", "Hello", "a", "SELECT * FROM",
    "A list of fruits:\n1. Apple\n2.", "To be, or not to be, that is the", "The square root of 144 is", "Grüße aus",
    "日本の首都は", "😀😃😄 means", "{\"name\": \"", "Dear Sir or Madam,", "The three laws of robotics are",
    "import torch\n", "Water boils at", "In 1969", "My favourite colour is",
)  # fmt: skip
SHARP = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "eos_token_id": list(ENDS)}
"""The configuration of a random model whose answers end now and then, and whose logits are not all alike."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharp")
    save_tiny("llama", SHARP, folder)
    return folder


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [
        [draw.randrange(5, VOCAB_SIZE) for _ in range(draw.choice((1, 15, 16, 17, 60)))] for _ in range(NUM_PROMPTS)
    ]


def spec_of(name: str, prompt: list[int], **sampling: Any) -> SequenceSpec:
    asked = {"max_tokens": MAX_TOKENS, "ignore_eos": False, **sampling}
    return sequence_spec(prompt, name, use_beam_search=True, **asked)


def searched(engine: Engine, specs: list[SequenceSpec]) -> list[tuple[Beam, ...]]:
    """The answers of searches that run side by side, each of which arrives two steps after the one before."""
    waiting, keys, found = list(specs), list[int](), dict[int, tuple[Beam, ...]]()
    for step in itertools.count():
        if waiting and step >= 2 * len(keys):
            keys.append(engine.add(waiting.pop(0), Purpose.GENERATE, float(step)).key)
        batch, outputs = engine.schedule(float(step))
        assert batch or waiting or len(found) == len(specs), "nothing runs, and not everything has ended"
        outputs += engine.commit(batch, engine.runner.execute(batch), float(step))
        found |= {o.sequence_key: o.beams for o in outputs if isinstance(o, Generated) and o.finish_reason is not None}
        engine.check()
        if len(found) == len(specs):
            assert engine.is_idle
            return [found[key] for key in keys]
    raise AssertionError


def refer(
    model: Any, prompt: list[int], width: int, penalty: float, early: bool | str = False
) -> list[tuple[list[int], float]]:
    """transformers' answers and their scores, best first."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = []
    for tokens in out.sequences[:, len(prompt) :].tolist():
        end = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append(tokens[:end])
    return list(zip(answers, out.sequences_scores.tolist(), strict=True))


def num_near_ties(search: BeamSearch, found: tuple[Beam, ...], expected: list[tuple[list[int], float]]) -> int:
    """How many answers differ from those that are expected, with scores that are as good. Anything else fails."""
    assert len(found) == len(expected)
    num_different = 0
    for beam, (token_ids, score) in zip(found, expected, strict=True):
        assert search.score(beam) == pytest.approx(score, abs=NEAR_TIE)
        num_different += list(beam.token_ids) != token_ids
    return num_different


@pytest.mark.parametrize(
    "early", [False, pytest.param(True, marks=pytest.mark.chaos), pytest.param("never", marks=pytest.mark.chaos)]
)
@pytest.mark.chaos
def test_a_search_finds_what_transformers_finds(tiny: Path, early: bool | str) -> None:
    model, engine = load_reference(tiny), make_engine(tiny, ENGINE)
    asked = [(prompt, width, penalty) for prompt in prompts() for width in WIDTHS for penalty in PENALTIES]
    specs = [
        spec_of(f"search-{i}", prompt, beam_width=width, length_penalty=penalty, early_stopping=str(early).lower())
        for i, (prompt, width, penalty) in enumerate(asked)
    ]
    found = searched(engine, specs)
    num_different = num_ended = 0
    for (prompt, width, penalty), spec, beams in zip(asked, specs, found, strict=True):
        search = BeamSearch.of(spec, engine.runner.eos_token_ids, engine.runner.max_model_len)
        num_different += num_near_ties(search, beams, refer(model, prompt, width, penalty, early))
        num_ended += sum(beam.finish_reason == "stop" for beam in beams)
    num_answers = sum(map(len, found))
    print(f"{num_answers} answers, {num_ended} of them ended by themselves, {num_different} other ones at a near tie")
    assert num_answers // 8 < num_ended < num_answers
    assert num_different <= num_answers // 100


def test_a_search_that_gives_way_finds_the_same(tiny: Path) -> None:
    """In a pool that is too small for all of them they lose their blocks again and again."""
    specs = [spec_of(f"s{i}", prompt, beam_width=4, max_tokens=40) for i, prompt in enumerate(prompts()[:6])]
    roomy = searched(make_engine(tiny, ENGINE), specs)
    engine = make_engine(tiny, replace(ENGINE, num_blocks=20))
    small = searched(engine, specs)
    assert engine.load().preemptions > 3
    assert [[b.token_ids for b in beams] for beams in small] == [[b.token_ids for b in beams] for beams in roomy]


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_the_real_model_is_searched_as_transformers_does(mode: str, model_dir: Path) -> None:
    """Answers come without their scores: one that differs is compared by the score that transformers gives it."""
    model = load_reference(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    asked = [(prompt, width, penalty) for prompt in prompts for width in WIDTHS for penalty in PENALTIES]
    num_different = 0
    with running_cluster(
        "--prefill", "1" if mode == "disaggregated" else "0", "--decode", "1", router_mode=mode
    ) as cluster:
        for prompt, width, penalty in asked:
            sampling = {"use_beam_search": True, "n": width, "length_penalty": penalty, "max_tokens": MAX_TOKENS}
            request = GenerateRequest(prompt=TokenIds(tuple(prompt)), sampling={**sampling, "logprobs": 0})
            answer = asks.listen(cluster.client.generate(request)).answer
            expected = refer(model, prompt, width, penalty)
            for choice, (token_ids, score) in zip(answer.choices, expected, strict=True):
                own = sum(choice.scores.logprobs) / len(choice.token_ids) ** penalty
                assert own == pytest.approx(score, abs=NEAR_TIE), f"{choice.token_ids} are not {token_ids}"
                num_different += list(choice.token_ids) != token_ids
    print(f"{len(asked)} searches, {num_different} answers are other ones at a near tie")
    assert num_different <= 4
