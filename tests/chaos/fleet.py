"""Workers without Ray, that come and go in milliseconds: for tests that start and end many of them.

A fork server has imported everything before the first worker is asked for; each worker is a process of its own, with
the arithmetic engine, real gRPC and real links. Redis and the router are real processes too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import torch
import uvloop

import decode_worker.worker
import prefill_worker.worker
from baton.cluster import Role
from baton.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    IndexConfig,
    ModelConfig,
    RouterConfig,
    TransferConfig,
    load,
)
from baton.engine.arithmetic import ArithmeticRunner
from baton.v1 import inference_pb2_grpc
from deploy.client import Client
from deploy.models import cache_dir, resolve
from deploy.processes import die_with_parent
from deploy.redis import EmbeddedRedis
from tests.integration.cluster import free_port

RUNNING = {Role.PREFILL: prefill_worker.worker.running, Role.DECODE: decode_worker.worker.running}
START_TIMEOUT_S = 60.0
_PROCESSES = multiprocessing.get_context("forkserver")


class Fleet:
    """Attributes:
    client, inference: of the router.
    """

    def __init__(self, config: Config, redis: EmbeddedRedis) -> None:
        self._config = config
        self._numbers = itertools.count()
        self.redis = redis
        self.workers: dict[str, multiprocessing.process.BaseProcess] = {}
        self.router_log = tempfile.NamedTemporaryFile("w+", prefix="router-", suffix=".log")  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        self.router = subprocess.Popen(
            [sys.executable, "-m", "router"],
            env=environment | {"BATON_CONFIG_JSON": config.to_json()},
            stdout=self.router_log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(),
        )
        address = f"127.0.0.1:{config.cluster.grpc_port}"
        self.client = Client(address)
        self._channel = grpc.insecure_channel(address)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)

    @property
    def log(self) -> str:
        return Path(self.router_log.name).read_text()

    def add(self, role: Role) -> str:
        """Starts a worker; it takes traffic as soon as it is registered. Returns its id."""
        worker_id = f"{role}-{next(self._numbers)}"
        process = _PROCESSES.Process(
            target=run_worker, args=(role, worker_id, self._config.to_json()), name=worker_id, daemon=True
        )
        process.start()
        self.workers[worker_id] = process
        return worker_id

    def remove(self, worker_id: str, number: signal.Signals) -> None:
        """Ends a worker and reaps it."""
        process = self.workers.pop(worker_id)
        assert process.pid
        os.kill(process.pid, number)
        process.join(30)
        assert not process.is_alive(), f"{worker_id} did not end"

    def wait_for(self, *worker_ids: str) -> None:
        """Until the router knows that they are ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(Exception):
                ready = {w["id"] for w in self.client.status()["workers"] if w["state"] == "ready"}
                if ready >= set(worker_ids):
                    return
            assert time.monotonic() < deadline, f"{worker_ids} did not become ready:\n{self.log}"
            time.sleep(0.02)

    def stop(self) -> None:
        self.client.close()
        self._channel.close()
        for worker_id in list(self.workers):
            self.remove(worker_id, signal.SIGTERM)
        self.router.terminate()
        self.router.wait(30)
        self.router_log.close()


@contextlib.contextmanager
def running_fleet(transfer: TransferConfig, router: RouterConfig) -> Iterator[Fleet]:
    """Redis and a router, and no worker yet. Leaving the block checks that no process is left."""
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    _PROCESSES.set_forkserver_preload([__name__])
    with EmbeddedRedis() as redis:
        config = Config(
            model=ModelConfig(path=str(model.path), served_name=model.served_name, revision=model.revision),
            engine=EngineConfig(runner="arithmetic", num_blocks=2048),
            transfer=transfer,
            index=IndexConfig(redis_url=redis.url, lease_s=3.0, renew_s=0.3, poll_s=0.2),
            router=router,
            cluster=ClusterConfig(grpc_port=free_port(), http_port=free_port()),
        )
        fleet = Fleet(config, redis)
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


def run_worker(role: Role, worker_id: str, config_json: str) -> None:
    """The worker's process."""
    uvloop.run(_serve(Role(role), worker_id, Config.from_json(config_json)))


async def _serve(role: Role, worker_id: str, config: Config) -> None:
    torch.set_num_threads(1)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = ArithmeticRunner(config.engine.num_blocks, max_num_seqs=config.engine.max_num_seqs)
    async with RUNNING[role](config, worker_id, "127.0.0.1", runner) as (_, ended):
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
