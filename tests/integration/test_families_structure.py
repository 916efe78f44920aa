"""Structured outputs of a model of each kind are what `generate` answers if the same tokens are masked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import validate

from baton.grammar import GrammarCompiler, GrammarMatcher
from baton.messages import SequenceSpec
from baton.structure import StructuredOutputs
from tests.integration.test_engine_models import (
    VOCAB_SIZE,
    Reference,
    answers,
    load_reference,
    make_engine,
    same_up_to_near_ties,
    save_tiny,
    tokens_of,
)
from tests.integration.test_families import prompts
from tests.support.builders import sequence_spec
from tests.support.families import KINDS
from tests.support.guessing import Known, run
from tests.support.model_folders import backend

pytestmark = pytest.mark.integration

EOS = 0
TEXTS = backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256)))
WHITE_SPACE = TEXTS.encode(" \n\r\t").ids
"""A random model may indent JSON for twenty tokens at each place."""
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "of": {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 3}},
    "required": ["on", "of"],
    "additionalProperties": False,
}
REGEX = "([a-p]{2,6}-)?[0-9]{3,9}"
JSON, PATTERN = StructuredOutputs(json=json.dumps(SCHEMA)), StructuredOutputs(regex=REGEX)
ASKED = (JSON, PATTERN, None, JSON, PATTERN)
"""The structure that each prompt's answer must follow; one has none, and its answer is the longest."""
CASES = [pytest.param(kind, marks=[] if kind == "gpt_oss" else pytest.mark.full) for kind in KINDS]


def specs() -> list[SequenceSpec]:
    own: dict[str, Any] = {"ignore_eos": False, "logit_bias": tuple((token, -100.0) for token in WHITE_SPACE)}
    return [
        sequence_spec(prompt, f"{i}", max_tokens=60, structured_outputs=asked, **own)
        for i, (prompt, asked) in enumerate(zip(prompts(), ASKED, strict=True))
    ]


def refer_masked(model: Any, spec: SequenceSpec, matcher: GrammarMatcher | None) -> Reference:
    """Returns the answer of `generate` if it chooses only among tokens that the matcher allows, without white space."""
    prompt = torch.tensor([spec.token_ids])
    num_taken = 0

    def masked(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal num_taken
        allowed = np.ones(VOCAB_SIZE, np.bool_)
        if matcher is not None:
            answer = token_ids[0, prompt.shape[1] :].tolist()
            matcher.take(answer[num_taken:])
            num_taken = len(answer)
            bits = np.frombuffer(matcher.allowed(), np.uint8)
            allowed = np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little").view(np.bool_)
        allowed[WHITE_SPACE] = False
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)

    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        eos_token_id=EOS,
        logits_processor=[masked],
        max_new_tokens=spec.sampling.max_tokens,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = [scores[0].topk(2).values for scores in out.scores]
    return Reference(out.sequences[0, prompt.shape[1] :].tolist(), [float(pair[0] - pair[1]) for pair in best])


def require_valid(answer: list[int], asked: StructuredOutputs) -> None:
    assert answer[-1] == EOS, "an answer ends where its structure does"
    text = TEXTS.decode(answer[:-1], skip_special_tokens=False)
    if asked is PATTERN:
        assert re.fullmatch(REGEX, text)
    else:
        validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("kind", CASES)
def test_structured_answers_are_those_of_generate_under_the_same_masks(kind: str, tmp_path: Path) -> None:
    """As they come, beside steps that are planned ahead, and with drafts."""
    save_tiny(kind, {"tie_word_embeddings": False, "eos_token_id": EOS} | KINDS[kind], tmp_path)
    TEXTS.save(str(tmp_path / "tokenizer.json"))
    reference, compiler = load_reference(tmp_path), GrammarCompiler(tmp_path / "tokenizer.json", VOCAB_SIZE, {EOS})
    expected = [
        refer_masked(reference, spec, None if asked is None else compiler.compile(asked))
        for spec, asked in zip(specs(), ASKED, strict=True)
    ]
    print([TEXTS.decode(each.tokens) for each in expected])
    engine = make_engine(tmp_path)
    plain, _ = answers(engine, specs(), 2)
    ahead, num_ahead = tokens_of(engine, specs(), ahead=True)
    assert num_ahead > 0
    assert engine.load().drafted_tokens == 0
    known = {
        spec.sequence_id: Known([*spec.token_ids, *answer], place, vocab_size=VOCAB_SIZE)
        for place, (spec, answer) in enumerate(zip(specs(), plain, strict=True))
    }
    drafted, _ = run(engine, specs(), known)
    assert 20 < engine.load().accepted_tokens < engine.load().drafted_tokens
    for got in (plain, ahead, [each.token_ids for each in drafted]):
        assert sum(map(same_up_to_near_ties, got, expected)) >= 4
        for answer, asked in zip(got, ASKED, strict=True):
            if asked is not None:
                require_valid(answer, asked)
