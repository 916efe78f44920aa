"""Routes of endpoints that take a body, and middleware for all paths.

The middleware answers OPTIONS, and HEAD for paths with GET, and adds the header x-request-id. Responses to POST set
their id themselves, so it skips them and does not slow down streams.

An endpoint declares its body as a `Reader`. FastAPI describes it in the OpenAPI document, and `read_body` reads it:

    @app.post("/v1/orders")
    async def order(request: Request, read: Reader[OrderBody]) -> Response:
        body = await read()
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import Match, request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.exchange import REQUEST_ID, id_of, read_body

if TYPE_CHECKING:
    AnyBody = TypeVar("AnyBody", bound=BaseModel)
    Reader = Callable[[], Awaitable[AnyBody]]
else:

    class Reader:
        """Stands for `Reader` when FastAPI evaluates the annotation `Reader[Body]`, and gives it the body."""

        def __class_getitem__(cls, body: type[BaseModel]) -> type[BaseModel]:
            return body


QUICK = 5
"""Compression level; higher levels take longer and gain little."""
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Description of answers that may be streams: in OpenAPI 3.1 the schema of a stream describes one event."""


class Methods:
    """Middleware that answers HEAD as GET without the body, and OPTIONS with the methods of the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "POST" and not scope["path"].endswith("/")):
            await self._app(scope, receive, send)
            return
        send = partial(_named, send, id_of(Request(scope)))
        if scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, partial(_without_body, send))
        elif scope["method"] == "OPTIONS" and (methods := methods_of(scope)):
            await Response(status_code=204, headers={"Allow": ", ".join(methods)})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def methods_of(scope: Scope) -> list[str]:
    """Return the methods of a request's path; empty: the path does not exist."""
    found: set[str] = set()
    for route in scope["app"].router.routes:
        if route.matches({**scope, "method": "GET"})[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    if "GET" in found:
        found.add("HEAD")
    return sorted({*found, "OPTIONS"}) if found else []


async def _named(send: Send, request_id: str, message: Message) -> None:
    if message["type"] == "http.response.start":
        MutableHeaders(scope=message).setdefault(REQUEST_ID, request_id)
    await send(message)


async def _without_body(send: Send, message: Message) -> None:
    await send({**message, "body": b""} if message["type"] == "http.response.body" else message)


class LongText:
    """Text that many clients request, compressed at most once."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    @cached_property
    def gzipped(self) -> bytes:
        """The compressed text."""
        return gzip.compress(self.text, QUICK, mtime=0)

    def answer(self, request: Request, media_type: str) -> Response:
        """Return a response with the text, compressed if the client accepts gzip."""
        asked = request.headers.get("accept-encoding", "")
        if not any(_takes_gzip(each) for each in asked.split(",")):
            return Response(self.text, media_type=media_type, headers={"Vary": "Accept-Encoding"})
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(self.gzipped, media_type=media_type, headers=headers)


def _takes_gzip(coding: str) -> bool:
    name, _, weight = coding.partition(";")
    return name.strip().lower() == "gzip" and weight.replace(" ", "").rstrip("0.") != "q="


def answers(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the description of answers with this JSON schema."""
    return {200: {"content": {"application/json": {"schema": schema}}}}


class BodyRoute(APIRoute):
    """Route that calls its endpoint with the request, the `Reader` of its body and the names in its path.

    FastAPI's own route would read the body without bounds. If the reader were a dependency, HTTP would cost a fifth
    more processor time for each request.
    """

    body: type[BaseModel] | None = None
    """The model of the body, if the endpoint takes one."""

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field is None:
            return
        kind: Any = self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            return await endpoint(request, functools.partial(read_body, request, kind), **request.path_params)

        self.body, self.app = kind, request_response(handle)
