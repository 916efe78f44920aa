"""Protection from the pages of websites: a check of the Host header against DNS rebinding, and CORS headers.

A browser lets the pages of a website send requests to that website's host, and the website chooses the address of its
name: perhaps that of a router on a laptop, which needs no key. Such a request differs from others in its Host header.
IP addresses, names of one word and the router's own names cannot be a website's, so they are always answered.

If `router.allowed_hosts` lists names, the router answers those alone. If it lists none, all names are answered, except
for requests that need no key and come over loopback: those can come from a browser, but not from an Ingress or a load
balancer.

Without CORS headers a browser hides responses from the pages of other websites. `router.cors_origins` lists those that
may read them. Paths below /api are for operators, and never get these headers.
"""

from __future__ import annotations

import fnmatch
import functools
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.config import Config

_HOST = re.compile(r"(?P<name>[a-z0-9._-]*[a-z0-9_-]|\[[0-9a-f:.]*\]|)\.?(:[0-9]*)?")
"""Pattern of a Host header: a name or an address, and an optional port. Other values are ambiguous."""
LONGEST_ADDRESS = len("[ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255]")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of one HTTP server."""

    own: frozenset[str] = frozenset()
    """Names of this router and its machine."""
    allowed: tuple[str, ...] = ()
    """`router.allowed_hosts`: further names, in which * stands for anything."""
    needs_key: bool = False
    """Whether requests need a key, which a website does not have."""

    @staticmethod
    def configured(config: Config, needs_key: bool) -> Hosts:
        """Return the hosts from the settings and the names of this machine."""
        own = {config.cluster.host, config.cluster.advertise_host, socket.gethostname()} - {""}
        allowed = tuple(map(str.lower, config.router.allowed_hosts))
        return Hosts(own=frozenset(map(str.lower, own)), allowed=allowed, needs_key=needs_key)

    def refused(self, scope: Scope) -> str | None:
        """Return the host of a request that must be refused; None: the request may be answered."""
        if not (self.allowed or (not self.needs_key and _is_local(scope))):
            return None
        for named in (value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == b"host"):
            host = _HOST.fullmatch(named)
            if host is None or not self._knows(host["name"]):
                return named if host is None else host["name"]
        return None

    def _knows(self, name: str) -> bool:
        is_nobodys = "." not in name or name.endswith(".localhost")
        if not is_nobodys and len(name) <= LONGEST_ADDRESS:
            is_nobodys = _address(name) is not None
        return is_nobodys or name in self.own or any(fnmatch.fnmatchcase(name, each) for each in self.allowed)


ANY = Hosts(needs_key=True)
"""Accepts every host."""


def _is_local(scope: Scope) -> bool:
    """Return whether a request came over loopback."""
    host, _ = scope.get("server") or ("", None)
    address = _address(host)
    return address is not None and address.is_loopback


@functools.lru_cache(maxsize=256)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


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
