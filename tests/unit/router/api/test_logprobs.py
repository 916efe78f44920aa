"""How the completions endpoints write log probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.scores import TokenScores
from router.api.openai.answers import CompletionLogprobs, of_chat
from router.prompt import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def test_a_part_of_a_character_is_written_by_its_bytes(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_fragment("é 😀!")
    num_tokens = len(token_ids)
    assert num_tokens > 3
    scores = TokenScores(tuple(-0.5 * i for i in range(num_tokens)), tuple(token_ids), (-1.0,) * num_tokens)
    chat = of_chat(token_ids, scores, tokenizer)["content"]
    assert b"".join(bytes(token["bytes"]) for token in chat).decode() == "é 😀!"
    assert [token["logprob"] for token in chat] == list(scores.logprobs)
    assert [len(token["top_logprobs"]) for token in chat] == [1] * num_tokens

    whole = CompletionLogprobs(tokenizer).piece(token_ids, scores)
    assert any(token.startswith("bytes:\\x") for token in whole["tokens"])
    assert whole["text_offset"] == sorted(whole["text_offset"])
    assert whole["text_offset"][-1] == len("é 😀"), "half characters are none"
    for cut in range(num_tokens + 1):
        writer = CompletionLogprobs(tokenizer)
        parts = [(token_ids[a:b], scores.part(a, b)) for a, b in ((0, cut), (cut, num_tokens)) if a < b]
        pieces = [writer.piece(*part) for part in parts]
        assert {name: [each for piece in pieces for each in piece[name]] for name in whole} == whole


def test_the_drawn_token_is_among_the_likeliest(tokenizer: Tokenizer) -> None:
    (drawn,), (best,) = tokenizer.encode_fragment("x"), tokenizer.encode_fragment("y")
    (top,) = CompletionLogprobs(tokenizer).piece([drawn], TokenScores((-3.0,), (best,), (-0.1,)))["top_logprobs"]
    assert top == {"x": -3.0, "y": -0.1}
