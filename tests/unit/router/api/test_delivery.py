"""How answers reach clients who read slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.errors import NotRead, WorkerFailed
from baton.tasks import seen_through
from router.api import delivery
from router.api.delivery import ReadAhead, deliver
from tests.support.waiting import until

NUM_ITEMS = 20


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LOOK_S", 0.02)


class Answer:
    """Items that are there at once, and what became of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_asked = 0
        self.has_ended = False
        self._error = error

    async def items(self) -> AsyncGenerator[int]:
        try:
            for self.num_asked in range(1, NUM_ITEMS + 1):
                yield self.num_asked
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)  # as what frees something does
            self.has_ended = True


class Client:
    """A client that takes an item only once it may."""

    def __init__(self, *, reads: bool = False) -> None:
        self.taken: list[int] = []
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()

    async def take(self, item: int) -> None:
        await self.reads.wait()
        self.taken.append(item)


ALL = list(range(1, NUM_ITEMS + 1))


async def test_a_client_that_reads_gets_each_item_as_it_comes() -> None:
    answer, client, ahead = Answer(), Client(reads=True), ReadAhead()
    await deliver(answer.items(), client.take, size=lambda item: 1, ahead=ahead)
    assert client.taken == ALL
    assert answer.has_ended


async def test_an_answer_ends_while_its_client_does_not_read() -> None:
    answer, client, ahead = Answer(), Client(), ReadAhead()
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
    await until(lambda: answer.has_ended)
    assert not client.taken
    assert ahead.num_bytes == 3 * (NUM_ITEMS - 1), "all but the one that is being written"
    client.reads.set()
    await delivering
    assert client.taken == ALL
    assert ahead.num_bytes == 0


async def test_no_more_is_read_ahead_than_there_is_room_for() -> None:
    ahead = ReadAhead(max_bytes=10)
    answers, clients = [Answer(), Answer()], [Client(), Client()]
    delivering = [
        asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
        for answer, client in zip(answers, clients, strict=True)
    ]
    await until(lambda: ahead.num_bytes >= 10)
    await asyncio.sleep(0.1)
    assert ahead.num_bytes <= 10 + 2 * 3
    assert not any(answer.has_ended for answer in answers)
    for client in clients:
        client.reads.set()
    await asyncio.gather(*delivering)
    assert [client.taken for client in clients] == [ALL, ALL]
    assert ahead.num_bytes == 0


async def test_a_slow_client_goes_on_while_others_take_all_the_room() -> None:
    ahead, slow, client = ReadAhead(max_bytes=10), Answer(), Client()
    ahead.add(1000)
    delivering = asyncio.create_task(deliver(slow.items(), client.take, size=lambda item: 3, ahead=ahead))
    await until(lambda: ahead.num_bytes > 1000)
    await asyncio.sleep(0.1)
    assert slow.num_asked == 2, "one is being written, one is kept"
    client.reads.set()
    async with asyncio.timeout(20):
        await delivering
    assert client.taken == ALL
    assert ahead.num_bytes == 1000


async def test_an_answer_is_read_ahead_as_soon_as_there_is_room() -> None:
    ahead, answer, client = ReadAhead(max_bytes=100), Answer(), Client()
    ahead.add(1000)
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
    await until(lambda: answer.num_asked == 2)
    ahead.add(-1000)
    await until(lambda: answer.has_ended)
    client.reads.set()
    await delivering


async def test_what_goes_wrong_comes_behind_what_was_read_ahead() -> None:
    answer, client = Answer(WorkerFailed("gone")), Client()
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 1, ahead=ReadAhead()))
    await until(lambda: answer.has_ended)
    client.reads.set()
    with pytest.raises(WorkerFailed):
        await delivering
    assert client.taken == ALL


@pytest.mark.parametrize("max_bytes", [10, 1000])
async def test_who_does_not_read_for_long_is_ended(max_bytes: int) -> None:
    answer, client, ahead = Answer(), Client(), ReadAhead(max_bytes)
    with pytest.raises(NotRead, match=r"has not read for 0\.2 s"):
        await deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead, stall_s=0.2)
    assert answer.has_ended
    assert ahead.num_bytes == 0
    assert not client.taken


async def test_who_does_not_read_loses_the_place_of_the_answer_where_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "CROWDED_STALL_S", 0.1)
    is_crowded = False
    answer, client, ahead = Answer(), Client(), ReadAhead(10, is_crowded=lambda: is_crowded)
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
    await asyncio.sleep(0.3)
    assert not answer.has_ended, "nobody is refused"
    is_crowded = True
    with pytest.raises(NotRead, match=r"for 0\.1 s while other requests wait for its slot"):
        await delivering
    assert (answer.has_ended, ahead.num_bytes) == (True, 0)


async def test_an_answer_that_is_computed_keeps_no_place_and_waits_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "CROWDED_STALL_S", 0.1)
    answer, client, ahead = Answer(), Client(), ReadAhead(is_crowded=lambda: answer.has_ended)
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
    await until(lambda: answer.has_ended)
    await asyncio.sleep(0.3)
    client.reads.set()
    await delivering
    assert client.taken == ALL


async def test_what_is_held_is_free_though_the_write_cannot_be_cancelled() -> None:
    answer, client, ahead = Answer(), Client(), ReadAhead(10)

    async def take(item: int) -> None:
        await seen_through(asyncio.ensure_future(client.take(item)))

    delivering = asyncio.create_task(deliver(answer.items(), take, size=lambda item: 3, ahead=ahead, stall_s=0.2))
    await until(lambda: answer.has_ended)
    assert (ahead.num_bytes, delivering.done()) == (0, False)
    client.reads.set()
    with pytest.raises(NotRead):
        await delivering
    assert client.taken == [1]


@pytest.mark.parametrize("max_bytes", [10, 1000])
async def test_a_client_that_leaves_ends_its_answer(max_bytes: int) -> None:
    answer, client, ahead = Answer(), Client(), ReadAhead(max_bytes)
    delivering = asyncio.create_task(deliver(answer.items(), client.take, size=lambda item: 3, ahead=ahead))
    await until(lambda: ahead.num_bytes > 0)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    assert answer.has_ended
    assert ahead.num_bytes == 0


async def test_a_client_that_reads_slowly_is_not_ended() -> None:
    answer, taken = Answer(), []

    async def take(item: int) -> None:
        await asyncio.sleep(0.05)
        taken.append(item)

    await deliver(answer.items(), take, size=lambda item: 3, ahead=ReadAhead(), stall_s=0.5)
    assert taken == ALL
