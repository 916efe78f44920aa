"""Hosts whose clocks differ by an hour, or jump: whoever came last holds the id, and no lease is shorter for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.errors import Fenced
from kvstore.index import Op
from kvstore.index.keys import Keys
from tests.contract.test_index import FakeWorker, follower, keys, owns, running, snapshot, stored
from tests.contract.test_leases import LOAD, worker_info
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer

HOUR_S = 3600.0


def host(server: RedisServer, namespace: str, ahead_s: float) -> Backend:
    backend = server.backend(namespace)
    backend.clock.now += ahead_s
    return backend


@pytest.mark.parametrize("clocks", [(HOUR_S, 0.0), (0.0, -HOUR_S), (HOUR_S, -HOUR_S), (-HOUR_S, HOUR_S)])
async def test_a_worker_that_moves_to_a_host_with_another_clock_follows_itself(
    server: RedisServer, namespace: str, clocks: tuple[float, float]
) -> None:
    """A router that has seen the first incarnation takes up the next ones, and none of what the past ones say."""
    first, second = (host(server, namespace, ahead_s) for ahead_s in clocks)
    epochs: list[int] = []
    late = follower(server.backend(namespace))
    async with running(late):
        for number, backend in enumerate((first, second, first)):
            if number == 2:
                backend.clock.now -= 2 * HOUR_S  # set back between two starts
            worker = FakeWorker(backend, "w", await backend.leases.acquire("w"))
            info = worker_info("w", worker.epoch)
            assert await backend.leases.renew(info, LOAD)
            async with running(worker.publisher):
                worker.store(number, 10 + number)
                await until(lambda: owns(late.mirror, worker))  # noqa: B023 - awaited here
            for past in epochs:
                for event in (stored(past, 1, 99), snapshot(past, 100, 99)[0]):
                    with pytest.raises(Fenced):
                        await first.index.apply(event)
                with pytest.raises(Fenced):
                    await first.leases.renew(worker_info("w", past), LOAD)
                with pytest.raises(Fenced):
                    await second.leases.acquire("w", past)
            epochs.append(worker.epoch)
            assert [each.info for each in await second.leases.list_workers()] == [info]
        assert late.mirror.lookup(keys(99)) == {}
    assert epochs == sorted(set(epochs))


async def test_clocks_an_hour_apart_keep_workers_for_the_same_time(server: RedisServer, namespace: str) -> None:
    """Only the store's own clock says when a lease ends."""
    hosts = {"ahead": HOUR_S, "behind": -HOUR_S, "right": 0.0}
    backends = {name: host(server, namespace, ahead_s) for name, ahead_s in hosts.items()}
    workers = {name: FakeWorker(each, name, await each.leases.acquire(name)) for name, each in backends.items()}
    late = follower(backends["behind"])
    async with running(*(worker.publisher for worker in workers.values()), late):
        for name, worker in workers.items():
            assert await backends[name].leases.renew(worker_info(name, worker.epoch), LOAD)
            worker.store(1, 2)
        await until(lambda: all(owns(late.mirror, worker) for worker in workers.values()))
        backends["right"].clock.now -= 2 * HOUR_S  # while it serves
        assert await backends["right"].leases.renew(worker_info("right", workers["right"].epoch), LOAD)
        workers["right"].store(3)
        await until(lambda: owns(late.mirror, workers["right"]))
    assert {each.info.id for each in await backends["ahead"].leases.list_workers()} == workers.keys()
    connection = backends["ahead"].connection
    assert connection
    lives = [await connection.call("PTTL", Keys(namespace).lease(name)) for name in workers]
    assert all(0 < life <= 10_000 for life in lives), lives
    events = [event for _, event in await backends["ahead"].index.read((0, 0), 0) if event]
    assert {event.epoch for event in events if event.op is Op.STORED} == {each.epoch for each in workers.values()}
