"""Usage records of two routers: one suite for marks in memory and in every Redis."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.api import Usage
from baton.errors import ConfigError, StoreUnavailable
from baton.telemetry.instruments import Instruments
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys
from kvstore.leases import RecordKey
from router.timeline import usage_log
from router.timeline.usage_log import UsageBook, UsageFile
from router.timeline.usage_marks import FoundMark, MarkStore, MemoryMarks, RedisMarks
from router.timeline.usage_record import HOLD_S, UsageMark, UsageRecord
from tests.support.builders import cluster_status

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer

KEY, DIGEST = RecordKey("acme", "r"), b"digest"
CUT = UsageRecord(
    time_s=1_800_000_000.0, request_id="r", tenant="acme", model="m", usage=Usage(10, 4, 8, 1),
    finish_reasons=(), status="cancelled", is_resumption=False,
)  # fmt: skip
WHOLE = replace(CUT, usage=Usage(10, 9, 8, 1), finish_reasons=("stop",), status="ok")


@pytest.fixture
def marks(backend: Backend) -> MarkStore:
    if backend.store:
        return MemoryMarks(backend.clock)
    assert backend.router
    return RedisMarks(backend.router, backend.namespace, backend.clock)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's Redis may take longer than a router waits."""
    monkeypatch.setattr(usage_log, "TIMEOUT_S", 20.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "usage.jsonl"


def book(log: Path, marks: MarkStore) -> UsageBook:
    return UsageBook(UsageFile(str(log)), marks, Instruments(cluster_status))


def lines(log: Path) -> list[tuple[str, str, int, int]]:
    read = [json.loads(line) for line in log.read_text().splitlines()]
    return [(one["request_id"], one["status"], one["prompt_tokens"], one["completion_tokens"]) for one in read]


async def test_a_request_that_goes_on_at_another_router_has_one_record(
    marks: MarkStore, backend: Backend, log: Path
) -> None:
    a, b = book(log, marks), book(log, marks)
    first = a.placed(KEY, DIGEST, False)
    a.ended(KEY, first, CUT)
    await a.flush()
    assert lines(log) == []
    second = b.placed(KEY, DIGEST, True)
    await b.flush()
    backend.clock.now += 2 * HOLD_S
    await a.sweep()
    assert lines(log) == []
    b.ended(KEY, second, WHOLE)
    await b.flush()
    assert lines(log) == [("r", "ok", 10, 9)]


async def test_a_router_that_notices_late_that_its_client_has_left_writes_nothing(marks: MarkStore, log: Path) -> None:
    a, b = book(log, marks), book(log, marks)
    first = a.placed(KEY, DIGEST, False)
    await a.flush()
    b.ended(KEY, b.placed(KEY, DIGEST, True), WHOLE)
    await b.flush()
    a.ended(KEY, first, CUT)
    await a.flush()
    assert lines(log) == [("r", "ok", 10, 9)]


async def test_what_nobody_goes_on_with_is_written_by_whoever_is_there(
    marks: MarkStore, backend: Backend, log: Path
) -> None:
    a, b = book(log, marks), book(log, marks)
    a.ended(KEY, a.placed(KEY, DIGEST, False), CUT)
    await a.flush()
    await b.sweep()
    assert lines(log) == []
    backend.clock.now += HOLD_S
    await b.sweep()
    assert lines(log) == [("r", "cancelled", 10, 4)]
    await asyncio.gather(a.sweep(), b.sweep())
    assert lines(log) == [("r", "cancelled", 10, 4)]
    b.ended(KEY, b.placed(KEY, DIGEST, True), WHOLE)
    await b.flush()
    assert lines(log)[1:] == [("r", "ok", 0, 5)], "who comes back late: what is new"


async def test_another_prompt_under_the_id_is_another_request(marks: MarkStore, log: Path) -> None:
    a, b = book(log, marks), book(log, marks)
    a.ended(KEY, a.placed(KEY, DIGEST, False), CUT)
    await a.flush()
    b.ended(KEY, b.placed(KEY, b"other", True), WHOLE)
    b.ended(RecordKey("zeta", "r"), b.placed(RecordKey("zeta", "r"), DIGEST, True), WHOLE)
    await b.flush()
    assert lines(log) == [("r", "cancelled", 10, 4), ("r", "ok", 10, 9), ("r", "ok", 10, 9)]


async def test_the_last_router_writes_what_is_held_when_it_ends(marks: MarkStore, log: Path) -> None:
    routers = [
        UsageBook(UsageFile(str(log)), marks, Instruments(cluster_status), num_routers)
        for num_routers in (lambda: 2, lambda: 1)
    ]
    for number, router in enumerate(routers):
        key = RecordKey("acme", f"r{number}")
        router.ended(key, router.placed(key, DIGEST, False), replace(CUT, request_id=key.request_id))
        await router.close()
    assert lines(log) == [("r1", "cancelled", 10, 4)]


async def test_marks_change_only_from_what_was_read(marks: MarkStore, backend: Backend) -> None:
    plain, held = UsageMark(digest="d", token="1"), UsageMark(digest="d", token="1", held=CUT)
    none = await marks.get(KEY)
    assert none.mark is None
    assert await marks.swap(KEY, none, held)
    assert not await marks.swap(KEY, none, plain)
    assert (await marks.get(KEY)).mark == held
    assert await marks.due() == []
    backend.clock.now += HOLD_S
    assert await marks.due() == [KEY]
    assert await marks.swap(KEY, await marks.get(KEY), plain)
    assert await marks.due() == []
    assert await marks.swap(KEY, await marks.get(KEY), held)
    backend.clock.now += HOLD_S
    await marks.forget_due(KEY)
    assert await marks.due() == []


async def test_marks_expire(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    marks, name = RedisMarks(backend.connection, namespace), Keys(namespace).usage("acme", "r")
    assert await marks.swap(KEY, await marks.get(KEY), UsageMark(digest="d", token="1"))
    assert 3_590_000 < await backend.connection.call("PTTL", name) <= 3_600_000


async def test_garbage_in_place_of_marks_stops_no_record(server: RedisServer, namespace: str, log: Path) -> None:
    backend = server.backend(namespace)
    assert backend.connection
    keys, router = Keys(namespace), book(log, RedisMarks(backend.connection, namespace, backend.clock))
    await backend.connection.call("ZADD", keys.held, 0, "no json", 1, "[]", 2, '["gone", "r"]')
    for command in (("SET", keys.usage("acme", "r"), "x"), ("SADD", keys.usage("acme", "r"), "x")):
        await backend.connection.pipeline([("DEL", keys.usage("acme", "r")), command])
        router.ended(KEY, router.placed(KEY, DIGEST, False), WHOLE)
        await router.flush()
    assert lines(log) == [("r", "ok", 10, 9)] * 2
    await router.sweep()
    assert await backend.connection.call("ZCARD", keys.held) == 0
    await backend.connection.pipeline([("DEL", keys.held), ("SET", keys.held, "x")])
    assert await RedisMarks(backend.connection, namespace).due() == []
    router.ended(KEY, router.placed(KEY, DIGEST, False), CUT)
    await router.flush()
    assert await backend.connection.call("ZCARD", keys.held) == 1


async def test_without_redis_records_are_written_at_once(log: Path) -> None:
    marks = RedisMarks(RedisConnection("redis://127.0.0.1:1/0"), "ns")
    with pytest.raises(StoreUnavailable):
        await marks.get(KEY)
    router = book(log, marks)
    router.ended(KEY, router.placed(KEY, DIGEST, True), CUT)
    router.ended(KEY, router.placed(KEY, DIGEST, False), WHOLE)
    await router.flush()
    assert lines(log) == [("r", "cancelled", 10, 4), ("r", "ok", 10, 9)]
    await router.close()


async def test_a_redis_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, log: Path
) -> None:
    class Hanging(MemoryMarks):
        async def get(self, key: RecordKey) -> FoundMark:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(usage_log, "TIMEOUT_S", 0.05)
    router = book(log, Hanging(time.monotonic))
    router.ended(KEY, router.placed(KEY, DIGEST, False), WHOLE)
    await router.flush()
    assert lines(log) == [("r", "ok", 10, 9)]
    assert "without asking other routers: no answer" in caplog.text
    await router.close()


def test_a_file_that_was_moved_is_begun_anew(log: Path) -> None:
    file = UsageFile(str(log))
    file.append(["a"])
    log.rename(moved := log.with_suffix(".1"))
    file.append(["b"])
    log.unlink()
    file.append(["c", "d"])
    assert (moved.read_text(), log.read_text()) == ("a\n", "c\nd\n")
    file.close()


def test_a_file_that_cannot_be_written_is_an_error_of_the_settings(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "usage.jsonl"):
        with pytest.raises(ConfigError, match=r"router\.usage_log: cannot write"):
            UsageFile(str(path))


async def test_a_full_disk_costs_records_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, log: Path
) -> None:
    import os

    write: Any = os.write
    instruments = Instruments(cluster_status)
    router = UsageBook(UsageFile(str(log)), MemoryMarks(), instruments)

    async def end() -> None:
        router.ended(KEY, router.placed(KEY, DIGEST, False), WHOLE)
        await router.flush()

    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
    await end()
    monkeypatch.setattr(os, "write", lambda file, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    await end()
    monkeypatch.undo()
    await end()
    text = await asyncio.to_thread(log.read_text)
    assert text.startswith('{"time": \n{"time": "2027')
    assert text.endswith("}\n")
    assert caplog.text.count("usage records cannot be written") == 1
    counted = instruments.exposition().decode()
    assert 'baton_usage_records_total{outcome="failed"} 2.0' in counted
    assert 'baton_usage_records_total{outcome="written"} 1.0' in counted
