"""Records of requests in flight, stored in Redis; `kvstore/index/keys.py` lists the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.index.connection import BadValue, RedisConnection
from kvstore.index.keys import Keys
from kvstore.index.reads import HashBounds, pairs
from kvstore.leases.journal import FIELD_BYTES, choices_of, fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.index.sealed import Seal
    from kvstore.leases.journal import Noted, RecordEnd, RecordEntry, RecordKey

RECORD_BOUNDS = HashBounds(num_fields=100_000, name_bytes=FIELD_BYTES, value_bytes=2**22 + 2**10, num_bytes=2**26)
"""Bounds of a record: 16 million tokens, a million in one field. A flush writes one field for each choice."""
BATCH = 64
"""Records in one round trip. Packing more of them at once would delay the tokens of all streams."""


class RedisRecords:
    """`RecordStore` in Redis. Owns `connection`: `close` closes it.

    Args:
        seal: seals the written values; None: they are stored unsealed, and every readable value is accepted.
    """

    def __init__(
        self, connection: RedisConnection, namespace: str, *, ttl_s: float = 60.0, seal: Seal | None = None
    ) -> None:
        self._connection = connection
        self._seal = seal
        self._keys = Keys(namespace)
        self._ttl_ms = int(ttl_s * 1000)

    async def write(self, entries: Sequence[RecordEntry], ended: Sequence[RecordEnd]) -> None:
        for begin in range(0, len(ended), BATCH):
            await self._connection.pipeline([self._forget(past) for past in ended[begin : begin + BATCH]])
        for begin in range(0, len(entries), BATCH):
            batch = entries[begin : begin + BATCH]
            written = await self._connection.pipeline([command for entry in batch for command in self._add(entry)])
            for entry, answer in zip(batch, written[::2], strict=True):
                if isinstance(answer, BadValue):
                    name = self._name(entry.key, entry.digest)
                    self._connection.note(name, answer.reason)
                    await self._connection.pipeline([("UNLINK", name), *self._add(entry)])

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        name = self._name(key, digest)
        fields: dict[bytes, bytes] = {}
        problem = ""
        async for found in pairs(self._connection, name, RECORD_BOUNDS):
            if isinstance(found, BadValue):
                self._connection.note(name, problem := found.reason)
            elif (value := self._opened(name, *found)) is not None:
                fields[found[0]] = value
        if problem and not fields:
            raise ValueError(problem)
        try:
            return choices_of(fields)
        except ValueError as error:
            self._connection.note(name, error)
            raise

    async def close(self) -> None:
        await self._connection.close()

    def _add(self, entry: RecordEntry) -> list[tuple[object, ...]]:
        name = self._name(entry.key, entry.digest)
        return [
            ("HSET", name, *(part for field in self._closed(name, fields_of(entry)).items() for part in field)),
            ("PEXPIRE", name, self._ttl_ms),
        ]

    def _closed(self, name: str, fields: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        if self._seal is None:
            return fields
        return {field: self._seal.close(name, field, value) for field, value in fields.items()}

    def _opened(self, name: str, field: bytes, value: bytes) -> bytes | None:
        """Return the value of a field; None if no router has sealed it."""
        if self._seal is None:
            return value
        try:
            return self._seal.open(name, field, value)
        except ValueError as error:
            self._connection.note(name, error)
            return None

    def _forget(self, past: RecordEnd) -> tuple[object, ...]:
        """Return the command that removes fields of a record; Redis removes a record without fields."""
        name = self._name(past.key, past.digest)
        return ("UNLINK", name) if past.fields is None else ("HDEL", name, *past.fields)

    def _name(self, key: RecordKey, digest: bytes) -> str:
        return self._keys.record(key.tenant_id, key.request_id, digest)
