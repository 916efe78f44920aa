"""Public API as plain values: a client's request, and the chunks of the response.

gRPC (`baton.wire`) and HTTP (`router.api.http`) both convert their messages to these.
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
    """True if text that spells a special token becomes that token.

    Only some tenants may request this; the default is text.
    """
    add_special_tokens: bool = True
    """True if the model's tokens around a text are added (BOS for some models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A prompt of messages, which the model's chat template renders."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    """Tools that the model may call."""
    tool_choice: ToolChoice = ANY_TOOL
    documents: tuple[Mapping[str, Any], ...] = ()
    """Sources for the response, for templates that read `documents`: JSON values."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the template: JSON values."""
    add_generation_prompt: bool = True
    """True if the prompt ends with the start of the assistant's next message."""
    continue_final_message: bool = False
    """True if the response continues the last message; the template then writes nothing after it."""
    parse_special: bool = False
    """See `Text`."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """Images of its messages, in order."""
        return tuple(part for each in self.messages if each.parts for part in each.parts if isinstance(part, bytes))


class TruncationSide(StrEnum):
    LEFT = "left"
    """Drop the start of the prompt."""
    RIGHT = "right"
    """Drop the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation of a prompt that is too long."""

    num_tokens: int
    """Maximum number of tokens to keep; -1: as many as leave space for `max_tokens`."""
    side: TruncationSide = TruncationSide.LEFT

    def of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a prompt that are kept, at most `num_tokens`, which is positive."""
        is_left = self.side is TruncationSide.LEFT
        return tuple(token_ids[-self.num_tokens :] if is_left else token_ids[: self.num_tokens])


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that the client has tokenized itself."""

    ids: tuple[int, ...]

    @staticmethod
    def of(token_ids: Sequence[int], most: int, truncation: Truncation | None) -> TokenIds:
        """Copy a client's tokens, but at most as many as a model could take.

        Args:
            most: the longest prompt.
            truncation: how the client wants a prompt to be truncated.

        Raises:
            InvalidRequest: there are too many tokens and no truncation.
        """
        if truncation is None:
            if len(token_ids) > most:
                raise too_long(len(token_ids), most)
            return TokenIds(tuple(token_ids))
        return TokenIds(replace(truncation, num_tokens=most).of(token_ids))


def too_long(num_tokens: int, most: int, model: str = "this model") -> ContextLengthExceeded:
    """Return the error of a prompt of more tokens than the model takes."""
    return ContextLengthExceeded(
        f"the prompt has {num_tokens} tokens, but {model} takes at most {most} (its context window less one token of "
        "answer); shorten the prompt",
        "input",
    )


PromptInput = Text | Chat | TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request, not validated yet.

    `sampling` holds the values that the client set, by the names of `baton.sampling.SamplingParams`; the model's
    defaults fill in the rest.
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
    """The client's objectives; None: the objectives of its SLO class."""
    itl_ms: float | None = None
    e2e_ms: float | None = None
    resume_from: Mapping[int, int] = field(default_factory=dict)
    """Choice index -> number of its tokens that the client already has, of a broken stream; empty: a new request."""
    continuous_usage: bool = False
    """True if every chunk carries the usage so far."""
    truncation: Truncation | None = None
    """None: a prompt that is too long is rejected."""
    shortens_answer: bool = False
    """True if the router lowers a `max_tokens` that exceeds the rest of the context window, instead of rejecting it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens, including all `best_of` choices and the beams of a search."""
    cached_tokens: int
    """Prompt tokens whose KV was found in a cache, or pulled from another worker's, instead of computed."""
    reasoning_tokens: int = 0
    """Completion tokens that belong to reasoning, including its markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The life of a request's first choice in seconds, on the router's clock. `router.timeline.folds` has them."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    """Time from the request's arrival to its last token: the sum of the following six stages."""
    queue_s: float = 0.0
    """Time before the first token that belongs to no other stage; prefix pulls happen in this time."""
    admission_s: float = 0.0
    """Time of waiting for capacity on the decode worker, before the prompt was computed."""
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """The part of the KV transfer that came after the first token. The rest overlapped with the prefill."""
    decode_s: float = 0.0
    """Time after the first token that belongs to no other stage."""
    recovery_s: float = 0.0
    """Time lost to workers that failed."""
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
    """Scores of all tokens but the first, which has no predecessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """New output of one choice.

    The last chunk of the whole stream carries `usage` and `timing`; all carry `usage` if the request asks for that.
    """

    request_id: str
    choice_index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    """New text of the reasoning at the start of a chat response."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """New parts of the tool calls in a chat response."""
    num_reasoning_tokens: int = 0
    """Tokens of the choice's reasoning so far, including its markers."""
    stop_reason: str | int | None = None
    """Stop string, or id of the stop token, that finished the choice; None: neither did."""
    usage: Usage | None = None
    timing: Timing | None = None
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, if the request asks for them."""
    prompt_scores: PromptScores | None = None
    """The prompt's log probabilities, if the request asks for them: once, in the first chunk of its first choice."""
    quota: Quota | None = None
    """Remaining quota of the tenant: in the first chunk, if there are limits. HTTP has it in headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model, as clients see it."""

    id: str
    path: str
    """Folder of the model or of the adapter."""
    max_model_len: int
    created: int
    weights: str
    """Weight format, as `model.weights` names it."""
    kv_dtype: str
    """Data type of its KV pages, as `engine.kv_dtype` names it."""
    parent: str = ""
    """Id of the model that a LoRA adapter adapts; empty: it is no adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A worker that could have been chosen, with its estimated cost, in seconds. See `router.placement.Terms`."""

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
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSeconds:
    """Prediction or result of a placement, in seconds; None: unknown. See `router.placement.Prediction`."""

    wait_s: float | None = None
    room_s: float | None = None
    pull_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Placement of one choice; field names are those of `baton status --explain --json`."""

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
    """Time from the placement to the first token; 0: no token was drawn yet."""
    options: tuple[Option, ...]
    """The candidates; empty if the router has dropped them."""
    predicted: PlacementSeconds
    measured: PlacementSeconds
