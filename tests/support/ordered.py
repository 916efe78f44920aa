"""A controller for fleets of tests, which have none: it announces itself, and passes orders on to the workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from baton import wire
from baton.cluster import ControllerInfo, PoolStatus, Role
from baton.rpc import RpcServer, channel
from baton.rpc.doors import CONTROLLERS_RULES, member_doors, member_metadata
from baton.trust import Principal
from baton.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvstore.index import RedisConnection
from kvstore.leases import RedisLeases
from tests.support.members import keys_of

INCARNATION = "controller-of-a-test"
TIMEOUT_S = 30.0
CONTROL = "/baton.v1.WorkerControl"


class _Orders(admin_pb2_grpc.AdminServicer):
    def __init__(self, leases: RedisLeases) -> None:
        self._leases = leases

    async def DrainWorker(self, request: admin_pb2.DrainWorkerRequest, context: Any) -> admin_pb2.DrainWorkerResponse:  # noqa: N802
        await self._tell(request.worker_id, "Drain", worker_pb2.DrainRequest(timeout_s=TIMEOUT_S))
        return admin_pb2.DrainWorkerResponse()

    async def SetWorkerRole(  # noqa: N802
        self, request: admin_pb2.SetWorkerRoleRequest, context: Any
    ) -> admin_pb2.SetWorkerRoleResponse:
        order = worker_pb2.SetRoleRequest(role=request.role, timeout_s=TIMEOUT_S)
        await self._tell(request.worker_id, "SetRole", order)
        return admin_pb2.SetWorkerRoleResponse()

    async def ScalePool(self, request: admin_pb2.ScalePoolRequest, context: Any) -> admin_pb2.ScalePoolResponse:  # noqa: N802
        await self._leases.set_desired({request.pool: request.desired})
        return wire.scale_response(PoolStatus(desired=request.desired, ready=0))

    async def _tell(self, worker_id: str, method: str, order: Any) -> None:
        found = next(each for each in await self._leases.list_workers() if each.info.id == worker_id)
        proof = member_metadata(keys_of(Principal.CONTROLLER), f"{CONTROL}/{method}", found.info.incarnation)
        async with channel(found.info.address, None) as link:
            await getattr(worker_pb2_grpc.WorkerControlStub(link), method)(order, metadata=proof, timeout=TIMEOUT_S)


@contextlib.contextmanager
def ordered(redis_url: str, content_id: str, **sizes: int) -> Iterator[None]:
    """A controller while the block is entered, in a thread of its own.

    Args:
        sizes: the desired size of each pool.
    """
    ended, announced = threading.Event(), threading.Event()

    async def serve() -> None:
        leases = RedisLeases(RedisConnection(redis_url), content_id, keys=keys_of(Principal.CONTROLLER))
        rpc = RpcServer(
            ("baton.v1.Admin",),
            member_doors(keys_of(Principal.CONTROLLER), INCARNATION, CONTROLLERS_RULES),
            describes_itself=False,
        )
        admin_pb2_grpc.add_AdminServicer_to_server(_Orders(leases), rpc.server)
        me = ControllerInfo(pid=1, address=f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}", incarnation=INCARNATION)
        await rpc.start()
        try:
            await leases.set_desired({role.value: sizes.get(role.value, 1) for role in Role})
            while not ended.is_set():
                await leases.announce_controller(me)
                announced.set()
                await asyncio.sleep(0.2)
        finally:
            await rpc.stop(0)
            await leases.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert announced.wait(TIMEOUT_S), "the controller does not start"
        yield
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
