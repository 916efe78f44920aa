"""The contract of LeaseStore, the keeper that holds a lease, and the Redis that `baton up` brings along."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from baton.cluster import (
    BlockCounts,
    Computes,
    ControllerInfo,
    OpenConnections,
    PoolScaling,
    PoolTrouble,
    Role,
    TransferCounts,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.costs import PRIOR
from baton.errors import ConfigError, Fenced, StoreUnavailable
from deploy import embedded_redis
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import BlockEvent, IndexOutcome, Op, RedisConnection
from kvstore.index.keys import Keys
from kvstore.leases import LeaseKeeper, RedisLeases
from kvstore.leases.codec import decode_info, decode_load, encode, encode_load
from router.cluster.registry import Dependencies
from tests.contract.roles import url_of
from tests.support import builders
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contract.conftest import Backend, RedisServer

LOAD = WorkerLoad(
    state=WorkerState.READY,
    running=3,
    waiting=1,
    queued_tokens=170,
    blocks=BlockCounts(100, 60, 30, 10),
    state_rows=BlockCounts(9, 4, 3, 2),
    adapters=("ab" * 32, "cd" * 32),
    adapter_load_s=0.25,
    self_check="ok",
)


def worker_info(worker_id: str, epoch: int) -> WorkerInfo:
    return builders.worker_info(worker_id, Role.PREFILL, epoch=epoch, address=f"{worker_id}:1")


async def test_a_worker_is_listed_as_it_describes_itself(backend: Backend) -> None:
    leases = backend.leases
    b, a = [worker_info(worker_id, await leases.acquire(worker_id)) for worker_id in ("w-b", "w-a")]
    assert await leases.list_workers() == []  # acquired, not described yet
    await leases.renew(b, LOAD)
    await leases.renew(a, LOAD)
    assert await leases.list_workers() == [Worker(a, LOAD), Worker(b, LOAD)]
    draining = dataclasses.replace(LOAD, state=WorkerState.DRAINING)
    await leases.renew(a, draining)
    assert await leases.list_workers() == [Worker(a, draining), Worker(b, LOAD)]


async def test_the_controller_is_known_as_it_describes_itself(backend: Backend) -> None:
    assert await backend.leases.get_controller() is None
    for scaling in ((), (PoolScaling("decode", 0.5, 3), PoolScaling("prefill", 0.25, 1))):
        trouble = tuple(PoolTrouble(each.pool, 1, 2) for each in scaling)
        await backend.leases.announce_controller(
            me := ControllerInfo(pid=7, address="127.0.0.1:7", scaling=scaling, incarnation="c7", trouble=trouble)
        )
        assert await backend.leases.get_controller() == me


async def test_a_router_may_ask_redis_for_its_memory(backend: Backend) -> None:
    if backend.router is None:
        return  # there is no Redis
    dependencies = Dependencies(backend.router, {})
    await dependencies.look(0.0)
    memory = dependencies.store_memory
    assert memory is not None
    assert memory.used_bytes > 2**16
    dependencies.store_memory = None
    await dependencies.look(1.0)
    assert dependencies.store_memory is None, "it was asked a second ago"


async def test_epochs_rise_even_when_the_clock_does_not(backend: Backend) -> None:
    first = await backend.leases.acquire("w")
    assert first == 1_000_000_000
    assert await backend.leases.acquire("w") == first + 1
    backend.clock.now -= 3600
    assert await backend.leases.acquire("w") == first + 2
    backend.clock.now += 7200
    assert await backend.leases.acquire("w") == first + 3_600_000


async def test_epochs_rise_after_the_lease_has_gone(backend: Backend) -> None:
    first = await backend.leases.acquire("w")
    await backend.lapse("w")
    second = await backend.leases.acquire("w")
    await backend.leases.release("w", second)
    assert [second, await backend.leases.acquire("w")] == [first + 1, first + 2]


async def test_a_newer_incarnation_fences_the_older(backend: Backend) -> None:
    leases = backend.leases
    old = worker_info("w", await leases.acquire("w"))
    await leases.renew(old, LOAD)
    new = worker_info("w", await leases.acquire("w"))
    with pytest.raises(Fenced, match=str(new.epoch)):
        await leases.renew(old, LOAD)
    await leases.renew(new, LOAD)
    await leases.release("w", old.epoch)  # a slow shutdown takes nothing from the successor
    assert await leases.list_workers() == [Worker(new, LOAD)]


async def test_a_fenced_worker_stays_fenced_when_its_successor_has_died(backend: Backend) -> None:
    old, new = await backend.leases.acquire("w"), await backend.leases.acquire("w")
    assert new > old
    await backend.lapse("w")
    with pytest.raises(Fenced):
        await backend.leases.renew(worker_info("w", old), LOAD)


async def test_a_lapsed_lease_does_not_come_back(backend: Backend) -> None:
    """Regression: a worker that woke from a pause was again the one that everybody had written off."""
    info = worker_info("w", await backend.leases.acquire("w"))
    assert await backend.leases.renew(info, LOAD)
    await backend.lapse("w")
    assert not await backend.leases.renew(info, LOAD)
    assert await backend.leases.list_workers() == []
    again = worker_info("w", await backend.leases.acquire("w", info.epoch))
    assert again.epoch > info.epoch
    assert await backend.leases.renew(again, LOAD)
    assert await backend.leases.list_workers() == [Worker(again, LOAD)]
    with pytest.raises(Fenced):
        await backend.leases.renew(info, LOAD)


async def test_a_lease_that_the_store_lost_comes_back_with_its_own_epoch(backend: Backend) -> None:
    info = worker_info("w", await backend.leases.acquire("w"))
    await backend.leases.renew(info, LOAD)
    await backend.lose("w")
    assert await backend.leases.list_workers() == []
    assert await backend.leases.renew(info, LOAD)
    assert await backend.leases.list_workers() == [Worker(info, LOAD)]


async def test_who_wakes_from_a_pause_does_not_fence_its_successor(backend: Backend) -> None:
    """Its lease had expired, and before it acquired the next one, another process did under its name."""
    old = await backend.leases.acquire("w")
    await backend.lapse("w")
    assert not await backend.leases.renew(worker_info("w", old), LOAD)
    successor = worker_info("w", await backend.leases.acquire("w"))
    with pytest.raises(Fenced, match=str(successor.epoch)):
        await backend.leases.acquire("w", old)
    assert await backend.leases.renew(successor, LOAD)


async def test_release_ends_the_lease_and_the_blocks(backend: Backend) -> None:
    info = worker_info("w", await backend.leases.acquire("w"))
    await backend.leases.renew(info, LOAD)
    await backend.index.apply(BlockEvent(worker_id="w", epoch=info.epoch, seq=1, op=Op.STORED, keys=(b"k" * 16,)))
    await backend.leases.release("w", info.epoch)
    assert await backend.leases.list_workers() == []
    assert await backend.index.snapshot("w", info.epoch) == (0, set())


async def test_a_renewal_keeps_the_blocks_alive(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    info = worker_info("w", await backend.leases.acquire("w"))
    for seq, op in enumerate((Op.STORED, Op.SNAPSHOT_BEGIN, Op.SNAPSHOT_PART), 1):
        await backend.index.apply(BlockEvent(worker_id="w", epoch=info.epoch, seq=seq, op=op, keys=(b"k" * 16,)))
    assert backend.connection
    keys = [key for key in await backend.connection.call("KEYS", "*") if namespace.encode() in key]
    owned = [key for key in keys if any(kind in key for kind in (b":blk:", b":seq:", b":snap:"))]
    assert len(owned) == 3
    await backend.connection.pipeline([("PEXPIRE", key, 5000) for key in owned])
    await backend.leases.renew(info, LOAD)
    assert all(life > 50_000 for life in await backend.connection.pipeline([("PTTL", key) for key in owned]))


async def test_regression_owner_entries_without_expiry(server: RedisServer, namespace: str) -> None:
    """kthena#1223: owner fields without a TTL live for ever. Everything that a dead worker leaves expires."""
    backend = server.backend(namespace)
    epoch = await backend.leases.acquire("w")
    await backend.leases.renew(worker_info("w", epoch), LOAD)
    for seq, op in enumerate((Op.STORED, Op.SNAPSHOT_BEGIN, Op.SNAPSHOT_PART), 1):
        await backend.index.apply(BlockEvent(worker_id="w", epoch=epoch, seq=seq, op=op, keys=(b"k" * 16,)))
    assert backend.connection
    keys = [key for key in await backend.connection.call("KEYS", "*") if namespace.encode() in key and b":w" in key]
    lives = dict(zip(keys, await backend.connection.pipeline([("PTTL", key) for key in keys]), strict=True))
    assert len(lives) == 6  # lease, epoch, blk, seq, snap, and the set of ids, which is pruned
    assert [key for key, life in lives.items() if life < 0] == [f"kv:{{{namespace}}}:workers".encode()]
    await backend.lapse("w")
    await backend.leases.list_workers()
    assert not await backend.connection.call("SMEMBERS", f"kv:{{{namespace}}}:workers")


@pytest.mark.parametrize("part", ["worker", "router", "controller"])
async def test_every_part_may_list_workers(server: RedisServer, namespace: str, part: str) -> None:
    """Regression: prefill workers look for decode workers, and the chart's Redis did not let them."""
    backend = server.backend(namespace)
    info = worker_info("w", await backend.leases.acquire("w"))
    await backend.leases.renew(info, LOAD)
    server.opened.append(connection := RedisConnection(url_of(server.embedded.url, part)))
    assert backend.connection
    await backend.connection.call("SADD", Keys(namespace).workers, "gone", "", "x" * 300)
    assert await RedisLeases(connection, namespace).list_workers() == [Worker(info, LOAD)]
    assert await backend.connection.call("SMEMBERS", Keys(namespace).workers) == {b"w"}


async def test_desired_sizes_are_kept(backend: Backend) -> None:
    assert await backend.leases.get_desired() == {}
    await backend.leases.set_desired({"prefill": 2, "decode": 3})
    await backend.leases.set_desired({"prefill": 0})
    assert await backend.leases.get_desired() == {"prefill": 0, "decode": 3}


async def test_the_boot_token_stays(backend: Backend) -> None:
    boot = await backend.leases.boot()
    assert boot
    assert await backend.leases.boot() == boot
    assert (await backend.index.state()).boot == boot


def test_a_field_of_a_newer_release_is_skipped() -> None:
    info, load = encode(worker_info("w", 1)), encode(LOAD)
    newer = load.replace('"total":100', '"total":100,"pinned":4').replace('"running":3', '"running":3,"paused":1')
    assert newer != load
    assert (decode_info(info.encode()), decode_load(newer.encode())) == (worker_info("w", 1), LOAD)
    newer = load.replace('"s_weights"', '"s_of_later":1e-3,"s_weights"').replace(
        '"resent"', '"again":{"x":[]},"resent"'
    )
    assert newer.count("later") == newer.count("again") == 1
    assert (decode_info(info.encode()), decode_load(newer.encode())) == (worker_info("w", 1), LOAD)
    older = json.loads(load)
    del older["costs"], older["transfers"]
    assert decode_load(json.dumps(older).encode()) == LOAD


def test_a_worker_of_an_older_release_serves_no_adapters() -> None:
    info, load = json.loads(encode(worker_info("w", 1))), json.loads(encode(LOAD))
    assert decode_info(json.dumps(info | {"max_adapters": 4}).encode()).max_adapters == 4
    del info["max_adapters"], load["adapters"], load["adapter_load_s"]
    assert decode_info(json.dumps(info).encode()).max_adapters == 0
    found = decode_load(json.dumps(load).encode())
    assert (found.adapters, found.adapter_load_s) == ((), 0.0)


@pytest.mark.parametrize(
    "wrong", [{"adapters": ["\x1b[2J"]}, {"adapters": ["a" * 65]}, {"adapters": "ab"}, {"adapter_load_s": 1e6}]
)
def test_no_lease_lists_what_can_be_no_adapter(wrong: dict[str, object]) -> None:
    load = json.loads(encode(LOAD)) | wrong
    with pytest.raises(ValueError, match=r"adapter|a{9}|x1b"):
        decode_load(json.dumps(load).encode())


def test_engine_and_sampler_are_read_as_names_and_an_older_release_names_none() -> None:
    info = dataclasses.replace(worker_info("w", 1), engine="transformers", sampler="inverse-transform-blake2b/1")
    assert decode_info(encode(info).encode()) == info
    older = json.loads(encode(info))
    del older["engine"], older["sampler"]
    read = decode_info(json.dumps(older).encode())
    assert read == worker_info("w", 1)
    assert (read.engine, read.sampler) == ("", "")


def test_what_a_worker_computes_with_is_read_within_bounds() -> None:
    computes = Computes(gpu="NVIDIA H200", num_ranks=2, dtype="bfloat16", plans_ahead=True, fallbacks=("a: b",))
    info = dataclasses.replace(worker_info("w", 1), computes=computes)
    assert decode_info(encode(info).encode()) == info
    older = json.loads(encode(info))
    del older["computes"]
    assert decode_info(json.dumps(older).encode()) == worker_info("w", 1)
    for name, garbage in (
        ("num_graphs", 2**31), ("num_fused", -1), ("num_ranks", "2"), ("plans_ahead", "yes"), ("attention", "a b"),
        ("fallbacks", ["x"] * 1001), ("fallbacks", [1]), ("gpu", 5),
    ):  # fmt: skip
        written = json.loads(encode(info))
        written["computes"][name] = garbage
        with pytest.raises(ValueError, match=r"\bno (number|name|list|text)"):
            decode_info(json.dumps(written).encode())


@pytest.mark.parametrize("name", ["engine", "sampler"])
@pytest.mark.parametrize(
    "garbage", ["a b", "a\n", "x" * 65, "\u00e9", "\ud800", "<b>", 1, None, ["a"], {"a": "b"}], ids=repr
)
def test_what_is_no_name_of_an_engine_or_a_sampler_is_refused(name: str, garbage: object) -> None:
    written = json.dumps(json.loads(encode(worker_info("w", 1))) | {name: garbage})
    with pytest.raises(ValueError, match="is no name of at most 64"):
        decode_info(written.encode())


async def test_a_set_of_ids_that_is_lost_is_told_like_a_loss_of_everything(server: RedisServer, namespace: str) -> None:
    """Who renews next is listed alone, and the others must not be taken for dead until they have renewed."""
    backend = server.backend(namespace)
    info = worker_info("w", await backend.leases.acquire("w"))
    boot, name = await backend.leases.boot(), Keys(namespace).workers
    assert backend.connection
    await backend.connection.pipeline([("DEL", name), ("SET", name, "x")])
    with pytest.raises(StoreUnavailable):
        await backend.leases.list_workers()
    assert await backend.leases.renew(info, LOAD)
    assert await backend.leases.list_workers() == [Worker(info, LOAD)]
    assert await backend.leases.boot() != boot


async def test_a_lease_that_cannot_be_read_is_a_lease(server: RedisServer, namespace: str) -> None:
    backend, keys = server.backend(namespace), Keys(namespace)
    infos = {each: worker_info(each, await backend.leases.acquire(each)) for each in ("a", "b", "c")}
    for info in infos.values():
        await backend.leases.renew(info, LOAD)
    assert backend.connection
    await backend.connection.pipeline(
        [("HSET", keys.lease("a"), "load", '{"state": "resting"}'), ("DEL", keys.lease("c"))]
    )
    assert await backend.leases.list_leases() == {"a": None, "b": Worker(infos["b"], LOAD)}
    assert await backend.leases.list_workers() == [Worker(infos["b"], LOAD)]


async def test_an_epoch_that_cannot_be_read_is_told_by_whoever_lists(server: RedisServer, namespace: str) -> None:
    """Only its owner reads it, and owners show nothing."""
    owner, reader, keys = server.backend(namespace), server.backend(namespace), Keys(namespace)
    info = worker_info("w", await owner.leases.acquire("w"))
    await owner.leases.renew(info, LOAD)
    assert reader.connection
    await reader.connection.call("SET", keys.epoch("w"), "x")
    assert await reader.leases.list_workers() == [Worker(info, LOAD)]
    assert [(each.what, each.times) for each in reader.connection.garbage.seen()] == [("epoch", 1)]


async def test_the_highest_epoch_that_can_be_read_is_given_to_nobody(server: RedisServer, namespace: str) -> None:
    """The next one could not be read, and its worker would be on no list."""
    backend = server.backend(namespace)
    assert backend.connection
    await backend.connection.call("SET", Keys(namespace).epoch("w"), 2**42)
    info = worker_info("w", await backend.leases.acquire("w"))
    assert await backend.leases.renew(info, LOAD)
    assert await backend.leases.list_workers() == [Worker(info, LOAD)]


async def test_one_forged_epoch_fences_nobody_off(server: RedisServer, namespace: str) -> None:
    """Two copies of it are always written together. Where they differ, the lesser one is believed."""
    backend = server.backend(namespace)
    info = worker_info("w", await backend.leases.acquire("w"))
    keys = Keys(namespace)
    assert backend.connection
    forgeries = [("HSET", keys.lease("w"), "epoch", 2**41), ("SET", keys.epoch("w"), 2**41)]
    for seq, forgery in enumerate(forgeries, 1):
        await backend.leases.renew(info, LOAD)
        await backend.connection.call(*forgery)
        applied = await backend.index.apply(
            BlockEvent(worker_id="w", epoch=info.epoch, seq=seq, op=Op.STORED, keys=(b"k" * 16,))
        )
        assert applied.outcome is IndexOutcome.APPLIED
        assert await backend.leases.renew(info, LOAD)
        assert await backend.leases.list_workers() == [Worker(info, LOAD)]
    assert await backend.leases.acquire("w", info.epoch) == info.epoch + 1


async def test_the_keeper_renews_at_once_when_asked(backend: Backend) -> None:
    keeper = LeaseKeeper(backend.leases, "w", renew_s=60)
    info = worker_info("w", await keeper.acquire())
    load = [WorkerLoad()]
    renewed = asyncio.Queue[WorkerState]()

    def describe() -> tuple[WorkerInfo, WorkerLoad]:
        renewed.put_nowait(load[0].state)
        return info, load[0]

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run(describe))
        assert await renewed.get() is WorkerState.STARTING
        load[0] = LOAD
        keeper.renew_soon()
        assert await renewed.get() is WorkerState.READY
        running.cancel()
    await keeper.close()
    assert await backend.leases.list_workers() == []


async def test_the_keeper_renews_soon_what_has_changed_and_seldom_what_has_not(backend: Backend) -> None:
    keeper = LeaseKeeper(backend.leases, "w", renew_s=0.6, report_s=0.02)
    info, loads = worker_info("w", await keeper.acquire()), [LOAD]
    renewed = list[WorkerLoad]()
    renew = backend.leases.renew

    async def noted(info: WorkerInfo, load: WorkerLoad) -> bool:
        renewed.append(load)
        return await renew(info, load)

    keeper._leases = SimpleNamespace(renew=noted, release=backend.leases.release)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run(lambda: (info, loads[0])))
        await asyncio.sleep(0.3)
        assert renewed == [LOAD], "nothing has changed"
        loads[0] = dataclasses.replace(LOAD, running=4)
        began_s = time.monotonic()
        await until(lambda: len(renewed) == 2)
        assert time.monotonic() - began_s < 0.5
        await until(lambda: renewed[1:] == [loads[0], loads[0]])
        assert time.monotonic() - began_s > 0.5
        running.cancel()
    await keeper.close()


async def test_the_keeper_does_not_renew_for_a_load_that_was_reported(backend: Backend) -> None:
    reported, can_report = list[WorkerLoad](), [True]

    def report(load: WorkerLoad) -> bool:
        reported.append(load)
        return can_report[0]

    keeper = LeaseKeeper(backend.leases, "w", renew_s=60, report_s=0.02, report=report)
    described = [Worker(worker_info("w", await keeper.acquire()), LOAD)]

    async def is_listed() -> None:
        while await backend.leases.list_workers() != described[-1:]:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.02)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run(lambda: (described[-1].info, described[-1].load)))
        await is_listed()
        busy = dataclasses.replace(LOAD, running=9, number=1)
        described.append(Worker(described[0].info, busy))
        await until(lambda: len(reported) > 2)
        assert set(reported) == {busy}
        assert await backend.leases.list_workers() == described[:1]
        described.append(Worker(dataclasses.replace(described[0].info, node="elsewhere"), busy))
        await is_listed()
        can_report[0] = False
        described.append(Worker(described[-1].info, dataclasses.replace(busy, running=8, number=2)))
        await is_listed()
        running.cancel()
    await keeper.close()


def test_a_reported_load_is_the_load() -> None:
    costs = dataclasses.replace(PRIOR, s_overhead=1.5)
    links = (OpenConnections("nccl", "P2P", 3),)
    for load in (
        WorkerLoad(),
        LOAD,
        dataclasses.replace(LOAD, costs=costs, connections=links, number=7, expert_tokens=(0, 3)),
        dataclasses.replace(LOAD, transfers=TransferCounts(sent_committed=2, transfer_s=0.5)),
    ):
        assert decode_load(encode_load(load)) == load
    assert encode_load(WorkerLoad()) == b"{}", "what has its default does not travel"


async def test_the_keeper_stops_when_fenced_after_a_pause(backend: Backend) -> None:
    """Regression: a worker that was paused beyond its lease must not go on beside its successor."""
    keeper = LeaseKeeper(backend.leases, "w", renew_s=0.01)
    epoch = await keeper.acquire()
    await backend.lapse("w")
    successor = worker_info("w", await backend.leases.acquire("w"))
    await backend.leases.renew(successor, LOAD)
    async with asyncio.timeout(5):
        with pytest.raises(Fenced):
            await keeper.run(lambda: (worker_info("w", epoch), LOAD))
    assert keeper.fenced.is_set()
    await keeper.close()
    assert await backend.leases.list_workers() == [Worker(successor, LOAD)]


async def test_the_keeper_goes_on_under_a_new_epoch_when_its_lease_expired(backend: Backend) -> None:
    keeper = LeaseKeeper(backend.leases, "w", renew_s=0.01)
    first = await keeper.acquire()
    await backend.lapse("w")
    async with asyncio.timeout(5):
        await keeper.run(lambda: (worker_info("w", first), LOAD))  # returns
        info = worker_info("w", await keeper.acquire())
        assert info.epoch == keeper.epoch > first
        assert await backend.leases.renew(info, LOAD)
        await backend.leases.acquire("w")
        with pytest.raises(Fenced):
            await keeper.acquire()
    assert keeper.fenced.is_set()


async def test_the_keeper_outlives_redis_and_keeps_its_epoch(own_server: RedisServer, namespace: str) -> None:
    backend = own_server.backend(namespace)
    keeper = LeaseKeeper(backend.leases, "w", renew_s=0.02)
    info = worker_info("w", await keeper.acquire())
    boot = await backend.leases.boot()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run(lambda: (info, LOAD)))
        own_server.embedded.kill()
        await until(lambda: not keeper.connected)
        with pytest.raises(StoreUnavailable):
            await backend.leases.list_workers()
        own_server.embedded.start()
        await until(lambda: keeper.connected)
        assert await backend.leases.list_workers() == [Worker(info, LOAD)]
        assert await backend.leases.boot() != boot
        running.cancel()


async def test_a_zombie_that_returns_first_after_a_loss_is_fenced(own_server: RedisServer, namespace: str) -> None:
    backend = own_server.backend(namespace)
    zombie = worker_info("w", await backend.leases.acquire("w"))
    successor = worker_info("w", await backend.leases.acquire("w"))
    own_server.embedded.kill()
    own_server.embedded.start()
    with pytest.raises(StoreUnavailable):
        await backend.leases.boot()  # the old connection
    await backend.leases.renew(zombie, LOAD)
    await backend.leases.renew(successor, LOAD)
    with pytest.raises(Fenced):
        await backend.leases.renew(zombie, LOAD)


async def test_the_keeper_waits_for_redis_to_acquire(own_server: RedisServer, namespace: str) -> None:
    backend = own_server.backend(namespace)
    own_server.embedded.kill()
    keeper = LeaseKeeper(backend.leases, "w")
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        acquiring = tasks.create_task(keeper.acquire())
        await asyncio.sleep(0.05)
        assert not acquiring.done()
        own_server.embedded.start()
    assert acquiring.result() == 1_000_000_000


def test_a_url_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        RedisConnection("http://localhost:1")


async def test_the_embedded_redis_listens_on_a_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedRedis(port=port) as server:
        connection = RedisConnection(server.url)
        assert await connection.call("CONFIG", "GET", "maxmemory-policy")
        policy = await connection.call("CONFIG", "GET", "maxmemory-policy")
        assert "noeviction" in str(policy)
        await connection.close()
        with pytest.raises(ConfigError, match="ended at once"):
            EmbeddedRedis(port=port).start()
        first = server.pid
    assert first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_an_embedded_redis_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot start .* \(exit 127\): .*missing: No such file"):
        EmbeddedRedis(binary=tmp_path / "missing").start()
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\necho loading for ever\nexec sleep 60\n")
    mute.chmod(0o755)

    def seconds() -> float:
        """The time that a start may take is over as soon as the program has printed its line."""
        return float(any(log.stat().st_size for log in tmp_path.glob("baton-redis-*/log")))

    monkeypatch.setattr(embedded_redis, "time", SimpleNamespace(monotonic=seconds, sleep=time.sleep))
    with pytest.raises(ConfigError, match=r"did not answer within 0\.2 s: loading for ever"):
        EmbeddedRedis(binary=mute, parent=tmp_path, start_timeout_s=0.2).start()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_embedded_redis_dies_with_its_parent() -> None:
    code = (
        "import sys, time; from deploy.embedded_redis import EmbeddedRedis; server = EmbeddedRedis(); server.start();"
        "sys.stdout.write(f'{server.pid}\\n'); sys.stdout.flush(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not _is_running(pid), 5.0)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"  # nobody may reap it in a container
    except OSError:
        return False
