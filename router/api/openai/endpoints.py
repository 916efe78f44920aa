"""OpenAI's endpoints, and vLLM's for tokens."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from baton.api import Chat, GenerateRequest, ModelCard, PromptInput, TokenIds, too_long
from baton.errors import InvalidRequest
from baton.tools import ToolUse
from router.admission.tenants import Tenant
from router.api.answering import Asked, Taking, answered, chunks_of
from router.api.exchange import JsonAnswer, ascii_json, id_headers, ignored_of, named
from router.api.openai.answers import CompletionForm, Shape
from router.api.openai.body import DEFAULT_COMPLETION_TOKENS, CompletionBody, SloBody
from router.api.openai.chat import ChatBody, DetokenizeBody, TokenizeBody, description_of, prompt_of
from router.api.routes import STREAMED, Reader
from router.models.table import ModelTable
from router.request.model import LoadedModel
from router.service import RouterService

DESCRIBED = 16
"""Number of tokenizers whose descriptions are kept."""


def add_endpoints(app: FastAPI, models: ModelTable) -> None:
    """Add OpenAI's endpoints, and vLLM's for tokens."""
    _add_openai(app, models)
    _add_vllm(app, models)


def _add_openai(app: FastAPI, models: ModelTable) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(request: Request, read: Reader[ChatBody]) -> Response:
        """Answer a chat."""
        with Taking(models, request, "chat") as taking:
            asked = await _asked(taking, request, await read())
        return await answered(request, *asked)

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(request: Request, read: Reader[CompletionBody]) -> Response:
        """Continue a text."""
        with Taking(models, request, "text_completion") as taking:
            asked = await _asked(taking, request, await read())
        return await answered(request, *asked)

    listed = ModelList(models)

    @app.get("/v1/models")
    async def model_cards(request: Request) -> Response:
        """List the models that the tenant may use, and their adapters."""
        return Response(listed(request.state.tenant), media_type="application/json")

    @app.get("/v1/models/{model:path}")
    async def model_card(request: Request, model: str) -> dict[str, Any]:
        """Describe a model or an adapter."""
        return _described(models.card(model, request.state.tenant))


def _add_vllm(app: FastAPI, models: ModelTable) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request, read: Reader[TokenizeBody]) -> Response:
        """Tokenize a prompt."""
        with Taking(models, request, "tokenize") as taking:
            body = await read()
            service = taking.service(body)
            prompt = prompt_of(body, lambda: service.model.tokenizer.chat_template, ignored_of(request))
        tokens = await service.tokenize(prompt, request.state.tenant)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [service.model.tokenizer.token(token) for token in tokens]
        return JsonAnswer(answer, headers=id_headers(request))

    @app.post("/detokenize")
    async def detokenize(request: Request, read: Reader[DetokenizeBody]) -> Response:
        """Convert tokens to text."""
        with Taking(models, request, "detokenize") as taking:
            body = await read()
            service = taking.service(body)
            if len(body.tokens) > (most := service.facts.max_model_len):
                raise too_long(len(body.tokens), most)
            if not 0 <= min(body.tokens, default=0) <= max(body.tokens, default=0) < service.facts.vocab_size:
                raise InvalidRequest(f"tokens must be ids from 0 to {service.facts.vocab_size - 1}", "tokens")
        text = await asyncio.to_thread(service.model.tokenizer.decode_all, body.tokens)
        return JsonAnswer({"prompt": text}, headers=id_headers(request))

    @functools.lru_cache(maxsize=DESCRIBED)
    def described(model: LoadedModel) -> bytes:
        return ascii_json(description_of(model.tokenizer))

    @app.get("/tokenizer_info")
    async def tokenizer_info(
        request: Request, model: Annotated[str, Query(description="The model; empty: the default or only one.")] = ""
    ) -> Response:
        """Describe the tokenizer: its tokenizer_config.json, and the chat template in use."""
        service = models.service(model, request.state.tenant, str)
        return Response(described(service.model), media_type="application/json")


async def _asked(taking: Taking, request: Request, body: ChatBody | CompletionBody) -> Asked:
    service, is_chat = taking.service(body), isinstance(body, ChatBody)
    request.state.written = body.written()  # not the body itself, which would stay in memory until the answer ends
    if isinstance(body, ChatBody):
        prompts = [body.prompt(lambda: service.model.tokenizer.chat_template, ignored_of(request))]
    else:
        prompts = body.prompts(service.facts.max_model_len - 1)
    request_id = named(request, body.request_id, "chatcmpl-" if is_chat else "cmpl-")
    shape = Shape(
        id=request_id,
        created=int(time.time()),
        model=service.name_of(body.model or ""),
        is_chat=is_chat,
        continuous_usage=body.continuous_usage,
        tokenizer=service.model.tokenizer,
        num_choices=body.n or 1,
        echo=await body.echoed(prompts, service.model.tokenizer) if isinstance(body, CompletionBody) else (),
        has_prompt_logprobs=body.prompt_logprobs is not None,
        is_forced=isinstance(prompts[0], Chat) and prompts[0].tool_choice.use is ToolUse.REQUIRED,
        prompt_ids=await _ids_of(service, request, body, prompts) if body.return_token_ids else (),
        is_scoring=isinstance(body, CompletionBody) and body.is_scoring,
    )
    slo = body.slo or SloBody()
    generate = GenerateRequest(
        prompt=prompts[0],
        request_id=request_id,
        model=body.model or "",
        sampling=_sampling(service, body, request.state.tenant),
        priority=body.priority or 0,
        ttft_ms=slo.ttft_ms,
        itl_ms=slo.itl_ms,
        e2e_ms=slo.e2e_ms,
        continuous_usage=body.continuous_usage,
        truncation=body.truncation,
        skip_reasoning=isinstance(body, ChatBody) and body.skips_reasoning,
    )
    asked = [generate]
    if len(prompts) > 1:
        asked = [replace(generate, prompt=each, request_id=f"{request_id}-{i}") for i, each in enumerate(prompts)]
    is_streamed = bool(body.stream)
    chunks = chunks_of(service, request, asked, is_streamed=is_streamed, num_choices=shape.num_choices)
    return Asked(chunks, CompletionForm(shape, include_usage=body.include_usage), is_streamed)


async def _ids_of(
    service: RouterService, request: Request, body: ChatBody | CompletionBody, prompts: Sequence[PromptInput]
) -> tuple[Sequence[int], ...]:
    """Return the token ids of each prompt.

    Raises:
        InvalidRequest: the truncated length depends on the answer's length; see `RouterService.tokenize` too.
    """
    truncation = body.truncation
    if truncation is not None and truncation.num_tokens == -1:
        raise InvalidRequest(
            "return_token_ids cannot be combined with truncate_prompt_tokens=-1; set a number of tokens",
            "truncate_prompt_tokens",
        )
    return tuple(
        [
            each.ids if isinstance(each, TokenIds) else await service.tokenize(each, request.state.tenant, truncation)
            for each in prompts
        ]
    )


def _sampling(service: RouterService, body: ChatBody | CompletionBody, tenant: Tenant) -> dict[str, Any]:
    """Return the sampling parameters of a request.

    OpenAI's default length of a completion is limited to the tenant's maximum with the model. A reasoning budget of another service's
    field is dropped if the model does not reason.
    """
    asked = body.sampling()
    if isinstance(body, ChatBody) and body.budget is not None and service.model.format.reasoning is not None:
        asked.setdefault("thinking_budget", body.budget)
    if isinstance(body, CompletionBody) and "max_tokens" not in asked:
        most = tenant.tightest(service.name_of(body.model or "")).max_answer_tokens
        asked["max_tokens"] = min(DEFAULT_COMPLETION_TOKENS, most or DEFAULT_COMPLETION_TOKENS)
    return asked


class ModelList:
    """The list of models as JSON. It is kept until the models change, because there may be thousands of adapters."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._version: tuple[object, ...] = ()
        self._json: dict[tuple[str, ...], bytes] = {}
        """Lists by the patterns of the models that a tenant may use."""

    def __call__(self, tenant: Tenant) -> bytes:
        """Return the list for a tenant."""
        if self._version != (version := self._models.version):
            self._version = version
            self._json.clear()
        if (found := self._json.get(tenant.models)) is None:
            cards = [_described(card) for card in self._models.cards(tenant)]
            first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
            listed = {"object": "list", "data": cards, "first_id": first, "last_id": last, "has_more": False}
            found = self._json[tenant.models] = ascii_json(listed)
        return found


def _described(card: ModelCard) -> dict[str, Any]:
    """Return a model's card with the fields of OpenAI's and of Anthropic's API, and with vLLM's `root` and `parent`."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "root": card.path,
        "parent": card.parent or None,
        "type": "model",
        "display_name": card.id,
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_model_len": card.max_model_len,
        "weights": card.weights,
        "kv_dtype": card.kv_dtype,
    }
