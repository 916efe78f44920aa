"""Orders reach the controller from routers and operators alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import ControllerInfo
from baton.errors import Conflict, NoController
from baton.rpc import RpcServer
from baton.rpc.member_auth import CONTROLLERS_RULES, member_auth
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import admin_pb2
from deploy.controller.service import add_orders
from deploy.local import leave
from router.cluster.orders import ControllerClient


class Orders:
    """It refuses each order once it has read it."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    async def scale(self, pool: str, desired: int, is_forced: bool) -> None:
        self.heard.append((pool, desired, is_forced))
        raise Conflict("heard")

    async def drain(self, worker_id: str) -> None:
        self.heard.append((worker_id,))
        raise Conflict("heard")

    async def set_role(self, worker_id: str, role: str) -> None:
        self.heard.append((worker_id, role))
        raise Conflict("heard")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    write_private(tmp_path / "secret", draw_secret())
    return tmp_path / "secret"


@contextlib.asynccontextmanager
async def controlling(secret: Path, orders: Any) -> AsyncIterator[ControllerInfo]:
    endpoints = member_auth(KeyFile(secret, Principal.CONTROLLER), "c1", CONTROLLERS_RULES)
    rpc = RpcServer(("baton.v1.Admin",), endpoints, describes_itself=False)
    add_orders(rpc.server, orders)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    yield ControllerInfo(pid=1, address=f"127.0.0.1:{port}", incarnation="c1")
    await rpc.stop(0)


async def order_all(client: ControllerClient, error: type[Exception], said: str) -> None:
    for order in (
        client.scale(admin_pb2.ScalePoolRequest(pool="decode", desired=2, force=True)),
        client.drain(admin_pb2.DrainWorkerRequest(worker_id="decode-0")),
        client.set_role(admin_pb2.SetWorkerRoleRequest(worker_id="decode-0", role="prefill")),
    ):
        with pytest.raises(error, match=said):
            await order


async def test_a_routers_orders_are_heard(secret: Path) -> None:
    orders = Orders()
    async with controlling(secret, orders) as controller:
        await order_all(ControllerClient(lambda: controller, KeyFile(secret, Principal.ROUTER)), Conflict, "heard")
    assert orders.heard == [("decode", 2, True), ("decode-0",), ("decode-0", "prefill")]


async def test_nobody_elses_are_and_the_client_is_not_to_blame(secret: Path) -> None:
    orders = Orders()
    async with controlling(secret, orders) as controller:
        for member in (Principal.WORKER, Principal.CONTROLLER):
            client = ControllerClient(lambda: controller, KeyFile(secret, member))
            await order_all(
                client,
                NoController,
                "does not take orders of this router: .* accepts calls only from (operator, )?router",
            )
        await order_all(ControllerClient(lambda: controller), NoController, "has no proof")
        past = ControllerInfo(pid=1, address=controller.address, incarnation="c0")
        client = ControllerClient(lambda: past, KeyFile(secret, Principal.ROUTER))
        await order_all(client, NoController, "was made for another process")
    assert not orders.heard


async def test_a_machine_leaves_by_an_operators_keys(secret: Path) -> None:
    """A worker's would let whoever has taken one over end all others."""
    heard = []

    class Taking(Orders):
        async def drain(self, worker_id: str) -> Any:
            heard.append(worker_id)
            raise Conflict("it is heard, and that is enough")

    async with controlling(secret, Taking()) as controller:
        for member, is_heard in ((Principal.WORKER, False), (None, False), (Principal.OPERATOR, True)):
            keys = KeyFile(secret, member) if member else None
            assert not await leave._drain(["decode-0"], controller, keys)
            assert heard == ["decode-0"] * is_heard
