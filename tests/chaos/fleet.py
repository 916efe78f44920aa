"""Workers without Ray, that come and go in milliseconds: for tests that start and end many of them.

A fork server has imported everything before the first worker is asked for; each worker is a process of its own, with
the arithmetic engine, real gRPC and real links. Redis and the routers are real processes too. Once gRPC runs in the
tests' own process, only the fork server forks: gRPC's pollers do not always survive it in the parent.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import c_double
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop

from baton.blocks import content_id
from baton.cluster import Role
from baton.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    IndexConfig,
    ModelConfig,
    RouterConfig,
    TelemetryConfig,
    TestingConfig,
    TransferConfig,
    load,
)
from baton.errors import Fenced
from baton.rpc import RpcServer
from baton.rpc.server import ServerIdentity
from baton.telemetry import logs
from baton.tls import own_endpoint_tls
from baton.v1 import worker_pb2_grpc
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from deploy.processes import FENCED, tied
from engine.core.loop import EngineLoop
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.engines import engine_over, make_engine
from engine.testing import ArithmeticRunner, image_placeholder_of
from tests.integration.cluster import Served, free_port
from tests.support.asking import exposition
from tests.support.members import control, leased, secret_file
from tests.support.operator import OPERATOR_KEY
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from worker.process import serve

START_TIMEOUT_S = 180.0
NUM_LAYERS = 2
_PROCESSES = multiprocessing.get_context("forkserver")


class RouterProcess(Served):
    """To be connected after all of them have been started."""

    def __init__(self, config: Config) -> None:
        self.id = config.router.id
        self.tls = own_endpoint_tls(config)
        self.api_key = OPERATOR_KEY if config.router.tenants_file else ""
        self._log_file = tempfile.NamedTemporaryFile("w+", prefix=f"{self.id}-", suffix=".log")  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        self.process = subprocess.Popen(
            tied([sys.executable, "-m", "router"]),
            env=environment | {"BATON_CONFIG_JSON": config.to_json()},
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
        )
        self.grpc = f"127.0.0.1:{config.cluster.grpc_port}"
        self.http = f"127.0.0.1:{config.cluster.http_port}"

    def metrics(self) -> list[tuple[str, float]]:
        """Every sample of the metrics: its name with the labels, and its value."""
        samples = [line.rpartition(" ") for line in exposition(self).splitlines() if not line.startswith("#")]
        return [(name, float(value)) for name, _, value in samples]

    def stop(self) -> None:
        self.disconnect()
        self.process.terminate()
        self.process.wait(30)
        self._log_file.close()


class RedisProcess:
    """A Redis that can be killed and started again, empty, at the same address."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._orders, theirs = _PROCESSES.Pipe()
        self._keeper = _PROCESSES.Process(target=_keep_redis, args=(self._port, theirs), name="redis", daemon=True)
        self._keeper.start()
        self._await_done()

    def kill(self) -> None:
        self._order("kill")

    def start(self) -> None:
        self._order("start")

    def pause(self) -> None:
        self._order("pause")

    def resume(self) -> None:
        self._order("resume")

    def close(self) -> None:
        self._order("")
        self._keeper.join(30)

    def _order(self, order: str) -> None:
        self._orders.send(order)
        self._await_done()

    def _await_done(self) -> None:
        assert self._orders.poll(30), "Redis does not do as told"
        self._orders.recv()


def _keep_redis(port: int, orders: Connection) -> None:
    """The process whose child Redis is: it does as it is told, and says when it is done."""
    with EmbeddedRedis(port=port) as redis:
        obey: dict[str, Callable[[], object]] = {
            "kill": redis.kill,
            "start": redis.start,
            "pause": lambda: os.kill(redis.pid or 0, signal.SIGSTOP),
            "resume": lambda: os.kill(redis.pid or 0, signal.SIGCONT),
        }
        orders.send(True)
        while order := orders.recv():
            obey[order]()
            orders.send(True)
    orders.send(True)


class Progress:
    """What a worker's engine has done, in memory shared with the tests: it can be read when the worker is dead."""

    def __init__(self) -> None:
        self._shared = RawArray(c_double, 3)

    @property
    def num_drawn(self) -> int:
        """Tokens drawn since the worker's start, counted before they are sent."""
        return int(self._shared[0])

    @property
    def step_began_s(self) -> float:
        """Begin of the latest step, on the monotonic clock, which is the same in all processes."""
        return self._shared[1]

    @property
    def is_device_lost(self) -> bool:
        return self._shared[2] == 1

    @property
    def does_device_hang(self) -> bool:
        return self._shared[2] == 2

    def lose_device(self) -> None:
        """Has every further step fail, and the end of the engine wait for ever."""
        self._shared[2] = 1

    def hang_device(self) -> None:
        """Has the next step wait for ever, and the end of the engine, too."""
        self._shared[2] = 2

    def begins(self) -> None:
        self._shared[1] = time.monotonic()

    def has_drawn(self, num_tokens: int) -> None:
        self._shared[0] += num_tokens


class NotingRunner(ArithmeticRunner):
    """The arithmetic engine, which notes its progress."""

    progress: Progress

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.progress.begins()
        if self.progress.is_device_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if self.progress.does_device_hang:
            threading.Event().wait()
        output = super().execute(step, on_layer_done)
        self.progress.has_drawn(sum(map(len, output.sampled_token_ids)))
        return output

    def close(self) -> None:
        if self.progress.is_device_lost or self.progress.does_device_hang:
            threading.Event().wait()


class Fleet:
    """Attributes:
    client, inference: of the first router.
    progress: of the engine of each worker, also of those that have died.
    """

    def __init__(
        self,
        config: Config,
        redis: RedisProcess,
        num_routers: int = 1,
        shares_address: bool = False,
    ) -> None:
        secret = secret_file()
        config = replace(config, cluster=replace(config.cluster, secret=secret))
        shared = replace(config.cluster, grpc_port=free_port(), http_port=free_port(), routers=num_routers)
        self.config = config
        self._numbers = itertools.count()
        self.redis = redis
        self.workers: dict[str, multiprocessing.process.BaseProcess] = {}
        self._roles: dict[str, Role] = {}
        self.progress: dict[str, Progress] = {}
        self.routers = [
            RouterProcess(
                replace(
                    config,
                    router=replace(config.router, id=f"router-{number}"),
                    cluster=shared
                    if shares_address
                    else replace(shared, grpc_port=free_port(), http_port=free_port(), routers=1),
                )
            )
            for number in range(num_routers)
        ]
        for router in self.routers:
            router.connect()
        self.client, self.inference = self.routers[0].client, self.routers[0].inference

    @property
    def log(self) -> str:
        return "\n".join(router.log for router in self.routers)

    def add(
        self,
        role: Role,
        worker_id: str = "",
        config: Config | None = None,
        *,
        behind: Proxy | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> str:
        """Starts a worker; it takes traffic as soon as it is registered. Returns its id: a new one, if none is given.

        One that has the id already is left to the caller.

        Args:
            config: of this worker alone; by default the fleet's.
            behind: how routers and other workers reach its gRPC server.
            prepare: called in its process, before anything else.
        """
        if behind:
            prepare = partial(_announce_other_port, behind.port, behind.target)
        worker_id = worker_id or f"worker-{next(self._numbers)}"
        self.progress[worker_id] = Progress()
        process = _PROCESSES.Process(
            target=run_worker,
            args=(
                *(role, worker_id, (config or self.config).to_json(), self.progress[worker_id]),
                prepare,
            ),
            name=worker_id,
            daemon=True,
        )
        process.start()
        self.workers[worker_id], self._roles[worker_id] = process, role
        return worker_id

    def started_as(self, role: Role) -> list[str]:
        """The workers that were started in a role and have not been removed, in the order of their starts."""
        return [worker_id for worker_id in self.workers if self._roles[worker_id] is role]

    def fill(self, *roles: Role) -> RouterProcess:
        """Starts a worker of each, and returns the first router once all are ready."""
        self.wait_for(*[self.add(role) for role in roles])
        return self.routers[0]

    def control(self, worker_id: str) -> AbstractContextManager[worker_pb2_grpc.WorkerControlStub]:
        """Orders to a worker, as the controller gives them."""
        return control(leased(self.redis.url, content_id(self.config.kv_identity), worker_id))

    def send(self, worker_id: str, number: signal.Signals) -> None:
        pid = self.workers[worker_id].pid
        assert pid
        os.kill(pid, number)

    def remove(self, worker_id: str, number: signal.Signals) -> None:
        """Ends a worker, if it has not died already, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self.send(worker_id, number)
        process = self.workers.pop(worker_id)
        process.join(30)
        assert not process.is_alive(), f"{worker_id} did not end"

    def clear(self) -> None:
        """Ends all workers, so that the next test finds none."""
        for worker_id in list(self.workers):
            self.remove(worker_id, signal.SIGTERM)

    def wait_for(self, *worker_ids: str) -> None:
        """Until every router knows that they are ready: these processes, and not others of the same id before them."""
        expected = {(worker_id, self.workers[worker_id].pid) for worker_id in worker_ids}

        def ready(router: RouterProcess) -> set[tuple[str, int | None]]:
            return {(w["id"], w["pid"]) for w in router.client.status()["workers"] if w["state"] == "ready"}

        for router in self.routers:
            wait_until(
                lambda router=router: ready(router) >= expected,  # type: ignore[misc]
                START_TIMEOUT_S,
                seen=lambda: f"{worker_ids} did not become ready:\n{self.log}",
                not_yet=(Exception,),
            )

    def stop(self) -> None:
        self.clear()
        for router in self.routers:
            router.stop()


@contextlib.contextmanager
def running_fleet(
    transfer: TransferConfig,
    router: RouterConfig,
    *,
    num_routers: int = 1,
    num_blocks: int = 2048,
    lease_s: float = 3.0,
    step_ms: float = 0.0,
    token_ms: float = 0.0,
    faults: str = "",
    shares_address: bool = False,
    telemetry: TelemetryConfig | None = None,
    cluster: ClusterConfig | None = None,
    model_path: Path | None = None,
    **engine: Any,
) -> Iterator[Fleet]:
    """Redis and routers, and no worker yet. Leaving the block checks that no process is left.

    Args:
        step_ms: what a step of a worker takes at least.
        token_ms: what each of its tokens takes besides.
        shares_address: the routers listen on the same ports.
        model_path: folder of the model; None: the default one's.
        engine: more of its settings; with a `runner`, the workers compute a real model.
    """
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    _PROCESSES.set_forkserver_preload([__name__])
    with contextlib.closing(RedisProcess()) as redis:
        config = Config(
            model=ModelConfig(
                path=str(model_path or model.path), served_name=model.served_name, revision=model.revision
            ),
            engine=EngineConfig(num_blocks=num_blocks, **engine),
            transfer=transfer,
            index=IndexConfig(redis_url=redis.url, lease_s=lease_s, renew_s=0.3, poll_s=0.2),
            router=router,
            testing=TestingConfig(arithmetic="runner" not in engine, step_ms=step_ms, token_ms=token_ms, faults=faults),
            telemetry=telemetry or TelemetryConfig(),
            cluster=cluster or ClusterConfig(),
        )
        fleet = Fleet(config, redis, num_routers, shares_address)
        try:
            yield fleet
            started = [psutil.Process(w.pid) for w in fleet.workers.values()]
        except BaseException:
            print(fleet.log)
            fleet.stop()
            raise
        fleet.stop()
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive, f"left behind: {alive}"


def run_worker(
    role: Role, worker_id: str, config_json: str, progress: Progress, prepare: Callable[[], None] | None
) -> None:
    """The worker's process."""
    if prepare:
        prepare()
    config = Config.from_json(config_json)
    logs.configure(config.telemetry.log_level, config.telemetry.log_format, f"baton-{role}")
    try:
        uvloop.run(_serve(Role(role), worker_id, config, progress))
    except* Fenced:
        sys.exit(FENCED)


def _announce_other_port(announced: int, listens: int) -> None:
    """Has this process, which is one worker's, listen at one port and name another to the cluster."""
    bind = RpcServer.bind

    def bind_there(self: RpcServer, host: str, port: int, tls: ServerIdentity | None = None) -> int:
        bind(self, host, listens, tls)
        return announced

    RpcServer.bind = bind_there  # type: ignore[method-assign]


async def _serve(role: Role, worker_id: str, config: Config, progress: Progress) -> None:
    torch.set_num_threads(1)

    def make(config: Config, cache: Path) -> EngineLoop:
        runner = NotingRunner(
            config.engine.num_blocks,
            max_num_seqs=config.engine.batch(on_gpu=False).max_num_seqs,
            num_layers=NUM_LAYERS,
            layer_s=config.testing.step_ms / 1e3 / NUM_LAYERS,
            token_s=config.testing.token_ms / 1e3,
            tokenizer=Path(config.model.path) / "tokenizer.json",
            max_adapters=config.engine.max_adapters,
            image_placeholder=image_placeholder_of(Path(config.model.path)),
        )
        runner.progress = progress
        return engine_over(runner, config.engine)

    await serve(config, role, worker_id, "127.0.0.1", make=make if config.testing.arithmetic else make_engine)
