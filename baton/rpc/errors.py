"""Typed errors across gRPC: one interceptor on the way out, one function on the way in.

The class name travels in the trailing metadata `baton-error`, so that an error arrives at one of ours as what it was;
strangers see the status code and the sentence. A worker's calls share a stream, so their errors travel in it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from baton import errors, wire
from baton.errors import BatonError, Overloaded, WorkerFailed
from baton.messages import Failed

ERROR_KEY = "baton-error"
RETRY_AFTER_KEY = "retry-after"
MAX_MESSAGE_CHARACTERS = 1024
CLIENTS_METHODS = ("/baton.v1.Inference/", "/baton.v1.Admin/")
Check = Callable[[Any], None]

logger = logging.getLogger(__name__)


def _tree(cls: type[BatonError]) -> dict[str, type[BatonError]]:
    return {cls.__name__: cls, **{name: c for sub in cls.__subclasses__() for name, c in _tree(sub).items()}}


_CLASSES = _tree(errors.BatonError)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps every `BatonError` raised by a handler of `baton.v1` to its status code.

    A client's message that has a field which this release does not know is refused before its handler.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/baton.v1."):
            return handler
        # One that reads no message refuses whatever is said.
        is_clients = details.method.startswith(CLIENTS_METHODS) and handler.request_deserializer is not None
        check = wire.check_known if is_clients else None
        if handler.response_streaming:
            method = handler.stream_stream if handler.request_streaming else handler.unary_stream
            # A handler that writes to the context instead of yielding is guarded like a unary one.
            guard = _guard_stream if inspect.isasyncgenfunction(method) else _guard_unary
            wrapped = guard(method, check)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrapped = _guard_unary(handler.unary_unary, check)
            make = grpc.unary_unary_rpc_method_handler
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _guard_unary(method: Callable[..., Awaitable[Any]], check: Check | None) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if check is not None:
                check(request)
            return await method(request, context)
        except BatonError as error:
            await abort(context, error)
        except Exception as error:
            await _abort_unexpected(context, error)

    return guarded


def _guard_stream(method: Callable[..., Any], check: Check | None) -> Callable[..., Any]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            if check is not None:
                check(request)
            async with contextlib.aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
        except BatonError as error:
            await abort(context, error)
        except Exception as error:
            await _abort_unexpected(context, error)

    return guarded


async def _abort_unexpected(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """A defect of ours: the log gets the traceback, the client a sentence."""
    if isinstance(error, (grpc.aio.AbortError, grpc.RpcError)):
        raise error
    logger.exception("a call failed unexpectedly")
    await abort(context, BatonError("internal error; the server's log says more"))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with the error's status."""
    metadata = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    # Longer texts break grpc's limit on trailers, and the client would see that instead.
    await context.abort(grpc.StatusCode[error.status], str(error)[:MAX_MESSAGE_CHARACTERS], tuple(metadata))
    raise AssertionError("abort raises")


def from_rpc_error(error: grpc.RpcError, peer: str) -> BatonError:
    """What a failed call to `peer` means: the typed error it raised, or `WorkerFailed` when the call itself broke."""
    trailers: Any = error.trailing_metadata() or ()
    metadata = dict(trailers)
    details = error.details() or error.code().name
    if ERROR_KEY not in metadata:
        return WorkerFailed(f"{peer} broke off: {error.code().name}: {details}")
    failed = Failed(str(metadata[ERROR_KEY]), details, float(metadata.get(RETRY_AFTER_KEY, 1.0)))
    return from_failed(failed, peer)


def to_failed(error: BatonError) -> Failed:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return Failed(type(error).__name__, str(error)[:MAX_MESSAGE_CHARACTERS], retry_after_s)


def from_failed(failed: Failed, peer: str) -> BatonError:
    """The typed error that `peer` raised; `WorkerFailed` when it was a defect, or of a kind unknown here."""
    cls = _CLASSES.get(failed.kind, BatonError)
    if cls is BatonError:
        return WorkerFailed(f"{peer} failed: {failed.message}")
    if cls is Overloaded:
        return Overloaded(failed.message, failed.retry_after_s)
    return cls(failed.message)
