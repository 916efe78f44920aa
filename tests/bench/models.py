"""Benchmark of a router with many models: its CPU while none of them has a request, and its memory for each.

The router is a real process without a model of its own. Another process plays the controllers and the workers, which
renew their leases as real ones do while they are idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from baton.cluster import ControllerInfo, ModelAnnouncement, Role, WorkerLoad, WorkerState
from baton.config import ClusterConfig, Config, IndexConfig, ModelConfig, RouterConfig, load
from baton.rpc import RpcServer
from baton.rpc.member_auth import CONTROLLERS_RULES, member_auth
from baton.rpc.model_files import ModelFilesServicer
from baton.serving_files import ProvidedFiles
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import worker_pb2_grpc
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from deploy.processes import tied
from kvstore.index import RedisConnection
from kvstore.leases import RedisEndpoint, RedisLeases
from tests.bench.report import Report, Table
from tests.bench.stats import spread
from tests.integration.cluster import free_port
from tests.support import builders

NUM_WORKERS = 10
"""Workers of each model."""
GATE = 0.1
WINDOW_S = 5.0


def run(quick: bool) -> Report:
    table = Table(
        f"A router whose models have {NUM_WORKERS} idle workers each",
        ("models", "share of a core", "resident MiB"),
        note=f"gate with 20 models: below {GATE:.0%} of a core",
    )
    for num_models in (1, 5) if quick else (1, 20):
        with _cluster(num_models) as router:
            shares = []
            for _ in range(2 if quick else 6):
                before_s = sum(router.cpu_times()[:2])
                time.sleep(WINDOW_S)
                shares.append((sum(router.cpu_times()[:2]) - before_s) / WINDOW_S)
            table.rows.append((str(num_models), spread(shares), f"{router.memory_info().rss / 2**20:.0f}"))
    return Report("models", [table])


@contextlib.contextmanager
def _cluster(num_models: int) -> Iterator[psutil.Process]:
    """Yield the router's process when it serves all models, and has rested for a while."""
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        redis = EmbeddedRedis(socket_path=Path(folder, "redis.sock"), parent=Path(folder))
        redis.start()
        stack.callback(redis.stop)
        secret = Path(folder, "secret")
        write_private(secret, draw_secret())
        config = Config(
            index=IndexConfig(redis_url=redis.url),
            router=RouterConfig(own_model=False),
            cluster=ClusterConfig(
                secret=str(secret), grpc_port=free_port(), http_port=free_port(), cache_dir=str(Path(folder, "cache"))
            ),
        )
        members = multiprocessing.get_context("spawn").Process(
            target=_play, args=(config.to_json(), str(model.path), num_models), daemon=True
        )
        members.start()
        stack.callback(_end, members)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        router = subprocess.Popen(
            tied([sys.executable, "-m", "router"]),
            env=environment | {"BATON_CONFIG_JSON": config.to_json()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(router.wait)
        stack.callback(router.kill)
        asyncio.run(_until_all_are_served(config, num_models))
        time.sleep(WINDOW_S)
        yield psutil.Process(router.pid)


def _end(members: BaseProcess) -> None:
    members.kill()
    members.join()


async def _until_all_are_served(config: Config, num_models: int) -> None:
    keys = KeyFile(config.cluster.secret, Principal.OPERATOR)
    store = RedisEndpoint(RedisConnection(config.index.url), config.cluster.endpoint, keys=keys)
    async with asyncio.timeout(300):
        while True:
            routed = [each for router in await store.list_routers() for each in router.models]
            if sum(each.ready_workers == NUM_WORKERS for each in routed) == num_models:
                break
            await asyncio.sleep(0.5)
    await store.close()


def _play(config_json: str, model_path: str, num_models: int) -> None:
    asyncio.run(_members(Config.from_json(config_json), model_path, num_models))


async def _members(config: Config, model_path: str, num_models: int) -> None:
    """Be the controllers and the workers of all models, until killed."""
    keys = {each: KeyFile(config.cluster.secret, each) for each in Principal}
    provided, incarnation = ProvidedFiles.of_model(model_path), os.urandom(8).hex()
    rpc = RpcServer(("baton.v1.ModelFiles",), member_auth(keys[Principal.CONTROLLER], incarnation, CONTROLLERS_RULES))
    worker_pb2_grpc.add_ModelFilesServicer_to_server(ModelFilesServicer(provided.read), rpc.server)
    me = ControllerInfo(pid=os.getpid(), address=f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}", incarnation=incarnation)
    await rpc.start()
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_models):
            content = f"{number:032x}"
            tasks.create_task(_control(config, keys[Principal.CONTROLLER], content, provided.digest, me))
            tasks.create_task(_work(config, keys[Principal.WORKER], content))


async def _control(config: Config, keys: KeyFile, content: str, files: str, me: ControllerInfo) -> None:
    name = f"model-{int(content, 16)}"
    model = ModelAnnouncement(content_id=content, name=name, path="/", release=name, files=files)
    store = RedisEndpoint(RedisConnection(config.index.url), config.cluster.endpoint, keys=keys)
    leases = RedisLeases(RedisConnection(config.index.url), content, keys=keys)
    for number in itertools.count():
        if number % 10 == 0:
            await store.announce_model(model)
        await leases.announce_controller(me)
        await leases.set_desired({"prefill": 0, "decode": NUM_WORKERS})
        await asyncio.sleep(1.0)


async def _work(config: Config, keys: KeyFile, content: str) -> None:
    leases = RedisLeases(RedisConnection(config.index.url), content, keys=keys)
    workers = []
    for number in range(NUM_WORKERS):
        info = builders.worker_info(
            f"worker-{number}", Role.DECODE, content_id=content, address=f"127.0.0.1:{number + 1}"
        )
        workers.append(replace(info, epoch=await leases.acquire(info.id)))
    while True:
        for info in workers:
            await leases.renew(info, WorkerLoad(state=WorkerState.READY))
        await asyncio.sleep(config.index.renew_s)
