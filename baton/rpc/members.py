"""Members' servers take calls of members alone: of those whose certificate bears the members' name.

The authority may have signed others, too: a tenant's certificate opens the routers' doors, and no worker's.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from baton.errors import NotAMember
from baton.rpc.errors import CallContext
from baton.tls import Tls, names_in_call


class MembersOnly(grpc.aio.ServerInterceptor):
    """Refuses calls of Baton's own services by others than members.

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
        if not handler.response_streaming:
            make, method = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.request_streaming:
            make, method = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        else:
            make, method = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        return make(self._behind(method), handler.request_deserializer, handler.response_serializer)

    def _behind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, behind a look at the caller's certificate, which is known only when the call begins."""

        async def answered(request: Any, context: CallContext) -> Any:
            self._require_member(context)
            return await method(request, context)

        async def streamed(request: Any, context: CallContext) -> AsyncIterator[Any]:
            self._require_member(context)
            async for response in method(request, context):
                yield response

        return streamed if inspect.isasyncgenfunction(method) else answered

    def _require_member(self, context: CallContext) -> None:
        if f"DNS:{self._name}" not in names_in_call(context.auth_context()):
            raise NotAMember(f"only members of the cluster may call this: a certificate of {self._name!r} is needed")


def members_only(tls: Tls | None) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors of a member's server: none where all speak plain text."""
    return [MembersOnly(tls.name)] if tls is not None else []
