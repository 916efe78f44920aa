"""What the chaos tests ask, what a client hears, and what it should hear.

Two answers are equal if tokens, text, finish reason and usage of every choice are. How many prompt tokens came from a
cache is left out: that depends on who has died before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.api import GenerateChunk, GenerateRequest, Text, TokenIds
from baton.engine.model.arithmetic import drawn, modulus
from baton.sampling import SamplingParams
from baton.v1 import inference_pb2
from tests.support.asking import prompt_of

VOCAB_SIZE = 49152
"""Of the arithmetic model, as everywhere."""
MODULUS = modulus(VOCAB_SIZE)
SPLIT_CHARACTER, SPLIT_CHARACTER_LENGTH = (7906, 237), 228
"""Two tokens that are a character only together, and a prompt's length after which the arithmetic model answers the
second one to the first."""
MANY_BYTES = "Count the cats: 🐈 🐈‍⬛ 🙂🎉 — Grüße, 日本の首都は 😀😃😄"


@dataclass(frozen=True, slots=True)
class Choice:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What is the same every time."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(slots=True)
class Listening:
    """One stream, heard to its end."""

    answer: Answer
    retries: int
    longest_gap_s: float
    """Between two messages, or before the first one."""


@dataclass(slots=True)
class _Hearing:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


def listen(
    parts: Iterable[GenerateChunk | inference_pb2.GenerateResponse],
    on_tokens: Callable[[int], object] = lambda num_tokens: None,
) -> Listening:
    """Args:
    on_tokens: told how many tokens have been heard, after each message.
    """
    hearings: dict[int, _Hearing] = {}
    gap_s, last_s, num_tokens = 0.0, time.monotonic(), 0
    part: Any = None
    for part in parts:
        now = time.monotonic()
        gap_s, last_s = max(gap_s, now - last_s), now
        hearing = hearings.setdefault(part.choice_index, _Hearing())
        assert not (hearing.finish_reason and (part.token_ids or part.text)), f"a choice goes on after its end: {part}"
        hearing.token_ids += part.token_ids
        hearing.text += part.text
        hearing.finish_reason = hearing.finish_reason or str(part.finish_reason or "")
        num_tokens += len(part.token_ids)
        on_tokens(num_tokens)
    choices = tuple(
        Choice(tuple(heard.token_ids), heard.text, heard.finish_reason) for _, heard in sorted(hearings.items())
    )
    answer = Answer(choices, part.usage.prompt_tokens, part.usage.completion_tokens)
    return Listening(answer, part.timing.retries, gap_s)


def greedy(prompt: Sequence[int], num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        prompt=TokenIds(tuple(prompt)), sampling={"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    )


def seeded(prompt: Sequence[int], num_tokens: int, seed: int, n: int = 1) -> GenerateRequest:
    """Draws among 16 tokens."""
    sampling = {"temperature": 1.0, "top_k": 16, "top_p": 1.0, "seed": seed, "n": n}  # all set: the model has defaults
    return GenerateRequest(
        prompt=TokenIds(tuple(prompt)), sampling={**sampling, "max_tokens": num_tokens, "ignore_eos": True}
    )


def of_text(text: str, num_tokens: int, seed: int) -> GenerateRequest:
    """The prompt is written as text, so that the router's tokenizer reads it."""
    return replace(seeded([1], num_tokens, seed), prompt=Text(text))


def of_split_character(num_tokens: int) -> GenerateRequest:
    """Greedy, and the answer begins with a character of two tokens."""
    (first, _), length = SPLIT_CHARACTER, SPLIT_CHARACTER_LENGTH
    rest = [0, *prompt_of(length, length - 1)]
    weighted = sum((position + 1) * token for position, token in enumerate(rest))
    return greedy([(first - weighted) % MODULUS, *rest[1:]], num_tokens)


def stopped_by(request: GenerateRequest, answer: Answer, share: float) -> GenerateRequest:
    """The same with a stop string: what stands in its answer's text after so large a share of it."""
    (choice,) = answer.choices
    begin = int(share * len(choice.text))
    return replace(request, sampling={**request.sampling, "stop": (choice.text[begin : begin + 6],)})


def expected(request: GenerateRequest) -> list[tuple[int, ...]]:
    """The tokens of every choice, worked out without a cache and without a cluster. Stop strings are not known here."""
    assert isinstance(request.prompt, TokenIds)
    return [_expected(request, index) for index in range(request.sampling.get("n", 1))]


def _expected(request: GenerateRequest, choice_index: int) -> tuple[int, ...]:
    assert isinstance(request.prompt, TokenIds)
    prompt, sampling = request.prompt.ids, request.sampling
    params = SamplingParams(
        temperature=sampling["temperature"], top_k=sampling.get("top_k", 0), seed=sampling.get("seed", 0)
    )
    tokens = list(prompt)
    weighted = sum((position + 1) * token for position, token in enumerate(tokens))
    for _ in range(sampling["max_tokens"]):
        position = len(tokens)
        tokens.append(drawn(weighted % MODULUS, params, choice_index, position, VOCAB_SIZE))
        weighted += (position + 1) * tokens[-1]
    return tuple(tokens[len(prompt) :])
