"""Reads the body of a request, writes JSON and event streams, and handles clients that disconnect."""

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
from baton.errors import BatonError, InvalidRequest, NotRead
from baton.quota import Quota
from router.admission import MAX_REQUEST_ID, check_request_id
from router.api.delivery import HTTP, AnswerPadding, ReadAhead, deliver
from router.api.fields import MAX_READINGS, DeclaredBody, Ignored, without_ignored
from router.api.parsing import BodyParser, PacedWork, PartCount
from router.api.unserved import is_anthropics

MAX_BODY_BYTES = 8 * 2**20
"""Maximum length of a body over HTTP."""
REQUEST_ID = "x-request-id"
AnyBody = TypeVar("AnyBody", bound=BaseModel)
T = TypeVar("T")


def ignored_of(request: Request) -> Ignored:
    """Return the record of the body's ignored fields so far; a header of the response names them."""
    found: Ignored | None = request.scope["state"].get("ignored")
    if found is None:
        own: bool | None = request.state.tenant.strict
        found = request.scope["state"]["ignored"] = Ignored(request.app.state.is_strict if own is None else own)
    return found


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Return the body, validated as FastAPI does it. The raw bytes are dropped after parsing.

    Raises:
        RequestValidationError: the body is empty, or does not match the model.
        HTTPException: the content type is not JSON, the body is too long, or it has a content encoding.
        InvalidRequest: the body is not JSON, has too many parts, or has an unknown field.
        Unsupported: the body has a field that is refused.
        Overloaded: see `BodyParser.parse`.
    """
    ignored = ignored_of(request)

    def validated(value: Any) -> AnyBody:
        return _validated(value, kind, ignored)

    body, parts = await _received(request)
    try:
        if not body:
            raise RequestValidationError([{"loc": ("body",), "msg": "Field required"}])
        if not _is_json(given := request.headers.get("content-type", "")):
            # Browsers send other content types to any address without a CORS preflight.
            raise HTTPException(415, f"the content type of a body must be application/json, got {given[:80]!a}")
        parser: BodyParser = request.app.state.parser
        parsing = parser.parse(body, parts, request.state.tenant.id, validated)
        del body
        return await parsing
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON, at character {error.pos}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON in UTF-8, or nested too deeply") from error


@contextlib.asynccontextmanager
async def at_a_reports_turn(request: Request) -> AsyncGenerator[None]:
    """Context manager: waits for the turn to write a report of the router, which takes milliseconds.

    Raises:
        Overloaded: too many reports wait, in total or for this client.
    """
    reports: PacedWork = request.app.state.reports
    async with reports.turn(request.client.host if request.client else "", 1), reports.piece():
        yield


def _validated(value: Any, kind: type[AnyBody], ignored: Ignored) -> AnyBody:
    """Return the validated body. Fields that make it invalid but would have no effect are removed from `value`.

    Raises:
        InvalidRequest: the value is not an object; see `DeclaredBody.check_fields` too.
        ValidationError: the value does not match the model.
    """
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    for _ in range(MAX_READINGS):
        try:
            body = kind.model_validate(value, from_attributes=True, context=ignored)
            break
        except ValidationError as error:
            if not without_ignored(value, error, ignored):
                raise
    else:
        body = kind.model_validate(value, from_attributes=True, context=ignored)
    if isinstance(body, DeclaredBody):
        body.check_fields(ignored)
    return body


async def _received(request: Request) -> tuple[bytes, PartCount]:
    """Receive a body, and return its bytes and the counts of its parts.

    A body that is too long or has too many parts is refused while it comes in. A Content-Length that is too large is
    refused before that.
    """
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise HTTPException(415, f"the content encoding {encoding[:40]!a} is not supported; send the body unencoded")
    pieces, num_bytes, parts = list[bytes](), 0, PartCount()
    _check_length(int(request.headers.get("content-length", 0)))
    async for piece in request.stream():
        num_bytes += len(piece)
        _check_length(num_bytes)
        parts.add(piece)
        pieces.append(piece)
    return b"".join(pieces), parts


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise HTTPException(
            413, f"the body is longer than {MAX_BODY_BYTES} bytes; shorten the prompt, or send smaller images"
        )


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    message = email.message.Message()
    message["content-type"] = content_type
    kind, _, subtype = message.get_content_type().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def named(request: Request, own: str | None, prefix: str) -> str:
    """Return the id of a request: the id in its body, else one made from its header x-request-id, else a new one.

    The response echoes the header. If prefix and header together are too long for an id, the id omits the header.

    Args:
        own: the id in the body, if any.
        prefix: start of an id that does not come from the body.

    Raises:
        InvalidRequest: the body's id is not valid, see `check_request_id`.
    """
    given = id_of(request) if REQUEST_ID in request.headers else ""
    fits = given and len(prefix) + len(given) <= MAX_REQUEST_ID
    request_id = own or f"{prefix}{given if fits else uuid.uuid4().hex}"
    check_request_id(request_id)
    request.state.request_id = given or request_id
    return request_id


def id_of(request: Request) -> str:
    """Return the x-request-id of a response: the request's header, else the request's id, else a new id."""
    state = request.scope.setdefault("state", {})
    found: str | None = state.get("request_id")
    if found is None:
        given = request.headers.get(REQUEST_ID, "")
        is_fit = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
        found = state["request_id"] = given if is_fit else f"req-{uuid.uuid4().hex}"
    return found


def id_headers(request: Request) -> dict[str, str]:
    """Return the headers x-request-id and, if fields of the body were ignored, x-baton-ignored.

    Anthropic's clients read the id from the header request-id, so their endpoints get that too.
    """
    headers = {REQUEST_ID: id_of(request)}
    if is_anthropics(request.scope["path"]):
        headers["request-id"] = headers[REQUEST_ID]
    ignored: Ignored | None = request.scope["state"].get("ignored")
    return headers | ignored.headers() if ignored is not None else headers


def limit_headers(quota: Quota | None) -> dict[str, str]:
    """Return OpenAI's headers x-ratelimit-*; empty if the tenant has no limits."""
    headers = {}
    if quota is not None:
        for what, rate in (("requests", quota.requests), ("tokens", quota.tokens)):
            if rate is not None:
                headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
                headers[f"x-ratelimit-reset-{what}"] = duration(rate.reset_s)
    return headers


def timing_headers(timing: Timing | None) -> dict[str, str]:
    """Return the header Server-Timing of a whole answer; empty if no times are known.

    Its times are in milliseconds. Stages that took no time are omitted.
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
    """Return a duration in the format of OpenAI's headers: 250ms, 7.66s, 6m0s, 1h2m0s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


class JsonAnswer(JSONResponse):
    """JSON response that is written by `ascii_json`."""

    def render(self, content: Any) -> bytes:
        return ascii_json(content)


class EventStream(StreamingResponse):
    """Response with a stream of events, each written as it comes.

    The generator is closed as soon as the client disconnects, so that the request ends everywhere at once.

    Args:
        broken: returns the last event of a stream whose client has not read for too long.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        ahead: ReadAhead,
        broken: Callable[[BatonError], bytes],
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._events = events
        self._ahead = ahead
        self._broken = broken

    async def stream_response(self, send: Send) -> None:
        padding = AnswerPadding(HTTP, self._ahead.is_crowded)

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
    """Await the answer; cancel it and raise ClientDisconnect if the client disconnects first."""
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
        watching.cancel()  # not awaited: it holds nothing, and waiting for it would cost as much as starting it


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event with one JSON value, and with a name if one is given."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, ascii_json(body))


def comment(num_bytes: int) -> bytes:
    """Return a comment for a stream of events, which clients skip; empty if `num_bytes` is 0."""
    return b":%b\n" % (b" " * num_bytes) if num_bytes else b""


WAITING = b": wait\n\n"
"""Comment that shows that a stream is still waiting."""


def ascii_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII.

    Some clients take U+2028 for the end of a line, and text that a response quotes from a request may be invalid
    Unicode.
    """
    try:
        return to_json(value, ensure_ascii=True)
    except ValueError:  # half of a surrogate pair, which only the slower encoder can write
        return json.dumps(value).encode()
