"""OpenAI's endpoints, and vLLM's for tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateChunk, GenerateRequest, PromptInput, PromptScores, Timing, Usage
from baton.errors import BatonError, InvalidRequest
from baton.telemetry import tracing
from router.admission import check_model
from router.api.exchange import EventStream, event, id_headers, named, read_body, unless_disconnected
from router.api.openai.answers import ChoiceAnswer, Shape
from router.api.openai.body import SloBody
from router.api.openai.chat import ChatBody, prompt_of
from router.api.openai.completions import CompletionBody
from router.api.openai.document import document
from router.api.openai.errors import error_body
from router.api.openai.logprobs import CompletionLogprobs
from router.api.openai.several import together
from router.api.openai.tokens import DetokenizeBody, TokenizeBody
from router.request.model import Ingress
from router.service import RouterService

OPENAPI_PATH = "/openapi.json"


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
        return await _answer(service, request, body, body.prompts(), is_chat=False)

    # Not as FastAPI's own routes, whose machinery for dependencies costs half as much as the rest of a request.
    app.add_route("/v1/chat/completions", chat_completions, ["POST"])
    app.add_route("/v1/completions", completions, ["POST"])

    @app.get(OPENAPI_PATH)
    async def openapi() -> JSONResponse:
        return JSONResponse(document())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        check_model(model, service.facts)
        return _model_card(service)


def _add_vllm(app: FastAPI, service: RouterService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model or "", service.facts)
        prompt = prompt_of(body)
        tokens = await service.tokenize(prompt, request.state.tenant)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [service.model.tokenizer.token(token) for token in tokens]
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        check_model(body.model or "", service.facts)
        if any(not 0 <= token < service.facts.vocab_size for token in body.tokens):
            raise InvalidRequest(f"tokens must be ids from 0 to {service.facts.vocab_size - 1}", "tokens")
        return {"prompt": service.model.tokenizer.decode_all(body.tokens)}


async def _answer(
    service: RouterService,
    request: Request,
    body: ChatBody | CompletionBody,
    prompts: list[PromptInput],
    *,
    is_chat: bool,
) -> Response:
    request_id = named(request, body.request_id, "chatcmpl" if is_chat else "cmpl")
    shape = Shape(
        id=request_id,
        created=int(time.time()),
        model=service.facts.id,
        is_chat=is_chat,
        continuous_usage=body.continuous_usage,
        tokenizer=service.model.tokenizer,
        num_choices=body.n or 1,
        echo=body.echoed(service.model.tokenizer) if isinstance(body, CompletionBody) else (),
        has_prompt_logprobs=body.prompt_logprobs is not None,
    )
    slo = body.slo or SloBody()
    generate = GenerateRequest(
        prompt=prompts[0],
        request_id=request_id,
        model=body.model or "",
        sampling=body.sampling(),
        priority=body.priority or 0,
        ttft_ms=slo.ttft_ms,
        itl_ms=slo.itl_ms,
        e2e_ms=slo.e2e_ms,
        continuous_usage=body.continuous_usage,
        truncation=body.truncation,
        skip_reasoning=isinstance(body, ChatBody) and body.include_reasoning is False,
    )
    address, port = request.scope.get("server") or ("", 0)
    ingress = Ingress(address, port or 0, bool(body.stream))
    trace = tracing.from_metadata(request.headers.items())
    requests = [generate]
    if len(prompts) > 1:
        requests = [replace(generate, prompt=each, request_id=f"{request_id}-{i}") for i, each in enumerate(prompts)]
    starts = [partial(service.generate, each, trace, request.state.tenant, ingress) for each in requests]
    chunks = together(starts, shape.num_choices)
    if not body.stream:
        return JSONResponse(await unless_disconnected(request, _whole(chunks, shape)), headers=id_headers(request))
    # The first chunk is awaited here, so that a refusal still becomes a status code.
    first = await unless_disconnected(request, anext(chunks))
    return EventStream(_events(first, chunks, shape, body.include_usage), id_headers(request))


async def _whole(chunks: AsyncGenerator[GenerateChunk], shape: Shape) -> dict[str, Any]:
    answers: dict[int, ChoiceAnswer] = {}
    prompts: dict[int, PromptScores] = {}
    usage, timing = Usage(0, 0, 0), Timing()
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            answer = answers.setdefault(chunk.choice_index, ChoiceAnswer())
            answer.text += chunk.text
            answer.reasoning += chunk.reasoning
            answer.tool_calls += chunk.tool_calls
            answer.token_ids += chunk.token_ids
            answer.scores.append(chunk.scores)
            if chunk.finish_reason:
                answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
            usage, timing = chunk.usage or usage, chunk.timing or timing
            if chunk.prompt_scores is not None:
                prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
    return shape.whole(dict(sorted(answers.items())), usage, timing, prompts)


async def _events(
    first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk], shape: Shape, include_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events, OpenAI's way. An error after the first token becomes an event: the status is long sent."""
    begun: dict[int, CompletionLogprobs] = {}
    prompts: dict[int, PromptScores] = {}
    usage, timing = None, Timing()
    async with contextlib.aclosing(chunks):
        try:
            chunk: GenerateChunk | None = first
            while chunk is not None:
                if chunk.prompt_scores is not None:
                    prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
                index, is_first = chunk.choice_index, chunk.choice_index not in begun
                is_new = chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason or chunk.scores
                if is_new or is_first:
                    logprobs = begun.get(index) or begun.setdefault(index, CompletionLogprobs(shape.tokenizer))
                    scores = prompts.get(shape.prompt_of(index))
                    yield event(shape.chunk(index, chunk, is_first, logprobs, scores))
                usage, timing = chunk.usage or usage, chunk.timing or timing
                chunk = await anext(chunks, None)
        except BatonError as error:
            yield event(error_body(error))
            return
    if include_usage and usage is not None:
        yield event(shape.usage_chunk(usage, timing))
    yield "data: [DONE]\n\n"


def _model_card(service: RouterService) -> dict[str, Any]:
    card = service.model.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.max_model_len,
    }
