"""Thread that owns one end of a transport: it opens the transport, runs a loop on it until stopped, and closes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from baton.errors import TransferError
from kvstore.transfer.device import LOSSES
from kvstore.transfer.pipeline.driven import post
from kvstore.transfer.transport.base import Transport
from kvstore.transfer.transport.streams import own_stream

OnTransport = Callable[[TransferError | None], None]
"""Called on the event loop: with None once the transport is open, and with the error once it has ended."""

AnyTransport = TypeVar("AnyTransport", bound=Transport, contravariant=True)
T = TypeVar("T", bound=Transport)
OpenTransport = Callable[[], T]
"""Opens an end of a transport; called in the thread that will own it. May raise any kind of error."""


class TransportLoop(Protocol[AnyTransport]):
    """Loop that the thread runs: `SendLoop` or `ReceiveLoop`."""

    def run(self, transport: AnyTransport) -> None:
        """Send or receive messages until `stop`.

        Raises:
            TransferError: the transport failed, and with it the connection.
        """

    def stop(self) -> None:
        """Make `run` return before its next message; called by any thread. Idempotent."""


class TransportThread(Generic[T]):
    """Daemon thread of a transport, with futures for the event loop that started it.

    An error after which a device no longer computes is also recorded in `LOSSES`.

    Attributes:
        opened: done once the transport is open; fails with TransferError if it cannot be opened.
        over: done once no message is sent or received any more, before the transport is closed; with the error that
            ended it, or None.
        ended: done once the thread has released the transport, which may take as long as a message; with the error.

    Args:
        device: the device to or from which the thread copies.
    """

    def __init__(
        self, name: str, open_transport: OpenTransport[T], transport_loop: TransportLoop[T], device: torch.device
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[TransferError | None] = loop.create_future()
        self.ended: asyncio.Future[TransferError | None] = loop.create_future()
        self._device = device
        self._loop = loop
        self._open_transport = open_transport
        self._transport_loop = transport_loop
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, on_transport: OnTransport) -> None:
        """Report to the caller that the transport is open, and that it has ended."""

        def opened(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                on_transport(None)

        self.opened.add_done_callback(opened)
        self.over.add_done_callback(
            lambda future: on_transport(future.result() or TransferError("the transport was closed"))
        )

    def stop(self) -> None:
        """End the thread as soon as its transport allows it; does not wait. Idempotent."""
        self._transport_loop.stop()
        with self._lock:
            self._stopped = True
            transport = self._transport
        if transport is not None:
            transport.abort()

    async def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, and return whether it came; the thread may still be in a blocked operation."""
        await asyncio.wait([self.ended], timeout=timeout_s)
        if self.ended.done():
            self._thread.join()
        return self.ended.done()

    def _run(self) -> None:
        try:
            with own_stream(self._device):
                error = self._use_transport()
        except Exception as failure:  # an error of a device
            LOSSES.note(failure)
            error = TransferError(f"the transport's thread failed: {failure!r}")
            post(self._loop, _settle, self.opened, error)
            post(self._loop, _finish, self.over, error)
        post(self._loop, _finish, self.ended, _without_frames(error))

    def _use_transport(self) -> TransferError | None:
        error: TransferError | None = None
        transport: T | None = None
        try:
            transport = self._open_transport()
            with self._lock:
                self._transport = transport
                if self._stopped:
                    transport.abort()
            post(self._loop, _settle, self.opened, None)
            self._transport_loop.run(transport)
        except TransferError as failure:
            error = failure
        except Exception as failure:  # a device or a library may raise any kind of error
            error = TransferError(f"the transport's thread failed: {failure!r}")
            error.__cause__ = failure
        finally:
            if error is not None:
                LOSSES.note(error)
            with self._lock:
                self._transport = None
            post(self._loop, _settle, self.opened, error or TransferError("the transport is closed"))
            post(self._loop, _finish, self.over, _without_frames(error))
            if transport is not None:
                error = _closed(transport) or error
        return error


def _closed(transport: Transport) -> TransferError | None:
    try:
        transport.close()
    except Exception as failure:  # a library may raise any kind of error, and `ended` must be settled in any case
        LOSSES.note(failure)
        return TransferError(f"the transport could not be closed: {failure!r}")
    return None


def _without_frames(error: TransferError | None) -> TransferError | None:
    """Drop the frames of an error: they hold slots and the transport, which must not live as long as the error."""
    if error is not None:
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _settle(opened: asyncio.Future[None], error: TransferError | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)
        opened.exception()  # retrieved, even if no task awaits it


def _finish(ended: asyncio.Future[TransferError | None], error: TransferError | None) -> None:
    if not ended.done():
        ended.set_result(error)
