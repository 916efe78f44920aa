"""CORS headers: without them a browser hides responses from the pages of other websites.

`router.cors_origins` lists the websites. Paths below /api are for operators, and never get these headers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

EXPOSED = (
    "x-request-id", "request-id", "retry-after", "server-timing", "x-baton-ignored", "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens", "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens",
)  # fmt: skip
"""Headers of a response that a page may read."""
METHODS = "GET, HEAD, POST, OPTIONS"
KEPT_S = 600
"""Time for which a browser may cache a preflight, in seconds."""
LONGEST_ASKED = 2048
"""Maximum length of `Access-Control-Request-Headers`, in characters."""
FOR_OPERATORS = "/api/"
"""Prefix of the paths that reveal something about the cluster, and are for operators."""


class Origins:
    """Middleware that adds CORS headers for allowed origins, and answers their preflight requests.

    Args:
        allowed: origins such as https://chat.example; * stands for anything.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = tuple(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_public = scope["type"] == "http" and not scope["path"].startswith(FOR_OPERATORS)
        headers = Headers(scope=scope) if is_public else None
        origin = headers.get("origin", "") if headers is not None else ""
        if headers is None or not any(fnmatch.fnmatchcase(origin, each) for each in self._allowed if origin):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            asked = headers.get("access-control-request-headers", "")
            allowed = {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": asked if len(asked) <= LONGEST_ASKED and asked.isprintable() else "",
                "Access-Control-Max-Age": str(KEPT_S),
            }
            await Response(status_code=204, headers=allowed)(scope, receive, partial(_send, send, origin))
        else:
            await self._app(scope, receive, partial(_send, send, origin))


async def _send(send: Send, origin: str, message: Message) -> None:
    if message["type"] == "http.response.start":
        headers = MutableHeaders(scope=message)
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = ", ".join(EXPOSED)
        headers.add_vary_header("Origin")
    await send(message)
