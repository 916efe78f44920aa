"""Bounded reads of values that may have any size, because any process that reaches Redis may have written them.

Redis itself compares the size of a value with its limit and sends nothing larger (`read.lua`, `scan.lua`). A response
has `ANSWER_BYTES` at most, so a reader's memory does not grow with the stored data. Between two responses, and after
each few milliseconds of work with one, other tasks of the event loop run.

    async for lease in hashes(connection, keys, {"info": 65_536, "load": 65_536}):
        match lease:
            case None: ...              # there is none
            case BadValue(reason): ...
            case [info, load]: ...

Every function raises StoreUnavailable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from baton.tasks import paced
from kvstore.index.connection import BadValue, RedisConnection, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

READ = Script("kvstore.index", "read.lua")
SCAN = Script("kvstore.index", "scan.lua")
ANSWER_BYTES = 2**23
"""Maximum bytes of one response."""
STEP = 500
"""Values in one response, and the approximate number of names in one step through a set or hash."""
FoundValue: TypeAlias = "bytes | BadValue | None"
FoundFields: TypeAlias = "Sequence[bytes | None] | BadValue | None"
START = b"0"
"""Cursor at which a walk through a set starts and finishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashBounds:
    """Bounds of a Redis hash."""

    num_fields: int
    name_bytes: int
    value_bytes: int
    """Maximum bytes of one value, and of all values."""
    num_bytes: int


class ScanStep(NamedTuple):
    """Step through a set, or through the names of a hash."""

    cursor: bytes
    """Cursor of the next step; `START`: the walk is complete."""
    found: list[Any]
    """Members; or names, each followed by the length of its value."""
    num_long: int
    """Number of names that are too long."""


async def strings(connection: RedisConnection, keys: Sequence[str], most: int) -> AsyncIterator[FoundValue]:
    """Yield the string at each key, or None if there is none.

    Args:
        most: the maximum bytes of a string.
    """
    async for found in _values(connection, keys, (most,), most):
        yield found if found is None or isinstance(found, BadValue) else found[0]


async def string(connection: RedisConnection, key: str, most: int) -> FoundValue:
    """Return the string at a key, or None if there is none."""
    found = [each async for each in strings(connection, [key], most)]
    return found[0]


async def hashes(
    connection: RedisConnection, keys: Sequence[str], most: Mapping[str, int]
) -> AsyncIterator[FoundFields]:
    """Yield fields of the hash at each key, or None if there is none.

    Args:
        most: the fields' names, with the maximum bytes of each.
    """
    args = [part for field in most.items() for part in field]
    async for found in _values(connection, keys, args, sum(most.values())):
        yield found


async def fields(connection: RedisConnection, key: str, most: Mapping[str, int]) -> FoundFields:
    """Return fields of the hash at a key, like `hashes`."""
    found = [each async for each in hashes(connection, [key], most)]
    return found[0]


async def pairs(
    connection: RedisConnection, key: str, bounds: HashBounds
) -> AsyncIterator[tuple[bytes, bytes] | BadValue]:
    """Yield the fields of a hash, in no order, each with its value; a BadValue for a field beyond the bounds."""
    num_fields = num_bytes = 0
    cursor = START
    while True:
        step = _step(await connection.ask(SCAN, [key], "hash", cursor, STEP, bounds.name_bytes))
        if isinstance(step, BadValue):
            yield step
            return
        if step.num_long:
            yield BadValue(f"names of its fields have more than {bounds.name_bytes} bytes")
        names = []
        for name, length in zip(step.found[::2], step.found[1::2], strict=True):
            if length > bounds.value_bytes:
                yield BadValue(f"a field of it has {length} bytes, and may have {bounds.value_bytes}")
            else:
                names.append((name, length))
        cursor = step.cursor
        num_fields += len(names)
        num_bytes += sum(length for _, length in names)
        if num_fields > bounds.num_fields or num_bytes > bounds.num_bytes:
            yield BadValue(f"it has more than {bounds.num_fields} fields, or {bounds.num_bytes} bytes")
            return
        async for pair in _pairs_of(connection, key, names, bounds.value_bytes):
            yield pair
        if cursor == START:
            return


async def members(connection: RedisConnection, key: str, most: int) -> AsyncIterator[list[bytes] | BadValue]:
    """Yield the members of a set, step by step. A member that stays in the set is yielded at least once, perhaps twice.

    Args:
        most: the maximum bytes of a member; a BadValue stands for larger members.
    """
    cursor = START
    while True:
        step = await set_step(connection, key, cursor, most)
        if isinstance(step, BadValue):
            yield step
            return
        if step.num_long:
            yield BadValue(f"{step.num_long} of its members have more than {most} bytes")
        yield step.found
        cursor = step.cursor
        if cursor == START:
            return


async def set_step(connection: RedisConnection, key: str, cursor: bytes, most: int) -> ScanStep | BadValue:
    """Take one step through a set.

    Args:
        cursor: the cursor that the previous step returned.
        most: the maximum bytes of a member.
    """
    return _step(await connection.ask(SCAN, [key], "set", cursor, STEP, most))


def _step(answer: Sequence[Any]) -> ScanStep | BadValue:
    after, found, num_long = answer
    return ScanStep(after, found, num_long) if after.isdigit() else BadValue(after.decode())


async def _pairs_of(
    connection: RedisConnection, key: str, names: Sequence[tuple[bytes, int]], most: int
) -> AsyncIterator[tuple[bytes, bytes] | BadValue]:
    """Yield fields of one hash.

    Args:
        names: the fields' names, and the number of bytes that each has had.
        most: the maximum bytes of a field.
    """
    rest = list(names)
    while rest:
        size = 0
        batch: list[tuple[bytes, int]] = []
        while rest and (not batch or size + rest[-1][1] <= ANSWER_BYTES):
            batch.append(rest.pop())
            size += batch[-1][1]
        args = [part for field in batch for part in field]
        async for found in _values(connection, [key], args, size):
            if isinstance(found, BadValue):  # a field has grown since
                async for pair in _each_alone(connection, key, [name for name, _ in batch], most):
                    yield pair
            elif found is not None:
                async for (name, _), value in paced(zip(batch, found, strict=True)):
                    if value is not None:
                        yield name, value


async def _each_alone(
    connection: RedisConnection, key: str, names: Sequence[bytes], most: int
) -> AsyncIterator[tuple[bytes, bytes] | BadValue]:
    for name in names:
        async for found in _values(connection, [key], (name, most), most):
            if isinstance(found, BadValue):
                yield found
            elif found is not None and found[0] is not None:
                yield name, found[0]


async def _values(
    connection: RedisConnection, keys: Sequence[str], args: Sequence[str | bytes | int], most: int
) -> AsyncIterator[Sequence[bytes | None] | BadValue | None]:
    """Yield the result of `read.lua` for each key.

    Args:
        most: the maximum bytes of the result for one key.
    """
    at_once = max(1, min(STEP, ANSWER_BYTES // max(most, 1)))
    for start in range(0, len(keys), at_once):
        (answers,) = await connection.ask(READ, keys[start : start + at_once], *args)
        async for found in paced(answers):
            yield BadValue(found.decode()) if isinstance(found, bytes) else found
