"""How an endpoint takes a body and answers with a stream, and what happens when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import json
import math
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from baton.api import Timing
from baton.errors import BatonError, NotRead
from baton.quota import Quota
from router.admission import check_request_id
from router.api.delivery import ReadAhead, deliver
from router.api.filling import HTTP, AnswerFilling
from router.api.unserved import is_anthropics

MAX_BODY_BYTES = 8 * 2**20
"""Longest body of a request over HTTP."""
REQUEST_ID = "x-request-id"
AnyBody = TypeVar("AnyBody", bound=BaseModel)
T = TypeVar("T")


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body, validated as FastAPI does it.

    Raises:
        RequestValidationError: it is no JSON, or not what is asked for.
        HTTPException: it is no text.
        InvalidRequest: it has too many parts.
        Overloaded: see `BodyParser.parse`.
    """
    value: Any = await request.body()
    try:
        if value and _is_json(request.headers.get("content-type", "")):
            value = await request.app.state.parser.parse(value, request.state.tenant.id)
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


def named(request: Request, own: str | None, prefix: str) -> str:
    """Returns the id of a request: the one that its body has, else one made of its header x-request-id, else a new one.

    Args:
        prefix: what an id begins with that the body does not have.

    Raises:
        InvalidRequest: see `check_request_id`.
    """
    given = request.headers.get(REQUEST_ID)
    request_id = own or f"{prefix}{given or uuid.uuid4().hex}"
    check_request_id(request_id)
    request.state.request_id = given or request_id
    return request_id


def id_headers(request: Request) -> dict[str, str]:
    """The header x-request-id of an answer: as the request has it, else the request's id, if it has got that far.

    Anthropic's clients look for it under another name.
    """
    found = request.scope.get("state", {}).get("request_id") or request.headers.get(REQUEST_ID)
    names = (REQUEST_ID, "request-id") if is_anthropics(request.scope["path"]) else (REQUEST_ID,)
    return dict.fromkeys(names, found) if found else {}


def limit_headers(quota: Quota | None) -> dict[str, str]:
    """The headers x-ratelimit-* of an answer, as OpenAI has them; empty where a tenant has no limits."""
    headers = {}
    if quota is not None:
        for what, rate in (("requests", quota.requests), ("tokens", quota.tokens)):
            if rate is not None:
                headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
                headers[f"x-ratelimit-reset-{what}"] = duration(rate.reset_s)
    return headers


def timing_headers(timing: Timing | None) -> dict[str, str]:
    """The header Server-Timing of a whole answer, in milliseconds, with the stages that took any time; none where no
    times are known.
    """
    if timing is None:
        return {}
    seconds = {"total": timing.total_s, "first_token": timing.ttft_s} | {
        name: spent_s
        for name, spent_s in (
            ("queue", timing.queue_s),
            ("decode_admission", timing.admission_s),
            ("prefill", timing.prefill_s),
            ("transfer", timing.transfer_s),
            ("decode", timing.decode_s),
            ("recovery", timing.recovery_s),
        )
        if spent_s
    }
    return {"Server-Timing": ", ".join(f"{name};dur={each * 1e3:.1f}" for name, each in seconds.items())}


def duration(seconds: float) -> str:
    """Returns a time as OpenAI's headers have it: 250ms, 7.66s, 6m0s, 1h2m0s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


class JsonAnswer(JSONResponse):
    """Writes its value as `ascii_json` does."""

    def render(self, content: Any) -> bytes:
        return ascii_json(content)


class EventStream(StreamingResponse):
    """A stream of events, each written as it comes.

    Closes its generator when the client leaves, at whatever point, so that the request ends everywhere at once.

    Args:
        broken: returns the event that comes last where the client has not read for too long.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        ahead: ReadAhead,
        broken: Callable[[BatonError], bytes],
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", **headers})
        self._events = events
        self._ahead = ahead
        self._broken = broken

    async def stream_response(self, send: Send) -> None:
        padding = AnswerFilling(HTTP, self._ahead.is_crowded)

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def fill(data: bytes) -> None:
            await write(comment(padding.of_next(len(data))) + data)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await deliver(self._events, fill, size=sys.getsizeof, ahead=self._ahead)
        except NotRead as error:
            await write(self._broken(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
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
        watching.cancel()  # not awaited: it holds nothing, and its end would cost as much as its beginning


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event of one JSON value, with a name or without."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, ascii_json(body))


def comment(num_bytes: int) -> bytes:
    """A comment in a stream of events, which clients pass over; none of no bytes."""
    return b":%b\n" % (b" " * num_bytes) if num_bytes else b""


def ascii_json(value: Any) -> bytes:
    """Writes a value as JSON in ASCII: some clients take U+2028 for the end of a line, and what an answer quotes of a
    request may be no valid Unicode.
    """
    try:
        return to_json(value, ensure_ascii=True)
    except ValueError:  # half of a surrogate pair, which only the slower one writes
        return json.dumps(value).encode()
