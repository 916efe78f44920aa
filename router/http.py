"""The HTTP door: OpenAI's API over the router's service, with OpenAI's shapes and error bodies.

A thin client of the same path that gRPC takes. Fields that are part of OpenAI's API and not built yet are refused with
501 naming them, unless they ask for what happens anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api import Chat, ChatMessage, GenerateChunk, GenerateRequest, Prompt, Text, TokenIds, Usage
from baton.errors import BatonError, InvalidRequest, Overloaded, Unsupported
from baton.telemetry import tracing
from router.admission import check_model
from router.service import RouterService

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
MAX_BODY_BYTES = 8 * 2**20
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True, False), "audio": (), "best_of": (1,), "detokenize": (True,), "echo": (False,),
    "frequency_penalty": (0,), "function_call": ("none",), "functions": ([],), "logit_bias": ({},),
    "length_penalty": (1,), "logprobs": (False,), "max_logprobs": (), "min_tokens": (0,), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,), "priority": (0,),
    "reasoning_effort": (), "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "use_beam_search": (False,),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
"""OpenAI's and vLLM's fields that are not built yet -> the values that ask for nothing. null always does."""
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user",
}  # fmt: skip
"""Fields that do not change an answer."""


class _Body(BaseModel):
    """What /v1/chat/completions and /v1/completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, by our names."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise InvalidRequest(f"unknown field {name!r}; remove it or correct its name", name)
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                raise Unsupported(f"{name} is not supported yet; leave it out", name)
        for name, value in (self.stream_options or {}).items():
            if name not in ("include_usage", "include_obfuscation") and value:
                raise Unsupported(f"stream_options.{name} is not supported yet; leave it out", "stream_options")
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop:
            asked["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            asked["stop_token_ids"] = tuple(self.stop_token_ids)
        return asked

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None

    def prompt(self) -> Prompt:
        return Chat(tuple(_chat_message(message, index) for index, message in enumerate(self.messages)))

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        return asked


class CompletionBody(_Body):
    prompt: str | list[Any]

    def prompts(self) -> list[Prompt]:
        """One text, a list of texts, one list of token ids, or a list of such lists."""
        if isinstance(self.prompt, str):
            return [Text(self.prompt)]
        if self.prompt and all(isinstance(item, str) for item in self.prompt):
            return [Text(item) for item in self.prompt]
        if all(_is_token_id(item) for item in self.prompt):
            return [TokenIds(tuple(self.prompt))]
        if all(isinstance(item, list) and all(_is_token_id(i) for i in item) for item in self.prompt):
            return [TokenIds(tuple(item)) for item in self.prompt]
        raise InvalidRequest("prompt must be a string, a list of strings, or lists of token ids", "prompt")

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_COMPLETION_TOKENS, **super().sampling()}


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one of the two endpoints writes an answer."""

    id: str
    created: int
    model: str
    is_chat: bool

    def whole(self, choices: Mapping[int, _Answer], usage: Usage) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [self._choice(i, a) for i, a in choices.items()], "usage": _usage(usage)}

    def chunk(self, index: int, chunk: GenerateChunk, is_first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": chunk.finish_reason, "logprobs": None}
        if self.is_chat:
            choice["delta"] = {**({"role": "assistant"} if is_first else {}), "content": chunk.text}
        else:
            choice["text"] = chunk.text
        return {**self._head("chat.completion.chunk" if self.is_chat else "text_completion"), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": _usage(usage)}

    def _choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Answer:
    text: str = ""
    finish_reason: str | None = None


def create_app(service: RouterService, is_ready: Callable[[], str], metrics: Callable[[], bytes]) -> FastAPI:
    """The HTTP application.

    Args:
        is_ready: "" when requests can be served, else the reason why not.
        metrics: the Prometheus text.
    """
    app = FastAPI(title="Baton", openapi_url=None)
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    app.add_middleware(_BodyLimit)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await _answer(service, request, body, [body.prompt()], is_chat=True)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(service, request, body, body.prompts(), is_chat=False)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        check_model(model, service.facts)
        return _model_card(service)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model or "", service.facts)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("set either prompt or messages", "prompt")
        prompt: Prompt = Text(body.prompt or "")
        if body.messages is not None:
            prompt = Chat(tuple(_chat_message(message, index) for index, message in enumerate(body.messages)))
        tokens = await service.tokenize(prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        check_model(body.model or "", service.facts)
        if any(not 0 <= token < service.facts.vocab_size for token in body.tokens):
            raise InvalidRequest(f"tokens must be ids from 0 to {service.facts.vocab_size - 1}", "tokens")
        return {"prompt": service.model.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        reason = is_ready()
        return JSONResponse({"status": reason or "ok"}, status_code=503 if reason else 200)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _answer(
    service: RouterService, request: Request, body: ChatBody | CompletionBody, prompts: list[Prompt], *, is_chat: bool
) -> Response:
    if len(prompts) != 1:
        raise Unsupported("several prompts in one request are not supported yet; send them one by one", "prompt")
    kind = "chatcmpl" if is_chat else "cmpl"
    request_id = body.request_id or f"{kind}-{uuid.uuid4().hex}"
    shape = _Shape(request_id, int(time.time()), service.facts.id, is_chat)
    generate = GenerateRequest(prompts[0], request_id, body.model or "", body.sampling())
    chunks = service.generate(generate, tracing.from_metadata(request.headers.items()))
    if not body.stream:
        return JSONResponse(await _unless_disconnected(request, _whole(chunks, shape)))
    # The first chunk is awaited here, so that a refusal still becomes a status code.
    first = await _unless_disconnected(request, anext(chunks))
    return _EventStream(_events(first, chunks, shape, body.include_usage))


async def _whole(chunks: AsyncGenerator[GenerateChunk], shape: _Shape) -> dict[str, Any]:
    answers: dict[int, _Answer] = {}
    usage = Usage(0, 0, 0)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            answer = answers.setdefault(chunk.choice_index, _Answer())
            answer.text += chunk.text
            answer.finish_reason = chunk.finish_reason or answer.finish_reason
            usage = chunk.usage or usage
    return shape.whole(dict(sorted(answers.items())), usage)


async def _events(
    first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk], shape: _Shape, include_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events, OpenAI's way. An error after the first token becomes an event: the status is long sent."""
    begun: set[int] = set()
    usage = None
    async with contextlib.aclosing(chunks):
        try:
            chunk: GenerateChunk | None = first
            while chunk is not None:
                if chunk.text or chunk.finish_reason or chunk.choice_index not in begun:
                    yield _event(shape.chunk(chunk.choice_index, chunk, chunk.choice_index not in begun))
                    begun.add(chunk.choice_index)
                usage = chunk.usage or usage
                chunk = await anext(chunks, None)
        except BatonError as error:
            yield _event(_error_body(error))
            return
    if include_usage and usage is not None:
        yield _event(shape.usage_chunk(usage))
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
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _chat_message(message: Mapping[str, Any], index: int) -> ChatMessage:
    """A message of text; parts of text are joined, as `router.text.chat` joins them."""
    where = f"messages[{index}]"
    for name in set(message) - {"role", "content", "name", "refusal"}:
        if message[name]:
            raise Unsupported(f"{where}.{name!a} is not supported yet; leave it out", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, where) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise InvalidRequest(f"{where} must have a role and content, both strings", where)
    return ChatMessage(message["role"], content)


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unsupported(f"{where}.content may hold text parts only", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.content holds a part whose text is not a string", where)
    text: str = part["text"]
    return text


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality that tells False from 0: `logprobs: 0` asks for the chosen token's."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


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


def _is_token_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"  # ASCII: some clients take U+2028 for the end of a line


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _model_card(service: RouterService) -> dict[str, Any]:
    card = service.model.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.max_model_len,
    }


def _error_body(error: BatonError) -> dict[str, Any]:
    kind = "invalid_request_error" if isinstance(error, (InvalidRequest, Unsupported)) else "server_error"
    if isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": type(error).__name__}}


class _Json(JSONResponse):
    """ASCII only: what an error quotes may be no valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


async def _on_baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unsupported):
        headers["x-should-retry"] = "false"  # the openai package retries every other 5xx
    return _Json(_error_body(error), error.http, headers)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")
    return _Json(_error_body(InvalidRequest(f"{param or 'the body'}: {first['msg']}", param or None)), 400)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
    return _Json({"error": body}, error.status_code)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    """A defect of ours; uvicorn logs the traceback."""
    return _Json(_error_body(BatonError("internal error; the server's log says more")), 500)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
