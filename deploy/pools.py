"""The pools: which worker actors there should be, and bringing back those that die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable
from typing import Any

from baton.blocks import content_id
from baton.cluster import Role
from baton.config import Config
from baton.errors import BatonError, ConfigError, StoreUnavailable
from deploy.actors import RESOURCE, WorkerActor
from kvstore.index import Connection
from kvstore.leases import RedisLeases

logger = logging.getLogger(__name__)

MAX_WORKERS = 256
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Waits before the restarts of a worker that keeps failing to start."""

# Before Ray is imported: keep a local cluster on loopback, and keep it from calling home.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402
import ray.exceptions  # noqa: E402


class LocalRay:
    """A Ray cluster of this machine alone, for the life of a context."""

    def __enter__(self) -> LocalRay:
        ray.init(
            address="local",
            num_cpus=1,
            resources={RESOURCE: MAX_WORKERS},
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # workers exchange nothing through it
            log_to_driver=True,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        ray.shutdown()


class Pools:
    """Keeps `cluster.prefill` and `cluster.decode` workers running, each in an actor of its own."""

    def __init__(self, config: Config, host: str) -> None:
        self._config = config
        self._host = host
        self._desired = {Role.PREFILL: config.cluster.prefill, Role.DECODE: config.cluster.decode}
        self._actors: dict[str, Any] = {}
        self._leases = RedisLeases(Connection(config.index.redis_url), content_id(config.model.revision))
        num_workers = sum(self._desired.values())
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        self._options = {
            "num_cpus": 0,  # an actor that asks for a CPU nobody has stays pending for ever, without an error
            "num_gpus": min(1.0, num_gpus / num_workers) if num_gpus and config.model.device != "cpu" else 0,
            "resources": {RESOURCE: 1},
            "max_restarts": 0,  # we bring workers back ourselves, and know when
        }

    async def start(self) -> None:
        """Starts every worker, at once.

        Raises:
            ConfigError, ModelLoadError: a worker cannot run as configured.
        """
        ids = [(role, f"{role.value}-{i}") for role, count in self._desired.items() for i in range(count)]
        async with asyncio.timeout(self._config.cluster.start_timeout_s), asyncio.TaskGroup() as tasks:
            for role, worker_id in ids:
                tasks.create_task(self._start_worker(role, worker_id))

    async def run(self) -> None:
        """Brings back workers that die, and tells the routers how many there should be. Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_desired())
            for worker_id in self._actors:
                tasks.create_task(self._keep(Role(worker_id.rpartition("-")[0]), worker_id))

    async def stop(self) -> None:
        """Lets every worker leave the cluster, then ends its process."""
        await asyncio.gather(*(self._stop_worker(actor) for actor in self._actors.values()))
        await self._leases.close()

    async def _start_worker(self, role: Role, worker_id: str) -> None:
        actor = ray.remote(WorkerActor).options(**self._options).remote(
            role.value, worker_id, self._host, self._config.to_json()
        )  # fmt: skip
        self._actors[worker_id] = actor
        started = await _result(actor.start.remote())
        logger.info("%s is ready, pid %d, at %s", worker_id, started["pid"], started["address"])

    async def _keep(self, role: Role, worker_id: str) -> None:
        num_failures = 0
        while True:
            try:
                await _result(self._actors[worker_id].ended.remote())
            except (ray.exceptions.RayError, BatonError) as error:
                logger.warning("%s is gone (%s); starting it again", worker_id, _first_line(error))
            await _kill(self._actors[worker_id])
            await asyncio.sleep(RESTART_BACKOFF_S[min(num_failures, len(RESTART_BACKOFF_S) - 1)])
            try:
                await self._start_worker(role, worker_id)
                num_failures = 0
            except (ray.exceptions.RayError, BatonError) as error:
                num_failures += 1
                logger.error("%s does not start: %s", worker_id, _first_line(error))

    async def _publish_desired(self) -> None:
        """Redis holds a copy; after it lost its state (a new boot token) it gets it again."""
        published_to = None
        while True:
            with contextlib.suppress(StoreUnavailable):
                boot = await self._leases.boot()
                if boot != published_to:
                    await self._leases.set_desired({role.value: count for role, count in self._desired.items()})
                    published_to = boot
            await asyncio.sleep(self._config.index.poll_s)

    async def _stop_worker(self, actor: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(_result(actor.stop.remote()), self._config.cluster.stop_timeout_s / 2)
        await _kill(actor)


async def _kill(actor: Any) -> None:
    await asyncio.to_thread(ray.kill, actor)


async def _result(reference: Awaitable[Any]) -> Any:
    """Awaits a Ray call; the worker's own typed error comes out as itself."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_sizes(config: Config) -> None:
    """Raises ConfigError unless the pool sizes can be served."""
    prefill, decode = config.cluster.prefill, config.cluster.decode
    if decode < 1 or prefill < 0 or prefill + decode > MAX_WORKERS:
        raise ConfigError(
            f"--prefill {prefill} --decode {decode}: there must be at least 1 decode worker, "
            f"and at most {MAX_WORKERS} workers in all"
        )
    if prefill == 0 and config.router.mode == "split":
        raise ConfigError("router.mode is split, which needs at least one prefill worker; use --prefill 1")
