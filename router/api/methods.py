"""What every path answers to: OPTIONS, HEAD where there is GET, and the header x-request-id of answers without a body.

Answers to POST have their id already, so that streams are not slowed down.
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
"""The level of compression: a higher one takes longer, and gains little."""


class Methods:
    """Answers HEAD as GET without its body, and OPTIONS with the methods of the path."""

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
    """The methods of a request's path; none: there is no such path."""
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
    """A text that many ask for, and that is compressed once at most."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    @cached_property
    def gzipped(self) -> bytes:
        """The text, compressed."""
        return gzip.compress(self.text, QUICK, mtime=0)

    def answer(self, request: Request, media_type: str) -> Response:
        """The answer with the text, compressed if the client asks for that."""
        asked = request.headers.get("accept-encoding", "")
        if not any(_takes_gzip(each) for each in asked.split(",")):
            return Response(self.text, media_type=media_type, headers={"Vary": "Accept-Encoding"})
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(self.gzipped, media_type=media_type, headers=headers)


def _takes_gzip(coding: str) -> bool:
    name, _, weight = coding.partition(";")
    return name.strip().lower() == "gzip" and weight.replace(" ", "").rstrip("0.") != "q="
