"""`baton leave`: drains the workers of this machine before it leaves the cluster. A pod's preStop hook runs it.

It asks Ray to place nothing on this node any more, and the controller to drain the workers. Replacements then start
elsewhere first, and take over the requests. If the controller restarts, `leave` waits for it until the workers need the
remaining time to drain without it. Then it sends them SIGTERM: they drain as well, but without replacements. It does so
earlier if the whole cluster is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Collection

import grpc
import psutil

from baton.blocks import content_id
from baton.cluster import ControllerInfo
from baton.config import Config
from baton.errors import StoreUnavailable, WorkerFailed
from baton.rpc import channel, from_rpc_error
from baton.rpc.member_auth import member_metadata
from baton.tasks import cancel_and_wait
from baton.tls import Tls, member_tls
from baton.trust import KeyFile, Principal, open_keys
from baton.v1 import admin_pb2, admin_pb2_grpc
from deploy.ray_pools.drain_node import place_nothing_on
from kvstore.index import RedisConnection
from kvstore.leases import LeaseStore, RedisLeases

logger = logging.getLogger(__name__)
POLL_S = 0.5
ORDER_S = 5.0
"""Timeout for a call of the controller."""
RAY_S = 5.0
"""Timeout for Ray's reply. Without a head, Ray cannot place anything; a new head is asked as soon as it listens."""
GONE_S = 30.0
"""Time after which a cluster counts as gone if none of its parts can be found."""


async def leave(config: Config, hosts: Collection[str], timeout_s: float) -> list[str]:
    """Drain the workers of this machine, and return the ids of those that are still running after the timeout.

    Ray is asked first, because it might otherwise start new workers here.

    Args:
        config: configuration with the model's revision and the address of Ray's head (`cluster.ray_address`).
        hosts: addresses of this machine.
        timeout_s: maximum wait.

    Raises:
        ConfigError: the file of `cluster.secret` has no operator keys.
    """
    keys = open_keys(config.cluster.secret, Principal.OPERATOR)
    deadline_s = time.monotonic() + timeout_s
    told_ray = asyncio.create_task(_tell_ray(hosts, config.cluster.ray_address, deadline_s))
    if not (await asyncio.wait([told_ray], timeout=RAY_S))[0]:
        logger.warning(
            "Ray's head at %s has not answered within %g s; continuing without it", config.cluster.ray_address, RAY_S
        )
    here = workers_on(hosts, config.cluster.name)
    tls = member_tls(config.cluster)
    redis = RedisConnection(config.index.url, tls=tls)
    leases = RedisLeases(redis, content_id(config.kv_identity), lease_s=config.index.lease_s, keys=keys)
    try:
        drained_by: ControllerInfo | None = None
        there_s = time.monotonic()
        patient_until_s = max(deadline_s - config.cluster.drain_timeout_s, there_s + GONE_S)
        ordered: set[str] = set()
        """Workers that got SIGTERM: a second one would stop them before they have drained."""
        while here and time.monotonic() < deadline_s:
            controller, answers = await _controller(leases)
            if controller is not None or await _is_there(config.cluster.ray_address, answers):
                there_s = time.monotonic()
            if time.monotonic() > (patient_until_s if controller else min(there_s + GONE_S, patient_until_s)):
                ordered |= _end({worker_id: here[worker_id] for worker_id in here.keys() - ordered})
            if controller is not None and (drained_by is None or not _is_same(controller, drained_by)):
                drained_by = controller if await _drain(here, controller, keys, tls) else None
            await asyncio.sleep(POLL_S)
            here = {worker_id: process for worker_id, process in here.items() if _runs(process)}
    finally:
        await cancel_and_wait([told_ray])
        await leases.close()
    return sorted(here)


def workers_on(hosts: Collection[str], cluster: str = "") -> dict[str, psutil.Process]:
    """Return the worker processes that listen on one of the addresses, by worker id. Command lines identify them.

    Args:
        cluster: Ray namespace of the cluster, because workers of other models may run here; empty: any cluster.
    """
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            match process.cmdline():
                case [_, "-P", "-m", "worker", _, worker_id, host, *rest] if host in hosts:
                    if not cluster or "--cluster" not in rest or cluster in rest:
                        found[worker_id] = process
    return found


def own_hosts() -> set[str]:
    """Return the addresses of this machine; in a pod, POD_IP only."""
    if pod_ip := os.environ.get("POD_IP"):
        return {pod_ip}
    found = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return found | {socket.gethostname()}


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def _tell_ray(hosts: Collection[str], address: str, deadline_s: float) -> None:
    """Ask Ray to place nothing here, once its head listens: Ray's own client needs 40 s to detect that it does not."""
    while True:
        if await _listens(address):
            break
        await asyncio.sleep(POLL_S)
    try:
        await asyncio.to_thread(place_nothing_on, hosts, address, deadline_s - time.monotonic())
    except WorkerFailed as error:
        logger.warning("%s", error)


async def _controller(leases: LeaseStore) -> tuple[ControllerInfo | None, bool]:
    """Return the controller, if one is known, and whether Redis answers."""
    try:
        return await leases.get_controller(), True
    except StoreUnavailable as error:
        logger.warning("%s", error)
        return None, False


async def _is_there(ray_address: str, redis_answers: bool) -> bool:
    """Return True if the cluster still exists, although no controller is known.

    Redis alone does not prove it, because an external Redis outlives the cluster. In Kubernetes, DNS knows the Service
    of a restarting head until the release is uninstalled.
    """
    return await _listens(ray_address) or (redis_answers and await _has_name(ray_address))


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(RAY_S):
            _, connection = await asyncio.open_connection(host, port)
        connection.close()
        return True
    return False


async def _has_name(address: str) -> bool:
    """Return True unless DNS reports that the host of the address does not exist."""
    try:
        await asyncio.get_running_loop().getaddrinfo(address.rpartition(":")[0], None)
    except socket.gaierror as error:
        return error.errno != socket.EAI_NONAME
    return True


def _is_same(one: ControllerInfo, other: ControllerInfo) -> bool:
    return (one.address, one.incarnation) == (other.address, other.incarnation)


async def _drain(
    here: Collection[str], controller: ControllerInfo, keys: KeyFile | None, tls: Tls | None = None
) -> bool:
    """Ask the controller to drain each worker, and return True if it has accepted all of them."""
    try:
        async with channel(controller.address, tls) as link:
            for worker_id in here:
                request = admin_pb2.DrainWorkerRequest(worker_id=worker_id)
                proof = member_metadata(keys, "/baton.v1.Admin/DrainWorker", controller.incarnation)
                await admin_pb2_grpc.AdminStub(link).DrainWorker(request, timeout=ORDER_S, metadata=proof)
                logger.info("draining %s", worker_id)
    except grpc.aio.AioRpcError as error:
        logger.warning("%s; asking again", from_rpc_error(error, f"the controller at {controller.address}"))
        return False
    return True


def _end(here: dict[str, psutil.Process]) -> set[str]:
    for worker_id, process in here.items():
        logger.warning("no controller is known; terminating %s", worker_id)
        with contextlib.suppress(psutil.Error):
            process.terminate()
    return set(here)
