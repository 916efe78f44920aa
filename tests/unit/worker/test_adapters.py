"""A worker checks one folder of an adapter at a time, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from baton.adapters import AdapterFacts
from baton.errors import InvalidRequest, Overloaded, Unsupported
from baton.v1 import worker_pb2
from worker.adapters import AdapterChecks
from worker.calls import CallServicer

FACTS = AdapterFacts(path="/adapters/one", digest="ab" * 32, rank=8, targets=(), num_bytes=4096)


class Engine:
    """Checks a folder once it may, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()

    async def check(self, path: str) -> AdapterFacts:
        self.asked.append(path)
        await self.may_answer.wait()
        if path == "/bad":
            raise InvalidRequest("its bias is not applied", "path")
        return FACTS


async def test_what_the_engine_finds_is_answered() -> None:
    engine = Engine()
    engine.may_answer.set()
    calls = CallServicer(checks=AdapterChecks(engine.check))
    asked = worker_pb2.CheckAdapterRequest(path="/adapters/one")
    answer = await calls.CheckAdapter(asked, cast("Any", None))
    assert (answer.digest, answer.rank, answer.num_bytes) == ("ab" * 32, 8, 4096)
    assert engine.asked == ["/adapters/one"]


async def test_the_engines_refusal_is_the_answer_and_the_next_one_is_checked() -> None:
    engine = Engine()
    engine.may_answer.set()
    checks = AdapterChecks(engine.check)
    with pytest.raises(InvalidRequest, match="its bias is not applied"):
        await checks.check("/bad")
    assert await checks.check("/good") == FACTS


@pytest.mark.parametrize("path", ["", "relative", "/a\n", "/" + "x" * 1024, "/\ud800"])
async def test_what_can_be_no_path_is_not_looked_at(path: str) -> None:
    engine = Engine()
    with pytest.raises(InvalidRequest, match="must be absolute, printable and have at most 1024 characters"):
        await AdapterChecks(engine.check).check(path)
    assert engine.asked == []


async def test_a_worker_without_adapters_says_what_to_set() -> None:
    with pytest.raises(Unsupported, match=r"set engine\.max_adapters"):
        await AdapterChecks().check("/adapters/one")


async def test_one_folder_is_checked_at_a_time() -> None:
    engine = Engine()
    checks = AdapterChecks(engine.check)
    first = asyncio.create_task(checks.check("/one"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="checking another adapter"):
        await checks.check("/two")
    engine.may_answer.set()
    assert await first == FACTS
    assert await checks.check("/two") == FACTS
    assert engine.asked == ["/one", "/two"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_check_that_hangs_is_given_up_and_keeps_others_out_until_it_ends(leaves: bool) -> None:
    engine = Engine()
    checks = AdapterChecks(engine.check, timeout_s=0.01)
    if leaves:
        first = asyncio.create_task(checks.check("/bad"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    else:
        with pytest.raises(InvalidRequest, match=r"could not read /bad within 0\.01 s"):
            await checks.check("/bad")
    with pytest.raises(Overloaded):
        await checks.check("/two")
    engine.may_answer.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await checks.check("/two") == FACTS
