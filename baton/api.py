"""The public API as plain values: what a client asks, and the pieces of the answer.

gRPC (`baton.wire`) and HTTP (`router.api.http`) both turn their bytes into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from baton.chat import ChatMessage
from baton.errors import ContextLengthExceeded
from baton.quota import Quota
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from baton.tools import ANY_TOOL, Tool, ToolCallDelta, ToolChoice


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of plain text."""

    text: str
    parse_special: bool = False
    """Whether what is spelled as a special token is that token, as only some tenants may ask; else it is text."""
    add_special_tokens: bool = True
    """Whether the model's tokens around a text are added (BOS for some)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A prompt of messages, which the model's chat template writes out."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    """What the model may call."""
    tool_choice: ToolChoice = ANY_TOOL
    documents: tuple[Mapping[str, Any], ...] = ()
    """What the answer may draw on, for templates that read `documents`: JSON values."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template: JSON values."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the begin of the assistant's next message."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, after which the template writes nothing then."""
    parse_special: bool = False
    """See `Text`."""


class TruncationSide(StrEnum):
    LEFT = "left"
    """The prompt loses its begin."""
    RIGHT = "right"
    """The prompt loses its end."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What happens to a prompt that is too long."""

    num_tokens: int
    """The most of it that are kept; -1: as many as leave room for `max_tokens`."""
    side: TruncationSide = TruncationSide.LEFT

    def of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns what is kept of a prompt, at most `num_tokens`, which is positive."""
        is_left = self.side is TruncationSide.LEFT
        return tuple(token_ids[-self.num_tokens :] if is_left else token_ids[: self.num_tokens])


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that the client has tokenized itself."""

    ids: tuple[int, ...]

    @staticmethod
    def of(token_ids: Sequence[int], most: int, truncation: Truncation | None) -> TokenIds:
        """Copies what a client sent, but no more of it than a model could take.

        Args:
            most: the longest prompt.
            truncation: what the client wants a prompt to be cut to.

        Raises:
            InvalidRequest: they are too many, and are not to be cut.
        """
        if truncation is None:
            check_num_tokens(len(token_ids), most)
            return TokenIds(tuple(token_ids))
        return TokenIds(replace(truncation, num_tokens=most).of(token_ids))


def check_num_tokens(num_tokens: int, most: int, model: str = "this model") -> None:
    """Raises ContextLengthExceeded for a prompt of more tokens than the model takes."""
    if num_tokens > most:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but {model} takes at most {most} (its context window less one "
            "token of answer); shorten the prompt",
            "input",
        )


PromptInput = Text | Chat | TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request, not validated yet.

    `sampling` holds what the client set, by the names of `baton.sampling.SamplingParams`; the model's defaults fill in
    the rest.
    """

    prompt: PromptInput
    request_id: str = ""
    model: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    skip_text: bool = False
    skip_reasoning: bool = False
    priority: int = 0
    """Higher runs earlier."""
    ttft_ms: float | None = None
    """The client's own objectives; None: those of its SLO class."""
    itl_ms: float | None = None
    e2e_ms: float | None = None
    resume_from: Mapping[int, int] = field(default_factory=dict)
    """Choice index -> tokens of it that the client has already, of a stream that broke; empty: a new request."""
    continuous_usage: bool = False
    """Whether every chunk carries the usage so far."""
    truncation: Truncation | None = None
    """None: a prompt that is too long is refused."""
    shortens_answer: bool = False
    """Whether the router lowers a `max_tokens` that exceeds the room in the context window, instead of refusing it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of the answer. All of `best_of` answers count, and the beams of a search."""
    cached_tokens: int
    """Prompt tokens whose KV was found in a cache, pulled from another worker's if need be, instead of computed."""
    reasoning_tokens: int = 0
    """Completion tokens that are of a reasoning, its marks included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The life of a request's first choice in seconds, on the router's clock. `router.slo` defines the stages."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    """Time from the request's arrival to its last token: the sum of the six stages that follow."""
    queue_s: float = 0.0
    """Time before the first token that is none of the other stages; a prefix that is pulled arrives in this time."""
    admission_s: float = 0.0
    """Waiting for room on the decode worker, before the prompt was computed."""
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """The part of the KV transfer that came after the first token. The rest went on during the prefill."""
    decode_s: float = 0.0
    """Time after the first token that is none of the other stages."""
    recovery_s: float = 0.0
    """Lost to workers that failed."""
    prefill_worker: str = ""
    decode_worker: str = ""
    mode: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of a prompt's tokens."""

    token_ids: tuple[int, ...]
    """The whole prompt."""
    scores: TokenScores
    """Scores of all tokens but the first, which follows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """What is new of one choice. The last chunk of the whole stream carries `usage` and `timing`; all carry `usage`
    where the request asks for that.
    """

    request_id: str
    choice_index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    """What is new of the reasoning with which an answer to a chat begins."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """What is new of the tool calls in an answer to a chat."""
    num_reasoning_tokens: int = 0
    """Tokens of the choice's reasoning so far, its marks included."""
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token, that ended the choice; None: neither did."""
    usage: Usage | None = None
    timing: Timing | None = None
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, where the request asks for them."""
    prompt_scores: PromptScores | None = None
    """The prompt's log probabilities, where the request asks for them: once, in the first chunk of its first choice."""
    quota: Quota | None = None
    """What the tenant has left of its limits: in the first chunk, where there are limits. HTTP has it in headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model, as clients see it."""

    id: str
    path: str
    max_model_len: int
    created: int
    weights: str
    """What they were made to, as `model.weights` names it."""
    kv_dtype: str
    """Type of its KV pages, as `engine.kv_dtype` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A worker that could have been chosen, with what it would have cost, in seconds. See `router.placement.Terms`."""

    worker_id: str
    role: str
    num_cached_tokens: int
    wait_s: float
    pull_s: float
    compute_s: float
    room_s: float
    exposed_s: float
    step_s: float
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSeconds:
    """What a placement expects, or what came of it, in seconds; None: not known. See `router.placement.Prediction`."""

    wait_s: float | None = None
    room_s: float | None = None
    pull_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How one choice was placed; field names are those of `baton status --explain --json`."""

    request_id: str
    choice_index: int
    tenant: str
    slo_class: str
    priority: int
    ttft_objective_s: float
    itl_objective_s: float
    num_prompt_tokens: int
    num_expected_tokens: int
    mode: str
    prefill_worker: str
    decode_worker: str
    source: str
    source_tokens: int
    outcome: str
    predicted_ttft_s: float
    measured_ttft_s: float
    """Time from the placement to the first token; 0: there was none yet."""
    options: tuple[Option, ...]
    """The candidates; empty where the router has dropped them."""
    predicted: PlacementSeconds
    measured: PlacementSeconds
