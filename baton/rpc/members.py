"""Restriction of members' servers to callers whose certificate bears the members' name.

The authority may have signed others, too: a tenant's certificate opens the routers' endpoints, but not a worker's. A
call is rejected before its message is read.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from baton.errors import NotAMember
from baton.rpc.arrivals import streaming
from baton.rpc.errors import CallContext
from baton.tls import Tls, names_in_call


class MembersOnly(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls of Baton's services by clients other than members.

    Args:
        name: DNS name in the certificates of members.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/baton.v1."):
            return handler
        return streaming(handler, self._behind(handler.stream_stream or handler.stream_unary))

    def _behind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with a check of the caller's certificate, which is known only when the call starts."""

        async def answered(messages: Any, context: CallContext) -> Any:
            self._require_member(context)
            return await method(messages, context)

        async def streamed(messages: Any, context: CallContext) -> AsyncIterator[Any]:
            self._require_member(context)
            async for response in method(messages, context):
                yield response

        return streamed if inspect.isasyncgenfunction(method) else answered

    def _require_member(self, context: CallContext) -> None:
        if f"DNS:{self._name}" not in names_in_call(context.auth_context()):
            raise NotAMember(f"only members of the cluster may call this: a certificate of {self._name!r} is needed")


def members_only(tls: Tls | None) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors of a member's server: none if all use plain text."""
    return [MembersOnly(tls.name)] if tls is not None else []
