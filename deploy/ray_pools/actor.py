"""Ray actor that runs one worker's process: Ray decides where it runs, and ends it with its node.

The worker has a separate process, because SIGTERM must drain a worker, but Ray handles SIGTERM itself in an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from baton.config import REDIS_URL, Config, child_environment, without_password
from baton.errors import WorkerFailed
from baton.messages import Failed
from baton.rpc.errors import from_failed
from baton.tasks import cancel_and_wait
from baton.tls import member_tls
from deploy.processes import FENCED, last_line, module_command, tied
from deploy.ray_pools.gpus import memory_share
from deploy.ray_pools.node_link import NodeLink, end_in_words
from deploy.ray_pools.turns import folder_of, wait_for_turn
from kvstore.transfer.transport.nccl_env import PINNED

logger = logging.getLogger(__name__)
RESOURCE = "baton_worker"
"""Both roles request the same Ray resource, so that a change of role changes nothing for Ray."""
SECRET = "BATON_CLUSTER_SECRET"
STDERR = 2
POOL_LABEL = "baton.dev/pool"
"""A Ray node with this label, prefill or decode, runs only workers that start in that pool, because the pools may use
different GPUs. With another value, or none, it runs workers of all pools."""


class WorkerActor:
    """Actor of one worker. Its methods run on its own event loop; before `start`, only `pool` and `turn` may be called.

    Args:
        role: the worker's initial role; it may change.
        pool: the pool in which the worker was first started, on whose nodes it runs.
        host: host at which the worker listens; empty: this Ray node's address.
        fingerprint: fingerprint of the cluster's keys, which the worker's keys must match; empty: no secret.
    """

    def __init__(
        self, role: str, worker_id: str, host: str, config_json: str, fingerprint: str = "", *, pool: str
    ) -> None:
        self._role = role
        self._pool = pool
        self._worker_id = worker_id
        self._host = host
        self._config_json = config_json
        self._fingerprint = fingerprint
        self._started: asyncio.Task[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Task[int] | None = None
        self._node: NodeLink | None = None
        self._watching: asyncio.Task[None] | None = None
        self._turn: asyncio.Task[BinaryIO] | None = None

    def __repr__(self) -> str:
        """Return the name with which Ray prefixes the lines of its log."""
        return self._worker_id

    async def pool(self) -> str:
        """Return the pool in which the worker was started, independent of its current role."""
        return self._pool

    async def turn(self, limit: int) -> None:
        """Wait until fewer than `limit` other workers of this node load their models. `start` ends the turn.

        If this node's temporary folder cannot be used, the worker does not wait.
        """
        if self._turn is None and self._started is None:
            self._turn = asyncio.create_task(wait_for_turn(folder_of(_node_id()), limit))
        try:
            if self._turn is not None:
                await asyncio.shield(self._turn)
        except OSError as error:
            logger.warning("%s does not wait for its turn to load its model: %s", self._worker_id, error)

    async def start(self) -> dict[str, Any]:
        """Load the model, join the cluster and accept traffic. May be called again.

        Returns:
            `pid`, `address`, `incarnation`, and `pod`: the Kubernetes pod that is this Ray node; empty: none.

        Raises:
            ModelLoadError, ConfigError: this worker cannot run as configured.
            WorkerFailed: it ended before it was ready.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
            self._started.add_done_callback(self._end_turn)
        return await asyncio.shield(self._started)

    async def ended(self) -> None:
        """Wait for the end of the process, which raises WorkerFailed. Never returns."""
        await self.start()
        assert self._ended is not None
        status = await asyncio.shield(self._ended)
        if status == FENCED:
            raise WorkerFailed(f"another process has the name {self._worker_id}: does another cluster use this Redis?")
        raise WorkerFailed(f"{self._worker_id} {end_in_words(status) or 'ended with status 0'}{_last_words()}")

    async def stop(self) -> None:
        """Let the worker leave the cluster, and wait until its process has ended."""
        if self._process is not None and self._ended is not None:
            self._say("away", "it is to leave")
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.shield(self._ended)

    def _end_turn(self, _: object) -> None:
        if self._turn is not None:
            self._turn.add_done_callback(lambda turn: turn.exception() or turn.result().close())

    async def _start(self) -> dict[str, Any]:
        self._node = NodeLink.of(os.environ, self._worker_id)
        reading, writing = os.pipe()
        with os.fdopen(reading) as reports:
            process = self._process = self._spawn(writing)
            os.close(writing)
            self._say("starting", f"it is a {self._role} worker")
            self._ended = asyncio.create_task(self._end_of(process))
            line = await asyncio.to_thread(reports.readline)
        if not line:
            raise WorkerFailed(f"{self._worker_id} ended before it was ready{_last_words() or '; its log says why'}")
        values: dict[str, Any] = json.loads(line)
        if "kind" in values:
            raise from_failed(Failed(**values), self._worker_id)
        tls = member_tls(Config.from_json(self._config_json).cluster)
        self._watching = asyncio.create_task(self._node.watch(values["address"], tls))
        return {**values, "pod": os.environ.get("POD_NAME", "")}

    async def _end_of(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the process, report it, and return the exit status."""
        status = await asyncio.to_thread(process.wait)
        if self._watching:
            await cancel_and_wait([self._watching])
        why = end_in_words(status)
        self._say("ended" if why else "left", why)
        if self._node:
            self._node.close()
        return status

    def _say(self, state: str, reason: str = "") -> None:
        if self._node:
            self._node.say(state, reason)

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        """Start the process from the event loop's thread: it dies with that thread, and hence with the actor."""
        config = Config.from_json(self._config_json)
        share = config.engine.memory_share * self._share(config)
        config = dataclasses.replace(
            config,
            engine=dataclasses.replace(config.engine, memory_share=share),
            index=dataclasses.replace(config.index, redis_url=own_redis_url(config, os.environ)),
            cluster=dataclasses.replace(config.cluster, secret=own_secret(config, os.environ)),
        )
        arguments = [self._role, self._worker_id, self._host or _node_address(), "--ready-fd", str(ready_fd)]
        if self._fingerprint:
            arguments += ["--keys", self._fingerprint]
        if taken := (self._node.path if self._node else "") or _own_file():
            arguments += ["--output", str(taken)]
        with (self._node.output() if self._node else None) or contextlib.nullcontext() as link:
            output = STDERR if link is None else link.fileno()
            return subprocess.Popen(
                tied(module_command("worker", *arguments)),
                env={
                    **child_environment(os.environ, REDIS_URL),
                    **worker_environment(config),
                    "BATON_CONFIG_JSON": config.to_json(),
                },
                pass_fds=[ready_fd],
                stdout=output,
                stderr=output,
            )

    def _share(self, config: Config) -> float:
        """Return this worker's share of the Ray node's memory, or of one of its GPUs."""
        import ray

        context = ray.get_runtime_context()
        own: dict[str, float] = context.get_assigned_resources()
        if gpus := own.get("GPU"):
            return memory_share(gpus)
        if self._host:  # all are on this machine
            return 1 / (config.cluster.prefill + config.cluster.decode)
        (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        return own[RESOURCE] / float(node["Resources"][RESOURCE])


def _last_words() -> str:
    """Return the last line of the log file of this process and the worker, as the end of a sentence.

    Empty: there is no such file, or it is empty.
    """
    log = _own_file()
    line = last_line(log) if log else ""
    return f": {line}; its log: {log}" if line else ""


def _own_file() -> Path | None:
    """Return the file to which Ray redirects this process's standard error; None: it is no file."""
    file = Path(os.path.realpath(f"/proc/self/fd/{STDERR}"))
    return file if file.is_file() else None


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _node_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())


def own_redis_url(config: Config, environ: Mapping[str, str]) -> str:
    """Return the URL of Redis for a worker on this Ray node, without the password.

    The node's own URL, which may have another user, takes precedence.
    """
    return without_password(environ.get(REDIS_URL, "")) or config.index.redis_url


def own_secret(config: Config, environ: Mapping[str, str]) -> str:
    """Return the path of the keys of a worker on this Ray node; the path in the node's environment takes precedence."""
    return environ.get(SECRET) or config.cluster.secret


def worker_environment(config: Config) -> dict[str, str]:
    """Return the environment variables that must be set before the worker's process starts and imports torch."""
    threads = str(config.engine.num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints its location
        "PYTHONUNBUFFERED": "1",
        **PINNED,
    }
