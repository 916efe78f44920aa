"""Log probabilities of a prompt, as the endpoints write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api import GenerateChunk, PromptScores, Timing, Usage
from baton.scores import TokenScores
from router.api.openai.answers import ChoiceAnswer, CompletionLogprobs, Shape, of_prompt
from router.prompt import Tokenizer

SCORES = TokenScores((-1.0, -2.5), (7, 8, 9, 10), (-0.5, -1.0, -0.25, -3.0))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> PromptScores:
    ids = tokenizer.encode_fragment("a 😀")
    assert len(ids) >= 3
    return PromptScores(tuple(ids[:3]), SCORES)


def shape(tokenizer: Tokenizer, **fields: object) -> Shape:
    common = {"id": "i", "created": 1, "model": "m", "is_chat": False, "continuous_usage": False}
    return Shape(tokenizer=tokenizer, **common | fields)  # type: ignore[arg-type]


def test_the_first_token_follows_nothing(tokenizer: Tokenizer, prompt: PromptScores) -> None:
    found = of_prompt(prompt, tokenizer)
    assert found[0] is None
    one, two, three = prompt.token_ids
    assert found[1] is not None
    assert found[1]["7"] == {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([7])}
    assert found[1][str(two)]["logprob"] == -1.0
    assert found[2] is not None
    assert list(found[2]) == [str(three), "9", "10"]
    assert one not in (7, 8, 9, 10)


def test_an_echo_comes_before_the_answer(tokenizer: Tokenizer, prompt: PromptScores) -> None:
    answer = ChoiceAnswer(text=" b", token_ids=[5], scores=[TokenScores((-0.5,), (6, 5), (-0.1, -0.5))])
    echoing = shape(tokenizer, echo=("a 😀",))
    (choice,) = echoing.whole({0: answer}, Usage(3, 1, 0), Timing(), {0: prompt})["choices"]
    assert choice["text"] == "a 😀 b"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 4
    assert choice["logprobs"]["text_offset"][0] == 0
    assert "prompt_logprobs" not in choice
    silent = shape(tokenizer, has_prompt_logprobs=True).whole({0: answer}, Usage(3, 1, 0), Timing(), {0: prompt})
    assert silent["choices"][0]["text"] == " b"
    assert silent["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert silent["choices"][0]["prompt_logprobs"] == of_prompt(prompt, tokenizer)
    chat = shape(tokenizer, is_chat=True, has_prompt_logprobs=True).whole(
        {0: answer}, Usage(3, 1, 0), Timing(), {0: prompt}
    )
    assert chat["prompt_logprobs"] == of_prompt(prompt, tokenizer)


def test_every_choice_of_a_stream_begins_with_the_echo(tokenizer: Tokenizer, prompt: PromptScores) -> None:
    echoing = shape(tokenizer, echo=("a 😀",), num_choices=2)
    for index in range(2):
        logprobs = CompletionLogprobs(tokenizer)
        chunk = GenerateChunk(
            request_id="i", choice_index=index, text=" b", token_ids=(5,), scores=TokenScores((-0.5,))
        )
        (first,) = echoing.chunk(index, chunk, True, logprobs, prompt)["choices"]
        (second,) = echoing.chunk(index, chunk, False, logprobs, prompt)["choices"]
        assert (first["text"], second["text"]) == ("a 😀 b", " b")
        assert first["logprobs"]["token_logprobs"] == [None, -1.0, -2.5, -0.5]
        assert second["logprobs"]["token_logprobs"] == [-0.5]
        assert second["logprobs"]["text_offset"][0] > first["logprobs"]["text_offset"][-1]


def test_each_prompt_s_choices_have_its_echo_and_its_scores(tokenizer: Tokenizer, prompt: PromptScores) -> None:
    other = PromptScores(prompt.token_ids[:1], TokenScores())
    answers = {i: ChoiceAnswer(text="!", token_ids=[5], scores=[TokenScores((-0.5,))]) for i in range(4)}
    echoing = shape(tokenizer, echo=("a 😀", "a"), num_choices=2, has_prompt_logprobs=True)
    choices = echoing.whole(answers, Usage(4, 4, 0), Timing(), {0: prompt, 1: other})["choices"]
    assert [choice["text"] for choice in choices] == ["a 😀!", "a 😀!", "a!", "a!"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [4, 4, 2, 2]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 1, 1]
