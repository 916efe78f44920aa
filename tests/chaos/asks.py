"""What the chaos tests ask, what a client hears, and what it should hear.

Two answers are equal if tokens, text, end and usage of every choice are. How many prompt tokens came from a
cache is left out: that depends on who has died before.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton import wire
from baton.api import Chat, GenerateChunk, GenerateRequest, PromptScores, Text, TokenIds
from baton.chat import ChatMessage
from baton.config import ModelConfig, load
from baton.messages import SequenceSpec
from baton.sampling import UNDRAWN, SamplingParams
from baton.scores import TokenScores
from baton.structure import StructuredOutputs
from baton.tools import Tool, ToolCallDelta, ToolChoice, ToolUse, joined_calls
from baton.v1 import inference_pb2
from deploy.models import cache_dir, resolve
from engine.core.beams import BeamSearch
from engine.sampling.pipeline import Sampler
from engine.sampling.steps import Row
from engine.sampling.structure import Structures
from engine.testing import adapter_number, modulus, sampled_of
from router.prompt import Tokenizer, in_tokens
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
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    finish_reason: str
    stop_reason: str | int | None
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class Answer:
    """What is the same every time."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int = 0
    prompt_scores: PromptScores | None = None


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
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str = ""
    stop_reason: str | int | None = None
    scores: list[TokenScores] = field(default_factory=list)


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
    prompt_scores: list[PromptScores] = []
    for part in map(_plain, parts):
        now = time.monotonic()
        gap_s, last_s = max(gap_s, now - last_s), now
        hearing = hearings.setdefault(part.choice_index, _Hearing())
        assert not (hearing.finish_reason and (part.token_ids or part.text or part.reasoning or part.tool_calls)), (
            f"a choice goes on after its end: {part}"
        )
        hearing.token_ids += part.token_ids
        hearing.text += part.text
        hearing.reasoning += part.reasoning
        hearing.tool_calls = joined_calls((*hearing.tool_calls, *part.tool_calls))
        hearing.scores.append(part.scores)
        hearing.finish_reason = hearing.finish_reason or str(part.finish_reason or "")
        hearing.stop_reason = hearing.stop_reason or part.stop_reason
        if part.prompt_scores is not None:
            prompt_scores.append(part.prompt_scores)
        num_tokens += len(part.token_ids)
        on_tokens(num_tokens)
    choices = tuple(
        Choice(
            token_ids=tuple(heard.token_ids),
            text=heard.text,
            reasoning=heard.reasoning,
            tool_calls=heard.tool_calls,
            finish_reason=heard.finish_reason,
            stop_reason=heard.stop_reason,
            scores=TokenScores.joined(heard.scores),
        )
        for _, heard in sorted(hearings.items())
    )
    assert len(prompt_scores) < 2, "they come once"
    usage = part.usage
    answer = Answer(choices, usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens, *prompt_scores)
    return Listening(answer, part.timing.retries, gap_s)


def _plain(part: GenerateChunk | inference_pb2.GenerateResponse) -> GenerateChunk:
    return part if isinstance(part, GenerateChunk) else wire.generate_chunk(part)


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


_CATS = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "lives": {"type": "integer", "minimum": 1}},
    "required": ["name", "lives"],
})  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 16},
    {"temperature": 1.25, "top_p": 0.875},
    {"temperature": 0.75, "min_p": 0.0625},
    {"temperature": 1.0, "typical_p": 0.75},
    {"temperature": 1.5, "top_k": 40, "xtc_probability": 0.5, "xtc_threshold": 0.0625},
    {"repetition_penalty": 1.25},
    {"presence_penalty": 0.625, "frequency_penalty": 0.375},
    {"frequency_penalty": -0.25},
    {"dry_multiplier": 0.75, "dry_allowed_length": 1},
    {"dry_multiplier": 1.5, "dry_base": 1.25, "dry_range": 40, "dry_sequence_breakers": ("a", "\n")},
    {"logit_bias": tuple((token_id, 3.0) for token_id in range(500, 49000, 97))},
    {"bad_words": ("the", "in", "\n"), "bad_word_ids": tuple((token_id,) for token_id in range(0, 49000, 300))},
    {"allowed_token_ids": tuple(range(40, 49000, 61))},
    {"min_tokens": 8, "stop_token_ids": tuple(range(3, 49000, 12))},
    {"stop_token_ids": tuple(range(7, 49000, 24)), "include_stop_str_in_output": True},
    {"stop": ("in", "er", "o"), "min_tokens": 6},
    {"stop": ("e", " t"), "include_stop_str_in_output": True, "min_tokens": 3},
    {"skip_special_tokens": False, "allowed_token_ids": (0, 1, 2, 5, 300, 301, 4000), "ignore_eos": True},
    {"logprobs": 0},
    {"logprob_token_ids": (4, 40000)},
    {"logprobs": 3, "temperature": 1.0, "top_k": 8},
    {"prompt_logprobs": 2, "temperature": 1.0},
    {"ignore_eos": False, "allowed_token_ids": (0, 9001, 18001, 27001, 36001, 45001)},
    {"structured_outputs": StructuredOutputs(json=_CATS), "temperature": 1.0},
    {"structured_outputs": StructuredOutputs(regex="[a-z]{2,4}( [0-9]{1,3}){2,6}")},
    {"structured_outputs": StructuredOutputs(grammar='start: "(" start ")" | start "," start | /[a-f]+/')},
    {
        "structured_outputs": StructuredOutputs(choice=("no", "yes, please", "größer als 😀")),
        "reasoning_end_ids": (44, 45),
    },
    {"reasoning_end_ids": (9, 10, 11), "thinking_budget": 5, "temperature": 1.0},
    {
        "structured_outputs": StructuredOutputs(choice=("no", "yes, please", "größer als 😀")),
        "reasoning_begin_id": 77,
        "reasoning_end_ids": (44, 45),
        "thinking_budget": 3,
        "logit_bias": ((77, 30.0),),
    },
    {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5},
    {"use_beam_search": True, "beam_width": 2, "length_penalty": 2.0, "early_stopping": "never", "logprobs": 1},
]
"""Each way of drawing, constraining and ending an answer. Fractions are those that a float of 32 bits has exactly."""


def of_options(number: int) -> GenerateRequest:
    """A request of one to four options, one after the other or in any combination; the prompt repeats itself."""
    rng = random.Random(number)
    chosen = [OPTIONS[number % len(OPTIONS)], *rng.sample(OPTIONS, rng.randrange(4))]
    begin = prompt_of(number, rng.choice((2, 9, 40, 70)))
    sampling: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
    for option in reversed(chosen):
        sampling |= option
    if "structured_outputs" in sampling:
        sampling["ignore_eos"] = False
    if "use_beam_search" in sampling:
        sampling = {name: value for name, value in sampling.items() if name not in (*UNDRAWN, "stop")}
        sampling["temperature"] = 0.0
    sampling |= {"seed": rng.randrange(2**40), "n": rng.choice((1, 1, 1, 2)), "max_tokens": rng.randrange(10, 20)}
    return GenerateRequest(prompt=TokenIds((*begin, *begin[-7:], *begin[:3])), sampling=sampling)


def of_chat(number: int) -> GenerateRequest:
    """A chat with the model of `tests.support.reasoning`: the answer reasons a while, for ever, or not at all, and may
    call tools.
    """
    rng = random.Random(number)
    words = StructuredOutputs(choice=("no", "yes, please", "größer als 😀"))
    marked = StructuredOutputs(regex="( |\n)?<think>[a-z \n]{4,9}</think>\n?[A-Z ]{2,9}")
    asked: dict[str, Any] = rng.choice([
        {"structured_outputs": words, "thinking_budget": rng.randrange(8)},
        {"structured_outputs": marked, "max_tokens": 60},
        {"thinking_budget": rng.randrange(8), "stop": ("e", "nk"), "min_tokens": rng.randrange(12)},
        {},
        {"logit_bias": ((_LINE_BREAK, 30.0),)},
    ])  # fmt: skip
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 16, "top_p": 1.0, "seed": rng.randrange(2**40)}
    sampling |= {"n": rng.choice((1, 2)), "max_tokens": rng.randrange(10, 30), **asked}
    opens = asked.get("structured_outputs") is not marked
    chat = Chat(messages=(ChatMessage(role="user", content=f"Question {number}?"),), template_kwargs={"opens": opens})
    if "structured_outputs" not in asked and rng.random() < 0.75:
        choice = ToolChoice(use=ToolUse.REQUIRED, is_parallel=rng.random() < 0.75)
        chat = replace(chat, tools=_TOOLS, tool_choice=choice)
        sampling |= {"max_tokens": 90, "thinking_budget": rng.randrange(6)}
    return GenerateRequest(prompt=chat, sampling=sampling)


_LINE_BREAK = 198
"""The token of one, which stands between two calls."""
_TOOLS = (
    Tool(
        name="cat",
        description="Finds a cat.",
        parameters={"properties": {"name": {"type": "string", "maxLength": 9}, "lives": {"type": "integer"}}},
        strict=True,
    ),
    Tool(name="count_cats", parameters={"properties": {}, "additionalProperties": False}),
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


def expected(request: GenerateRequest, adapter: str = "") -> list[tuple[int, ...]]:
    """The tokens of every choice, worked out without a cache and without a cluster.

    Args:
        adapter: digest of the adapter that answers; empty: the model itself.

    Stop strings are not known here: an answer that one of them ends is the beginning of what is returned.
    """
    assert isinstance(request.prompt, TokenIds)
    if request.sampling.get("use_beam_search"):
        return _searched(request, adapter)
    return [_expected(request, index, adapter) for index in range(request.sampling.get("n", 1))]


def _searched(request: GenerateRequest, adapter: str) -> list[tuple[int, ...]]:
    """The best answers of a beam search."""
    assert isinstance(request.prompt, TokenIds)
    params = in_tokens(replace(SamplingParams(seed=0), **request.sampling), _tokenizer())
    prompt, sampler = request.prompt.ids, Sampler({0}, _structures())
    spec = SequenceSpec(
        request_id="", choice_index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, cache_seed=b""
    )
    search = BeamSearch.of(spec, frozenset({0}), len(prompt) + spec.max_tokens)
    while not search.is_over:
        texts = [(*prompt, *beam.token_ids) for beam in search.running]
        sums = (sum((position + 1) * token for position, token in enumerate(text)) for text in texts)
        answers = [(each + adapter_number(adapter)) % MODULUS for each in sums]
        rows = [Row(params, 0, len(text), len(prompt), text if params.needs_history else ()) for text in texts]
        found = sampled_of(answers, rows, sampler, VOCAB_SIZE).candidates
        search, _ = search.advance([found[row] for row in range(len(rows))])
    return [beam.token_ids for beam in search.finished[: params.n]]


def _expected(request: GenerateRequest, choice_index: int, adapter: str) -> tuple[int, ...]:
    assert isinstance(request.prompt, TokenIds)
    prompt, sampling = request.prompt.ids, request.sampling
    params = SamplingParams(seed=0)
    params = in_tokens(replace(params, **sampling), _tokenizer())
    sampler = Sampler({0}, _structures())
    tokens = list(prompt)
    weighted = adapter_number(adapter) + sum((position + 1) * token for position, token in enumerate(tokens))
    for _ in range(sampling["max_tokens"]):
        position = len(tokens)
        row = Row(params, choice_index, position, len(prompt), tuple(tokens) if params.needs_history else ())
        tokens += sampled_of([weighted % MODULUS], [row], sampler, VOCAB_SIZE).token_ids
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == 0 and not params.ignore_eos):
            break
        weighted += (position + 1) * tokens[-1]
    return tuple(tokens[len(prompt) :])


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(_folder())


@functools.cache
def _structures() -> Structures:
    return Structures(_folder() / "tokenizer.json", VOCAB_SIZE, {0})


def _folder() -> Path:
    return resolve(ModelConfig(), cache_dir(load().cluster)).path
