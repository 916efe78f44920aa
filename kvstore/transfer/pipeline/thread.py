"""The one thread that owns one link: it opens it, moves messages until told to stop, and closes it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from baton.errors import TransferError
from kvstore.transfer.pipeline.driven import post
from kvstore.transfer.transport.base import Transport

if TYPE_CHECKING:
    from collections.abc import Callable


AnyTransport = TypeVar("AnyTransport", bound=Transport, contravariant=True)
L = TypeVar("L", bound=Transport)


class TransportLoop(Protocol[AnyTransport]):
    """What a lane does with its link."""

    def run(self, link: AnyTransport) -> None:
        """Moves messages until `stop`.

        Raises:
            TransferError: the link failed, and with it the pair.
        """

    def stop(self) -> None:
        """From any thread: `run` returns before its next message. Idempotent."""


class TransportThread(Generic[L]):
    """A daemon thread, and what the event loop that made it may know of it.

    Attributes:
        opened: done once the link is open; fails with TransferError if it cannot be.
        ended: done once the thread has let go of the link; the error that ended it, or None.
    """

    def __init__(self, name: str, open_link: Callable[[], L], traffic: TransportLoop[L]) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[TransferError | None] = loop.create_future()
        self._loop = loop
        self._open_link = open_link
        self._traffic = traffic
        self._lock = threading.Lock()
        self._link: Transport | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread as soon as its link lets it; does not wait. Idempotent."""
        self._traffic.stop()
        with self._lock:
            self._stopped = True
            link = self._link
        if link is not None:
            link.abort()

    async def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended; it may still be in a blocked operation."""
        await asyncio.wait([self.ended], timeout=timeout_s)
        if self.ended.done():
            self._thread.join()
        return self.ended.done()

    def _run(self) -> None:
        error: TransferError | None = None
        link: L | None = None
        try:
            link = self._open_link()
            with self._lock:
                self._link = link
                if self._stopped:
                    link.abort()
            post(self._loop, _settle, self.opened, None)
            self._traffic.run(link)
        except TransferError as failure:
            error = failure
        except Exception as failure:  # whatever a device or a library may raise in its own words
            error = TransferError(f"the link's thread failed: {failure!r}")
            error.__cause__ = failure
        finally:
            with self._lock:
                self._link = None
            if link is not None:
                error = _closed(link) or error
            post(self._loop, _settle, self.opened, error or TransferError("the link is closed"))
            post(self._loop, _finish, self.ended, _without_frames(error))


def _closed(link: Transport) -> TransferError | None:
    try:
        link.close()
    except Exception as failure:  # in its own words, and the lane must say that it has ended all the same
        return TransferError(f"the link could not be closed: {failure!r}")
    return None


def _without_frames(error: TransferError | None) -> TransferError | None:
    """The frames hold slots and the link, which had to live until it was closed, and must not live with the error."""
    if error is not None:
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def use_own_stream(device: torch.device) -> None:
    """On a GPU, a thread's copies and sums must not queue behind the engine's steps."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _settle(opened: asyncio.Future[None], error: TransferError | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)
        opened.exception()  # seen, even where nobody waits


def _finish(ended: asyncio.Future[TransferError | None], error: TransferError | None) -> None:
    if not ended.done():
        ended.set_result(error)
