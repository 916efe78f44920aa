"""The controller with workers that exist only here: they are ready, hang and die when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cluster import ControllerInfo, PoolStatus, PoolTrouble, Role, Worker, WorkerLoad, WorkerState
from baton.config import ClusterConfig, Config, IndexConfig, KubernetesConfig, PoolConfig, PoolsConfig
from baton.errors import ActorLost, ConfigError, Conflict, InvalidRequest, StoreUnavailable, WorkerFailed
from baton.rpc import MalformedCount, RpcServer
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2, worker_pb2_grpc
from deploy.controller import controller as controller_module
from deploy.controller import lease_watch, worker_life
from deploy.controller.controller import Controller
from deploy.controller.kubernetes_side import Kubernetes
from deploy.controller.orders import Orders
from deploy.controller.reconcile import WorkerPhase
from deploy.controller.state import ControllerState, RoleChange, load, locked, save
from deploy.controller.worker_life import ManagedWorker
from deploy.kubernetes.node_plan import NodeLayout, NodePod
from deploy.kubernetes.serving_pool import PoolSpec
from deploy.ray_pools import actors as ray_actors
from deploy.ray_pools.actors import RayActors, Started
from deploy.ray_pools.ray_import import ray
from kvstore.index import CountingMirror, MemoryStore
from kvstore.leases import MemoryEndpoint, MemoryLeases
from tests.integration.cluster import free_port
from tests.support.builders import worker_info
from tests.support.waiting import until

LEASE_S = 0.1
NO_GPUS = dict.fromkeys(Role, 0.0)
CONFIG = Config(index=IndexConfig(lease_s=LEASE_S, renew_s=0.02))


@dataclass(slots=True)
class Actor:
    may_start: asyncio.Event
    pool: Role
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Ray has lost it; the worker's process may run on."""


class LocalActors(RayActors):
    """In place of Ray. Workers find a node and are ready at once, unless `has_room` or `may_start` is clear."""

    def __init__(self) -> None:
        super().__init__(Config(), "", NO_GPUS)
        self.address = f"127.0.0.1:{free_port()}"
        self.alive: dict[str, Actor] = {}
        self.num_created = 0
        self.pod = ""
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_turn = asyncio.Event()
        self.has_turn.set()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.orphans: set[str] = set()
        """Workers that serve without an actor."""
        self.has_node = True
        """Ray has the node of the orphans."""
        self.incarnation = "a1"
        self.num_refused = 0
        """Actors that Ray is yet to refuse to create for adoption."""
        self.num_ended = 0
        """Actors that were ended without their workers."""

    def lose(self, worker_id: str) -> None:
        """Ray has lost this worker's actor."""
        self.orphans.add(worker_id)
        self.alive.pop(worker_id).lost.set()

    async def node_at(self, host: str) -> str | None:
        return "a-node" if self.has_node and host == "127.0.0.1" else None

    async def ids(self) -> list[str]:
        return list(self.alive)

    async def check(self) -> None:
        pass

    async def pools(self, worker_ids: Collection[str]) -> dict[str, Role]:
        return {worker_id: self.alive[worker_id].pool for worker_id in worker_ids}

    async def create(self, worker_id: str, role: Role, pool: Role, node_id: str = "") -> Actor:
        if node_id and self.num_refused:
            self.num_refused -= 1
            raise ActorLost("Ray has not created the actor")
        if node_id and worker_id not in self.orphans:
            raise WorkerFailed("no such worker runs there")
        self.orphans.discard(worker_id)
        self.num_created += not node_id
        self.alive[worker_id] = Actor(self.may_start, pool)
        return self.alive[worker_id]

    async def get(self, worker_id: str) -> Actor:
        if worker_id not in self.alive:
            raise WorkerFailed("it is gone")
        return self.alive[worker_id]

    async def placed(self, actor: Actor) -> None:
        await self.has_room.wait()

    async def turn(self, actor: Actor) -> None:
        await self.has_turn.wait()

    async def start(self, actor: Actor) -> Started:
        await self._unless_lost(actor, actor.may_start)
        return Started(1, self.address, self.pod, self.incarnation)

    async def ended(self, actor: Actor) -> None:
        await self._unless_lost(actor, actor.dead)
        raise WorkerFailed("it has ended")

    async def _unless_lost(self, actor: Actor, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(actor.lost.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(waits)
        if actor.lost.is_set():
            raise ActorLost("its node has died")

    async def stop(self, actor: Actor, timeout_s: float) -> None:
        if actor.lost.is_set():
            raise ActorLost("its node has died")
        actor.dead.set()

    async def kill(self, actor: Actor) -> None:
        actor.dead.set()
        self.alive = {worker_id: other for worker_id, other in self.alive.items() if other is not actor}

    async def end_only(self, actor: Actor) -> None:
        self.num_ended += 1
        self.lose(next(worker_id for worker_id, other in self.alive.items() if other is actor))


class Leases(MemoryLeases):
    """Redis, which may be away."""

    def __init__(self, store: MemoryStore, lease_s: float) -> None:
        super().__init__(store, lease_s=lease_s)
        self.is_away = False
        self.unreadable: set[str] = set()
        """Workers whose leases are of a release that tells something else."""

    async def list_leases(self) -> dict[str, Worker | None]:
        leases = await super().list_leases()
        return {worker_id: None if worker_id in self.unreadable else worker for worker_id, worker in leases.items()}

    async def get_controller(self) -> ControllerInfo | None:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().get_controller()

    async def boot(self) -> str:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().boot()

    async def list_workers(self) -> list[Worker]:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().list_workers()


class Clock:
    """In place of the module `time`: it moves when the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Bench:
    def __init__(
        self,
        folder: Path,
        config: Config,
        desired: dict[Role, int],
        is_first: bool,
        lease_s: float = LEASE_S,
        state: ControllerState | None = None,
    ) -> None:
        self.store = MemoryStore()
        self.leases = Leases(self.store, lease_s)
        self.actors = LocalActors()
        self.hanging: set[str] = set()
        """Ready workers whose leases nobody renews."""
        self.draining: set[str] = set()
        """Workers that say so in their leases."""
        self.info: dict[str, Any] = {}
        """Further fields of what the workers say of themselves."""
        self.load = WorkerLoad()
        """What they say of their work."""
        self.endpoint = MemoryEndpoint(self.store, lease_s=lease_s)
        me = ControllerInfo(pid=1, address="127.0.0.1:1")
        state, path = state or ControllerState(desired=desired, cluster="baton-x"), folder / "state.json"
        self.controller = Controller(
            config,
            me=me,
            malformed=MalformedCount(),
            actors=self.actors,
            leases=self.leases,
            endpoint=self.endpoint,
            mirror=CountingMirror(),
            path=path,
            state=state,
            is_first=is_first,
        )
        self.orders = Orders(self.controller)

    async def renew(self) -> None:
        epochs: dict[str, int] = {}
        while True:
            for worker_id in (self.actors.alive.keys() | self.actors.orphans) - self.hanging:
                role = self.controller.observed()[worker_id].role
                if worker_id not in epochs or not self.store.lease(worker_id):
                    epochs[worker_id] = await self.leases.acquire(worker_id)
                info = worker_info(worker_id, role, epoch=epochs[worker_id], **self.info)
                state = WorkerState.DRAINING if worker_id in self.draining else WorkerState.READY
                await self.leases.renew(info, replace(self.load, state=state))
            await asyncio.sleep(LEASE_S / 5)


@contextlib.asynccontextmanager
async def bench(
    folder: Path, config: Config = CONFIG, decode: int = 1, is_first: bool = False
) -> AsyncGenerator[Bench]:
    """A controller that runs while the block is entered."""
    bench = Bench(folder, config, {Role.PREFILL: 0, Role.DECODE: decode}, is_first)
    async with running(bench):
        yield bench


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncGenerator[None]:
    await bench.controller.adopt()
    tasks = [asyncio.create_task(bench.controller.run()), asyncio.create_task(bench.renew())]
    try:
        yield
    finally:
        await bench.orders.close()
        await cancel_and_wait(tasks)
        await bench.controller.let_go()


def is_in(bench: Bench, worker_id: str, phase: WorkerPhase) -> bool:
    return bench.controller.observed()[worker_id].phase is phase


def num_ready(bench: Bench) -> int:
    return bench.controller.pool(Role.DECODE).ready


class Drains(worker_pb2_grpc.WorkerControlServicer):
    """A worker's answer to the controller's order, and how many orders there were."""

    def __init__(self) -> None:
        self.num_drained = 0

    async def Drain(  # noqa: N802 - the protocol's name
        self, request: worker_pb2.DrainRequest, context: object
    ) -> worker_pb2.DrainResponse:
        self.num_drained += 1
        return worker_pb2.DrainResponse()

    async def SetRole(  # noqa: N802
        self, request: worker_pb2.SetRoleRequest, context: object
    ) -> worker_pb2.SetRoleResponse:
        raise AssertionError("nobody changes its role here")


async def test_a_worker_that_leaves_is_drained_first(tmp_path: Path) -> None:
    drains, server = Drains(), grpc.aio.server()
    worker_pb2_grpc.add_WorkerControlServicer_to_server(drains, server)
    async with bench(tmp_path, decode=2) as it:
        server.add_insecure_port(it.actors.address)
        await server.start()
        await until(lambda: num_ready(it) == 2)
        await it.orders.scale("decode", 1)
        await until(lambda: len(it.actors.alive) == 1)
        assert drains.num_drained == 1
    await server.stop(None)


async def test_no_order_is_taken_before_the_first_start_is_whole(tmp_path: Path) -> None:
    """`baton up` waits for the sizes that it was asked for."""
    async with bench(tmp_path, is_first=True) as it:
        it.actors.may_start.clear()
        await until(lambda: bool(it.actors.alive))
        for order in (
            lambda: it.orders.scale("decode", 2),
            lambda: it.orders.drain("worker-0"),
            lambda: it.orders.set_role("worker-0", "prefill"),
        ):
            with pytest.raises(Conflict, match="the cluster is still starting"):
                await order()
        it.actors.may_start.set()
        await it.controller.whole()
        assert (await it.orders.scale("decode", 2)).desired == 2
        await until(lambda: num_ready(it) == 2)


async def test_what_does_not_fit_is_refused_unless_it_is_forced(tmp_path: Path) -> None:
    async def room(before: Mapping[Role, int], after: Mapping[Role, int]) -> str:
        return "they are too many" if sum(after.values()) > sum(before.values()) else ""

    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        orders = Orders(it.controller, room=room)
        with pytest.raises(
            Conflict, match=r"decode cannot have 3 workers: they are too many; use --force to scale anyway"
        ):
            await orders.scale("decode", 3)
        assert it.controller.pool(Role.DECODE).desired == 2
        assert (await orders.scale("decode", 1)).desired == 1
        assert (await orders.scale("decode", 3, is_forced=True)).desired == 3


async def test_a_controller_that_comes_back_takes_orders_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, is_first=False) as it:
        it.actors.may_start.clear()
        assert (await it.orders.scale("decode", 2)).ready == 0


async def test_workers_in_one_pod_are_counted_as_neighbours(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await until(lambda: num_ready(it) == 1)
        it.actors.pod = "a-pod"
        await it.orders.scale("decode", 4)
        await until(lambda: num_ready(it) == 4)
        found = {worker.num_neighbours for worker in it.controller.observed().values() if worker.id != "worker-0"}
        assert found == {2}, "and none of those without a pod"
        assert it.controller.observed()["worker-0"].num_neighbours == 0


async def test_a_newer_version_s_pod_gets_a_worker_before_the_older_one_leaves(tmp_path: Path) -> None:
    """As long as it does not start, nothing else happens."""
    new = NodePod(name="new", deployment="decode")
    old = replace(new, name="old", is_current=False)
    async with bench(tmp_path) as it:
        it.actors.pod = "old"
        await until(lambda: num_ready(it) == 1)
        it.actors.pod = "new"
        it.actors.may_start.clear()
        it.controller.see_pods(NodeLayout({Role.PREFILL: "prefill", Role.DECODE: "decode"}), [old, new])
        await until(lambda: it.controller.ids == ["worker-0", "worker-1"])
        assert is_in(it, "worker-1", WorkerPhase.STARTING)
        assert is_in(it, "worker-0", WorkerPhase.READY)
        assert not it.controller.observed()["worker-0"].is_retiring
        it.actors.may_start.set()
        await until(lambda: it.controller.ids == ["worker-1"])
        assert it.actors.num_created == 2, "its pod has room for one"


@pytest.mark.parametrize("in_place", [True, False])
async def test_in_place_a_worker_leaves_before_another_one_has_room(tmp_path: Path, in_place: bool) -> None:
    """Where there is room for both, it stays until then."""
    async with bench(tmp_path, replace(CONFIG, kubernetes=KubernetesConfig(in_place=in_place))) as it:
        await until(lambda: num_ready(it) == 1)
        it.actors.has_room.clear()
        await it.orders.drain("worker-0")
        await until(lambda: "worker-1" in it.controller.ids)
        if in_place:
            await until(lambda: it.controller.ids == ["worker-1"])
        else:
            it.controller.step()
            assert is_in(it, "worker-0", WorkerPhase.READY)
        it.actors.has_room.set()
        await until(lambda: it.controller.ids == ["worker-1"] and num_ready(it) == 1)


async def test_a_controller_that_has_lost_its_state_believes_what_workers_say_of_their_roles(tmp_path: Path) -> None:
    """A head's pod that is replaced has an empty disk; the workers live on in Ray."""
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 2}, is_first=False, lease_s=60.0)
    await it.actors.create("worker-0", Role.PREFILL, Role.PREFILL)
    await it.actors.create("worker-1", Role.DECODE, Role.DECODE)
    flipped = worker_info("worker-0", Role.DECODE, epoch=await it.leases.acquire("worker-0"))
    await it.leases.renew(flipped, WorkerLoad(state=WorkerState.READY))
    await it.controller.adopt()
    try:
        assert it.controller.pool(Role.DECODE) == PoolStatus(desired=2, ready=2)
        assert it.controller.state.roles == {"worker-0": Role.DECODE, "worker-1": Role.DECODE}
        assert it.controller.state.pools == {"worker-0": Role.PREFILL, "worker-1": Role.DECODE}
        assert [worker.pool for worker in it.controller.placed_workers()] == [Role.PREFILL, Role.DECODE]
    finally:
        await it.controller.let_go()


async def test_a_worker_that_has_changed_its_role_is_started_again_in_its_pool(tmp_path: Path) -> None:
    """Its node has the room, and may be one that is for that pool alone."""
    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        it.controller.set_role("worker-0", Role.PREFILL)
        it.actors.alive["worker-0"].dead.set()
        await until(lambda: it.actors.num_created == 3)
        assert it.actors.alive["worker-0"].pool is Role.DECODE
        assert it.controller.observed()["worker-0"].role is Role.PREFILL


OF_TWO_ENGINES = replace(CONFIG, pools=PoolsConfig(decode=PoolConfig(engine={"tensor_parallel": 2, "max_num_seqs": 8})))


async def test_between_pools_of_different_engines_no_worker_changes_its_role(tmp_path: Path) -> None:
    async with bench(tmp_path, OF_TWO_ENGINES, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        sentence = (
            "^worker-0 cannot become a prefill worker: it keeps its engine, and the pools' engines differ in "
            "max_num_seqs, tensor_parallel; change the sizes of both pools with `baton scale` instead$"
        )
        with pytest.raises(InvalidRequest, match=sentence):
            await it.orders.set_role("worker-0", "prefill")
        assert (await it.orders.set_role("worker-0", "decode")).info.role is Role.DECODE, "it has the role"
        assert it.controller.state.role_change is None


async def test_after_a_change_of_one_pool_s_settings_its_workers_alone_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time, by a controller that starts with the new settings."""
    sizes, cluster = {Role.PREFILL: 1, Role.DECODE: 3}, ClusterConfig(max_unavailable="1")
    config = replace(CONFIG, cluster=cluster)
    before = Bench(tmp_path, config, sizes, is_first=False)
    async with running(before):
        await until(lambda: num_ready(before) == 3 and before.controller.pool(Role.PREFILL).ready == 1)
    state = load(tmp_path / "state.json")
    assert state is not None
    for settings, replaced in (
        (config, set()),
        (replace(config, pools=PoolsConfig(decode=PoolConfig(engine={"max_num_seqs": 8}))), {1, 2, 3}),
    ):
        it = Bench(tmp_path, settings, sizes, is_first=False, state=state)
        it.actors = it.controller._actors = it.controller._lives._actors = before.actors
        it.actors.num_created, fewest, retiring, record = 0, 3, [0], it.controller.record
        monkeypatch.setattr(
            it.controller, "record", lambda state, r=retiring, w=record: (r.append(len(state.retiring)), w(state))
        )
        async with running(it):
            await until(lambda it=it: num_ready(it) == 3)  # type: ignore[misc]
            while it.actors.num_created < len(replaced):
                fewest = min(fewest, sum(each.phase is WorkerPhase.READY for each in it.controller.observed().values()))
                await asyncio.sleep(0.01)
            await until(lambda it=it: num_ready(it) == 3 and len(it.controller.ids) == 4)  # type: ignore[misc]
            await asyncio.sleep(3 * LEASE_S)
            assert it.actors.num_created == len(replaced)
            assert fewest >= 3, "one of four at a time"
            assert max(retiring) == min(len(replaced), 1)
            assert "worker-0" in it.controller.ids, "the prefill worker"
            assert it.controller.state.retiring == frozenset()


async def test_the_serving_pools_say_in_what_their_engines_differ(tmp_path: Path) -> None:
    async with bench(tmp_path, OF_TWO_ENGINES) as it:
        assert it.controller.reports()[Role.DECODE].engine == ("max_num_seqs=8", "tensor_parallel=2")


async def test_who_has_changed_its_role_is_replaced_when_the_pools_get_different_engines(tmp_path: Path) -> None:
    """Its engine is the other pool's."""
    it = Bench(tmp_path, OF_TWO_ENGINES, {Role.PREFILL: 0, Role.DECODE: 2}, is_first=False, lease_s=60.0)
    for number, pool in enumerate((Role.PREFILL, Role.DECODE)):
        await it.actors.create(f"worker-{number}", Role.DECODE, pool)
        info = worker_info(f"worker-{number}", Role.DECODE, epoch=await it.leases.acquire(f"worker-{number}"))
        await it.leases.renew(info, WorkerLoad(state=WorkerState.READY))
    await it.controller.adopt()
    try:
        assert it.controller.state.retiring == {"worker-0"}
    finally:
        await it.controller.let_go()


async def test_a_worker_that_dies_soon_after_it_was_ready_waits_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (controller_module, lease_watch, worker_life):
        monkeypatch.setattr(module, "time", clock)
    async with bench(tmp_path) as it:
        for number, wait_s in enumerate((1.0, 2.0, 5.0)):
            await until(lambda: num_ready(it) == 1)
            it.actors.alive["worker-0"].dead.set()
            await until(lambda: num_ready(it) == 0)
            assert it.controller.observed()["worker-0"].start_at_s == clock.now_s + wait_s
            assert it.controller.trouble() == (PoolTrouble("prefill", 0, 0), PoolTrouble("decode", 0, number + 1))
            clock.now_s += 0.99 * wait_s
            it.controller.step()
            assert it.controller.observed()["worker-0"].phase is WorkerPhase.DOWN
            assert it.actors.num_created == number + 1
            clock.now_s += 0.02 * wait_s
            it.controller.step()


async def test_a_worker_that_served_for_a_while_comes_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_life, "STABLE_S", 0.0)
    monkeypatch.setattr(worker_life, "RESTART_BACKOFF_S", (0.0, 60.0))
    async with bench(tmp_path) as it:
        for number in range(3):
            await until(lambda number=number: num_ready(it) == 1 and it.actors.num_created == number + 1)  # type: ignore[misc]
            it.actors.alive["worker-0"].dead.set()


@contextlib.asynccontextmanager
async def answering(actors: LocalActors) -> AsyncGenerator[None]:
    """The workers answer health checks while the block is entered."""
    rpc = RpcServer(("baton.v1.WorkerControl",))
    rpc.bind("127.0.0.1", int(actors.address.rpartition(":")[2]))
    await rpc.start()
    await rpc.set_serving(True)
    try:
        yield
    finally:
        await rpc.stop(0)


async def test_a_worker_whose_actor_ray_has_lost_serves_on_and_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as Ray has its node again; it counts for its pool all the time."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    async with bench(tmp_path, decode=2) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 2)
        it.actors.has_node = False
        it.actors.lose("worker-1")
        await until(lambda: "worker-1 (decode) has lost its Ray actor" in caplog.text)
        await it.orders.scale("decode", 3)
        await asyncio.sleep(0.3)
        assert it.actors.orphans == {"worker-1"}
        assert (num_ready(it), it.actors.num_created) == (2, 2), "a new worker would take its room"
        it.actors.has_node = True
        await until(lambda: "worker-1" in it.actors.alive)
        await until(lambda: num_ready(it) == 3)
        assert it.actors.num_created == 3
        it.actors.alive["worker-1"].dead.set()
        await until(lambda: it.actors.num_created == 4 and num_ready(it) == 3)
    assert "worker-1 (decode) has lost its Ray actor, and serves on (its node has died)" in caplog.text


async def test_a_worker_that_has_died_with_its_actor_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer; or its node is back and does not run it; or a process of its name is another one."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    monkeypatch.setattr(worker_life, "RESTART_BACKOFF_S", (0.0,))
    async with bench(tmp_path) as it:
        await until(lambda: num_ready(it) == 1)
        it.actors.has_node = False
        it.actors.lose("worker-0")
        await until(lambda: it.actors.num_created == 2 and num_ready(it) == 1)
        async with answering(it.actors):
            it.actors.has_node = True
            it.actors.lose("worker-0")
            it.actors.orphans.clear()
            await until(lambda: it.actors.num_created == 3 and num_ready(it) == 1)
            it.actors.incarnation = "b2"
            it.actors.lose("worker-0")
            await until(lambda: it.actors.num_created == 4 and num_ready(it) == 1)


async def test_a_worker_that_loses_its_actor_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a process answers at the address of the one before."""
    monkeypatch.setattr(worker_life, "RESTART_BACKOFF_S", (0.0,))
    async with bench(tmp_path) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 1)
        it.actors.may_start.clear()
        it.actors.alive["worker-0"].dead.set()
        await until(lambda: it.actors.num_created == 2)
        it.actors.has_node = False
        it.actors.lose("worker-0")
        await until(lambda: it.actors.num_created == 3)
        it.actors.may_start.set()
        await until(lambda: num_ready(it) == 1)


async def test_a_worker_that_serves_costs_nothing_if_ray_fails_again_during_its_adoption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not create the actor; or loses it before it answers, though it may have adopted the worker by then."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    async with bench(tmp_path) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 1)
        it.actors.num_refused = 2
        it.actors.may_start = asyncio.Event()
        it.actors.lose("worker-0")
        await until(lambda: "worker-0" in it.actors.alive)
        it.actors.alive["worker-0"].lost.set()
        it.actors.may_start.set()
        await until(lambda: it.actors.num_ended == 1)
        await until(lambda: "worker-0" in it.actors.alive)
        await asyncio.sleep(0.1)
        assert (num_ready(it), it.actors.num_created) == (1, 1)


async def test_ray_s_errors_about_actors_tell_whether_the_worker_may_serve() -> None:
    """An actor for a node that has died meanwhile is lost, too."""

    async def failing(error: Exception) -> None:
        raise error

    for error in (ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnschedulableError("no such node")):
        with pytest.raises(ActorLost):
            await ray_actors._result(failing(error))


async def test_a_worker_leaves_although_it_has_no_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drained at once, and ended by its next actor."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    async with bench(tmp_path, decode=2) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 2)
        it.actors.has_node = False
        it.actors.lose("worker-1")
        await it.orders.scale("decode", 1)
        await until(lambda: is_in(it, "worker-1", WorkerPhase.LEAVING))
        await asyncio.sleep(0.1)
        it.actors.has_node = True
        await until(lambda: it.controller.ids == ["worker-0"] and not it.actors.orphans)
        assert set(it.actors.alive) == {"worker-0"}


async def test_a_worker_whose_actor_is_lost_while_it_drains_is_ended_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would stay on its node, and keep its GPU, until its time without an actor is over."""

    async def drain(worker: ManagedWorker) -> None:
        it.actors.lose(worker.id)

    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    async with bench(tmp_path, decode=2) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 2)
        it.actors.has_node = False
        monkeypatch.setattr(it.controller._lives, "_drain", drain)
        await it.orders.scale("decode", 1)
        await asyncio.sleep(0.3)
        assert it.actors.orphans == {"worker-1"}
        it.actors.has_node = True
        await until(lambda: it.controller.ids == ["worker-0"] and not it.actors.orphans)
        assert set(it.actors.alive) == {"worker-0"}


async def test_a_cluster_ends_although_ray_does_not_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its workers end by themselves later."""
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, stop_timeout_s=0.2))
    it = Bench(tmp_path, config, {Role.PREFILL: 0, Role.DECODE: 1}, is_first=True, lease_s=60.0)
    async with answering(it.actors):
        await it.controller.adopt()
        running = asyncio.create_task(it.controller.run())
        await until(lambda: num_ready(it) == 1)
        it.actors.has_node = False
        it.actors.lose("worker-0")
        await asyncio.sleep(0.1)
        await cancel_and_wait([running])
        await asyncio.wait_for(it.controller.end_workers(), 5.0)
    assert "worker-0 (decode) may still run" in caplog.text


@pytest.mark.parametrize("has_state", [True, False])
async def test_a_controller_finds_workers_that_ray_does_not_know_by_their_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    """Ray has started afresh. On Kubernetes the state file may be lost at the same time, with the controller's pod."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    sizes = {Role.PREFILL: 0, Role.DECODE: 2}
    known = {f"worker-{number}": Role.DECODE for number in range(2)}
    state = ControllerState(desired=sizes, cluster="baton-x", roles=known, pools=known) if has_state else None
    config = replace(CONFIG, kubernetes=KubernetesConfig(namespace="" if has_state else "serving"))
    it = Bench(tmp_path, config, sizes, is_first=False, lease_s=60.0, state=state)
    for worker_id in known:
        it.actors.orphans.add(worker_id)
        epoch = await it.leases.acquire(worker_id)
        info = worker_info(worker_id, epoch=epoch, address=it.actors.address, incarnation="a1", pid=7)
        await it.leases.renew(info, WorkerLoad(state=WorkerState.READY))
    it.actors.has_node = False
    async with answering(it.actors):
        await it.controller.adopt()
        try:
            assert it.controller.pool(Role.DECODE) == PoolStatus(desired=2, ready=2)
            assert it.controller.worker("worker-0").info.pid == 7
            pod = NodePod(name="a-pod", deployment="decode", address="127.0.0.1")
            it.controller.see_pods(NodeLayout({Role.PREFILL: "prefill", Role.DECODE: "decode"}), [pod])
            assert {worker.pod for worker in it.controller.placed_workers()} == {"a-pod"}, "it must not be deleted"
            it.actors.has_node = True
            await until(lambda: set(it.actors.alive) == set(known))
            assert it.actors.num_created == 0
        finally:
            await it.controller.let_go()


async def test_redis_that_has_lost_its_data_with_ray_gets_leases_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is away is waited for: otherwise workers that serve would be started again."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    known = {"worker-0": Role.DECODE}
    sizes = {Role.PREFILL: 0, Role.DECODE: 1}
    state = ControllerState(desired=sizes, cluster="baton-x", roles=known, pools=known)
    it = Bench(tmp_path, replace(CONFIG, index=IndexConfig(lease_s=5.0)), sizes, False, lease_s=60.0, state=state)
    it.actors.orphans.add("worker-0")

    async def renew() -> None:
        it.leases.is_away = True
        await asyncio.sleep(0.2)
        it.leases.is_away = False
        await asyncio.sleep(0.2)
        info = worker_info("worker-0", epoch=await it.leases.acquire("worker-0"), address=it.actors.address)
        await it.leases.renew(replace(info, incarnation="a1"), WorkerLoad(state=WorkerState.READY))

    async with answering(it.actors):
        renewing = asyncio.create_task(renew())
        await it.controller.adopt()
        await renewing
        try:
            assert it.controller.pool(Role.DECODE) == PoolStatus(desired=1, ready=1)
            await until(lambda: set(it.actors.alive) == {"worker-0"})
            assert it.actors.num_created == 0
        finally:
            await it.controller.let_go()


async def test_an_actor_that_is_lost_while_a_controller_takes_over_costs_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with a store knows the actors of a node that is gone for some seconds."""
    monkeypatch.setattr(worker_life, "ADOPT_S", 0.02)
    monkeypatch.setattr(worker_life, "ADOPTION_S", 0.1)
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 1}, is_first=False, lease_s=60.0)
    lost = await it.actors.create("worker-0", Role.DECODE, Role.DECODE)
    lost.may_start = asyncio.Event()
    info = worker_info("worker-0", epoch=await it.leases.acquire("worker-0"), address=it.actors.address)
    await it.leases.renew(replace(info, incarnation="a1"), WorkerLoad(state=WorkerState.READY))
    async with answering(it.actors):
        await it.controller.adopt()
        try:
            it.actors.lose("worker-0")
            await until(lambda: set(it.actors.alive) == {"worker-0"} and num_ready(it) == 1)
            assert it.actors.num_created == 1
        finally:
            await it.controller.let_go()


async def test_elsewhere_a_lease_alone_makes_no_worker_of_this_cluster(tmp_path: Path) -> None:
    """In a Ray cluster that is joined it may be that of a cluster that has ended."""
    it = Bench(tmp_path, CONFIG, {Role.PREFILL: 0, Role.DECODE: 1}, is_first=False, lease_s=60.0)
    info = worker_info("worker-7", epoch=await it.leases.acquire("worker-7"), address=it.actors.address)
    await it.leases.renew(info, WorkerLoad(state=WorkerState.READY))
    await it.controller.adopt()
    assert it.controller.ids == []
    await it.controller.let_go()


async def test_a_worker_that_hangs_is_started_again_after_two_leases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_watch, "GIVEN_UP_LEASES", 10**6)
    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        it.hanging.add("worker-1")
        await until(lambda: it.actors.num_created == 3)
        it.hanging.clear()
        await until(lambda: num_ready(it) == 2)
    assert "worker-1 (decode) has had no lease for 0 s: it does not serve" in caplog.text
    assert "worker-1 (decode) does not answer either: it is killed" in caplog.text
    assert "worker-0" not in caplog.text


async def test_a_worker_that_waits_for_its_turn_on_its_node_has_not_begun_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time for the start begins later, and others begin on other nodes meanwhile."""
    monkeypatch.setattr(controller_module, "TURN_S", 0.05)
    config = replace(CONFIG, cluster=ClusterConfig(start_timeout_s=0.3, starting=2))
    async with bench(tmp_path, config, decode=4) as it:
        it.actors.has_turn.clear()
        it.actors.num_created = 0
        await until(lambda: it.actors.num_created == 4)
        await asyncio.sleep(0.4)
        found = it.controller.observed().values()
        assert [(each.phase, each.waits_for_turn) for each in found] == [(WorkerPhase.STARTING, True)] * 4
        assert it.controller.trouble()[1] == PoolTrouble("decode", 0, 0)
        it.actors.has_turn.set()
        await until(lambda: num_ready(it) == 4)
        assert it.actors.num_created == 4


async def test_a_worker_that_answers_without_a_lease_serves_nobody_and_is_started_again_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path, decode=2) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 2)
        await asyncio.sleep(3 * LEASE_S)
        assert num_ready(it) == 2
        it.hanging.add("worker-1")
        await until(lambda: num_ready(it) == 1)
        with pytest.raises(Conflict, match="worker-1 is hanging"):
            await it.orders.set_role("worker-1", "prefill")
        with pytest.raises(Conflict, match="worker-0 is the last ready worker"):
            await it.orders.set_role("worker-0", "prefill")
        assert it.actors.num_created == 2
        await until(lambda: it.actors.num_created == 3)
        it.hanging.clear()
        await until(lambda: num_ready(it) == 2)
    assert caplog.text.count("worker-1 (decode) has had no lease for 0 s: it does not serve") == 1
    assert caplog.text.count("worker-1 (decode) answers: it is left to its streams for now") == 1
    assert caplog.text.count("worker-1 (decode) has had no lease for 1 s: it is killed") == 1
    assert "worker-0 (decode) has had no lease" not in caplog.text


async def test_a_worker_that_hangs_leaves_without_being_asked(tmp_path: Path) -> None:
    async with bench(tmp_path, decode=2) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 2)
        it.hanging.add("worker-0")
        await until(lambda: num_ready(it) == 1)
        await it.orders.scale("decode", 1)
        await until(lambda: set(it.actors.alive) == {"worker-1"})


async def test_a_worker_whose_lease_cannot_be_read_is_not_held_to_hang(tmp_path: Path) -> None:
    """It is of the next release, perhaps: whoever hangs has no lease."""
    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        it.leases.unreadable.add("worker-1")
        await asyncio.sleep((lease_watch.GIVEN_UP_LEASES + 2) * LEASE_S)
        assert not it.controller.observed()["worker-1"].is_silent
        assert (it.actors.num_created, num_ready(it)) == (2, 2)


async def test_a_worker_that_drains_without_an_order_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who reaches it can tell it so; it would take no request for the rest of its life."""
    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        it.draining.add("worker-1")
        await until(lambda: set(it.actors.alive) == {"worker-0", "worker-2"} and num_ready(it) == 2)
        await asyncio.sleep(3 * LEASE_S)
        assert (it.actors.num_created, it.controller.ids) == (3, ["worker-0", "worker-2"])
    assert caplog.text.count("worker-1 (decode) drains without an order from here: another worker takes its place") == 1


async def test_a_worker_that_drains_to_change_its_role_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_moved = asyncio.Event()

    async def drain(flip: RoleChange) -> None:
        it.draining.add(flip.worker_id)
        await has_moved.wait()

    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        monkeypatch.setattr(it.controller, "ask_for_role", drain)
        changing = asyncio.create_task(it.orders.set_role("worker-0", "prefill"))
        await asyncio.sleep(3 * LEASE_S)
        assert it.controller.observed()["worker-0"].is_held
        has_moved.set()
        await changing
        await asyncio.sleep(LEASE_S / 2)  # its lease is behind
        it.draining.clear()
        await asyncio.sleep(2 * LEASE_S)
        assert (it.actors.num_created, it.controller.pool(Role.PREFILL).ready) == (2, 1)


async def test_the_sizes_of_the_serving_pools_wait_for_a_change_of_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes both sizes, from what they were when it began."""
    has_moved = asyncio.Event()

    async def move(flip: RoleChange) -> None:
        await has_moved.wait()

    async with bench(tmp_path, decode=2) as it:
        it.controller.follow(Role.DECODE, PoolSpec(size=2, asked=2, max_size=4))
        await until(lambda: num_ready(it) == 2)
        monkeypatch.setattr(it.controller, "ask_for_role", move)
        changing = asyncio.create_task(it.orders.set_role("worker-0", "prefill"))
        await until(lambda: it.controller.state.role_change is not None)
        it.controller.follow(Role.DECODE, PoolSpec(size=4, asked=4, max_size=4))
        it.controller.step()
        assert it.controller.state.desired == {Role.PREFILL: 0, Role.DECODE: 2}
        has_moved.set()
        await changing
        await until(lambda: num_ready(it) == 4)
        assert it.controller.pool(Role.PREFILL) == PoolStatus(desired=1, ready=1)


async def test_a_worker_that_leaves_while_it_starts_is_never_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it becomes so in the very pass of the event loop in which it is told."""
    caplog.set_level(logging.INFO)
    async with bench(tmp_path) as it:
        await until(lambda: num_ready(it) == 1)
        it.actors.may_start.clear()
        await it.orders.scale("decode", 2)
        await until(lambda: is_in(it, "worker-1", WorkerPhase.STARTING) and len(it.actors.alive) == 2)
        for _ in range(10):
            await asyncio.sleep(0)  # so that it is known to start
        it.actors.may_start.set()
        await it.orders.scale("decode", 1)
        await until(lambda: it.controller.ids == ["worker-0"])
        assert set(it.actors.alive) == {"worker-0"}
        assert not it.controller._lives.failed.done()
    assert "worker-1 (decode) leaves" in caplog.text
    assert "worker-1 (decode) is ready" not in caplog.text


async def test_a_worker_with_the_number_of_one_that_has_left_stays(tmp_path: Path) -> None:
    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        await it.orders.scale("decode", 1)
        await until(lambda: it.controller.ids == ["worker-0"])
        assert it.controller.state.retiring == frozenset()
        await it.orders.scale("decode", 2)
        await until(lambda: num_ready(it) == 2)
        assert it.controller.ids == ["worker-0", "worker-1"]


async def test_without_redis_nobody_is_held_to_hang(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, answering(it.actors):
        await until(lambda: num_ready(it) == 1)
        it.leases.is_away = True
        it.hanging.add("worker-0")
        await asyncio.sleep(5 * LEASE_S)
        assert num_ready(it) == 1
        it.leases.is_away = False  # it comes back without its leases, which workers have to see first
        await asyncio.sleep(LEASE_S)
        assert num_ready(it) == 1
        it.store.boot = "another"
        await asyncio.sleep(1.5 * LEASE_S)
        assert num_ready(it) == 1
        await until(lambda: num_ready(it) == 0)


async def test_a_worker_that_waits_for_room_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "ROOM_S", 0.05)
    async with bench(tmp_path) as it:
        it.actors.has_room.clear()
        await until(lambda: "waits" in caplog.text)
        it.controller.step()
        assert it.controller.trouble()[1] == PoolTrouble("decode", 1, 0)
        it.actors.has_room.set()
        await until(lambda: num_ready(it) == 1)
    waits = "worker-0 (decode) waits: no Ray node for decode workers has room for 1 baton_worker"
    assert caplog.text.count(waits) == 1


async def test_a_change_of_role_that_fails_is_told_of_when_nobody_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    nobody_waits = asyncio.Event()

    async def fail(flip: RoleChange) -> None:
        await nobody_waits.wait()
        raise WorkerFailed("the worker is gone")

    async with bench(tmp_path, decode=2) as it:
        await until(lambda: num_ready(it) == 2)
        monkeypatch.setattr(it.controller, "ask_for_role", fail)
        caller = asyncio.create_task(it.orders.set_role("worker-0", "prefill"))
        await until(lambda: it.controller.state.role_change is not None)
        await cancel_and_wait((caller,))
        nobody_waits.set()
        await until(lambda: it.controller.state.role_change is None)
        await until(lambda: "a change of role failed" in caplog.text)
    assert "worker-0 (decode) is to become a prefill worker" in caplog.text


async def test_what_it_says_of_the_cluster_has_no_password(tmp_path: Path) -> None:
    config = replace(CONFIG, index=replace(CONFIG.index, redis_url="redis://me:planted@10.0.0.9:6379/1"))
    async with bench(tmp_path, config) as it:
        assert (await it.controller.observe()).redis_address == "redis://me:***@10.0.0.9:6379/1"


async def test_orders_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with bench(tmp_path) as it:
        await until(lambda: num_ready(it) == 1)
        await it.orders.drain("worker-0")
        await it.orders.scale("decode", 2)
    assert "worker-0 (decode) is to leave" in caplog.text
    assert "decode: 2 workers are desired" in caplog.text


async def test_a_start_that_takes_too_long_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_life, "RESTART_BACKOFF_S", (60.0, 0.0))
    async with bench(tmp_path, replace(CONFIG, cluster=ClusterConfig(start_timeout_s=0.1))) as it:
        it.actors.may_start.clear()
        await until(lambda: it.actors.num_created == 2)
        assert len(it.actors.alive) == 1
    assert "worker-0 (decode) was not ready within 0.1 s (cluster.start_timeout_s)" in caplog.text


class Names:
    """What `RayActors.create` uses of Ray: names, each of which one actor at a time may have."""

    class exceptions:  # noqa: N801 - as Ray calls it
        RayError = RuntimeError

    class Remote:
        def __init__(self, ray: Names, name: str = "") -> None:
            self._ray, self._name = ray, name

        def options(self, name: str, **chosen: object) -> Names.Remote:
            self._ray.chosen = chosen
            return Names.Remote(self._ray, name)

        def remote(self, *arguments: object, **_: object) -> object:
            self._ray.arguments = arguments
            time.sleep(self._ray.make_s)
            if self._name in self._ray.names:
                raise ValueError("the name is taken")
            self._ray.names[self._name] = object()
            return self._ray.names[self._name]

    def __init__(self, make_s: float = 0.0) -> None:
        self.make_s = make_s
        self.names: dict[str, object] = {}
        self.chosen: dict[str, object] = {}
        self.arguments: tuple[object, ...] = ()

    def remote(self, _: type) -> Remote:
        return Names.Remote(self)

    def get_actor(self, name: str) -> object:
        if name not in self.names:
            raise ValueError("no such actor")
        return self.names[name]

    def kill(self, actor: object) -> None:
        self.names = {name: other for name, other in self.names.items() if other is not actor}


async def test_an_actor_gets_the_settings_and_the_gpus_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its role is the other pool's."""
    ray = Names()
    monkeypatch.setattr(ray_actors, "ray", ray)
    actors = RayActors(OF_TWO_ENGINES, "", {Role.PREFILL: 1.0, Role.DECODE: 2.0})
    for pool, max_num_seqs, gpus in ((Role.PREFILL, "auto", 1.0), (Role.DECODE, 8, 2.0)):
        await actors.create(f"worker-{pool}", Role.DECODE, pool)
        assert Config.from_json(str(ray.arguments[3])).engine.max_num_seqs == max_num_seqs
        assert ray.chosen["num_gpus"] == gpus
        assert actors.needs(pool)["GPU"] == gpus


class SaysItsPool:
    """An actor's handle; the actor answers at once, or never."""

    def __init__(self, pool: Role | None) -> None:
        self._said = pool
        self.pool = self

    async def remote(self) -> str:
        if self._said is None:
            await asyncio.Event().wait()
        return str(self._said)


async def test_actors_say_for_which_pool_they_are_and_one_that_does_not_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A controller that has lost its state knows of them by their ids alone, which name no role."""
    ray = Names()
    waiting = SaysItsPool(None)
    ray.names = {"worker-0": SaysItsPool(Role.PREFILL), "worker-1": SaysItsPool(Role.DECODE), "worker-2": waiting}
    monkeypatch.setattr(ray_actors, "ray", ray)
    monkeypatch.setattr(ray_actors, "SAY_S", 0.05)
    ids = ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert await RayActors(Config(), "", NO_GPUS).pools(ids) == {"worker-0": Role.PREFILL, "worker-1": Role.DECODE}
    assert ray.names.keys() == {"worker-0", "worker-1"}
    assert "worker-2 is ended: its pool is unknown" in caplog.text


async def test_a_name_that_stays_taken_is_made_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that was made too late is nobody's, and detached."""
    ray = Names()
    ray.names["worker-0"] = object()
    monkeypatch.setattr(ray_actors, "ray", ray)
    monkeypatch.setattr(ray_actors, "NAME_TAKEN_S", 0.1)
    actors = RayActors(Config(), "", NO_GPUS)
    with pytest.raises(WorkerFailed, match=r"has not created the actor worker-0: its name is still taken after 0.1 s"):
        await actors.create("worker-0", Role.DECODE, Role.DECODE)
    assert await actors.create("worker-0", Role.DECODE, Role.DECODE) is ray.names["worker-0"]


async def test_an_actor_that_takes_long_to_make_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Names(make_s=0.2)
    monkeypatch.setattr(ray_actors, "ray", ray)
    monkeypatch.setattr(ray_actors, "NAME_TAKEN_S", 0.05)
    assert await RayActors(Config(), "", NO_GPUS).create("worker-0", Role.DECODE, Role.DECODE) is ray.names["worker-0"]


async def test_the_sizes_are_those_of_the_serving_pools(tmp_path: Path) -> None:
    """As far as such pools can serve; a paused one is not followed; and both endpoints lead to the same size."""
    async with bench(tmp_path) as it:
        it.controller.follow(Role.DECODE, PoolSpec(size=3, asked=3, max_size=4))
        await until(lambda: num_ready(it) == 3)
        it.controller.follow(Role.DECODE, PoolSpec(size=0, asked=0, max_size=4))
        it.controller.step()
        report = it.controller.reports()[Role.DECODE]
        assert (report.desired, report.num_workers, report.num_ready) == (3, 3, 3)
        assert "at least 1 decode worker" in report.refusal
        it.controller.follow(Role.DECODE, PoolSpec(size=1, asked=1, max_size=4, is_paused=True))
        it.controller.step()
        assert it.controller.pool(Role.DECODE).desired == 3
        with pytest.raises(InvalidRequest, match="paused"):
            await it.orders.scale("decode", 2)
        it.controller.follow(Role.DECODE, PoolSpec(size=2, asked=2, max_size=4))
        await until(lambda: len(it.controller.ids) == 2)
        assert it.controller.reports()[Role.DECODE].refusal == ""
        with pytest.raises(InvalidRequest, match="allows 0 to 4"):
            await it.orders.scale("decode", 5)
        it.controller.follow(Role.PREFILL, PoolSpec(size=0, asked=0, max_size=0))
        with pytest.raises(Conflict, match="worker-0 cannot become a prefill worker: its ServingPool allows 0 to 0"):
            await it.orders.set_role("worker-0", "prefill")


async def test_an_order_is_kept_in_kubernetes_before_it_is_carried_out(tmp_path: Path) -> None:
    kept: list[dict[Role, int]] = []

    class Keeping(Kubernetes):
        def __init__(self) -> None:
            pass

        async def set_sizes(self, controller: Controller, sizes: Mapping[Role, int]) -> None:
            if is_away:
                raise StoreUnavailable("Kubernetes is away")
            kept.append(dict(sizes))

    is_away = True
    async with bench(tmp_path) as it:
        orders = Orders(it.controller, Keeping())
        await until(lambda: num_ready(it) == 1)
        with pytest.raises(StoreUnavailable):
            await orders.scale("decode", 2)
        assert it.controller.pool(Role.DECODE).desired == 1
        is_away = False
        await orders.scale("decode", 2)
        assert kept == [{Role.DECODE: 2}]
        assert it.controller.pool(Role.DECODE).desired == 2


def test_a_state_file_is_of_one_cluster_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    with (
        locked(path),
        pytest.raises(ConfigError, match=r"cluster.state_file: .*state.json is in use by another cluster"),
        locked(path),
    ):
        raise AssertionError("two have it")
    with locked(path):
        pass
    with pytest.raises(ConfigError, match="cannot lock"), locked(Path("/dev/null/state.json")):
        pass


def test_pools_and_roles_of_workers_are_kept(tmp_path: Path) -> None:
    state = ControllerState(
        desired={Role.PREFILL: 1, Role.DECODE: 1},
        roles={"worker-0": Role.DECODE},
        pools={"worker-0": Role.PREFILL},
        settings={"worker-0": "[]"},
    )
    save(tmp_path / "state.json", state)
    assert load(tmp_path / "state.json") == state


def test_gpus_are_kept_by_pool_and_those_of_a_file_of_an_earlier_version_are_both_pools(tmp_path: Path) -> None:
    sizes, gpus = {Role.PREFILL: 1, Role.DECODE: 1}, {Role.PREFILL: 0.5, Role.DECODE: 2.0}
    path = tmp_path / "state.json"
    save(path, ControllerState(desired=sizes, gpus_per_worker=gpus))
    assert load(path) == ControllerState(desired=sizes, gpus_per_worker=gpus)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gpus_per_worker": 0.25}))
    found = load(path)
    assert found is not None
    assert found.gpus_per_worker == dict.fromkeys(Role, 0.25)


@pytest.mark.parametrize("size", ["Infinity", "NaN", '"many"', "null"])
def test_a_state_file_with_sizes_that_are_none_is_refused(tmp_path: Path, size: str) -> None:
    values: dict[str, object] = {
        "cluster": "", "workers": {}, "pools": {}, "retiring": [], "flip": None, "gpus_per_worker": 0,
    }  # fmt: skip
    path = tmp_path / "state.json"
    path.write_text(json.dumps(values)[:-1] + f', "desired": {{"prefill": {size}, "decode": 1}}}}')
    with pytest.raises(ConfigError, match=r"cluster\.state_file: cannot use"):
        load(path)
