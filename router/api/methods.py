"""Middleware for all paths: OPTIONS, HEAD for paths with GET, and the header x-request-id.

Responses to POST set their id themselves, so this middleware skips them and does not slow down streams.
"""

from __future__ import annotations

import gzip
from functools import cached_property, partial

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.exchange import REQUEST_ID, id_of

QUICK = 5
"""Compression level; higher levels take longer and gain little."""


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
