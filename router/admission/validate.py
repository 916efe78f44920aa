"""Bad requests end here, with a sentence that says what to change. No worker ever sees them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.api import GenerateRequest, PromptInput, TokenIds, Truncation, check_num_tokens
from baton.errors import ContextLengthExceeded, Forbidden, InvalidRequest, ModelNotFound
from baton.sampling import UNDRAWN, SamplingParams
from router.admission.tenants import Tenant

MAX_REQUEST_ID = 128
MAX_SETTLED = 128
"""Sampling parameters that are kept: most clients ask for the same again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What validation needs to know of the served model."""

    id: str
    vocab_size: int
    max_model_len: int
    default_sampling: SamplingParams
    default_max_tokens: int = 0
    """Answer length when a client gives none; 0: up to the context window."""
    max_answer_tokens: int | None = None
    """The longest answer that the tenant may ask for; None: any that the context window leaves room for."""

    def of(self, tenant: Tenant) -> ModelFacts:
        """Return the facts with the tenant's own bound."""
        return self if tenant.max_answer_tokens is None else replace(self, max_answer_tokens=tenant.max_answer_tokens)


def check_model(name: str, model: ModelFacts) -> None:
    """Raise ModelNotFound for another model than the served one; an empty name means that one."""
    if name not in ("", model.id):
        raise ModelNotFound(f"the model {name!r} is not served here; use {model.id!r}", "model")


def check_length(num_characters: int, longest_token: int, model: ModelFacts) -> None:
    """Raise ContextLengthExceeded for a text that cannot fit however it is tokenized, before that costs anything."""
    limit = model.max_model_len * longest_token
    if num_characters > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_characters} characters, but the {model.max_model_len - 1} tokens that {model.id} "
            f"takes never hold more than {limit}; shorten the prompt",
            "input",
        )


def check_prompt(token_ids: Sequence[int], model: ModelFacts) -> None:
    """Raise InvalidRequest unless these are 1 to max_model_len - 1 tokens."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", "input")
    check_num_tokens(len(token_ids), model.max_model_len - 1, model.id)


def check_vocabulary(token_ids: Sequence[int], model: ModelFacts) -> None:
    """Raise InvalidRequest unless these ids, of which there is at least one, are the model's."""
    if max(token_ids) >= model.vocab_size or min(token_ids) < 0:
        bad = next(t for t in token_ids if not 0 <= t < model.vocab_size)
        raise InvalidRequest(
            f"token id {bad} is outside the vocabulary of {model.id}; ids go from 0 to {model.vocab_size - 1}",
            "token_ids",
        )


def check_special(prompt: PromptInput, tenant: Tenant) -> None:
    """Raise Forbidden for a prompt that may write special tokens, of a tenant that may not."""
    if not isinstance(prompt, TokenIds) and prompt.parse_special and not tenant.parse_special:
        raise Forbidden("this API key may not write special tokens; unset parse_special, or ask the operator")


def truncation_of(asked: Truncation | None, params: SamplingParams, model: ModelFacts) -> Truncation | None:
    """Return how a prompt is truncated, in a number of tokens.

    Raises:
        InvalidRequest: it is none that a prompt may have.
    """
    if asked is None:
        return None
    most = model.max_model_len - 1
    num_tokens = model.max_model_len - (params.max_tokens or 1) if asked.num_tokens == -1 else asked.num_tokens
    if not 1 <= num_tokens <= most:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be 1 to {most}, or -1 with a max_tokens of at most {most}; "
            f"got {asked.num_tokens}",
            "truncate_prompt_tokens",
        )
    return replace(asked, num_tokens=num_tokens)


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest unless the id is empty, or short and printable: it travels in every message and log."""
    if len(request_id) > MAX_REQUEST_ID or not request_id.isascii() or not request_id.isprintable():
        raise InvalidRequest(
            f"request_id must be at most {MAX_REQUEST_ID} printable ASCII characters; shorten it or leave it empty",
            "request_id",
        )


def check_resume(request: GenerateRequest, params: SamplingParams) -> None:
    """Raise InvalidRequest for a `resume_from` that cannot be of this request, as far as is known by now."""
    if request.resume_from and not request.request_id:
        raise InvalidRequest(
            "resume_from continues the request of a request_id; set it to the one that the answer carried", "request_id"
        )
    for index, num_tokens in request.resume_from.items():
        if not 0 <= index < params.n:
            raise InvalidRequest(
                f"resume_from names choice {index}, but sampling.n is {params.n}; name 0 to {params.n - 1}",
                "resume_from",
            )
        if not 0 <= num_tokens <= (num_tokens if params.max_tokens is None else params.max_tokens):
            raise InvalidRequest(
                f"resume_from names {num_tokens} tokens of choice {index}, but an answer of this request has "
                f"0 to {params.max_tokens}; send the request as it was, and the number of tokens that came",
                "resume_from",
            )


def sampling_params(asked: Mapping[str, Any], model: ModelFacts) -> SamplingParams:
    """The request's sampling, with the model's defaults where the client set nothing; `with_lengths` adds lengths.

    Raises:
        InvalidRequest: a value is out of range.
    """
    return _settled(tuple(asked.items()), model)


@functools.lru_cache(maxsize=MAX_SETTLED)
def _settled(asked: tuple[tuple[str, Any], ...], model: ModelFacts) -> SamplingParams:
    defaults = model.default_sampling
    if dict(asked).get("use_beam_search"):
        undrawn: dict[str, Any] = {name: neutral[0] for name, neutral in UNDRAWN.items()}
        defaults = replace(defaults, **undrawn, temperature=0.0)
    params = replace(defaults, **{"min_tokens": 0, **dict(asked)})
    if params.use_beam_search:
        params = replace(params, temperature=0.0)
    for name, ids in params.named_token_ids.items():
        for token_id in ids:
            if not 0 <= token_id < model.vocab_size:
                raise InvalidRequest(
                    f"sampling.{name} holds {token_id}, outside the vocabulary of {model.id}; "
                    f"ids go from 0 to {model.vocab_size - 1}",
                    name,
                )
    limit = model.max_answer_tokens
    for name, num_tokens in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if limit is not None and num_tokens is not None and num_tokens > limit and name in dict(asked):
            raise InvalidRequest(
                f"{name} must be at most {limit} with this API key, got {num_tokens}; lower it, or ask the operator",
                name,
            )
    return params


def with_lengths(
    params: SamplingParams,
    asked: Mapping[str, Any],
    num_prompt_tokens: int,
    model: ModelFacts,
    *,
    shortens: bool = False,
) -> SamplingParams:
    """Return the request with `max_tokens` set: what the client asked, else what the context window and the tenant's
    own bound leave. The least length that the model recommends gives way to that.

    Args:
        shortens: lower a `max_tokens` that exceeds the room in the context window, if there is any.

    Raises:
        ContextLengthExceeded: prompt and answer together exceed the context window.
    """
    room = model.max_model_len - num_prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = min(room, model.default_max_tokens or room, model.max_answer_tokens or room)
    if shortens and room > 0:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and sampling.max_tokens asks for {max_tokens} more, but "
            f"the context window of {model.id} is {model.max_model_len}; lower max_tokens to at most {room}",
            "max_tokens",
        )
    recommended = 0 if "min_tokens" in asked else min(model.default_sampling.min_tokens, max_tokens)
    if max_tokens == params.max_tokens and not recommended:
        return params
    return replace(params, max_tokens=max_tokens, min_tokens=recommended or params.min_tokens)
