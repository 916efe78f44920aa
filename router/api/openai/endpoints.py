"""OpenAI's endpoints, and vLLM's for tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from baton.api import GenerateRequest, PromptInput, check_num_tokens
from baton.errors import InvalidRequest
from router.admission import check_model
from router.admission.tenants import Tenant
from router.api.answering import answered, chunks_of
from router.api.exchange import JsonAnswer, named, read_body
from router.api.openai.answers import Shape
from router.api.openai.body import SloBody
from router.api.openai.chat import ChatBody, prompt_of
from router.api.openai.completions import DEFAULT_COMPLETION_TOKENS, CompletionBody
from router.api.openai.form import CompletionForm
from router.api.openai.tokens import DetokenizeBody, TokenizeBody
from router.service import RouterService


def add_endpoints(app: FastAPI, service: RouterService) -> None:
    """Adds OpenAI's endpoints, and vLLM's for tokens."""
    _add_openai(app, service)
    _add_vllm(app, service)


def _add_openai(app: FastAPI, service: RouterService) -> None:
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        return await _answer(service, request, body, [body.prompt()], is_chat=True)

    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        return await _answer(service, request, body, body.prompts(service.facts.max_model_len - 1), is_chat=False)

    # Not as FastAPI's own routes, whose machinery for dependencies costs half as much as the rest of a request.
    app.add_route("/v1/chat/completions", chat_completions, ["POST"])
    app.add_route("/v1/completions", completions, ["POST"])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        check_model(model, service.facts)
        return _model_card(service)


def _add_vllm(app: FastAPI, service: RouterService) -> None:
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        check_model(body.model or "", service.facts)
        prompt = prompt_of(body)
        tokens = await service.tokenize(prompt, request.state.tenant)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [service.model.tokenizer.token(token) for token in tokens]
        return JsonAnswer(answer)

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        check_model(body.model or "", service.facts)
        check_num_tokens(len(body.tokens), service.facts.max_model_len)
        if any(not 0 <= token < service.facts.vocab_size for token in body.tokens):
            raise InvalidRequest(f"tokens must be ids from 0 to {service.facts.vocab_size - 1}", "tokens")
        return JsonAnswer({"prompt": service.model.tokenizer.decode_all(body.tokens)})

    app.add_route("/tokenize", tokenize, ["POST"])
    app.add_route("/detokenize", detokenize, ["POST"])


async def _answer(
    service: RouterService,
    request: Request,
    body: ChatBody | CompletionBody,
    prompts: list[PromptInput],
    *,
    is_chat: bool,
) -> Response:
    request_id = named(request, body.request_id, "chatcmpl-" if is_chat else "cmpl-")
    shape = Shape(
        id=request_id,
        created=int(time.time()),
        model=service.facts.id,
        is_chat=is_chat,
        continuous_usage=body.continuous_usage,
        tokenizer=service.model.tokenizer,
        num_choices=body.n or 1,
        echo=body.echoed(prompts, service.model.tokenizer) if isinstance(body, CompletionBody) else (),
        has_prompt_logprobs=body.prompt_logprobs is not None,
    )
    slo = body.slo or SloBody()
    generate = GenerateRequest(
        prompt=prompts[0],
        request_id=request_id,
        model=body.model or "",
        sampling=_sampling(body, request.state.tenant),
        priority=body.priority or 0,
        ttft_ms=slo.ttft_ms,
        itl_ms=slo.itl_ms,
        e2e_ms=slo.e2e_ms,
        continuous_usage=body.continuous_usage,
        truncation=body.truncation,
        skip_reasoning=isinstance(body, ChatBody) and body.include_reasoning is False,
    )
    asked = [generate]
    if len(prompts) > 1:
        asked = [replace(generate, prompt=each, request_id=f"{request_id}-{i}") for i, each in enumerate(prompts)]
    is_streamed = bool(body.stream)
    chunks = chunks_of(service, request, asked, is_streamed=is_streamed, num_choices=shape.num_choices)
    form = CompletionForm(shape, include_usage=body.include_usage)
    return await answered(request, chunks, form, is_streamed=is_streamed)


def _sampling(body: ChatBody | CompletionBody, tenant: Tenant) -> dict[str, Any]:
    """What a request asks of the sampling; OpenAI's default length of a completion gives way to the tenant's bound."""
    asked = body.sampling()
    if isinstance(body, CompletionBody) and "max_tokens" not in asked:
        asked["max_tokens"] = min(DEFAULT_COMPLETION_TOKENS, tenant.max_answer_tokens or DEFAULT_COMPLETION_TOKENS)
    return asked


def _model_card(service: RouterService) -> dict[str, Any]:
    card = service.model.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.max_model_len,
        "weights": card.weights,
        "kv_dtype": card.kv_dtype,
    }
