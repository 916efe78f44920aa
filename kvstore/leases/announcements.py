"""Announcements in Redis: signed values that a router or a controller renews regularly."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from redis.exceptions import NoPermissionError

from baton.errors import StoreUnavailable
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index import reads
from kvstore.index.connection import BadValue, RedisConnection, Script
from kvstore.index.names import IdSet
from kvstore.leases.signed import HEAD_BYTES, SignedRegistry

if TYPE_CHECKING:
    from baton.trust import KeyFile, Principal

logger = logging.getLogger(__name__)
T = TypeVar("T")
ANNOUNCE = Script("kvstore.leases", "announce.lua")


class Announcements:
    """Values that this process announces, and authentic values that it reads.

    Args:
        lease_s: time for which Redis keeps an announced value, and for which a reader accepts a value after it first
            read it.
        clock: wall time in seconds.
        monotonic_s: monotonic seconds.
        keys: this member's keys; None: nothing is signed, and every readable value is accepted.

    Attributes:
        signed: signer and verifier of the values; None: nothing is signed.
    """

    def __init__(
        self,
        connection: RedisConnection,
        lease_s: float,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        keys: KeyFile | None = None,
    ) -> None:
        self.signed = None if keys is None else SignedRegistry(keys, lease_s, clock, monotonic_s)
        self._connection = connection
        self._lease_ms = int(lease_s * 1000)

    async def announce(self, key: str, body: str, *, ids: str = "", announced_id: str = "") -> None:
        """Write a value.

        Args:
            ids: key of a set of ids, to which `announced_id` is added; empty: none.
        """
        await self.set_stamps(may_fall=True)
        value = body if self.signed is None else self.signed.announcement(key, body)
        await self._connection.run(ANNOUNCE, [key, ids] if ids else [key], value, self._lease_ms, announced_id)

    def read(
        self, key: str, author: Principal, decode: Callable[[bytes], T], found: Any, *, is_lasting: bool = False
    ) -> list[T]:
        """Return the decoded value as a list of one; an empty list if it is not authentic or cannot be read.

        Args:
            decode: decodes the value's body; raises ValueError.
            is_lasting: True if readers accept the value until the next one is written, regardless of its age.
        """
        if self.signed is None:
            return self.decoded(key, decode, found)
        seen = self.decoded(key, partial(self.signed.seen, key, author, must_be_timely=not is_lasting), found)
        if not seen:
            last = self.signed.last(key)
            return last.value if last is not None else []
        sight, body = seen[0]
        if sight.is_new:
            sight.value = self.decoded(key, decode, body)
        return sight.value if is_lasting or self.signed.is_alive(sight) else []

    def decoded(self, key: str, decode: Callable[[Any], T], found: Any) -> list[T]:
        """Return the decoded value as a list of one; an empty list if `decode` raises ValueError."""
        try:
            if isinstance(found, BadValue):
                raise ValueError(found.reason)
            return [decode(found)]
        except ValueError as error:
            self._connection.note(key, error)
            return []

    async def set_stamps(self, *, may_fall: bool) -> bool:
        """Adjust the stamps of the next writes if this machine's clock was set by more than readers tolerate.

        Either the new time or the old one may be correct; Redis' clock decides. Stamps come from this process's clock
        or from its own count of elapsed time, never from Redis. So a false time from Redis can make readers reject the
        stamps, but it cannot make a member sign a value that is valid on another day.

        Args:
            may_fall: whether stamps may be lower than earlier ones; readers accept lower stamps at once with a higher
            epoch.

        Returns:
            False if the stamps would have to be lower.
        """
        if self.signed is None:
            return True
        stamps = self.signed.stamps
        drift_s = stamps.drift_s
        if abs(drift_s) <= MAX_SKEW_S:
            stamps.follows_clock = True
        elif abs(stamps.counted_s - await self._redis_s()) <= MAX_SKEW_S:
            if stamps.follows_clock:
                logger.warning("this machine's clock was set by %+.0f s and differs from that of Redis", drift_s)
            stamps.follows_clock = False
        elif drift_s < 0 and not may_fall:
            return False
        else:
            logger.warning("this machine's clock was set by %+.0f s; its signatures follow the clock", drift_s)
            stamps.restart()
        return True

    async def _redis_s(self) -> float:
        """Return the time of Redis' clock; NaN if this user may not read it."""
        try:
            seconds, _ = await self._connection.call("TIME")
        except StoreUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return math.nan
            raise
        return float(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedKind(Generic[T]):
    """Kind of the values of a set."""

    author: Principal
    """The members that announce them."""
    max_bytes: int
    """Maximum size of a value's body."""
    decode: Callable[[bytes], T]
    """Decodes a body; raises ValueError."""
    id_of: Callable[[T], str]
    """Returns the id that a decoded value names."""


class AnnouncedSet(Generic[T]):
    """Announcements of one kind: a set of ids, and a value per id.

    Args:
        ids: key of the set.
        key_of: returns the key of an id's value.
    """

    def __init__(
        self,
        connection: RedisConnection,
        announcements: Announcements,
        kind: AnnouncedKind[T],
        ids: str,
        key_of: Callable[[str], str],
    ) -> None:
        self._connection = connection
        self._announcements = announcements
        self._kind = kind
        self._ids_key = ids
        self._ids = IdSet(connection, ids, key_of)
        self._key_of = key_of

    async def announce(self, announced_id: str, body: str) -> None:
        """Write the value of an id, and list the id."""
        key = self._key_of(announced_id)
        await self._announcements.announce(key, body, ids=self._ids_key, announced_id=announced_id)

    async def list(self) -> list[T]:
        """Return the valid values, sorted by id. An unchanged value is neither verified nor decoded again."""
        ids = await self._ids.look()
        keys = [self._key_of(each) for each in ids]
        names = iter(zip(ids, keys, strict=True))
        values: dict[str, T] = {}
        async for found in reads.strings(self._connection, keys, HEAD_BYTES + self._kind.max_bytes):
            announced_id, key = next(names)
            if found is not None:
                decode = partial(self._decoded, announced_id)
                for value in self._announcements.read(key, self._kind.author, decode, found):
                    values[announced_id] = value
        self._ids.keep(values)
        return [*values.values()]

    def _decoded(self, announced_id: str, body: bytes) -> T:
        """Decode a body; raises ValueError if it belongs to another id."""
        value = self._kind.decode(body)
        if (named := self._kind.id_of(value)) != announced_id:
            raise ValueError(f"the entry names {named!r:.100}")
        return value
