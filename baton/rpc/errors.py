"""Typed errors across gRPC: one interceptor for the server, one function for the client.

The error's kind is sent in the trailing metadata `baton-error`, so that Baton's processes raise the same error again;
other clients see the status code and the message. A worker's calls share a stream, so their errors are sent in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc

from baton import wire
from baton.errors import BatonError, InvalidRequest, WorkerFailed, error_of, kind_of
from baton.messages import Failed

ERROR_KEY = "baton-error"
RETRY_AFTER_KEY = "retry-after"
USUAL_RETRY_S = 1.0
"""Seconds after which a call is tried again if the peer says nothing else."""
MAX_MESSAGE_CHARACTERS = 1024
CLIENTS_METHODS = ("/baton.v1.Inference/", "/baton.v1.Admin/")
CallContext = grpc.aio.ServicerContext[Any, Any]
Error = TypeVar("Error", bound=Exception)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MalformedCount:
    """Number of messages received by a server that are not valid protobuf."""

    total: int = 0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that maps every `BatonError` raised by a handler to its status code.

    It rejects an unreadable message, and a client's message with an unknown field, before the handler sees it. Every
    handler behind it takes a stream of messages, as `baton.rpc.arrivals` returns them.

    Args:
        malformed: counts messages that cannot be read.
    """

    def __init__(self, malformed: MalformedCount) -> None:
        self._malformed = malformed
        self._guarded_handlers: dict[str, tuple[Any, Any]] = {}
        """Latest handler of each method, and its replacement.

        The handler is the same for all calls but those that present a certificate.
        """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:  # without one it rejects every message
            return handler and _guarded(handler, None)
        known = self._guarded_handlers.get(details.method)
        if known is None or known[0] is not handler:
            known = self._guarded_handlers[details.method] = handler, self._reading(handler, details.method)
        return known[1]

    def _reading(self, handler: Any, method: str) -> Any:
        read = wire.readable(handler.request_deserializer)
        if method.startswith(CLIENTS_METHODS):
            read = _clients(read)
        # An error of this reader is raised when the next message is read.
        return _guarded(handler, lambda raw: self._checked(read(raw)))

    def _checked(self, message: Any) -> Any:
        if isinstance(message, wire.Unreadable):
            self._malformed.total += 1
            raise InvalidRequest(f"the message is not in protobuf's form: {message.reason}")
        return message


def _guarded(handler: Any, read: Callable[[bytes], Any] | None) -> Any:
    if handler.response_streaming:
        method, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    else:
        method, make = handler.stream_unary, grpc.stream_unary_rpc_method_handler
    # A handler that writes to the context instead of yielding is guarded like one with one response.
    guard = _guard_stream if inspect.isasyncgenfunction(method) else _guard_unary
    return make(guard(method), read, handler.response_serializer)


def _clients(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return the reader of a client's messages, which raises the error with which a message is rejected."""
    descriptor = read(b"").DESCRIPTOR

    def read_known(raw: bytes) -> Any:
        wire.check_num_fields(raw, descriptor)
        message = read(raw)
        if not isinstance(message, wire.Unreadable):
            wire.check_known(message)
        return message

    return read_known


def _guard_unary(method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    async def guarded(messages: Any, context: CallContext) -> Any:
        try:
            return await method(messages, context)
        except BatonError as error:
            await abort(context, _alone(error))
        except Exception as error:
            await _abort_unexpected(context, error)

    return guarded


def _guard_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(messages: Any, context: CallContext) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(method(messages, context)) as responses:
                async for response in responses:
                    yield response
        except BatonError as error:
            await abort(context, _alone(error))
        except Exception as error:
            await _abort_unexpected(context, error)

    return guarded


def _alone(error: Error) -> Error:
    """Return the error without the frames in which it and its causes were raised, and without the frames' objects.

    gRPC keeps the error that ends a call until garbage is collected.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


async def _abort_unexpected(context: CallContext, error: Exception) -> NoReturn:
    """End the call after an internal defect: the log gets the traceback, the client one sentence."""
    if isinstance(error, (grpc.aio.AbortError, grpc.RpcError)):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # gRPC's error if a client has left before a write
        raise asyncio.CancelledError from error
    logger.exception("a call failed unexpectedly")
    _alone(error)
    await abort(context, BatonError("internal error; the server's log says more"))


async def abort(context: CallContext, error: BatonError) -> NoReturn:
    """End the call with the error's status.

    Raises:
        CancelledError: the client has left in the meantime; gRPC would log that as a defect.
    """
    metadata = [(ERROR_KEY, kind_of(error))]
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    # Longer texts break grpc's limit on trailers, and the client would see that error instead.
    try:
        await context.abort(grpc.StatusCode[error.status], str(error)[:MAX_MESSAGE_CHARACTERS], tuple(metadata))
    except grpc.aio.InternalError as left:
        raise asyncio.CancelledError from left
    raise AssertionError("abort raises")


def refusal(error: BatonError) -> Any:
    """Return a handler that reads no message and ends the call with the error."""

    async def refuse(_: Any, context: CallContext) -> NoReturn:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def from_rpc_error(error: grpc.RpcError, peer: str) -> BatonError:
    """Return the typed error that `peer` raised, or `WorkerFailed` if the call itself broke."""
    trailers: Any = error.trailing_metadata() or ()
    metadata = dict(trailers)
    details = error.details() or error.code().name
    if ERROR_KEY not in metadata:
        return WorkerFailed(f"{peer} broke off: {error.code().name}: {details}")
    try:
        retry_after_s = float(metadata.get(RETRY_AFTER_KEY, USUAL_RETRY_S))
    except ValueError:
        retry_after_s = USUAL_RETRY_S
    return from_failed(Failed(str(metadata[ERROR_KEY]), details, retry_after_s), peer)


def is_lost(error: grpc.RpcError) -> bool:
    """Return whether the connection failed: UNAVAILABLE, and not as an error that the peer raised."""
    trailers: Any = error.trailing_metadata() or ()
    return ERROR_KEY not in dict(trailers) and error.code() is grpc.StatusCode.UNAVAILABLE


def to_failed(error: BatonError) -> Failed:
    """Encode an error as a message; long texts are cut, as in `abort`."""
    return Failed(kind_of(error), str(error)[:MAX_MESSAGE_CHARACTERS], error.retry_after_s or 0.0)


def from_failed(failed: Failed, peer: str) -> BatonError:
    """Return the typed error that `peer` raised; `WorkerFailed` for a defect or a kind that is unknown here."""
    error = error_of(failed.kind, failed.message, failed.retry_after_s)
    return error or WorkerFailed(f"{peer} failed: {failed.message}")
