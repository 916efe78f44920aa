"""What the controller announces of its model, how the model leaves, and to whom its keys in Redis belong."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.blocks import content_id
from baton.cluster import (
    ControllerInfo,
    ModelAnnouncement,
    Role,
    RoutedModel,
    RouterInfo,
    Worker,
    WorkerLoad,
    WorkerState,
)
from baton.config import ClusterConfig, Config, EngineConfig, ModelConfig, PoolConfig, PoolsConfig, RouterConfig
from baton.errors import ConfigError, Conflict
from baton.rpc import RpcServer
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource, ModelFilesServicer, read_model_files
from baton.serving_files import ServingFiles
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2_grpc
from deploy.controller import claim as claim_module
from deploy.controller.announcement import chosen_files
from deploy.controller.claim import Claim
from deploy.controller.state import ControllerState
from kvstore.index import MemoryStore
from kvstore.leases import MemoryLeases
from tests.integration.cluster import free_port
from tests.support.builders import worker
from tests.support.waiting import until
from tests.unit.deploy.controller.test_controller import CONFIG, Bench, num_ready, running
from tests.unit.deploy.controller.test_sleeping import FILES, announced, bench, providing

READY = WorkerLoad(state=WorkerState.READY)
POLL_S = 0.1
LEAVING = replace(CONFIG, index=replace(CONFIG.index, poll_s=POLL_S))


async def test_a_model_is_announced_as_it_is_configured(tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        model=ModelConfig(
            id="org/tiny", path="/models/tiny", revision="r1", weights="int8g", share=3.0, release="blue"
        ),
        engine=EngineConfig(max_model_len=4096),
        pools=PoolsConfig(decode=PoolConfig(engine={"kv_dtype": "bfloat16"})),
        router=RouterConfig(mode="aggregated"),
    )
    it = Bench(tmp_path, config, {Role.PREFILL: 0, Role.DECODE: 1}, False, lease_s=5.0)
    async with providing(it), running(it):
        await until(lambda: bool(it.store.models))
        found = announced(it)
        assert abs(found.created_s - time.time()) < 60
        assert replace(found, created_s=0) == ModelAnnouncement(
            content_id=content_id(config.kv_identity),
            name="tiny",
            path="/models/tiny",
            release="blue",
            share=3.0,
            files=FILES.digest,
            max_model_len=4096,
            weights="int8g",
            kv_dtype="bfloat16",
            mode="aggregated",
        )


async def test_a_model_of_workers_that_provide_no_files_is_not_announced(tmp_path: Path) -> None:
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 1}, False, lease_s=5.0)
    async with running(it):
        await until(lambda: num_ready(it) == 1)
        await asyncio.sleep(0.2)
        assert not it.store.models


async def test_a_digest_is_announced_as_soon_as_it_is_known(tmp_path: Path) -> None:
    """Not only when the announcement is due again."""
    config = replace(CONFIG, index=replace(CONFIG.index, lease_s=600.0, renew_s=100.0, poll_s=100.0))
    it = Bench(tmp_path, config, {Role.PREFILL: 0, Role.DECODE: 1}, False, lease_s=600.0)
    async with providing(it), running(it):
        await until(lambda: num_ready(it) == 1 and bool(it.store.leases))
        it.controller.record(it.controller.state)
        await until(lambda: bool(it.store.models))


def reporting(worker_id: str, files: str, state: WorkerState = WorkerState.READY, epoch: int = 1) -> Worker:
    return worker(worker_id, load=replace(READY, state=state), files=files, epoch=epoch)


def test_while_workers_are_replaced_the_digest_of_most_of_them_is_announced() -> None:
    old, new = reporting("a", "old"), reporting("b", "new", epoch=9)
    assert chosen_files("", []) == ""
    assert chosen_files("", [reporting("a", "")]) == ""
    assert chosen_files("", [old]) == "old"
    assert chosen_files("old", [old, new]) == "old", "as many have it"
    assert chosen_files("old", [old, new, reporting("c", "new")]) == "new"
    assert chosen_files("new", [old, new]) == "new", "and not back"
    assert chosen_files("gone", [old, new]) == "new", "the newest worker's"
    assert chosen_files("old", []) == "old", "no worker is ready"
    assert chosen_files("old", [reporting("b", "new", WorkerState.STARTING)]) == "old"


async def test_routers_read_the_copy_and_it_follows_the_workers(tmp_path: Path) -> None:
    """A worker that sends something else costs nothing."""
    state = ControllerState(desired={Role.PREFILL: 0, Role.DECODE: 1}, files="f" * 64, created_s=7)
    async with bench(tmp_path, state=state) as it:
        rpc = RpcServer(("baton.v1.ModelFiles",))
        worker_pb2_grpc.add_ModelFilesServicer_to_server(ModelFilesServicer(it.controller.read_files), rpc.server)
        port = rpc.bind("127.0.0.1", 0)
        await rpc.start()
        source = FileSource("the controller", f"127.0.0.1:{port}", "")
        nobody = MemberLink(None, None)
        assert await read_model_files(source, FILES.digest, link=nobody) == FILES
        other = ServingFiles({"config.json": b"{}", "tokenizer.json": b"[]"})
        it.info["files"] = other.digest
        await until(lambda: announced(it).files == other.digest)
        assert announced(it).created_s == 7
        assert not it.controller.has_copy, "its workers still provide the old files"
        with pytest.raises(Conflict):
            await read_model_files(source, other.digest, link=nobody)
        assert await read_model_files(source, FILES.digest, link=nobody) == FILES, "routers may still need them"
        await rpc.stop(0)


def router(in_flight: int = 0, address: str = "10.9.9.9:1", config: Config = LEAVING) -> RouterInfo:
    other = RoutedModel(content_id="other", in_flight=9)
    own = RoutedModel(content_id=content_id(config.kv_identity), in_flight=in_flight)
    return RouterInfo(id="r", pid=1, grpc=address, http="", mirror_lag_s=0.0, models=(other, own))


async def leaves(it: Bench) -> asyncio.Task[float]:
    """End the workers of a bench whose controller no longer runs; the result says how long it took."""

    async def end() -> float:
        began_s = time.monotonic()
        await it.controller.end_workers()
        return time.monotonic() - began_s

    return asyncio.create_task(end())


@pytest.mark.parametrize("where", ["router", "worker"])
async def test_a_model_that_leaves_is_announced_and_its_requests_complete(tmp_path: Path, where: str) -> None:
    """Only they: those of other models do not keep it."""
    it = Bench(tmp_path, LEAVING, {Role.PREFILL: 0, Role.DECODE: 1}, True, lease_s=60.0)
    async with providing(it):
        await it.controller.adopt()
        tasks = [asyncio.create_task(it.controller.run()), asyncio.create_task(it.renew())]
        await until(lambda: num_ready(it) == 1 and bool(it.store.models))
        await cancel_and_wait(tasks[:1])
        await it.endpoint.announce_router(router(in_flight=int(where == "router")))
        it.load = WorkerLoad(running=int(where == "worker"))
        leaving = await leaves(it)
        await until(lambda: announced(it).is_leaving)
        await asyncio.sleep(5 * POLL_S)
        assert not leaving.done()
        assert it.actors.alive
        await it.endpoint.announce_router(router())
        it.load = WorkerLoad()
        await asyncio.wait_for(leaving, 10 * POLL_S)
        assert not it.actors.alive
        await cancel_and_wait(tasks)


async def test_a_model_that_nobody_uses_leaves_at_once_but_gives_routers_time_to_read_it(tmp_path: Path) -> None:
    """Routers of this machine that have ended, as those of `baton up` have by then, are not waited for."""
    for address, low_s, high_s in (
        ("", 0.0, POLL_S),
        (f"127.0.0.1:{free_port()}", 0.0, POLL_S),
        ("10.9.9.9:1", POLL_S, 1),
    ):
        it = Bench(tmp_path, LEAVING, {Role.PREFILL: 0, Role.DECODE: 1}, True, lease_s=60.0)
        async with running(it):
            await until(lambda it=it: num_ready(it) == 1)  # type: ignore[misc]
        if address:
            await it.endpoint.announce_router(router(in_flight=int(address.startswith("127")), address=address))
        assert low_s <= await (await leaves(it)) < high_s
        assert not it.actors.alive


async def test_requests_that_do_not_end_are_not_waited_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And without Redis the workers end, too."""
    config = replace(LEAVING, cluster=ClusterConfig(drain_timeout_s=0.3))
    for is_away, word in ((False, "requests still run"), (True, "cannot announce that the model leaves")):
        it = Bench(tmp_path, config, {Role.PREFILL: 0, Role.DECODE: 1}, True, lease_s=60.0)
        async with running(it):
            await until(lambda it=it: num_ready(it) == 1)  # type: ignore[misc]
        await it.endpoint.announce_router(router(in_flight=1))
        it.leases.is_away = is_away
        assert await (await leaves(it)) < 1.0
        assert word in caplog.text
        assert not it.actors.alive


def claim(leases: MemoryLeases, cluster: str, lease_s: float = 0.5) -> Claim:
    return Claim(leases, ControllerInfo(pid=1, address="h:1", cluster=cluster), lease_s)


async def announce(leases: MemoryLeases, cluster: str, address: str = "10.9.9.9:1") -> None:
    await leases.announce_controller(ControllerInfo(pid=7, address=address, cluster=cluster))


async def test_the_keys_of_a_model_belong_to_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "POLL_S", 0.02)
    leases = MemoryLeases(MemoryStore(), lease_s=60.0)
    await claim(leases, "ours").hold()
    for ours in ("ours", ""):  # the controller before, and one of an earlier release
        await announce(leases, ours)
        await claim(leases, "ours").hold()
    await announce(leases, "theirs")
    words = (
        r"^cluster theirs, whose controller is at 10\.9\.9\.9:1, already serves this model in the same Redis; stop it"
    )
    with pytest.raises(ConfigError, match=words):
        await claim(leases, "ours", lease_s=0.1).hold()


async def test_a_cluster_that_has_ended_lately_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "POLL_S", 0.02)
    leases = MemoryLeases(MemoryStore(), lease_s=0.3)
    await announce(leases, "theirs")
    began_s = time.monotonic()
    await claim(leases, "ours", lease_s=5.0).hold()
    assert 0.2 < time.monotonic() - began_s < 2.0
    leases = MemoryLeases(MemoryStore(), lease_s=60.0)
    await announce(leases, "theirs", f"127.0.0.1:{free_port()}")
    began_s = time.monotonic()
    await claim(leases, "ours", lease_s=60.0).hold()
    assert time.monotonic() - began_s < 2.0, "nobody listens there"


async def test_of_two_clusters_that_start_at_the_same_time_one_stays() -> None:
    leases = MemoryLeases(MemoryStore(), lease_s=60.0)
    first, second = claim(leases, "a"), claim(leases, "b")
    await first.hold()
    await second.hold()
    await announce(leases, "b")
    await first.hold()
    await announce(leases, "a")
    with pytest.raises(ConfigError, match="cluster a, whose controller"):
        await second.hold()


async def test_a_controller_ends_if_another_cluster_has_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it touches that cluster's workers. While Redis is away it cannot know, and finds out later."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(claim_module, "POLL_S", 0.02)
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 1}, False, lease_s=60.0)
    await announce(it.leases, "theirs")
    with pytest.raises(ConfigError, match="cluster theirs"):
        await it.controller.claim()
    it.leases.is_away = True
    await it.controller.claim()
    assert "whether another cluster serves this model is unknown" in caplog.text
    it.leases.is_away = False
    await it.controller.adopt()
    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.wait_for(it.controller.run(), 10)
    assert raised.group_contains(ConfigError, match="cluster theirs")
    assert not it.store.models
    stored = it.store.controller
    assert stored is not None
    assert stored[1].cluster == "theirs", "it has not announced itself"
    await it.controller.let_go()


async def test_the_autoscaler_sees_the_requests_of_its_own_model(tmp_path: Path) -> None:
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 1}, False, lease_s=60.0)
    other = RoutedModel(content_id="other", met=900, in_flight=9)
    own = RoutedModel(content_id=content_id(CONFIG.kv_identity), met=4, missed=3, rejected=2, held=1)
    await it.endpoint.announce_router(replace(router(), met=904, missed=3, models=(other, own)))
    await it.endpoint.announce_router(replace(router(), id="earlier", met=7, models=()))
    earlier, seen = (await it.controller.observe()).routers
    assert (seen.met, seen.missed, seen.rejected, seen.models) == (4, 3, 2, (own,))
    assert earlier.met == 7
