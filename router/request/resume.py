"""How a request goes on after its stream has broken: what its choices have answered is known here, or to Redis.

A client whose stream broke sends its request again, with `resume_from`, to any router.

`CallsInFlight`   If the broken call still runs here, unnoticed, the new call ends it first, and goes on with what it
                  had generated.
`Journal`         If its router died, another one goes on from what that had noted of its requests in flight. What was
                  not noted in time is generated again: the tokens are the same, so a journal that is late, lost or
                  away costs time and nothing else. Therefore the path of a request only leaves its record here; `run`
                  writes what is new of all of them, a few times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from baton.errors import Conflict, Overloaded, StoreUnavailable
from baton.messages import SequenceSpec
from baton.tasks import Flag
from kvstore.index.backoff import backoff_s
from kvstore.leases import Noted, RecordEnd, RecordEntry, RecordKey, RecordPart, RecordStore, field_of
from kvstore.leases.journal import DIGEST_BYTES, WRITER_BYTES
from router.dispatch.choice import Choice, ChoiceGroup

logger = logging.getLogger(__name__)
TAKE_OVER_S = 5.0
"""How long a call that continues a request waits for the one before it to unwind."""
FLUSH_S = 0.2
READ_S = 2.0
"""How long a request that is continued waits for its record: as long as some hundred tokens take."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A request in flight, as a later call finds it."""

    driver: asyncio.Task[Any]
    """The task that waits for the next chunk, or had the last one."""
    has_gone_on: bool = False
    """True if chunks after the first are asked for."""
    digest: bytes = b""
    """Digest of what determines its tokens; empty: not known yet."""
    group: ChoiceGroup | None = None
    """Choices of the request; None: not known yet."""
    is_superseded: bool = False
    ended: Flag = field(default_factory=Flag)

    @staticmethod
    def of_current_task() -> Call:
        """The call that the current task serves."""
        task = asyncio.current_task()
        assert task is not None
        return Call(driver=task)

    def begin(self, digest: bytes, group: ChoiceGroup) -> None:
        """Record the choices, now that they are known."""
        self.digest, self.group = digest, group

    def goes_on(self) -> None:
        """Record the task that asks for what follows the first chunk. One task awaits all the rest, but for an HTTP
        stream it is another one than awaited the first.
        """
        if not self.has_gone_on:
            self.has_gone_on, self.driver = True, asyncio.current_task() or self.driver

    def noted(self) -> dict[int, Noted]:
        """What has been generated of it, by choice."""
        choices = self.group.choices if self.group else ()
        return {
            choice.index: Noted(tuple(choice.emitted), choice.finish_reason, choice.only_sampler or "")
            for choice in choices
        }


class CallsInFlight:
    """The requests that this router serves now, by tenant and id."""

    def __init__(self) -> None:
        self._calls: dict[RecordKey, Call] = {}
        self._taken_over: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Tasks whose calls others continue."""

    @contextlib.contextmanager
    def entered(self, key: RecordKey) -> Iterator[Call]:
        """Enter the call that the current task serves: later calls find it while the block is entered."""
        call = self._calls[key] = Call.of_current_task()
        try:
            yield call
        finally:
            del self._calls[key]
            call.ended.set()

    async def take_over(self, key: RecordKey) -> Call | None:
        """End the call that serves this request here, if one does: its client has lost it, noticed or not.

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
        """Turn the end of a call whose request another call continues into Conflict. The block is one API call."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._taken_over:
                raise
            task.uncancel()
            raise Conflict("another call has taken this request over, to continue it") from None


@dataclass(slots=True, kw_only=True)
class _Noting:
    """A request in flight."""

    digest: bytes
    """Digest of everything that determines the tokens."""
    choices: Sequence[Choice]
    num_written: list[int]
    fields: list[bytes] = field(default_factory=list)
    """Fields of its record that were written."""


class Journal:
    """Owns `store`: `close` closes it."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._notings: dict[RecordKey, _Noting] = {}
        self._ended: list[RecordEnd] = []
        """Requests whose records the store has to forget."""

    @contextlib.contextmanager
    def noting(self, key: RecordKey, digest: bytes, choices: Sequence[Choice]) -> Iterator[None]:
        """Record a request while the block is entered. What stays for a while is of one that did not come to its end:
        another router may go on with it, or do so already.

        Args:
            choices: the request's, whose owner fills them as the answer comes.
        """
        noting = _Noting(digest=digest, choices=choices, num_written=[0] * len(choices))
        is_continued = any(choice.emitted for choice in choices)
        self._notings[key] = noting
        try:
            yield
        finally:
            del self._notings[key]
        if is_continued:  # with what another router has noted, which is of no use any more
            self._ended.append(RecordEnd(key, digest))
        elif noting.fields:
            self._ended.append(RecordEnd(key, digest, tuple(noting.fields)))

    async def recall(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        """What a router has recorded of this request, by choice; empty: nothing, or it cannot be had in time."""
        try:
            async with asyncio.timeout(READ_S):
                return await self._store.read(key, digest)
        except (StoreUnavailable, TimeoutError, ValueError) as error:
            logger.warning("%s is continued from its beginning: %s", key.request_id, error or "Redis does not answer")
            return {}

    async def run(self) -> None:
        """Write until cancelled. While the store is away nothing is kept for it; then all is written anew."""
        num_failures = 0
        while True:
            await asyncio.sleep(max(FLUSH_S, backoff_s(num_failures) if num_failures else 0.0))
            try:
                await self.flush()
                num_failures = 0
            except StoreUnavailable as error:
                num_failures += 1
                if num_failures == 1:
                    logger.warning("requests in flight are not noted, trying again: %s", error)

    async def flush(self) -> None:
        """Raises: StoreUnavailable."""
        ended, self._ended = self._ended, []
        entries = [entry for key, noting in self._notings.items() if (entry := self._entry(key, noting))]
        if not (ended or entries):
            return
        try:
            await self._store.write(entries, ended)
        except StoreUnavailable:
            for noting in self._notings.values():
                noting.num_written = [0] * len(noting.choices)
            raise

    async def close(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self.flush()
        await self._store.close()

    def _entry(self, key: RecordKey, noting: _Noting) -> RecordEntry | None:
        """What is new of a request, counted as written from here on."""
        parts = []
        for index, choice in enumerate(noting.choices):
            start, end = noting.num_written[index], len(choice.emitted)
            if end > start:
                part = RecordPart(
                    choice_index=index,
                    start=start,
                    token_ids=choice.emitted[start:],
                    finish_reason=choice.finish_reason,
                    sampler=choice.only_sampler or "",
                )
                parts.append(part)
                noting.num_written[index] = end
        if not parts:
            return None
        entry = RecordEntry(key, noting.digest, self._writer, parts)
        noting.fields += (field_of(entry, part) for part in parts)
        return entry


def digest_of(content_id: str, spec: SequenceSpec) -> bytes:
    """A digest of everything that determines the tokens of a request, but for the choices' index. Who does not know the
    tenant's cache seed cannot try prompts on it.
    """
    asked = (content_id, spec.num_prompt_tokens, spec.sampling.asked)
    digest = hashlib.blake2b(repr(asked).encode(), key=spec.cache_seed, digest_size=DIGEST_BYTES)
    digest.update(array("I", spec.token_ids).tobytes())
    return digest.digest()


def with_delivered(noted: Mapping[int, Noted], resume_from: Mapping[int, int]) -> dict[int, Noted]:
    """Add the choices of which the client has tokens and nothing is noted.

    Args:
        noted: what has been generated, by choice.
        resume_from: tokens that the client has, by choice.
    """
    return {index: Noted() for index, num_tokens in resume_from.items() if num_tokens} | dict(noted)


def only_delivered(noted: Mapping[int, Noted], resume_from: Mapping[int, int]) -> dict[int, Noted]:
    """Return of what is noted the tokens that the client has: the others are generated again, for their scores, which
    nobody notes.
    """
    known = {}
    for index, one in noted.items():
        num_tokens = min(resume_from.get(index, 0), len(one.token_ids))
        is_whole = num_tokens == len(one.token_ids)
        known[index] = Noted(one.token_ids[:num_tokens], one.finish_reason if is_whole else None, one.sampler)
    return known
