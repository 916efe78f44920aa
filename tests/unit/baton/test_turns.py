from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton import turns as turns_module
from baton.errors import Overloaded
from baton.turns import Turns


class Jobs:
    """Jobs of several tenants, each of which ends when it is asked to."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ends: dict[str, asyncio.Event] = {}
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str, size: int = 1) -> None:
        """Begins jobs; what stands before a name's digit is its tenant."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name, size))
        await self._settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await self._settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await self._settle()

    async def _run(self, name: str, size: int) -> None:
        async with self._turns.turn(name.rstrip("0123456789"), size):
            self.running.append(name)
            self._ends[name] = asyncio.Event()
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def two() -> AsyncIterator[Jobs]:
    """Of which two run at a time."""
    jobs = Jobs(Turns(2, 1000))
    yield jobs
    for task in jobs.tasks.values():
        task.cancel()
    await asyncio.gather(*jobs.tasks.values(), return_exceptions=True)


async def test_one_tenant_leaves_room_for_another(two: Jobs) -> None:
    await two.begin("a1", "a2", "a3")
    assert two.running == ["a1"]
    await two.begin("b1")
    assert two.running == ["a1", "b1"]


async def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    jobs = Jobs(Turns(1, 1000))
    await jobs.begin("a1", "a2", "a3", "a4", "b1", "c1", "c2")
    ran = []
    while jobs.running:
        ran += jobs.running
        await jobs.end(*jobs.running)
    assert ran == ["a1", "a2", "b1", "c1", "a3", "c2", "a4"]
    assert all(task.done() for task in jobs.tasks.values())


async def test_three_at_a_time_are_two_of_one_tenant() -> None:
    jobs = Jobs(Turns(3, 1000))
    await jobs.begin("a1", "a2", "a3")
    assert jobs.running == ["a1", "a2"]
    await jobs.begin("b1", "b2")
    assert jobs.running == ["a1", "a2", "b1"]
    await jobs.end("a1")
    assert jobs.running == ["a2", "b1", "a3"]
    await jobs.end("a2", "a3", "b1")
    assert jobs.running == ["b2"]
    await jobs.end("b2")


async def test_a_small_job_overtakes_a_large_one_of_the_same_tenant_and_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = Jobs(Turns(1, 2**30))
    await jobs.begin("a1")
    await jobs.begin("a2", size=turns_module.LARGE)
    await jobs.begin("a3")
    monkeypatch.setattr(turns_module, "PATIENCE_S", 0.0)
    await jobs.begin("a4", size=turns_module.LARGE)
    ran = []
    while jobs.running:
        ran += jobs.running
        await jobs.end(*jobs.running)
    assert ran == ["a1", "a3", "a4", "a2"]


async def test_who_leaves_makes_room(two: Jobs) -> None:
    await two.begin("a1", "b1", "a2", "b2", "c1", "c2")
    await two.leave("a2", "c1", "a1")
    assert two.running == ["b1", "c2"]
    await two.leave("b1", "c2")
    assert two.running == ["b2"]


async def test_a_turn_that_comes_while_its_job_leaves_is_passed_on() -> None:
    jobs = Jobs(Turns(1, 1000))
    await jobs.begin("a1", "a2", "a3")
    jobs.tasks["a1"].cancel()
    await asyncio.sleep(0)  # a2 has its turn, and does not know yet
    jobs.tasks["a2"].cancel()
    await jobs.end()
    assert jobs.running == ["a3"]
    await jobs.end("a3")


async def test_too_much_that_waits_is_refused() -> None:
    jobs = Jobs(Turns(1, 100))
    await jobs.begin("a1", size=50)
    await jobs.begin("a2", "a3", "b1", "b2", size=25)
    for name, size in (("a4", 1), ("c1", 1), ("d1", 60)):
        await jobs.begin(name, size=size)
        with pytest.raises(Overloaded, match="the queue is full"):
            await jobs.tasks[name]
    await jobs.leave("a2")
    await jobs.begin("c2", size=25)
    assert not jobs.tasks["c2"].done()
    await jobs.leave("a1", "a3", "b1", "b2", "c2")
    await jobs.begin("a5", size=50)
    assert jobs.running == ["a5"]
    await jobs.end("a5")
