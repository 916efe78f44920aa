"""Continues a request after its stream broke, from the tokens that this router or Redis has of it.

After a broken stream the client sends its request again, with `resume_from`, to any router.

`CallsInFlight`   If the broken call still runs on this router, the new call ends it first, and continues with the
                  tokens that it had generated. A router that stops ends all calls, for clients to continue elsewhere.
`Journal`         If the router died, another one continues from the tokens that it had recorded in Redis. Tokens that
                  were not recorded in time are generated again and come out identical, so a journal that is late, lost
                  or away costs only time. Therefore requests never wait for the journal: `run` writes the new tokens of
                  all of them a few times a second.
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

from baton.api import GenerateChunk
from baton.errors import Conflict, Overloaded, RouterStopping, StoreUnavailable
from baton.messages import SequenceSpec
from baton.tasks import Flag
from kvstore.index.backoff import backoff_s
from kvstore.leases import Noted, RecordEnd, RecordEntry, RecordKey, RecordPart, RecordStore, field_of
from kvstore.leases.journal import DIGEST_BYTES, WRITER_BYTES
from router.serve.choice import Choice, ChoiceGroup

logger = logging.getLogger(__name__)
TAKE_OVER_S = 5.0
"""Timeout of a call that continues a request for the end of the previous call."""
STOP_S = 2.0
"""Time in which the calls that a stopping router ends tell their clients."""
FLUSH_S = 0.2
READ_S = 2.0
"""Timeout for reading the record of a continued request: about the time of a hundred tokens."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A request in flight, which a later call may take over."""

    driver: asyncio.Task[Any]
    """The task that waits for the next chunk, or got the last one."""
    has_gone_on: bool = False
    """True if a chunk after the first was requested."""
    digest: bytes = b""
    """Digest of what determines its tokens; empty: not known yet."""
    group: ChoiceGroup | None = None
    """Choices of the request; None: not known yet."""
    is_superseded: bool = False
    is_stopped: bool = False
    """True if it must end with RouterStopping."""
    is_paused: bool = False
    """True while its client gets a chunk, so that its driver waits for the client."""
    ended: Flag = field(default_factory=Flag)

    @staticmethod
    def of_current_task() -> Call:
        """Return a call that the current task drives."""
        task = asyncio.current_task()
        assert task is not None
        return Call(driver=task)

    def begin(self, digest: bytes, group: ChoiceGroup) -> None:
        """Record the request's choices when they are known."""
        self.digest, self.group = digest, group

    def giving(self, chunk: GenerateChunk) -> GenerateChunk:
        """Return a chunk for the client. Until `goes_on`, the driver waits for the client."""
        self.is_paused = True
        return chunk

    def goes_on(self) -> None:
        """Record the task that requests the chunks after the first one.

        A single task awaits them all, but for an HTTP stream it is not the task that awaited the first chunk.

        Raises:
            RouterStopping: see `CallsInFlight.stop`.
        """
        self.is_paused = False
        if self.is_stopped:
            raise RouterStopping
        if not self.has_gone_on:
            self.has_gone_on, self.driver = True, asyncio.current_task() or self.driver

    def noted(self) -> dict[int, Noted]:
        """Return the tokens generated so far, by choice."""
        choices = self.group.choices if self.group else ()
        return {
            choice.index: Noted(tuple(choice.emitted), choice.finish_reason, choice.only_sampler or "")
            for choice in choices
        }


class CallsInFlight:
    """Requests that this router is serving, by tenant and id."""

    def __init__(self) -> None:
        self._calls: dict[RecordKey, Call] = {}
        self._has_stopped = False
        self._taken_over: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Tasks whose requests other calls continue."""

    @contextlib.contextmanager
    def entered(self, key: RecordKey) -> Iterator[Call]:
        """Context manager: registers a call of the current task, so that later calls can take it over.

        Raises:
            RouterStopping: see `stop`.
        """
        if self._has_stopped:
            raise RouterStopping
        call = self._calls[key] = Call.of_current_task()
        try:
            yield call
        except asyncio.CancelledError:
            if not call.is_stopped:
                raise
            call.driver.uncancel()
            raise RouterStopping from None
        finally:
            del self._calls[key]
            call.ended.set()

    def stop(self) -> None:
        """End all calls with RouterStopping, and further ones at once: the router stops."""
        self._has_stopped = True
        for call in self._calls.values():
            call.is_stopped = True
            if not call.is_paused:
                call.driver.cancel()

    async def take_over(self, key: RecordKey) -> Call | None:
        """End the call that serves this request on this router, if there is one: its client has lost the stream.

        Raises:
            Overloaded: the call does not end in time.
        """
        past: Call | None = None
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                while (call := self._calls.get(key)) is not None:  # after several retries, the last call wins
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
        """Context manager around one API call: raises Conflict if another call has taken over its request."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._taken_over:
                raise
            task.uncancel()
            raise Conflict("another call has taken over this request to continue it") from None


@dataclass(slots=True, kw_only=True)
class _Noting:
    """A request in flight, with the progress of its record."""

    digest: bytes
    """Digest of everything that determines the tokens."""
    choices: Sequence[Choice]
    num_written: list[int]
    fields: list[bytes] = field(default_factory=list)
    """Written fields of its record."""


class Journal:
    """Journal of the tokens of one router's requests in flight. Owns `store`: `close` closes it."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._notings: dict[RecordKey, _Noting] = {}
        self._ended: list[RecordEnd] = []
        """Requests whose records must be deleted from the store."""

    @contextlib.contextmanager
    def noting(self, key: RecordKey, digest: bytes, choices: Sequence[Choice]) -> Iterator[None]:
        """Context manager: records a request while it runs, and deletes its record when it completes.

        After an error the record stays for a while, because another router may continue the request, or already does.

        Args:
            choices: the request's choices; their owner adds tokens while the answer is generated.
        """
        noting = _Noting(digest=digest, choices=choices, num_written=[0] * len(choices))
        is_continued = any(choice.emitted for choice in choices)
        self._notings[key] = noting
        try:
            yield
        finally:
            del self._notings[key]
        if is_continued:  # also delete the record of the earlier router, which is no longer needed
            self._ended.append(RecordEnd(key, digest))
        elif noting.fields:
            self._ended.append(RecordEnd(key, digest, tuple(noting.fields)))

    async def recall(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        """Return the tokens that a router has recorded for this request, by choice; empty: none, or not in time."""
        try:
            async with asyncio.timeout(READ_S):
                return await self._store.read(key, digest)
        except (StoreUnavailable, TimeoutError, ValueError) as error:
            logger.warning("%s is continued from its start: %s", key.request_id, error or "Redis does not answer")
            return {}

    async def run(self) -> None:
        """Write new tokens until cancelled. After the store was away, write the records again from the start."""
        num_failures = 0
        while True:
            await asyncio.sleep(max(FLUSH_S, backoff_s(num_failures) if num_failures else 0.0))
            try:
                await self.flush()
                num_failures = 0
            except StoreUnavailable as error:
                num_failures += 1
                if num_failures == 1:
                    logger.warning("requests in flight are not recorded; retrying: %s", error)

    async def flush(self) -> None:
        """Write new tokens of all requests, and delete records of ended ones.

        Raises:
            StoreUnavailable: the store cannot be reached.
        """
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
        """Return the new tokens of a request, which count as written from now on; None: there are none."""
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
    """Return a digest of everything that determines a request's tokens, except the index of the choice.

    It is keyed with the tenant's cache seed, so without the seed prompts cannot be guessed from it.
    """
    asked = (content_id, spec.num_prompt_tokens, spec.sampling.asked)
    digest = hashlib.blake2b(repr(asked).encode(), key=spec.key_seed, digest_size=DIGEST_BYTES)
    digest.update(array("I", spec.token_ids).tobytes())
    for image in spec.images:
        digest.update(image.digest + array("I", (image.offset, image.num_tokens, *image.grid)).tobytes())
    return digest.digest()


def with_delivered(noted: Mapping[int, Noted], resume_from: Mapping[int, int]) -> dict[int, Noted]:
    """Add empty records for choices of which the client has tokens but no router has recorded any.

    Args:
        noted: recorded tokens by choice.
        resume_from: number of tokens that the client has, by choice.
    """
    return {index: Noted() for index, num_tokens in resume_from.items() if num_tokens} | dict(noted)


def only_delivered(noted: Mapping[int, Noted], resume_from: Mapping[int, int]) -> dict[int, Noted]:
    """Return the recorded tokens that the client has; the others are generated again to get their scores."""
    known = {}
    for index, one in noted.items():
        num_tokens = min(resume_from.get(index, 0), len(one.token_ids))
        is_whole = num_tokens == len(one.token_ids)
        known[index] = Noted(one.token_ids[:num_tokens], one.finish_reason if is_whole else None, one.sampler)
    return known
