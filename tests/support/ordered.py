"""A controller for fleets of tests, which have none: it announces itself, and passes orders on to the workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from baton.cluster import ControllerInfo, PoolStatus, Role, Worker
from baton.rpc import RpcServer, channel
from baton.rpc.member_auth import CONTROLLERS_RULES, member_auth, member_metadata
from baton.trust import Principal
from baton.v1 import worker_pb2, worker_pb2_grpc
from deploy.controller.service import add_orders
from kvstore.index import RedisConnection
from kvstore.leases import RedisLeases
from tests.support.members import keys_of

INCARNATION = "controller-of-a-test"
TIMEOUT_S = 30.0
CONTROL = "/baton.v1.WorkerControl"


class _Orders:
    """What `deploy.controller.service` takes for a controller's orders."""

    def __init__(self, leases: RedisLeases) -> None:
        self._leases = leases

    async def scale(self, pool: str, num_workers: int, is_forced: bool = False) -> PoolStatus:
        await self._leases.set_desired({pool: num_workers})
        return PoolStatus(desired=num_workers, ready=0)

    async def drain(self, worker_id: str) -> Worker:
        return await self._pass_on(worker_id, "Drain", worker_pb2.DrainRequest(timeout_s=TIMEOUT_S))

    async def set_role(self, worker_id: str, role: str) -> Worker:
        return await self._pass_on(worker_id, "SetRole", worker_pb2.SetRoleRequest(role=role, timeout_s=TIMEOUT_S))

    async def _pass_on(self, worker_id: str, method: str, order: Any) -> Worker:
        found = next(each for each in await self._leases.list_workers() if each.info.id == worker_id)
        proof = member_metadata(keys_of(Principal.CONTROLLER), f"{CONTROL}/{method}", found.info.incarnation)
        async with channel(found.info.address, None) as link:
            await getattr(worker_pb2_grpc.WorkerControlStub(link), method)(order, metadata=proof, timeout=TIMEOUT_S)
        return found


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
            member_auth(keys_of(Principal.CONTROLLER), INCARNATION, CONTROLLERS_RULES),
            describes_itself=False,
        )
        orders: Any = _Orders(leases)
        add_orders(rpc.server, orders)
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
