"""A model that sleeps and wakes, with workers that exist only here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.blocks import content_id
from baton.cluster import MAX_REASON, ModelAnnouncement, PoolStatus, Role, RoutedModel, RouterInfo
from baton.config import AutoscaleConfig, ClusterConfig, Config, KubernetesConfig, RouterConfig
from baton.errors import BatonError, Conflict, ModelLoadError, StoreUnavailable
from baton.rpc import RpcServer
from baton.rpc.model_files import ModelFilesServicer
from baton.serving_files import ServingFiles
from baton.v1 import worker_pb2_grpc
from deploy.controller import controller as controller_module
from deploy.controller import orders as orders_module
from deploy.controller import process
from deploy.controller.controller import Controller
from deploy.controller.kubernetes_side import Kubernetes
from deploy.controller.orders import Orders
from deploy.controller.process import Arguments
from deploy.controller.reconcile import ObservedWorker, WorkerPhase
from deploy.controller.sleeping import awoken, fallen_asleep, resized, wake_problem, wake_sizes
from deploy.controller.state import ControllerState, Sleep, load, save, sizes_problem, starting_sizes
from deploy.kubernetes.serving_pool import PoolSpec
from deploy.scaling.autoscaler import Autoscaler
from tests.support.waiting import until
from tests.unit.deploy.controller.test_controller import CONFIG, Actor, Bench, num_ready, running

FILES = ServingFiles({"config.json": b"{}", "tokenizer.json": b"{}"})
MAY_SLEEP = AutoscaleConfig(enabled=True, min_prefill=0, min_decode=0, max_workers=4, idle_s=60.0)
SLEEPY = replace(CONFIG, autoscale=MAY_SLEEP)
ASLEEP = {Role.PREFILL: 0, Role.DECODE: 0}
P, D = Role.PREFILL, Role.DECODE


@contextlib.asynccontextmanager
async def providing(bench: Bench) -> AsyncGenerator[None]:
    """The workers provide the model's files, and say so in their leases."""
    bench.info = {"files": FILES.digest, "address": bench.actors.address, "incarnation": "a1"}
    rpc = RpcServer(("baton.v1.ModelFiles",))
    worker_pb2_grpc.add_ModelFilesServicer_to_server(ModelFilesServicer(lambda digest: FILES), rpc.server)
    rpc.bind("127.0.0.1", int(bench.actors.address.rpartition(":")[2]))
    await rpc.start()
    try:
        yield
    finally:
        await rpc.stop(0)


@contextlib.asynccontextmanager
async def bench(
    folder: Path, config: Config = SLEEPY, prefill: int = 0, decode: int = 1, state: ControllerState | None = None
) -> AsyncGenerator[Bench]:
    """A controller that runs while the block is entered. Unless its model sleeps, its workers are ready."""
    it = Bench(folder, config, {P: prefill, D: decode}, False, lease_s=5.0, state=state)
    async with providing(it), running(it):
        if it.controller.state.desired[D]:
            await until(lambda: num_ready(it) == it.controller.state.desired[D] and it.controller.has_copy)
        await until(lambda: bool(it.store.models))
        yield it


def announced(bench: Bench) -> ModelAnnouncement:
    ((_, model),) = bench.store.models.values()
    return model


def router(**counts: int) -> RouterInfo:
    model = RoutedModel(content_id=content_id(SLEEPY.kv_identity), **counts)
    return RouterInfo(id="r", pid=1, grpc="10.9.9.9:1", http="", mirror_lag_s=0.0, models=(model,))


async def test_an_idle_model_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    """The routers read at every moment whether a request must wait, and whether somebody has already asked for it."""
    now = [0.0]
    async with bench(tmp_path, prefill=1, decode=2) as it:
        autoscaler = Autoscaler(SLEEPY, it.controller.observe, it.orders, clock=lambda: now[0])
        await it.endpoint.announce_router(router(met=4))
        for now[0] in (0.0, 30.0, 59.0):
            await autoscaler.step()
        assert num_ready(it) == 2
        now[0] = 60.0
        await autoscaler.step()
        await until(lambda: not it.controller.ids and not it.actors.alive)
        await until(lambda: announced(it).is_asleep)
        assert it.store.desired == {"prefill": 0, "decode": 0}
        it.actors.may_start.clear()
        num_created = it.actors.num_created
        await asyncio.gather(it.orders.wake(), it.orders.wake(), Orders(it.controller).wake())
        await it.orders.wake()
        await until(lambda: len(it.actors.alive) == 2)
        await until(lambda: it.store.desired == {"prefill": 1, "decode": 1})
        assert announced(it).is_asleep, "it wakes"
        it.actors.may_start.set()
        await until(lambda: not announced(it).is_asleep)
        assert it.actors.num_created == num_created + 2, "all of them have started it once"
        assert 0 < announced(it).wake_s < 10
        state = load(tmp_path / "state.json")
        assert state is not None
        assert (state.sleep, state.wake_s) == (None, announced(it).wake_s)


async def test_a_model_that_sleeps_is_announced_and_wakes_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    """Its routers read the files from the copy: there is no worker."""
    async with bench(tmp_path) as it:
        await it.orders.sleep()
        created_s = announced(it).created_s
    state = load(tmp_path / "state.json")
    async with bench(tmp_path, state=state) as it:
        await until(lambda: announced(it).is_asleep)
        assert (announced(it).files, announced(it).created_s) == (FILES.digest, created_s)
        assert (await asyncio.to_thread(it.controller.read_files, FILES.digest)).contents == FILES.contents
        it.orders.resume()
        await asyncio.sleep(0.1)
        assert it.actors.num_created == 0
        await it.orders.wake()
        await until(lambda: num_ready(it) == 1)


@pytest.mark.parametrize("loss", ["copy", "setting"])
async def test_a_model_that_could_not_be_awakened_or_must_not_sleep_wakes_at_the_start(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the files, routers that start then would not know it; and it is tried until it succeeds."""
    monkeypatch.setattr(orders_module, "RETRY_S", 0.02)
    async with bench(tmp_path, decode=2) as it:
        await it.orders.sleep()
    config = SLEEPY if loss == "copy" else replace(SLEEPY, autoscale=AutoscaleConfig())
    if loss == "copy":
        (tmp_path / "state.json.files" / "tokenizer.json").write_text("{ }")
    num_asked = 0

    async def room(before: Mapping[Role, int], after: Mapping[Role, int]) -> str:
        nonlocal num_asked
        num_asked += 1
        return "there is none yet" if num_asked < 3 else ""

    async with bench(tmp_path, config, state=load(tmp_path / "state.json")) as it:
        orders = Orders(it.controller, room=room)
        orders.resume()
        await until(lambda: it.controller.state.sleep is None)
        assert it.controller.state.desired[D] == (1 if loss == "copy" else 2)
        await until(lambda: it.controller.has_copy)
        await orders.close()


async def test_a_request_that_arrives_while_the_model_falls_asleep_wakes_it(tmp_path: Path) -> None:
    """And the sizes of the ServingPools are not followed while they are written."""
    writes: list[dict[Role, int]] = []
    may_write = asyncio.Event()

    class Slow(Kubernetes):
        def __init__(self) -> None:
            pass

        async def set_sizes(self, controller: Controller, sizes: Mapping[Role, int]) -> None:
            await may_write.wait()
            writes.append(dict(sizes))
            for role, size in sizes.items():
                controller.follow(role, PoolSpec(size=size, asked=size))

    async with bench(tmp_path) as it:
        for role, size in it.controller.state.desired.items():
            it.controller.follow(role, PoolSpec(size=size, asked=size))
        orders = Orders(it.controller, Slow())
        sleeping = asyncio.create_task(orders.sleep())
        await until(lambda: it.controller.state.sleep is not None)
        await asyncio.sleep(0)
        it.controller.step()
        assert it.controller.state.desired == ASLEEP, "whatever the ServingPools still say"
        waking = asyncio.create_task(orders.wake())
        await asyncio.sleep(0.05)
        may_write.set()
        await asyncio.gather(sleeping, waking)
        await orders.wake()
        assert writes == [ASLEEP, {P: 0, D: 1}]
        await until(lambda: num_ready(it) == 1 and not announced(it).is_asleep)


async def test_a_sleep_that_kubernetes_does_not_take_is_none(tmp_path: Path) -> None:
    class Away(Kubernetes):
        def __init__(self) -> None:
            pass

        async def set_sizes(self, controller: Controller, sizes: Mapping[Role, int]) -> None:
            raise StoreUnavailable("Kubernetes has not taken it")

    async with bench(tmp_path, decode=2) as it:
        orders = Orders(it.controller, Away())
        with pytest.raises(StoreUnavailable):
            await orders.sleep()
        assert it.controller.state.sleep is None
        await until(lambda: num_ready(it) == 2)
        await it.orders.sleep()
        with pytest.raises(StoreUnavailable):
            await orders.wake()
        assert it.controller.state.desired == ASLEEP
        await until(lambda: announced(it).problem == "Kubernetes has not taken it")


async def test_keda_or_an_operator_may_wake_it_too(tmp_path: Path) -> None:
    """And a ServingPool that goes back to 0 before a worker is ready lets it sleep on."""
    async with bench(tmp_path) as it:
        await it.orders.sleep()
        await until(lambda: announced(it).is_asleep and not it.controller.ids)
        it.actors.may_start.clear()
        for size, is_waking in ((2, True), (0, False), (2, True)):
            it.controller.follow(D, PoolSpec(size=size, asked=size))
            sleep = it.controller.state.sleep
            assert sleep is not None
            assert (sleep.waking_since_s > 0, it.controller.state.desired[D]) == (is_waking, size)
        await until(lambda: it.store.desired["decode"] == 2)
        assert announced(it).is_asleep
        it.actors.may_start.set()
        await until(lambda: not announced(it).is_asleep)
        assert announced(it).wake_s > 0


async def test_a_decode_pool_that_an_operator_empties_is_down_and_no_request_wakes_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.orders.scale("decode", 0) == PoolStatus(desired=0, ready=0)
        await it.orders.wake()
        assert it.controller.state.desired == ASLEEP
        await until(lambda: not it.controller.ids)
        assert not announced(it).is_asleep
        await it.orders.scale("decode", 1)
        await until(lambda: num_ready(it) == 1)
        await it.orders.sleep()
        await it.orders.scale("decode", 0)
        assert it.controller.state.sleep is None, "also if it slept"
        await it.orders.sleep()
        assert it.controller.state.sleep is None, "and it does not fall asleep"


async def test_the_model_does_not_sleep_before_routers_can_read_its_files_without_a_worker(tmp_path: Path) -> None:
    it = Bench(tmp_path, SLEEPY, {P: 0, D: 1}, False, lease_s=5.0)
    async with running(it):
        await until(lambda: num_ready(it) == 1)
        with pytest.raises(Conflict, match="the controller has no copy of its files yet"):
            await it.orders.sleep()
        async with providing(it):
            it.store.leases.clear()
            await until(lambda: it.controller.has_copy)
        it.controller.follow(D, PoolSpec(size=1, asked=1, min_size=1, max_size=4))
        with pytest.raises(Conflict, match="the model cannot sleep: its ServingPool allows 1 to 4"):
            await it.orders.sleep()
        assert num_ready(it) == 1


class Dying:
    """Workers that die at the start."""

    def __init__(self, bench: Bench, error: BatonError) -> None:
        self._error = error
        self._start = bench.actors.start
        bench.actors.start = self.start  # type: ignore[method-assign]
        self._bench = bench

    async def start(self, actor: Actor) -> Any:
        raise self._error

    def recover(self) -> None:
        self._bench.actors.start = self._start  # type: ignore[method-assign]


async def test_a_wake_up_that_makes_no_progress_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "ROOM_S", 0.05)
    async with bench(tmp_path) as it:
        await it.orders.sleep()
        await until(lambda: not it.controller.ids)
        it.actors.has_room.clear()
        await it.orders.wake()
        await until(lambda: announced(it).problem == "no node has room for 1 decode worker")
        dying = Dying(it, ModelLoadError(f"there is no room for KV\n\x1b[1m{'x' * 999}"))
        it.actors.has_room.set()
        await until(lambda: "worker-0 (decode) does not start: there is no room for KV" in announced(it).problem)
        assert len(announced(it).problem) <= MAX_REASON
        dying.recover()
        await until(lambda: not announced(it).is_asleep)
        assert announced(it).problem == ""


async def test_a_wake_up_for_which_there_is_no_room_is_refused_and_says_so(tmp_path: Path) -> None:
    reason = "1 more need 9.0 GiB"

    async def room(before: Mapping[Role, int], after: Mapping[Role, int]) -> str:
        return reason

    async with bench(tmp_path) as it:
        orders = Orders(it.controller, room=room)
        await orders.sleep()
        with pytest.raises(Conflict, match=r"the model cannot wake: 1 more need 9\.0 GiB"):
            await orders.wake()
        await until(lambda: "1 more need 9.0 GiB" in announced(it).problem)
        assert it.controller.state.desired == ASLEEP
        reason = ""
        await orders.wake()
        await until(lambda: not announced(it).is_asleep and not announced(it).problem)
        await orders.sleep()
        await until(lambda: announced(it).is_asleep)
        assert announced(it).problem == "", "of the sleep before"


STATE = ControllerState(desired={P: 2, D: 3}, cluster="baton-x")


def sleeping(config: Config, before: Mapping[Role, int]) -> dict[Role, int]:
    state = fallen_asleep(replace(STATE, desired=before))
    assert state.sleep is not None
    return wake_sizes(state, state.sleep, config)


def test_a_model_wakes_with_one_worker_of_each_pool_that_it_had() -> None:
    assert sleeping(SLEEPY, {P: 2, D: 3}) == {P: 1, D: 1}
    assert sleeping(SLEEPY, {P: 0, D: 3}) == {P: 0, D: 1}
    assert sleeping(replace(SLEEPY, router=RouterConfig(mode="disaggregated")), {P: 0, D: 1}) == {P: 1, D: 1}
    assert sleeping(replace(SLEEPY, router=RouterConfig(mode="aggregated")), {P: 1, D: 1}) == {P: 0, D: 1}
    fixed = replace(SLEEPY, autoscale=replace(MAY_SLEEP, max_workers=0))
    assert sleeping(fixed, {P: 2, D: 3}) == {P: 2, D: 3}, "without a limit the autoscaler adds no worker"
    off = replace(SLEEPY, autoscale=AutoscaleConfig(max_workers=4))
    assert sleeping(off, {P: 2, D: 3}) == {P: 2, D: 3}, "nor does one that is off"


def seen(role: Role, phase: WorkerPhase = WorkerPhase.READY, **values: Any) -> ObservedWorker:
    return ObservedWorker(id=f"worker-{role}", pool=role, role=role, phase=phase, **values)


def test_a_wake_up_ends_with_the_workers_that_the_mode_needs() -> None:
    waking = resized(fallen_asleep(STATE), {P: 1, D: 1}, 100.0)
    assert resized(waking, {P: 1, D: 2}, 110.0).sleep == waking.sleep, "it began with the first one"
    assert awoken(waking, [seen(P)], SLEEPY, 130.0) is None
    assert awoken(fallen_asleep(STATE), [seen(D)], SLEEPY, 130.0) is None, "one that leaves"
    assert awoken(STATE, [seen(D)], SLEEPY, 130.0) is None
    awake = awoken(waking, [seen(D)], SLEEPY, 130.0)
    assert awake is not None
    assert (awake.sleep, awake.wake_s) == (None, 30.0)
    disaggregated = replace(SLEEPY, router=RouterConfig(mode="disaggregated"))
    assert awoken(waking, [seen(D)], disaggregated, 130.0) is None
    assert awoken(waking, [seen(D), seen(P)], disaggregated, 130.0) == awake
    set_back = awoken(waking, [seen(D)], SLEEPY, 50.0)
    assert set_back is not None
    assert set_back.wake_s > 0, "the clock was set back"


def test_of_two_pools_the_problem_names_what_keeps_each() -> None:
    waking = resized(fallen_asleep(STATE), {P: 2, D: 1}, 100.0)
    waits = seen(P, WorkerPhase.STARTING, waits_for_room=True)
    down = seen(D, WorkerPhase.DOWN)
    assert wake_problem(waking, [waits, replace(waits, id="w"), down], {"worker-decode": "it died"}, "") == (
        "worker-decode (decode) does not start: it died; no node has room for 2 prefill workers"
    )
    retiring = replace(waits, id="leaves", is_retiring=True)
    assert wake_problem(waking, [waits, retiring, seen(D)], {}, "old") == "no node has room for 1 prefill worker"
    assert wake_problem(fallen_asleep(STATE), [], {}, "refused") == "refused"
    assert wake_problem(STATE, [down], {"worker-decode": "it died"}, "refused") == ""


def test_the_sleep_is_kept_and_a_file_of_the_release_before_has_none(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for state in (
        resized(fallen_asleep(STATE), {P: 1, D: 1}, 100.5),
        replace(fallen_asleep(STATE), wake_s=2.5, files=FILES.digest, created_s=7),
    ):
        save(path, state)
        assert load(path) == state
    values = json.loads(path.read_text())
    for name in ("sleep", "wake_s", "files", "created_s"):
        del values[name]
    path.write_text(json.dumps(values))
    assert load(path) == replace(STATE, desired=ASLEEP)


def test_an_empty_decode_pool_is_refused_unless_the_model_may_sleep(tmp_path: Path) -> None:
    assert "at least 1 decode worker" in sizes_problem(ASLEEP, CONFIG)
    assert sizes_problem(ASLEEP, SLEEPY) == ""
    disaggregated = replace(SLEEPY, router=RouterConfig(mode="disaggregated"))
    assert sizes_problem(ASLEEP, disaggregated) == ""
    assert "needs at least one prefill worker" in sizes_problem({P: 0, D: 1}, disaggregated)
    path = tmp_path / "state.json"
    save(path, fallen_asleep(STATE))
    remembered = replace(SLEEPY, cluster=ClusterConfig(state_file=str(path)))
    assert starting_sizes(remembered) == (STATE.desired, True), "`baton up` waits for workers"


async def test_on_kubernetes_pools_that_are_empty_without_a_state_file_are_asleep(tmp_path: Path) -> None:
    """Its pod's disk was lost with it."""

    class Empty(Kubernetes):
        def __init__(self) -> None:
            pass

        async def sizes(self) -> dict[Role, int]:
            return ASLEEP

    arguments = Arguments(
        cluster="baton-x",
        state_file=tmp_path / "state.json",
        worker_host="",
        worker_keys="",
        ready_fd=None,
        shows_logs=False,
        end=False,
        awaits_address=False,
    )
    config = replace(SLEEPY, kubernetes=KubernetesConfig(namespace="serving"))
    state = await process._state(config, arguments, Empty(), 0.0)
    assert (state.desired, state.sleep) == (ASLEEP, Sleep(before={P: 1, D: 1}))
