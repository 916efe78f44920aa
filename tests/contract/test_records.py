"""What routers note of requests in flight: one suite for memory and for every Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreUnavailable
from baton.sampling import FinishReason
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys
from kvstore.leases import (
    MemoryRecords,
    Noted,
    RecordEnd,
    RecordEntry,
    RecordKey,
    RecordPart,
    RecordStore,
    RedisRecords,
    field_of,
)

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer

KEY = RecordKey("acme", "r-1")
DIGEST, OTHER_DIGEST = b"d" * 16, b"e" * 16
A, B = b"router-a", b"router-b"


@pytest.fixture
def records(backend: Backend) -> RecordStore:
    if backend.store:
        return MemoryRecords(backend.store)
    assert backend.router
    return RedisRecords(backend.router, backend.namespace)


def part(
    choice_index: int,
    start: int,
    token_ids: list[int],
    finish_reason: FinishReason | None = None,
    sampler: str = "",
) -> RecordPart:
    return RecordPart(
        choice_index=choice_index, start=start, token_ids=token_ids, finish_reason=finish_reason, sampler=sampler
    )


def entry(*parts: RecordPart, key: RecordKey = KEY, digest: bytes = DIGEST, writer: bytes = A) -> RecordEntry:
    return RecordEntry(key, digest, writer, parts)


async def test_parts_add_up_for_every_choice(records: RecordStore) -> None:
    assert await records.read(KEY, DIGEST) == {}
    await records.write([entry(part(0, 0, [1, 2, 2**32 - 1]))], [])
    await records.write([entry(part(0, 3, [4]), part(3, 0, [7], FinishReason.LENGTH))], [])
    await records.write([entry(part(0, 4, [5, 6], FinishReason.STOP))], [])
    assert await records.read(KEY, DIGEST) == {
        0: Noted((1, 2, 2**32 - 1, 4, 5, 6), FinishReason.STOP),
        3: Noted((7,), FinishReason.LENGTH),
    }


async def test_the_sampler_is_noted_with_the_tokens_that_it_has_drawn(records: RecordStore) -> None:
    parts = [part(0, 0, [1], sampler="a/1"), part(0, 1, [2], FinishReason.STOP, sampler="a/1")]
    await records.write([entry(*parts, part(1, 0, [3]))], [])
    await records.write([entry(part(1, 0, [8, 9], sampler="b"), writer=B)], [])
    assert await records.read(KEY, DIGEST) == {
        0: Noted((1, 2), FinishReason.STOP, "a/1"),
        1: Noted((8, 9), sampler="b"),
    }


async def test_another_request_under_the_same_key_is_none(records: RecordStore) -> None:
    await records.write([entry(part(0, 0, [1]))], [])
    assert await records.read(KEY, OTHER_DIGEST) == {}
    assert await records.read(RecordKey("zeta", "r-1"), DIGEST) == {}
    await records.write([entry(part(0, 0, [2]), key=RecordKey("a:b", "c"))], [])
    assert await records.read(RecordKey("a", "b:c"), DIGEST) == {}


async def test_a_part_that_was_lost_hides_what_came_after_it(records: RecordStore) -> None:
    await records.write([entry(part(0, 0, [1, 2]), part(0, 3, [4], FinishReason.STOP), part(1, 1, [9]))], [])
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2))}


async def test_all_written_anew_over_what_was_there(records: RecordStore) -> None:
    await records.write([entry(part(0, 0, [1, 2])), entry(part(0, 2, [3, 4]))], [])
    await records.write([entry(part(0, 0, [1, 2, 3]))], [])
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2, 3, 4))}
    await records.write([entry(part(0, 0, [1, 2, 3, 4, 5], FinishReason.LENGTH))], [])
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2, 3, 4, 5), FinishReason.LENGTH)}


async def test_two_routers_notes_are_not_mixed(records: RecordStore) -> None:
    await records.write([entry(part(0, 0, [1, 2]), part(1, 0, [5]), writer=A)], [])
    await records.write([entry(part(0, 0, [1]), part(0, 2, [8, 9]), part(1, 0, [6, 7]), writer=B)], [])
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2)), 1: Noted((6, 7))}


async def test_a_router_that_is_done_leaves_what_another_one_notes(records: RecordStore) -> None:
    """Of the same id, which its client has sent there meanwhile."""
    mine, others = entry(part(0, 0, [1, 2, 3]), writer=A), entry(part(0, 0, [1]), writer=B)
    await records.write([mine], [])
    await records.write([others], [])
    done = RecordEnd(KEY, DIGEST, tuple(field_of(mine, part) for part in mine.parts))
    await records.write([], [done])
    await records.write([entry(part(0, 1, [2]), writer=B)], [done])
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2))}
    await records.write([], [RecordEnd(KEY, DIGEST)])
    assert await records.read(KEY, DIGEST) == {}


async def test_a_request_that_ends_leaves_another_ones_record_under_the_same_key(records: RecordStore) -> None:
    """Regression: of a request that had been continued, all fields under its id went, whoever had written them."""
    await records.write([entry(part(0, 0, [1])), entry(part(0, 0, [2]), digest=OTHER_DIGEST, writer=B)], [])
    await records.write([], [RecordEnd(KEY, DIGEST)])
    assert await records.read(KEY, DIGEST) == {}
    assert await records.read(KEY, OTHER_DIGEST) == {0: Noted((2,))}


async def test_what_has_ended_is_forgotten_before_the_new_is_noted(records: RecordStore) -> None:
    other = RecordKey("acme", "r-2")
    await records.write([entry(part(0, 0, [1])), entry(part(0, 0, [2]), key=other)], [])
    await records.write([entry(part(0, 0, [3]))], [RecordEnd(KEY, DIGEST), RecordEnd(other, DIGEST)])
    assert await records.read(KEY, DIGEST) == {0: Noted((3,))}
    assert await records.read(other, DIGEST) == {}
    await records.write([], [RecordEnd(KEY, DIGEST)])
    await records.write([], [])
    assert await records.read(KEY, DIGEST) == {}


async def test_a_record_lives_for_a_minute_after_it_was_written_to(backend: Backend, records: RecordStore) -> None:
    await records.write([entry(part(0, 0, [1]))], [])
    if backend.connection:
        name = Keys(backend.namespace).record(KEY.tenant_id, KEY.request_id, DIGEST)
        assert await backend.connection.call("PEXPIRE", name, 1000)
        await records.write([entry(part(0, 1, [2]))], [])
        assert 59_000 < await backend.connection.call("PTTL", name) <= 60_000
        return
    backend.clock.now += 59
    await records.write([entry(part(0, 1, [2]))], [])
    backend.clock.now += 59
    assert await records.read(KEY, DIGEST) == {0: Noted((1, 2))}
    backend.clock.now += 2
    assert await records.read(KEY, DIGEST) == {}


async def test_what_cannot_be_read_is_an_error_of_values(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    records = RedisRecords(backend.connection, namespace)
    await records.write([entry(part(0, 0, [1, 2]))], [])
    name = Keys(namespace).record(KEY.tenant_id, KEY.request_id, DIGEST)
    (field,) = await backend.connection.call("HKEYS", name)
    for value, reason in (
        (b"\0abc", "multiple of item size"),
        (b"because\0abcd", "'because' is not"),
        (b"\xff\0abcd", "can't decode"),
        (b"stop a b\0abcd", "'a b' is no name"),
        (b" " + b"a" * 65 + b"\0abcd", "is no name"),
    ):
        await backend.connection.call("HSET", name, field, value, "unknown", "x")
        with pytest.raises(ValueError, match=reason):
            await records.read(KEY, DIGEST)
    assert [(each.what, each.times) for each in backend.connection.garbage.seen()] == [("record", 5)]


async def test_a_record_of_a_wrong_type_is_written_anew_and_holds_up_no_other(
    server: RedisServer, namespace: str
) -> None:
    """Regression: as long as it lay there, nothing was noted of any request."""
    backend = server.backend(namespace)
    assert backend.connection
    records = RedisRecords(backend.connection, namespace)
    await backend.connection.call("SET", Keys(namespace).record(KEY.tenant_id, KEY.request_id, DIGEST), "x")
    with pytest.raises(ValueError, match="WRONGTYPE"):
        await records.read(KEY, DIGEST)
    other = RecordKey("acme", "r-2")
    await records.write([entry(part(0, 0, [1])), entry(part(0, 0, [2]), key=other)], [])
    assert await records.read(KEY, DIGEST) == {0: Noted((1,))}
    assert await records.read(other, DIGEST) == {0: Noted((2,))}
    assert [(each.what, each.times) for each in backend.connection.garbage.seen()] == [("record", 2)]
    await backend.connection.pipeline(
        [("UNLINK", name := Keys(namespace).record("acme", "r-2", DIGEST)), ("SET", name, "x")]
    )
    await records.write(
        [], [RecordEnd(other, DIGEST, (b"field",)), RecordEnd(KEY, DIGEST)]
    )  # what is useless stops nothing either
    assert await records.read(KEY, DIGEST) == {}


async def test_without_redis_it_says_so() -> None:
    records = RedisRecords(RedisConnection("redis://127.0.0.1:1/0"), "ns")
    with pytest.raises(StoreUnavailable):
        await records.write([entry(part(0, 0, [1]))], [RecordEnd(KEY, DIGEST)])
    with pytest.raises(StoreUnavailable):
        await records.read(KEY, DIGEST)
    await records.close()
