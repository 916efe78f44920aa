"""The HTTP API: OpenAI's API over the router's service, a thin client of the same path that gRPC takes.

`router.api.openai` has the bodies; this file has the endpoints, the event stream, and what happens when clients leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api import GenerateChunk, GenerateRequest, PromptInput, Text, Timing, Usage
from baton.errors import BatonError, InvalidRequest, Overloaded, Unauthenticated, Unsupported
from baton.tasks import cancel_and_wait
from baton.telemetry import tracing
from router.admission import check_model
from router.admission.tenants import TenantBook, api_key_of
from router.api.openai import (
    ChatBody,
    ChoiceAnswer,
    CompletionBody,
    DetokenizeBody,
    Shape,
    SloBody,
    TokenizeBody,
    chat_of,
    error_body,
)
from router.api.openai.logprobs import CompletionLogprobs
from router.api.page import HEADERS, PAGE
from router.request.model import Ingress
from router.service import RouterService

AnyBody = TypeVar("AnyBody", bound=BaseModel)
T = TypeVar("T")

MAX_BODY_BYTES = 8 * 2**20
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own telemetry, which would ask the environment with every request: the service has ours."""
OPEN_PATHS = {"/", "/health", "/healthz", "/readyz", "/metrics"}
"""Paths that need no API key: probes and scrapers have none, and the page at / shows only what /metrics shows."""


def create_app(
    service: RouterService, tenants: TenantBook, is_ready: Callable[[], str], metrics: Callable[[], bytes]
) -> FastAPI:
    """The HTTP application.

    Args:
        is_ready: "" when requests can be served, else the reason why not.
        metrics: the Prometheus text.
    """
    app = FastAPI(title="Baton", openapi_url=None, telemetry=NO_TELEMETRY)
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    app.add_middleware(_BodyLimit)
    app.add_middleware(_HttpAuthentication, tenants=tenants)  # the last is the first that a request meets

    _add_openai(app, service)
    _add_vllm(app, service)
    _add_page_and_probes(app, is_ready, metrics)
    return app


def _add_openai(app: FastAPI, service: RouterService) -> None:
    async def chat_completions(request: Request) -> Response:
        body = await _body(request, ChatBody)
        return await _answer(service, request, body, [body.prompt()], is_chat=True)

    async def completions(request: Request) -> Response:
        body = await _body(request, CompletionBody)
        return await _answer(service, request, body, body.prompts(), is_chat=False)

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
    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model or "", service.facts)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("set either prompt or messages", "prompt")
        prompt: PromptInput = Text(body.prompt or "")
        if body.messages is not None:
            prompt = chat_of(body.messages)
        tokens = await service.tokenize(prompt, request.state.tenant)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        check_model(body.model or "", service.facts)
        if any(not 0 <= token < service.facts.vocab_size for token in body.tokens):
            raise InvalidRequest(f"tokens must be ids from 0 to {service.facts.vocab_size - 1}", "tokens")
        return {"prompt": service.model.tokenizer.decode_all(body.tokens)}


def _add_page_and_probes(app: FastAPI, is_ready: Callable[[], str], metrics: Callable[[], bytes]) -> None:
    @app.get("/")
    async def page() -> Response:
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health")  # vLLM's name, for which load generators ask
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        reason = is_ready()
        return JSONResponse({"status": reason or "ok"}, status_code=503 if reason else 200)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body, validated as FastAPI does it.

    Raises:
        RequestValidationError: it is no JSON, or not what is asked for.
        HTTPException: it is no text.
    """
    value: Any = await request.body()
    try:
        if value and _is_json(request.headers.get("content-type", "")):
            value = json.loads(value)
    except json.JSONDecodeError as error:
        raise RequestValidationError([{"loc": ("body", error.pos), "msg": "JSON decode error"}]) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
    if value == b"":
        raise RequestValidationError([{"loc": ("body",), "msg": "Field required"}])
    try:
        return kind.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    message = email.message.Message()
    message["content-type"] = content_type
    kind, _, subtype = message.get_content_type().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


async def _answer(
    service: RouterService,
    request: Request,
    body: ChatBody | CompletionBody,
    prompts: list[PromptInput],
    *,
    is_chat: bool,
) -> Response:
    if len(prompts) != 1:
        raise Unsupported("several prompts in one request are not supported yet; send them one by one", "prompt")
    request_id = body.request_id or f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    shape = Shape(
        id=request_id,
        created=int(time.time()),
        model=service.facts.id,
        is_chat=is_chat,
        continuous_usage=body.continuous_usage,
        tokenizer=service.model.tokenizer,
        echo=body.echoed(prompts[0], service.model.tokenizer) if isinstance(body, CompletionBody) else None,
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
    )
    address, port = request.scope.get("server") or ("", 0)
    ingress = Ingress(address, port or 0, bool(body.stream))
    trace = tracing.from_metadata(request.headers.items())
    chunks = service.generate(generate, trace, request.state.tenant, ingress)
    if not body.stream:
        return JSONResponse(await _unless_disconnected(request, _whole(chunks, shape)))
    # The first chunk is awaited here, so that a refusal still becomes a status code.
    first = await _unless_disconnected(request, anext(chunks))
    return _EventStream(_events(first, chunks, shape, body.include_usage))


async def _whole(chunks: AsyncGenerator[GenerateChunk], shape: Shape) -> dict[str, Any]:
    answers: dict[int, ChoiceAnswer] = {}
    usage, timing, prompt = Usage(0, 0, 0), Timing(), None
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            answer = answers.setdefault(chunk.choice_index, ChoiceAnswer())
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            answer.scores.append(chunk.scores)
            if chunk.finish_reason:
                answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
            usage, timing = chunk.usage or usage, chunk.timing or timing
            prompt = prompt or chunk.prompt_scores
    return shape.whole(dict(sorted(answers.items())), usage, timing, prompt)


async def _events(
    first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk], shape: Shape, include_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events, OpenAI's way. An error after the first token becomes an event: the status is long sent."""
    begun: dict[int, CompletionLogprobs] = {}
    usage, timing, prompt = None, Timing(), None
    async with contextlib.aclosing(chunks):
        try:
            chunk: GenerateChunk | None = first
            while chunk is not None:
                prompt = prompt or chunk.prompt_scores
                index, is_first = chunk.choice_index, chunk.choice_index not in begun
                if chunk.text or chunk.finish_reason or chunk.scores or is_first:
                    logprobs = begun.get(index) or begun.setdefault(index, CompletionLogprobs(shape.tokenizer))
                    yield _event(shape.chunk(index, chunk, is_first, logprobs, prompt))
                usage, timing = chunk.usage or usage, chunk.timing or timing
                chunk = await anext(chunks, None)
        except BatonError as error:
            yield _event(error_body(error))
            return
    if include_usage and usage is not None:
        yield _event(shape.usage_chunk(usage, timing))
    yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Closes its generator when the client leaves, at whatever point, so that the request ends everywhere at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
    """Awaits the answer, or cancels it when the client leaves first."""
    answering = asyncio.current_task()
    assert answering is not None
    num_cancelled, has_left = answering.cancelling(), False

    def leave(watching: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not watching.cancelled():
            has_left = True
            answering.cancel()

    watching = asyncio.create_task(_disconnected(request))
    watching.add_done_callback(leave)
    try:
        return await answer
    except asyncio.CancelledError:
        if has_left and answering.uncancel() <= num_cancelled:
            raise ClientDisconnect from None
        raise
    finally:
        watching.remove_done_callback(leave)
        await cancel_and_wait([watching])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _HttpAuthentication:
    """Identifies the tenant, in `request.state.tenant`, or refuses a request before its body is read."""

    def __init__(self, app: ASGIApp, tenants: TenantBook) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["tenant"] = self._tenants.identify(api_key_of(scope["headers"]))
            except Unauthenticated as error:
                response = await _on_baton_error(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyLimit:
    """Refuses bodies that are too long to be a request, before they are parsed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes; shorten the prompt")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"  # ASCII: some clients take U+2028 for the end of a line


def _model_card(service: RouterService) -> dict[str, Any]:
    card = service.model.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.max_model_len,
    }


class _JsonAnswer(JSONResponse):
    """ASCII only: what an error quotes may be no valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


async def _on_baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return _JsonAnswer(error_body(error), error.http, headers)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ""
    for part in first["loc"][first["loc"][:1] == ("body",) :]:
        param += f"[{part}]" if param and isinstance(part, int) else f"{'.' if param else ''}{part}"
    is_unknown = first.get("type") == "extra_forbidden"
    reason = "unknown field; remove it or correct its name" if is_unknown else first["msg"]
    return _JsonAnswer(error_body(InvalidRequest(f"{param or 'the body'}: {reason}", param or None)), 400)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
    return _JsonAnswer({"error": body}, error.status_code)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    """A defect of ours; uvicorn logs the traceback."""
    return _JsonAnswer(error_body(BatonError("internal error; the server's log says more")), 500)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
