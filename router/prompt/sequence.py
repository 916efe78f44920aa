"""Makes of a prompt the sequence that workers compute.

1. `PromptEncoder`: chat template and tokenizer; the model can take the token ids.
2. `SequenceBuilder`: the sampling is settled, the cache keyed by tenant.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

from baton.api import Chat, PromptInput, Text, TokenIds, Truncation
from baton.blocks import cache_seed
from baton.messages import ROUTERS_SAMPLING, SequenceSpec
from baton.sampling import SamplingParams
from baton.tasks import seen_through
from router.admission import MAX_SETTLED, ModelFacts, Turns, check_length, check_prompt, check_vocabulary
from router.admission.tenants import Tenant
from router.prompt.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 16_384
"""Longest prompt that is tokenized on the event loop, in about 10 ms; longer ones go to a thread."""
MESSAGE_CHARACTERS = 64
"""What a message costs beside its text, in characters."""
MAX_THREADS = 4
"""Threads that tokenize at the same time, where there are as many processors. Most of the time they let the event loop
run: tokenizers give Python's lock back, templates do not."""
MAX_WAITING_CHARACTERS = 64 * 2**20
_NO_ROUTERS_SAMPLING: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.name in ROUTERS_SAMPLING}


class PromptEncoder:
    """Prompts of one model. Short ones are encoded at once, long ones in a few threads in which tenants take turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        num_threads = max(2, min(MAX_THREADS, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(num_threads, "prompts")
        self._turns = Turns(num_threads, MAX_WAITING_CHARACTERS)

    def close(self) -> None:
        """Ends the threads. Nothing is encoded any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, prompt: PromptInput, tenant: Tenant, facts: ModelFacts, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """The prompt's token ids. What has been encoded for the tenant's cache scope is not encoded again.

        Args:
            truncation: what is kept of a longer prompt.

        Raises:
            InvalidRequest: the prompt is empty, too long, not renderable, or has ids outside the vocabulary.
            Overloaded: many long prompts wait.
        """
        num_characters = _num_characters(prompt)
        if truncation is None:
            check_length(num_characters, self._tokenizer.longest_token, facts)
        cost = num_characters + _overhead(prompt)
        if cost > MAX_INLINE_CHARACTERS:
            async with self._turns.turn(tenant.id, cost):
                work = self._threads.submit(self._encode, prompt, tenant.scope)
                await seen_through(encoding := asyncio.wrap_future(work))
            token_ids = encoding.result()
        else:
            token_ids = self._encode(prompt, tenant.scope)
        if truncation is not None:
            token_ids = truncation.of(token_ids)
        check_prompt(token_ids, facts)
        if not isinstance(prompt, Chat):  # a chat's are the vocabulary's; what is put around a text may be anything
            check_vocabulary(token_ids, facts)
        return token_ids

    def _encode(self, prompt: PromptInput, scope: str) -> tuple[int, ...]:
        match prompt:
            case Text(text, parse_special, add_special_tokens):
                ids = self._tokenizer.encode(text, parse_special=parse_special, add_special_tokens=add_special_tokens)
                return tuple(ids)
            case Chat():
                return tuple(self._tokenizer.encode_chat(prompt, scope=scope))
            case TokenIds():
                return prompt.ids


def _num_characters(prompt: PromptInput) -> int:
    match prompt:
        case Text(text):
            return len(text)
        case Chat(messages=messages, tools=tools):
            texts = sum(message.num_characters for message in messages)
            return texts + sum(tool.num_characters for tool in tools)
    return 0


def _overhead(prompt: PromptInput) -> int:
    """What a prompt costs beside its texts, in characters."""
    if not isinstance(prompt, Chat):
        return 0
    of_any_size = bool(prompt.documents or prompt.template_kwargs)
    return MESSAGE_CHARACTERS * len(prompt.messages) + MAX_INLINE_CHARACTERS * of_any_size


class SequenceBuilder:
    """Sequences of one model.

    Args:
        cache_secret: keys the tenants' cache scopes, and the seeds of requests without one.
    """

    def __init__(self, content_id: str, vocab_size: int, cache_secret: str) -> None:
        self._content_id = content_id
        self._vocab_size = vocab_size
        self._secret = cache_secret.encode()
        self._cache_seeds: dict[str, bytes] = {}  # by cache scope: as many as the operator has named

    def build(
        self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, tenant: Tenant
    ) -> SequenceSpec:
        """The sequence of a request's first choice, whose sampling has token ids in place of texts (`in_tokens`)."""
        sampling = _for_workers(params, self._vocab_size)
        if sampling.seed is None:
            sampling = sampling.seeded(self._seed(tenant, request_id))
        return SequenceSpec(
            request_id=request_id,
            choice_index=0,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=sampling,
            cache_seed=self._cache_seed(tenant),
        )

    def _cache_seed(self, tenant: Tenant) -> bytes:
        seed = self._cache_seeds.get(tenant.scope)
        if seed is None:
            seed = self._cache_seeds[tenant.scope] = cache_seed(self._content_id, self._secret, tenant.scope)
        return seed

    def _seed(self, tenant: Tenant, request_id: str) -> int:
        """The seed of a request that sets none: the same on every router and in every attempt, and not predictable."""
        name = f"seed\0{tenant.id}\0{request_id}"
        drawn = hmac.digest(self._secret, name.encode(), "sha256")[:8]
        return max(-(2**63 - 1), int.from_bytes(drawn, "little", signed=True))


@functools.lru_cache(maxsize=MAX_SETTLED)
def _for_workers(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Returns what workers need to know, but for the seed where none is set and random numbers are drawn."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    logprobs = 0 if params.is_selected and params.logprobs is None else params.logprobs
    if params.use_beam_search:
        params = replace(params, beam_width=params.num_beams)
    seed = 0 if params.seed is None and not (params.temperature or params.xtc_probability) else params.seed
    return replace(params, **_NO_ROUTERS_SAMPLING, top_k=top_k, logprobs=logprobs, seed=seed)
