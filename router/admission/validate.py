"""Validates requests, so that no worker gets an invalid one. Each error says what to change.

A valid request has a claim: its tenant, priority and objectives.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.api import GenerateRequest, PromptInput, TokenIds, Truncation, too_long
from baton.config import DEFAULT_CLASS, RouterConfig
from baton.errors import ContextLengthExceeded, Forbidden, InvalidRequest, ModelNotFound
from baton.messages import Adapter
from baton.registered_adapters import NO_ADAPTERS, Adapters
from baton.sampling import UNDRAWN, SamplingParams
from baton.spelling import nearest
from router.admission.tenants import Tenant
from router.placement import Objective, Weights

MAX_REQUEST_ID = 128
MAX_SETTLED = 128
"""Size of the cache of sampling parameters: most clients send the same ones again and again."""
MAX_SHOWN = 200
"""Maximum length, in characters, of a model's name that errors show, and for which they look for a similar one."""
MAX_LOOKED_AT, MAX_COMPARED = 1000, 32
"""Maximum numbers of known names that are considered, and that are compared, to find a similar one."""
LEAST_PRIORITY = -1000
CUSTOM_CLASS = "custom"
"""SLO class of requests that set their own objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Limits and defaults of the served model that validation uses."""

    id: str
    vocab_size: int
    max_model_len: int
    default_sampling: SamplingParams
    default_max_tokens: int = 0
    """Default answer length, for requests without `max_tokens`; 0: up to the context window."""
    max_answer_tokens: int | None = None
    """Longest answer that the tenant may request; None: limited only by the context window."""

    def of(self, tenant: Tenant, model: str) -> ModelFacts:
        """Return the facts with the tenant's own limit on the answer.

        Args:
            model: name of the served model or adapter that the tenant requests.
        """
        limit = tenant.tightest(model).max_answer_tokens
        return self if limit is None else replace(self, max_answer_tokens=limit)


def check_model(name: str, model: ModelFacts, adapters: Adapters = NO_ADAPTERS) -> Adapter | None:
    """Return the adapter that a client requests as its model; None: it requests the served model, or names none.

    Raises:
        ModelNotFound: no model or adapter has this name.
    """
    if name in ("", model.id):
        return None
    registered = adapters.get(name)
    if registered is None:
        raise model_not_found(name, [model.id, *adapters])
    return registered.adapter


def model_not_found(name: str, known: Collection[str]) -> ModelNotFound:
    """Return the error for a name under which nothing is served to a client.

    Args:
        known: names of the models and adapters that the client's tenant may request. No other name is shown.
    """
    if meant := nearest_model(name, known):
        hint = f"did you mean {meant!r}?"
    elif len(known) == 1:
        hint = f"use {next(iter(known))!r}"
    elif known:
        hint = "/v1/models lists those that you can use"
    else:
        hint = "no model is available to this API key; ask the operator"
    return ModelNotFound(f"the model {name!r:.{MAX_SHOWN}} does not exist; {hint}", "model")


def nearest_model(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant; empty: none is similar.

    A comparison of two names takes up to 0.1 ms, and thousands of adapters may be registered. So of the first
    `MAX_LOOKED_AT` names, it compares the `MAX_COMPARED` that share the longest start with this one.
    """
    if len(name) > MAX_SHOWN:
        return ""
    lower = name.lower()

    def num_shared(each: str) -> int:
        pairs = zip(each.lower(), lower, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return nearest(name, heapq.nlargest(MAX_COMPARED, itertools.islice(known, MAX_LOOKED_AT), key=num_shared))


def check_length(num_characters: int, longest_token: int, model: ModelFacts) -> None:
    """Raise ContextLengthExceeded for a text that is too long however it is tokenized, before it is tokenized."""
    limit = model.max_model_len * longest_token
    if num_characters > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_characters} characters, but {model.id} accepts {model.max_model_len - 1} prompt "
            f"tokens, which hold at most {limit}; shorten the prompt",
            "input",
        )


def check_prompt(token_ids: Sequence[int], model: ModelFacts) -> None:
    """Raise InvalidRequest unless the prompt has 1 to max_model_len - 1 tokens."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", "input")
    if len(token_ids) > (most := model.max_model_len - 1):
        raise too_long(len(token_ids), most, model.id)


def check_vocabulary(token_ids: Sequence[int], model: ModelFacts) -> None:
    """Raise InvalidRequest unless all ids, at least one, are in the model's vocabulary."""
    if max(token_ids) >= model.vocab_size or min(token_ids) < 0:
        bad = next(t for t in token_ids if not 0 <= t < model.vocab_size)
        raise InvalidRequest(
            f"token id {bad} is outside the vocabulary of {model.id}; ids go from 0 to {model.vocab_size - 1}",
            "token_ids",
        )


def check_special(prompt: PromptInput, tenant: Tenant) -> None:
    """Raise Forbidden if a prompt sets `parse_special` and its tenant may not."""
    if not isinstance(prompt, TokenIds) and prompt.parse_special and not tenant.parse_special:
        raise Forbidden("this API key may not write special tokens; unset parse_special, or ask the operator")


def truncation_of(asked: Truncation | None, params: SamplingParams, model: ModelFacts) -> Truncation | None:
    """Return the truncation of a prompt, with -1 resolved to a number of tokens.

    Raises:
        InvalidRequest: the number of tokens is out of range.
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
    """Raise InvalidRequest unless the id is empty, or short and printable: it is part of every message and log line."""
    if len(request_id) > MAX_REQUEST_ID or not request_id.isascii() or not request_id.isprintable():
        raise InvalidRequest(
            f"request_id must be at most {MAX_REQUEST_ID} printable ASCII characters; shorten it or leave it empty",
            "request_id",
        )


def check_resume(request: GenerateRequest, params: SamplingParams) -> None:
    """Raise InvalidRequest for a `resume_from` that cannot belong to this request, as far as is known so far."""
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
    """Return the request's sampling parameters, with the model's defaults; `with_lengths` adds the lengths.

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
    """Return the sampling parameters with `max_tokens` and `min_tokens` set.

    Without a `max_tokens` of the client, the context window, the default and the tenant's limit determine it. The
    `min_tokens` that the model recommends is lowered to it.

    Args:
        shortens: lower a `max_tokens` that exceeds the remaining context window, if there is any room.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Tenant, priority and objectives of one request."""

    tenant: Tenant
    priority: int
    slo_class: str
    objective: Objective
    weights: Weights
    arrived_s: float
    """Arrival of the request, on the monotonic clock, or its release if it was held: its objectives count from here."""
    was_held: bool = False
    """True if the router has held it until its model was awake. The router has accepted it, so it does not refuse it
    when many held requests are released at once."""

    def released(self, now_s: float) -> Claim:
        """Return the claim of a request that was held until now."""
        return replace(self, arrived_s=now_s, was_held=True)


@dataclass(slots=True)
class SloCounts:
    """SLO outcomes of a model's requests since the router started. Cancelled requests are not counted."""

    met: int = 0
    missed: int = 0
    rejected: int = 0
    in_flight: int = 0
    """Requests that have arrived and not ended."""


def claim_of(request: GenerateRequest, tenant: Tenant, config: RouterConfig, arrived_s: float) -> Claim:
    """Return the claim of a request.

    Raises:
        InvalidRequest: an objective is not a positive number, or the priority is outside the tenant's range.
    """
    if request.priority < LEAST_PRIORITY:
        raise InvalidRequest(
            f"priority must be at least {LEAST_PRIORITY}, got {request.priority}; raise it", "priority"
        )
    if request.priority > tenant.max_priority:
        raise InvalidRequest(
            f"priority must be at most {tenant.max_priority} for {tenant.id!r}, got {request.priority}; lower it, or "
            "have the operator raise the tenant's max_priority",
            "priority",
        )
    slo = config.slo_classes.get(tenant.slo_class or DEFAULT_CLASS) or config.slo_class(tenant.slo_class)
    asked = {"ttft_ms": request.ttft_ms, "itl_ms": request.itl_ms, "e2e_ms": request.e2e_ms}
    for name, value in asked.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"slo.{name} must be a positive number of milliseconds, got {value}", f"slo.{name}")
    is_custom = any(value is not None for value in asked.values())
    return Claim(
        tenant=tenant,
        priority=request.priority,
        slo_class=CUSTOM_CLASS if is_custom else tenant.slo_class or DEFAULT_CLASS,
        objective=Objective(
            (slo.ttft_ms if request.ttft_ms is None else request.ttft_ms) / 1e3,
            (slo.itl_ms if request.itl_ms is None else request.itl_ms) / 1e3,
            (slo.e2e_ms if request.e2e_ms is None else request.e2e_ms) / 1e3,
        ),
        weights=Weights(slo.affinity_weight, slo.interference_weight),
        arrived_s=arrived_s,
    )
