"""`baton leave`: the workers of this machine leave the cluster before the machine does. A pod's preStop calls it.

It tells Ray to place nothing here any more, and asks the controller to drain them: others take their place, and what
they do goes over to those or to others. Where no controller answers, they are told to end, which drains them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Collection

import grpc
import psutil

from baton.blocks import content_id
from baton.cluster import Worker
from baton.config import Config
from baton.errors import StoreUnavailable, WorkerFailed
from baton.rpc import channel, from_rpc_error
from baton.v1 import admin_pb2, admin_pb2_grpc
from deploy.ray_node import place_nothing_on
from kvstore.index import Connection
from kvstore.leases import RedisLeases

logger = logging.getLogger(__name__)
POLL_S = 0.2
ORDER_S = 5.0
"""For the controller's answer."""


async def leave(config: Config, hosts: Collection[str], timeout_s: float) -> list[str]:
    """Returns the workers that are still here when the time is up.

    Ray is told first, or it might start here what leaves here.

    Args:
        config: with the model's revision.
        hosts: addresses of this machine.

    Raises:
        StoreUnavailable: Redis does not answer, so nobody knows who is here.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        await asyncio.to_thread(place_nothing_on, hosts, config.cluster.ray_address, timeout_s)
    except WorkerFailed as error:
        logger.warning("%s", error)
    leases = RedisLeases(
        Connection(config.index.redis_url), content_id(config.model.revision), lease_s=config.index.lease_s
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(leases.close)
        here = {(w.info.id, w.info.epoch): w for w in await leases.list_workers() if _host(w) in hosts}
        for worker in here.values():
            logger.info("%s leaves", worker.info.id)
            await _ask(leases, worker)
        while here and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(StoreUnavailable):
                left = {(w.info.id, w.info.epoch) for w in await leases.list_workers()}
                here = {key: worker for key, worker in here.items() if key in left and _lives(worker)}
    return sorted(worker_id for worker_id, _ in here)


def own_hosts() -> set[str]:
    """Addresses of this machine, and POD_IP."""
    found = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    found = {address for address in found if "." in address or ":" in address} | {socket.gethostname()}
    return {pod_ip} if (pod_ip := os.environ.get("POD_IP")) else found


async def _ask(leases: RedisLeases, worker: Worker) -> None:
    """The controller, who has another worker take its place first; or the worker itself."""
    try:
        if controller := await leases.get_controller():
            async with channel(controller.address) as link:
                request = admin_pb2.DrainWorkerRequest(worker_id=worker.info.id)
                await admin_pb2_grpc.AdminStub(link).DrainWorker(request, timeout=ORDER_S)
                return
        reason = "no controller is known"
    except grpc.aio.AioRpcError as error:
        reason = str(from_rpc_error(error, "the controller"))
    logger.warning("%s; %s is told itself", reason, worker.info.id)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(worker.info.pid, signal.SIGTERM)


def _lives(worker: Worker) -> bool:
    return psutil.pid_exists(worker.info.pid)


def _host(worker: Worker) -> str:
    return worker.info.address.rpartition(":")[0]
