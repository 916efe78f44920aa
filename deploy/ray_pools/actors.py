"""The workers' actors in Ray. They are detached: they survive the controller, and the next one finds them by name.

Nothing here blocks the event loop: Ray's synchronous calls run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.cluster import Role
from baton.config import ClusterConfig, Config
from baton.errors import ActorLost, BatonError, ConfigError, WorkerFailed
from baton.trust import KeyFile
from deploy.ray_pools.actor import POOL_LABEL, RESOURCE, WorkerActor
from deploy.ray_pools.gpus import NodeGpus
from deploy.ray_pools.ray_import import NodeAffinitySchedulingStrategy, ray

logger = logging.getLogger(__name__)
T = TypeVar("T")

NAME_TAKEN_S = 10.0
"""Maximum time for which the name of a killed actor stays taken."""
RETRY_S = 0.1
SAY_S = 10.0
"""Timeout for an actor to report its pool. A placed actor answers immediately, even while its worker starts."""
KILL_S = 3.0
"""Timeout for an actor to kill its worker's process. An actor that has no node yet does not answer."""
ANSWER_S = 30.0
"""Timeout of a simple call to Ray; after it, Ray counts as broken."""


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    address: str
    """host:port of its gRPC server."""
    pod: str
    """Kubernetes pod in which it runs; empty: none."""
    incarnation: str
    """Identity of its process; empty: its release does not report it."""


@contextlib.contextmanager
def joined(cluster: ClusterConfig, namespace: str, shows_logs: bool) -> Generator[None]:
    """Context manager: makes this process a driver in the Ray cluster. Blocks until its node is up.

    Raises:
        ConfigError: the cluster does not exist, has no node on this machine, or requires a token.
    """
    try:
        with _no_folder_for_workers():
            ray.init(
                address=cluster.ray_address,
                namespace=namespace,
                log_to_driver=shows_logs,
                logging_level=logging.ERROR,
                _node_ip_address=cluster.ray_node_ip or None,
            )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigError(
            f"cannot join the Ray cluster at {cluster.ray_address}, which must have a node on this machine: {reason}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _no_folder_for_workers() -> Generator[None]:
    """Context manager: changes to a temporary folder, which no longer exists when actors import modules.

    Actors search the driver's working folder first, so a user's `json.py` would run.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


async def nodes() -> list[NodeGpus]:
    """Return each node's resources for workers. Raises ConfigError if Ray does not answer."""
    return [node_gpus(node) for node in await _in_thread(ray.nodes) if node["Alive"]]


def node_gpus(node: Mapping[str, Any]) -> NodeGpus:
    """Return a node's resources from Ray's description."""
    resources, pool = node["Resources"], node["Labels"].get(POOL_LABEL)
    return NodeGpus(
        num_gpus=int(resources.get("GPU", 0)),
        num_workers=int(resources.get(RESOURCE, 0)),
        pool=Role(pool) if pool in set(Role) else None,
    )


async def end_all(namespace: str) -> list[str]:
    """End the actors of a cluster whose controller is gone, and return their names.

    Raises:
        ConfigError: Ray does not answer.
    """

    def end() -> list[str]:
        found = [actor["name"] for actor in ray.util.list_named_actors(True) if actor["namespace"] == namespace]
        actors = []
        for name in found:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                actors.append(ray.get_actor(name, namespace=namespace))
        # An actor of an earlier version has no `kill`.
        killed = [actor.kill.remote() for actor in actors if hasattr(actor, "kill")]
        ray.wait(killed, num_returns=len(killed), timeout=KILL_S)
        for actor in actors:
            ray.kill(actor)
        return found

    return await _in_thread(end)


class RayActors:
    """Actors by worker id.

    Args:
        host: host at which workers listen; empty: their Ray node's address.
        gpus_per_worker: amount of Ray's resource `GPU` for a worker of each pool.
        keys: keys that the workers' keys must match; None: the cluster has no secret.
    """

    def __init__(
        self, config: Config, host: str, gpus_per_worker: Mapping[Role, float], keys: KeyFile | None = None
    ) -> None:
        self._host = host
        self._configs = {pool: config.for_pool(pool).to_json() for pool in Role}
        self._gpus_per_worker = gpus_per_worker
        self._starting_per_node = config.cluster.starting_per_node
        self._keys = keys
        self._options: dict[str, Any] = {
            "lifetime": "detached",
            "num_cpus": 0,  # an actor that requests an unavailable CPU stays pending forever, without an error
            "resources": {RESOURCE: 1},
            "max_restarts": 0,  # the controller restarts workers, and so knows when they restart
        }

    def needs(self, pool: Role) -> dict[str, float]:
        """Return the free resources that a node needs for a worker of this pool."""
        gpus = {"GPU": self._gpus_per_worker[pool]} if self._gpus_per_worker[pool] else {}
        return {**self._options["resources"], **gpus}

    async def ids(self) -> list[str]:
        """Return the workers with an actor. Raises ConfigError if Ray does not answer."""
        names: list[str] = await _in_thread(ray.util.list_named_actors)
        return names

    async def pools(self, worker_ids: Collection[str]) -> dict[str, Role]:
        """Return the pools in which these workers were started, as reported by their actors.

        An actor that does not report its pool is ended: it has no node yet, and its pool is unknown.
        """
        said = await asyncio.gather(*map(self._pool, worker_ids))
        return {worker_id: pool for worker_id, pool in zip(worker_ids, said, strict=True) if pool}

    async def _pool(self, worker_id: str) -> Role | None:
        try:
            actor = await self.get(worker_id)
        except WorkerFailed:
            return None
        try:
            return Role(await asyncio.wait_for(_result(actor.pool.remote()), SAY_S))
        except (TimeoutError, WorkerFailed, AttributeError):  # AttributeError: an actor of an earlier version
            logger.warning("%s is ended: its pool is unknown", worker_id)
            await self.kill(actor)
            return None

    async def check(self) -> None:
        """Check Ray; wait for an unreachable head as long as Ray does (RAY_gcs_rpc_server_reconnect_timeout_s).

        Raises:
            ConfigError: Ray has given up, or no longer has this driver's node. A driver learns of a new Ray head only
                through its own node. Without that node it would miss every later actor event.
        """
        asked = asyncio.ensure_future(asyncio.to_thread(ray.nodes))
        if not (await asyncio.wait([asked], timeout=ANSWER_S))[0]:
            logger.warning("Ray's head has not answered for %.0f s; until it does, running workers continue", ANSWER_S)
        with _ray_answers():
            nodes = await asked
        node_id = ray.get_runtime_context().get_node_id()
        if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
            raise ConfigError("the Ray node of this process is gone")

    async def node_at(self, host: str) -> str | None:
        """Return the id of the live Ray node with this address; None: Ray has none. Raises ConfigError."""
        nodes = await _in_thread(ray.nodes)
        return next((node["NodeID"] for node in nodes if node["Alive"] and node["NodeManagerAddress"] == host), None)

    async def create(self, worker_id: str, role: Role, pool: Role, node_id: str = "") -> Any:
        """Create an actor, which runs once a node for this pool, or for all pools, has room for it.

        Args:
            node_id: Ray node whose running worker the actor adopts; empty: it starts one, on any node for the pool.

        Raises:
            ActorLost: Ray does not accept it.
        """
        others = ",".join(other for other in Role if other is not pool)
        nodes = {POOL_LABEL: f"!in({others})"}
        gpus = self._gpus_per_worker[pool]
        # Without SPREAD, Ray could place all workers on one node, and they would all end with it.
        place: dict[str, Any] = {"scheduling_strategy": "SPREAD", "label_selector": nodes}
        adopts = {"adopts": True} if node_id else {}  # an actor of an earlier version does not know the argument
        if node_id:
            place = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
        make = ray.remote(WorkerActor).options(name=worker_id, num_gpus=gpus, **place, **self._options).remote
        deadline_s = time.monotonic() + NAME_TAKEN_S
        try:
            while True:
                try:  # without a timeout: an actor created after a timeout would be unknown to the controller
                    fingerprint = self._keys.keys.fingerprint if self._keys else ""
                    arguments = (role.value, worker_id, self._host, self._configs[pool], fingerprint)
                    return await asyncio.to_thread(make, *arguments, pool=pool.value, **adopts)
                except ValueError as error:  # the previous actor is not quite gone
                    if time.monotonic() > deadline_s:
                        raise WorkerFailed(f"its name is still taken after {NAME_TAKEN_S:g} s") from error
                    await asyncio.sleep(RETRY_S)
        except (WorkerFailed, ray.exceptions.RayError) as error:
            with contextlib.suppress(WorkerFailed):  # an unknown actor has the name, and would keep it
                end = self.end_only if node_id else self.kill
                await end(await self.get(worker_id))
            raise ActorLost(f"Ray has not created the actor {worker_id}: {first_line(error)}") from error

    async def get(self, worker_id: str) -> Any:
        """Return the actor of that worker. Raises WorkerFailed if it is gone."""
        try:
            return await asyncio.to_thread(ray.get_actor, worker_id)
        except ValueError as error:
            raise WorkerFailed(f"the actor {worker_id} is gone") from error

    async def placed(self, actor: Any) -> None:
        """Wait until a node has the actor. Raises WorkerFailed if it is gone."""
        await _result(actor.__ray_ready__.remote())

    async def turn(self, actor: Any) -> None:
        """Wait until the actor's node lets its worker load the model. Raises WorkerFailed if the actor is gone."""
        with contextlib.suppress(AttributeError):  # an actor of an earlier version has no turns
            await _result(actor.turn.remote(self._starting_per_node))

    async def start(self, actor: Any) -> Started:
        """Wait until the worker is ready or adopted. May be called again. Raises the errors of `WorkerActor.start`."""
        answer = await _result(actor.start.remote())
        return Started(answer["pid"], answer["address"], answer["pod"], answer.get("incarnation", ""))

    async def ended(self, actor: Any) -> None:
        """Wait for the end of the worker's process, which raises WorkerFailed. Never returns.

        Raises:
            ActorLost: the actor is gone, for instance with its node.
        """
        while True:
            try:
                await _result(actor.ended.remote())
            except ActorLost as error:
                if not isinstance(error.__cause__, ray.exceptions.ActorUnavailableError):
                    raise
                await asyncio.sleep(RETRY_S)  # Ray does not know yet whether the actor is gone

    async def stop(self, actor: Any, timeout_s: float) -> None:
        """Let the worker leave the cluster, within at most `timeout_s`.

        Raises:
            ActorLost: the actor is gone, and has not ended the worker.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_result(actor.stop.remote()), timeout_s)

    async def kill(self, actor: Any) -> None:
        """Kill the worker, and then its actor, whose name becomes free a little later."""
        # AttributeError: an actor of an earlier version has no `kill`.
        with contextlib.suppress(BatonError, TimeoutError, AttributeError):
            await asyncio.wait_for(_result(actor.kill.remote()), KILL_S)
        await self.end_only(actor)

    async def end_only(self, actor: Any) -> None:
        """Kill the actor. On a node with a node process, a worker that it has started or adopted serves on."""
        await asyncio.to_thread(ray.kill, actor)


async def _in_thread(function: Callable[[], T]) -> T:
    with _ray_answers():
        return await asyncio.wait_for(asyncio.to_thread(function), ANSWER_S)


@contextlib.contextmanager
def _ray_answers() -> Generator[None]:
    """Context manager: raises ConfigError if Ray does not answer."""
    try:
        yield
    except (TimeoutError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(f"Ray does not answer: {first_line(error)}") from error


async def _result(reference: Awaitable[Any]) -> Any:
    """Await an actor's result; raise the worker's own typed error as itself."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise WorkerFailed(first_line(error)) from error
    except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
        raise ActorLost(first_line(error)) from error
    except ray.exceptions.RayError as error:
        raise WorkerFailed(first_line(error)) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
