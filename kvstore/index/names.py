"""The ids in a set of Redis, which may hold any number of other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import StoreUnavailable
from kvstore.index import reads
from kvstore.index.connection import BadValue, RedisConnection, Script
from kvstore.index.values import MAX_NAME_BYTES, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PRUNE = Script("kvstore.index", "prune.lua")
DROP = Script("kvstore.index", "drop.lua")
MAX_LOOKED_AT = 50_000
"""Names that one look goes through."""
MAX_LIVING = 512
"""Ids that one look finds, and that are remembered: twice as many as a cluster may have workers."""


class IdSet:
    """Finds the ids in a set whose values are there, and removes all others from the set.

    One look goes through `MAX_LOOKED_AT` names, and finds `MAX_LIVING` ids. A set that holds more is gone through by
    several looks, each from where the last one has ended. The ids that the caller has called genuine are found by each
    look, so none of them is lost among names that somebody else has written.

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
        """Returns ids, sorted.

        Raises:
            StoreUnavailable: also where something else than a set is in its place.
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
            found.update(await self._living(sorted(self._genuine - found)))
        return sorted(found)

    def keep(self, genuine: Iterable[str]) -> None:
        """Has the next looks find these ids, whatever else they find."""
        self._genuine = set(sorted(genuine)[:MAX_LIVING])

    async def _step(self) -> list[str]:
        """Returns the ids of the next step, and removes what it meets and is none."""
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
        """Returns the ids whose values are there, and removes the others from the set."""
        if not names:
            return []
        keys = [self._key, *map(self._key_of, names)]
        (living,) = await self._connection.run(PRUNE, keys, *names)
        return [name.decode() for name in living]
