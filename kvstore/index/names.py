"""Ids in a Redis set, which may hold any number of other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cluster import MAX_WORKERS
from baton.errors import StoreUnavailable
from kvstore.index import reads
from kvstore.index.connection import BadValue, RedisConnection, Script
from kvstore.index.values import MAX_NAME_BYTES, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PRUNE = Script("kvstore.index", "prune.lua")
DROP = Script("kvstore.index", "drop.lua")
MAX_LOOKED_AT = 50_000
"""Maximum number of names that one observation visits."""
MAX_LIVING = 2 * MAX_WORKERS
"""Maximum number of ids that one observation finds and that are remembered."""


class IdSet:
    """Finder of the ids in a set whose values exist; it removes all other names from the set.

    It does not look again for the values of ids that the caller has marked as genuine, because the caller reads them.

    One observation visits up to `MAX_LOOKED_AT` names and finds up to `MAX_LIVING` ids. A larger set takes several
    observations, each of which starts where the previous one stopped. Every observation finds the ids that the caller
    has marked as genuine, so none of them is lost among names that another process has written.

    Args:
        key: the set.
        key_of: returns the key of an id's value.
    """

    def __init__(self, connection: RedisConnection, key: str, key_of: Callable[[str], str]) -> None:
        self._connection = connection
        self._key = key
        self._key_of = key_of
        self._cursor = reads.START
        self._genuine: set[str] = set()

    async def look(self) -> list[str]:
        """Return ids, sorted; the values of genuine ones may have gone since.

        Raises:
            StoreUnavailable: also if the key holds a value of another type than a set.
        """
        found: set[str] = set()
        num_seen, started_at = 0, self._cursor
        while num_seen < MAX_LOOKED_AT and len(found) < MAX_LIVING:
            names = await self._step()
            found.update(await self._living(names))
            num_seen += len(names)
            if self._cursor == reads.START:
                break
        if (started_at, self._cursor) != (reads.START, reads.START):
            found |= self._genuine
        return sorted(found)

    def keep(self, genuine: Iterable[str]) -> None:
        """Make the next observations find these ids in addition to others."""
        self._genuine = set(sorted(genuine)[:MAX_LIVING])

    async def _step(self) -> list[str]:
        """Return the ids of the next step, and remove names that are not ids."""
        connection, key, cursor = self._connection, self._key, self._cursor
        step = await reads.set_step(connection, key, cursor, MAX_NAME_BYTES)
        if isinstance(step, BadValue):
            self._cursor = reads.START
            connection.note(key, step.reason)
            raise StoreUnavailable(f"Redis: {key} cannot be read")
        self._cursor = step.cursor
        if step.num_long:
            connection.note(key, f"{step.num_long} of its members have more than {MAX_NAME_BYTES} bytes")
            await connection.run(DROP, [key], cursor, reads.STEP, MAX_NAME_BYTES)
        names, others = [], []
        for member in step.found:
            try:
                names.append(text(member))
            except ValueError as error:
                connection.note(key, error)
                others.append(member)
        if others:
            await connection.call("SREM", key, *others)
        return names

    async def _living(self, names: Sequence[str]) -> list[str]:
        """Return the genuine ids and those whose values exist, and remove the others from the set."""
        genuine = [name for name in names if name in self._genuine]
        unknown = [name for name in names if name not in self._genuine]
        if not unknown:
            return genuine
        keys = [self._key, *map(self._key_of, unknown)]
        (living,) = await self._connection.run(PRUNE, keys, *unknown)
        return genuine + [name.decode() for name in living]
