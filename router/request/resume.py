"""Requests in flight on this router, and how a later call takes one over to continue it.

A client whose stream broke sends its request again, with `resume_from`. If the broken call still runs here, unnoticed,
the new call ends it first, and goes on with what it had generated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from baton.errors import Conflict, Overloaded
from kvstore.leases import Noted, RecordKey
from router.dispatch.choice import ChoiceGroup

TAKE_OVER_S = 5.0
"""How long a call that continues a request waits for the one before it to unwind."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A request in flight, as a later call finds it."""

    driver: asyncio.Task[Any]
    """The task that waits for the next chunk, or had the last one. The service notes it after each chunk: an HTTP
    stream's first chunk is awaited by another task than the rest."""
    digest: bytes = b""
    """Digest of what determines its tokens; empty: not known yet."""
    group: ChoiceGroup | None = None
    """Its choices; None: not known yet."""
    is_superseded: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @staticmethod
    def of_current_task() -> Call:
        """The call that the current task serves."""
        task = asyncio.current_task()
        assert task is not None
        return Call(driver=task)

    def begin(self, digest: bytes, group: ChoiceGroup) -> None:
        """Notes the choices, now that they are known."""
        self.digest, self.group = digest, group

    def noted(self) -> dict[int, Noted]:
        """What has been generated of it, by choice."""
        choices = self.group.choices if self.group else ()
        return {choice.index: Noted(tuple(choice.emitted), choice.finish_reason) for choice in choices}


class CallsInFlight:
    """The requests that this router serves now, by tenant and id."""

    def __init__(self) -> None:
        self._calls: dict[RecordKey, Call] = {}
        self._taken_over: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Tasks whose calls others continue."""

    @contextlib.contextmanager
    def entered(self, key: RecordKey, call: Call) -> Iterator[None]:
        """Later calls find this one while the block is entered."""
        self._calls[key] = call
        try:
            yield
        finally:
            del self._calls[key]
            call.ended.set()

    async def take_over(self, key: RecordKey) -> Call | None:
        """Ends the call that serves this request here, if one does: its client has lost it, noticed or not.

        Raises:
            Overloaded: it does not end in time.
        """
        past: Call | None = None
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                while (call := self._calls.get(key)) is not None:  # others may have come before: the last one wins
                    past = call
                    if not call.is_superseded:
                        call.is_superseded = call.driver.cancel()
                        self._taken_over.add(call.driver)
                    await call.ended.wait()
        except TimeoutError:
            raise Overloaded(f"an earlier call of {key.request_id!r} has not ended yet; try again later") from None
        return past

    @contextlib.contextmanager
    def conflict_when_taken_over(self) -> Iterator[None]:
        """Turns the end of a call whose request another call continues into Conflict. The block is one API call."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._taken_over:
                raise
            task.uncancel()
            raise Conflict("another call has taken this request over, to continue it") from None
