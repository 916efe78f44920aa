"""Ray actor of one worker: Ray decides on which node the worker runs, and the actor orders its start and end there.

The worker's process is a child of the node process (`deploy.ray_pools.node`), so that it serves on when Ray fails. It
could not run in the actor itself either: SIGTERM must drain a worker, but Ray handles SIGTERM in an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from baton.config import REDIS_URL, Config, child_environment, without_password
from baton.errors import WorkerFailed
from baton.messages import Failed
from baton.own_folder import own_folder
from baton.rpc.errors import from_failed
from baton.tls import member_tls
from deploy.processes import FENCED, module_command, tied
from deploy.ray_pools.gpus import memory_share
from deploy.ray_pools.node import SOCKET
from deploy.ray_pools.node_link import NodeLink
from deploy.ray_pools.supervisor import VISIBLE, StartOrder, WorkerName
from deploy.ray_pools.turns import folder_of, wait_for_turn
from kvstore.transfer.transport.nccl_env import PINNED

logger = logging.getLogger(__name__)
RESOURCE = "baton_worker"
"""Both roles request the same Ray resource, so that a change of role changes nothing for Ray."""
SECRET = "BATON_CLUSTER_SECRET"
MOST_CHARACTERS = 72
"""Maximum length of the path above an own node process's folder: a socket's path may have 107 characters."""
POOL_LABEL = "baton.dev/pool"
"""A Ray node with this label, prefill or decode, runs only workers that start in that pool, because the pools may use
different GPUs. With another value, or none, it runs workers of all pools."""


class WorkerActor:
    """Actor of one worker. Its methods run on its own event loop. Before `start`, call only `pool`, `turn` and `kill`.

    Args:
        role: the worker's initial role; it may change.
        pool: the pool in which the worker was first started, on whose nodes it runs.
        host: host at which the worker listens; empty: this Ray node's address.
        fingerprint: fingerprint of the cluster's keys, which the worker's keys must match; empty: no secret.
        adopts: whether `start` adopts the worker, which runs on this node already and has lost its previous actor.
    """

    def __init__(
        self,
        role: str,
        worker_id: str,
        host: str,
        config_json: str,
        fingerprint: str = "",
        *,
        pool: str,
        adopts: bool = False,
    ) -> None:
        self._role = role
        self._pool = pool
        self._worker_id = worker_id
        self._host = host
        self._config_json = config_json
        self._fingerprint = fingerprint
        self._adopts = adopts
        self._started: asyncio.Task[dict[str, Any]] | None = None
        self._node: NodeLink | None = None
        self._own: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.ExitStack()
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
        if self._turn is None and self._started is None and not self._adopts:
            self._turn = asyncio.create_task(wait_for_turn(folder_of(_node_id()), limit))
        try:
            if self._turn is not None:
                await asyncio.shield(self._turn)
        except OSError as error:
            logger.warning("%s does not wait for its turn to load its model: %s", self._worker_id, error)

    async def start(self) -> dict[str, Any]:
        """Start the worker and wait until it accepts traffic, or adopt the running worker. May be called again.

        Returns:
            `pid`, `address`, `incarnation`, and `pod`: the Kubernetes pod that is this Ray node; empty: none.

        Raises:
            ModelLoadError, ConfigError: this worker cannot run as configured.
            WorkerFailed: it ended before it was ready, or the worker to adopt does not run on this node.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._adopt() if self._adopts else self._start())
            self._started.add_done_callback(self._end_turn)
        return await asyncio.shield(self._started)

    async def ended(self) -> None:
        """Wait for the end of the process, which raises WorkerFailed. Never returns."""
        await self.start()
        assert self._node is not None
        end = await self._node.ended()
        if end.status == FENCED:
            raise WorkerFailed(f"another process has the name {self._worker_id}: does another cluster use this Redis?")
        raise WorkerFailed(f"{self._worker_id} {end.in_words}")

    async def stop(self) -> None:
        """Let the worker leave the cluster, and wait until its process has ended."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Kill the worker's process, and wait until it has ended. Call it before Ray kills this actor."""
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        if self._node is not None:
            self._node.say("away", "it is leaving")
            self._node.send_signal(number)
            with contextlib.suppress(WorkerFailed):
                await self._node.ended()

    def _end_turn(self, _: object) -> None:
        if self._turn is not None:
            self._turn.add_done_callback(lambda turn: turn.exception() or turn.result().close())

    async def _start(self) -> dict[str, Any]:
        config = Config.from_json(self._config_json)
        path = os.environ.get(SOCKET) or await self._own_node_process()
        self._node = await NodeLink.open(path, self._name())
        order = self._order(config, path)
        return await self._reported(await self._node.start(order, f"it is a {self._role} worker"))

    async def _adopt(self) -> dict[str, Any]:
        if not (path := os.environ.get(SOCKET)):
            raise WorkerFailed(f"{self._worker_id} has ended with its actor: its Ray node has no node process")
        self._node = await NodeLink.open(path, self._name())
        return await self._reported(await self._node.adopt(self._gpus()[0]))

    async def _reported(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's report, and watch the worker from now on. Raises the error that it has reported."""
        assert self._node is not None
        if "kind" in report:
            raise from_failed(Failed(**report), self._worker_id)
        tls = member_tls(Config.from_json(self._config_json).cluster)
        self._watching = asyncio.create_task(self._node.watch(report["address"], tls))
        return {**report, "pod": os.environ.get("POD_NAME", "")}

    def _order(self, config: Config, path: str) -> StartOrder:
        """Return the order that starts the worker.

        Args:
            config: configuration of the cluster.
            path: socket of the node process, which keeps the worker's latest output.
        """
        cluster = config.cluster
        share = config.engine.memory_share * self._share(config)
        config = dataclasses.replace(
            config,
            engine=dataclasses.replace(config.engine, memory_share=share),
            index=dataclasses.replace(config.index, redis_url=own_redis_url(config, os.environ)),
            cluster=dataclasses.replace(config.cluster, secret=own_secret(config, os.environ)),
        )
        gpus, gpu_share = self._gpus()
        arguments = [self._role, self._worker_id, self._host or _node_address()]
        arguments += ["--node", path, "--cluster", self._cluster()]
        if self._fingerprint:
            arguments += ["--keys", self._fingerprint]
        return StartOrder(
            command=module_command("worker", *arguments),
            environment={
                **child_environment(os.environ, REDIS_URL),
                **worker_environment(config),
                "BATON_CONFIG_JSON": config.to_json(),
            },
            gpus=gpus,
            gpu_share=gpu_share,
            orphan_timeout_s=cluster.orphan_timeout_s,
            end_timeout_s=cluster.drain_timeout_s + cluster.stop_timeout_s,
        )

    def _name(self) -> WorkerName:
        """Return the worker's name at its node process."""
        return WorkerName(self._cluster(), self._worker_id, Config.from_json(self._config_json).release)

    def _cluster(self) -> str:
        """Return the Ray namespace of this actor's cluster."""
        import ray

        return str(ray.get_runtime_context().namespace)

    def _own_node_process(self) -> asyncio.Future[str]:
        """Start a node process for this actor alone, and return the future path of its socket. It ends with the actor.

        The actor needs it if Ray was started without a node process on this Ray node. Ray may kill it with the actor,
        so that its folder stays until the next one is created.
        """
        temporary = Path(tempfile.gettempdir())
        is_short = len(str(temporary)) <= MOST_CHARACTERS
        folder = self._stack.enter_context(own_folder(temporary if is_short else Path("/tmp"))) / "node"
        reading, writing = os.pipe()
        options = ["--folder", str(folder), "--log-format", "raw", "--ready-fd", str(writing)]
        command = module_command("deploy.ray_pools.node", *options)
        # The event loop's thread starts it: the process ends with that thread, and hence with the actor.
        self._own = subprocess.Popen(tied(command, signal.SIGTERM), pass_fds=[writing])
        os.close(writing)
        return asyncio.ensure_future(asyncio.to_thread(_socket_of, reading))

    def _share(self, config: Config) -> float:
        """Return this worker's share of the Ray node's memory, or of each of its GPUs."""
        import ray

        if gpu_share := self._gpus()[1]:
            return gpu_share
        if self._host:  # all are on this machine
            return 1 / (config.cluster.prefill + config.cluster.decode)
        own_id = ray.get_runtime_context().get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == own_id)
        return self._assigned()[RESOURCE] / float(node["Resources"][RESOURCE])

    def _gpus(self) -> tuple[Sequence[str], float]:
        """Return the GPUs that Ray has assigned to this actor, and its share of each."""
        amount = self._assigned().get("GPU", 0.0)
        return (os.environ.get(VISIBLE, "").split(","), memory_share(amount)) if amount else ((), 0.0)

    def _assigned(self) -> Mapping[str, float]:
        """Return the resources that Ray has assigned to this actor."""
        import ray

        assigned: dict[str, float] = ray.get_runtime_context().get_assigned_resources()
        return assigned


def _socket_of(report: int) -> str:
    with os.fdopen(report) as reports:
        line = reports.readline()
    if not line:
        raise WorkerFailed("the node process did not start; the actor's log in Ray's log folder has the reason")
    return str(json.loads(line)["socket"])


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
