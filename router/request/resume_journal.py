"""Notes what each request in flight has answered so far, where the other routers can read it.

A client whose router died asks another one, which goes on from there. What was not noted in time is generated again:
the tokens are the same, so a journal that is late, lost or away costs time and nothing else. Therefore the path of a
request only leaves its record here; `run` writes what is new of all of them, a few times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.errors import StoreUnavailable
from baton.messages import SequenceSpec
from kvstore.index.backoff import backoff_s
from kvstore.leases import Noted, RecordEnd, RecordEntry, RecordKey, RecordPart, RecordStore, field_of
from kvstore.leases.journal import DIGEST_BYTES, WRITER_BYTES
from router.dispatch.choice import Choice

logger = logging.getLogger(__name__)
FLUSH_S = 0.2
READ_S = 2.0
"""How long a request that is continued waits for its record: as long as some hundred tokens take."""


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
        """Notes a request while the block is entered. What stays for a while is of one that did not come to its end:
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
            self._ended.append(RecordEnd(key))
        elif noting.fields:
            self._ended.append(RecordEnd(key, tuple(noting.fields)))

    async def recall(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        """What a router has recorded of this request, by choice; empty: nothing, or it cannot be had in time."""
        try:
            async with asyncio.timeout(READ_S):
                return await self._store.read(key, digest)
        except (StoreUnavailable, TimeoutError, ValueError) as error:
            logger.warning("%s is continued from its beginning: %s", key.request_id, error or "Redis does not answer")
            return {}

    async def run(self) -> None:
        """Writes until cancelled. While the store is away nothing is kept for it; then all is written anew."""
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
    """A digest of everything that determines the tokens of a request, but for the choices' index."""
    asked = (content_id, spec.num_prompt_tokens, spec.sampling)
    digest = hashlib.blake2b(repr(asked).encode(), digest_size=DIGEST_BYTES)
    digest.update(array("I", spec.token_ids).tobytes())
    return digest.digest()
