"""The controller's process: `python -m deploy.controller`.

It is a child of `baton up` or `baton run controller` itself, configured by BATON_CONFIG_JSON.

SIGINT     ends all workers, then itself
SIGTERM    ends only itself; the next controller takes over the workers as they are
--end      finds the workers, ends them, and does nothing else
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from baton.addresses import address_of
from baton.blocks import content_id
from baton.cluster import VERSION, ControllerInfo, Role
from baton.config import Config, IndexConfig, process_config
from baton.errors import BatonError, ConfigError, first_of
from baton.rpc import RpcServer, members_only
from baton.rpc.errors import to_failed
from baton.rpc.member_auth import CONTROLLERS_RULES, member_auth, require_keys
from baton.rpc.model_files import ModelFilesServicer
from baton.telemetry import logs
from baton.tls import Tls, member_tls
from baton.trust import KeyFile, Principal, open_keys
from baton.v1 import worker_pb2_grpc
from deploy.controller.controller import Controller
from deploy.controller.kubernetes_side import Kubernetes, connected
from deploy.controller.orders import AskForRoom, Orders
from deploy.controller.room import bytes_per_worker, gpu_problem, memory_problem
from deploy.controller.service import add_orders
from deploy.controller.state import ControllerState, Sleep, load, locked, sizes_problem
from deploy.processes import UNJOINED, tell_parent
from deploy.ray_pools import actors as ray_actors
from deploy.ray_pools.actor import RESOURCE
from deploy.ray_pools.actors import RayActors
from deploy.ray_pools.gpus import gpus_per_worker, kept_gpus
from deploy.scaling.autoscaler import Autoscaler
from kvstore.index import CountingMirror, Mirror, MirrorFollower, RedisConnection, RedisIndex
from kvstore.leases import RedisEndpoint, RedisLeases, ReportedLoads

logger = logging.getLogger(__name__)
SERVICE_NAMES = ("baton.v1.Admin", "baton.v1.ModelFiles")
STOP_GRACE_S = 1.0
NODES_POLL_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    cluster: str
    state_file: Path
    worker_host: str
    worker_keys: str
    ready_fd: int | None
    shows_logs: bool
    end: bool
    awaits_address: bool


class Stop:
    """Request to stop, from a signal."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.ends_workers = False

    def ask(self, ends_workers: bool) -> None:
        self.ends_workers |= ends_workers
        self.asked.set()


class Ready:
    """Reporter of the outcome of the first start to `baton up`. Without a descriptor this is not the first start."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self.is_awaited = fd is not None

    def tell(self, **values: object) -> None:
        if self._fd is not None:
            tell_parent(self._fd, **values)
            self._fd = None

    def fail(self, error: BatonError) -> None:
        self.tell(**dataclasses.asdict(to_failed(error)))


async def run(config: Config, arguments: Arguments, stop: Stop, ready: Ready) -> None:
    """Run the controller until a signal.

    Raises:
        ConfigError: Ray does not answer, its nodes have no room for the workers, the keys are invalid, or missing
            although other machines could reach the controller, or another cluster serves this model in the same Redis.
        BatonError: during the first start, a worker cannot start as configured.
    """
    host = config.cluster.controller_host
    keys = open_keys(config.cluster.secret, Principal.CONTROLLER)
    require_keys(keys, host, "cluster.controller_host")
    async with contextlib.AsyncExitStack() as stack:
        kubernetes = (
            await stack.enter_async_context(connected(config.kubernetes)) if config.kubernetes.namespace else None
        )
        state = await _state(config, arguments, kubernetes, 0.0 if ready.is_awaited else config.cluster.start_timeout_s)
        if ready.is_awaited and state.sleep:  # an operator waits for the workers
            state = dataclasses.replace(state, desired=state.sleep.before, sleep=None)
        actors = RayActors(_workers_config(config, arguments), arguments.worker_host, state.gpus_per_worker, keys)
        incarnation = os.urandom(8).hex()
        tls = member_tls(config.cluster)
        interceptors = (*member_auth(keys, incarnation, CONTROLLERS_RULES), *members_only(tls))
        rpc = RpcServer(SERVICE_NAMES, interceptors, describes_itself=False)
        port = rpc.bind(host, config.cluster.controller_port, tls)
        me = ControllerInfo(
            pid=os.getpid(),
            address=address_of(config.cluster.advertise_host or host, port),
            cluster=arguments.cluster,
            version=VERSION,
            incarnation=incarnation,
        )
        stores = await stack.enter_async_context(_stores(config, keys, tls))
        mirror = CountingMirror()
        follower = _follower(stores.index, mirror, config.index, stores.loads)
        controller = Controller(
            config,
            me=me,
            malformed=rpc.malformed,
            actors=actors,
            leases=stores.leases,
            endpoint=stores.endpoint,
            mirror=mirror,
            path=arguments.state_file,
            state=state,
            is_first=ready.is_awaited,
            tls=tls,
            keys=keys,
        )
        if not arguments.end:
            await controller.claim()
        await controller.adopt()
        if not arguments.end:
            orders = Orders(controller, kubernetes, _room(controller) if arguments.worker_host else None)
            await _serve(controller, orders, kubernetes, follower=follower, rpc=rpc, stop=stop, ready=ready)
        if arguments.end or stop.ends_workers:
            await controller.end_workers()
        else:
            await controller.let_go()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """The controller's connections to Redis."""

    leases: RedisLeases
    endpoint: RedisEndpoint
    index: RedisIndex
    loads: ReportedLoads


@contextlib.asynccontextmanager
async def _stores(config: Config, keys: KeyFile | None, tls: Tls | None) -> AsyncGenerator[_Stores]:
    def connection() -> RedisConnection:
        return RedisConnection(config.index.url, tls=tls)

    content, lease_s = content_id(config.kv_identity), config.index.lease_s
    redis = connection()
    loads = ReportedLoads(redis)
    stores = _Stores(
        leases=RedisLeases(redis, content, lease_s=lease_s, keys=keys, loads=loads),
        endpoint=RedisEndpoint(connection(), config.cluster.endpoint, lease_s=lease_s, keys=keys),
        index=RedisIndex(connection(), content, keys=keys),
        loads=loads,
    )
    try:
        yield stores
    finally:
        await stores.index.close()
        await stores.endpoint.close()
        await stores.leases.close()


def _follower(index: RedisIndex, mirror: Mirror, config: IndexConfig, loads: ReportedLoads) -> MirrorFollower:
    return MirrorFollower(
        index,
        mirror,
        poll_s=config.poll_s,
        lease_s=config.lease_s,
        blocks_ttl_s=config.blocks_ttl_s,
        on_load=loads.report,
    )


def _workers_config(config: Config, arguments: Arguments) -> Config:
    """Return the workers' configuration, with the absolute path of their key file.

    Workers run in other folders than this process.
    """
    if not (path := arguments.worker_keys or config.cluster.secret):
        return config
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, secret=str(Path(path).absolute())))


def _room(controller: Controller) -> AskForRoom:
    """Return a function that checks whether more workers fit. All workers of the cluster run on this machine."""
    per_worker = {pool: bytes_per_worker(controller.config, pool) for pool in Role}

    async def problem(before: Mapping[Role, int], after: Mapping[Role, int]) -> str:
        num_more = {pool: after[pool] - before[pool] for pool in Role}
        if max(num_more.values()) <= 0:
            return ""
        nodes = await ray_actors.nodes()
        return gpu_problem(nodes, after, controller.state.gpus_per_worker) or memory_problem(per_worker, num_more)

    return problem


async def _serve(
    controller: Controller,
    orders: Orders,
    kubernetes: Kubernetes | None,
    *,
    follower: MirrorFollower,
    rpc: RpcServer,
    stop: Stop,
    ready: Ready,
) -> None:
    add_orders(rpc.server, orders)
    worker_pb2_grpc.add_ModelFilesServicer_to_server(ModelFilesServicer(controller.read_files), rpc.server)
    orders.resume()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(orders.close)
        await rpc.start()
        stack.push_async_callback(rpc.stop, STOP_GRACE_S)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(controller.run(), name="controller"),
                tasks.create_task(follower.run(), name="mirror"),
                tasks.create_task(_tell_when_whole(controller, ready), name="whole"),
            ]
            if kubernetes:
                background.append(tasks.create_task(kubernetes.run(controller), name="kubernetes"))
            if controller.config.autoscale.enabled:
                autoscaler = Autoscaler(
                    controller.config, controller.observe, orders, on_decided=controller.announce_scaling
                )
                background.append(tasks.create_task(autoscaler.run(), name="autoscaler"))
            await rpc.set_serving(True)
            await stop.asked.wait()
            for task in background:
                task.cancel()


async def _tell_when_whole(controller: Controller, ready: Ready) -> None:
    await controller.whole()
    ready.tell(pid=os.getpid())


async def _state(config: Config, arguments: Arguments, kubernetes: Kubernetes | None, wait_s: float) -> ControllerState:
    """Return the previous controller's state, or that of a new cluster.

    Workers of an earlier cluster may still run in a joined Ray cluster; they are ended first.

    Args:
        wait_s: timeout for nodes with room for the workers to join Ray.
    """
    found = load(arguments.state_file)
    if found is not None and found.cluster == arguments.cluster:
        return dataclasses.replace(found, gpus_per_worker=kept_gpus(config, found.gpus_per_worker))
    if found is not None and found.cluster and (ended := await ray_actors.end_all(found.cluster)):
        logger.warning("ended %s, left in Ray by a previous cluster", ", ".join(ended))
    if kubernetes:  # its nodes may still join
        sizes = await kubernetes.sizes()
        if reason := sizes_problem(sizes, config):
            raise ConfigError(f"the sizes of the ServingPools are not possible: {reason}")
        shares = {pool: config.gpus_per_worker(pool) for pool in Role}
        # With the state file, the knowledge is lost whether an operator has emptied the pools.
        configured = {Role.PREFILL: config.cluster.prefill, Role.DECODE: config.cluster.decode}
        sleep = None if sizes[Role.DECODE] else Sleep(before=configured)
        return ControllerState(desired=sizes, cluster=arguments.cluster, gpus_per_worker=shares, sleep=sleep)
    desired = {Role.PREFILL: config.cluster.prefill, Role.DECODE: config.cluster.decode}  # as `up` found them
    shares = await _gpus_per_worker(config, desired, wait_s)
    return ControllerState(desired=desired, cluster=arguments.cluster, gpus_per_worker=shares)


async def _gpus_per_worker(config: Config, desired: Mapping[Role, int], wait_s: float) -> dict[Role, float]:
    """Return the GPUs per worker of each pool, once the nodes in Ray have room for all desired workers."""
    deadline_s = time.monotonic() + wait_s
    while True:
        nodes = await ray_actors.nodes()
        try:
            if any(node.num_workers for node in nodes):
                is_on_cpu = config.model.device == "cpu"
                return dict.fromkeys(Role, 0.0) if is_on_cpu else gpus_per_worker(config, nodes, desired)
            raise ConfigError(
                f"the Ray cluster has no resource {RESOURCE!r}; start its nodes with `ray start --resources "
                f"'{{\"{RESOURCE}\": N}}'` for N workers each"
            )
        except ConfigError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(NODES_POLL_S)


async def _until_stopped(config: Config, arguments: Arguments, ready: Ready) -> None:
    """Run, and exit immediately on failure, because threads may wait for a Ray that no longer answers."""
    stop = Stop()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.ask, True)
    loop.add_signal_handler(signal.SIGTERM, stop.ask, False)
    try:
        await run(config, arguments, stop, ready)
    except* BatonError as errors:
        error = first_of(errors)
        ready.fail(error)
        logger.error("the controller ends: %s", error)
        os._exit(1)
    except* Exception:
        logger.exception("the controller ends")
        os._exit(1)


def _with_address(config: Config) -> Config:
    """Return the configuration with the address of Ray, which was still starting when this process started."""
    if not (address := sys.stdin.readline().strip()):
        sys.exit(UNJOINED)  # there is no Ray, and `baton up` ends
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, ray_address=address))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.controller", description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", required=True, help="Ray namespace of this cluster's workers")
    parser.add_argument("--state-file", type=Path, required=True)
    parser.add_argument("--worker-host", default="", help="host at which workers listen; empty: their node's address")
    parser.add_argument("--worker-keys", default="", help="file of the workers' keys; empty: cluster.secret names it")
    parser.add_argument(
        "--ready-fd", type=int, help="inherited descriptor to which the controller writes when the pools are complete"
    )
    parser.add_argument("--shows-logs", action="store_true", help="print what workers print")
    parser.add_argument(
        "--awaits-address", action="store_true", help="read Ray's host:port, one line, from the standard input"
    )
    parser.add_argument("--end", action="store_true", help="end the workers of a controller that is gone")
    arguments = Arguments(**vars(parser.parse_args()))
    config = process_config()
    logs.configure(config.telemetry.log_level, config.telemetry.log_format, "baton-controller")
    ready = Ready(arguments.ready_fd)
    try:
        if arguments.awaits_address:
            config = _with_address(config)
        with (
            locked(arguments.state_file),
            ray_actors.joined(config.cluster, arguments.cluster, arguments.shows_logs),
        ):
            asyncio.run(_until_stopped(config, arguments, ready))
    except ConfigError as error:
        ready.fail(error)
        logger.error("%s", error)
        sys.exit(UNJOINED)
    except KeyboardInterrupt:  # before the event loop, which would end the workers, has started
        sys.exit(1)
