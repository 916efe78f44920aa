"""Passes operators' orders on to the controller."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc

from baton.cluster import ControllerInfo
from baton.errors import BatonError, NoController
from baton.rpc import channel, from_rpc_error
from baton.rpc.errors import is_lost
from baton.v1 import admin_pb2, admin_pb2_grpc


class ControllerClient:
    """Orders to the controller that is known at the moment. Every method raises the controller's own typed errors.

    Raises:
        NoController: none is known, or the one that is does not answer.
    """

    def __init__(self, known: Callable[[], ControllerInfo | None]) -> None:
        self._known = known

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        async with self._stub() as stub:
            return await stub.ScalePool(request)

    async def drain(self, request: admin_pb2.DrainWorkerRequest) -> admin_pb2.DrainWorkerResponse:
        async with self._stub() as stub:
            return await stub.DrainWorker(request)

    async def set_role(self, request: admin_pb2.SetWorkerRoleRequest) -> admin_pb2.SetWorkerRoleResponse:
        async with self._stub() as stub:
            return await stub.SetWorkerRole(request)

    @contextlib.asynccontextmanager
    async def _stub(self) -> AsyncGenerator[admin_pb2_grpc.AdminAsyncStub]:
        """A stub on a channel of its own: orders are rare, and the controller comes back at another address."""
        if (controller := self._known()) is None:
            raise NoController(
                "no controller is known, so the pools cannot be changed; it runs as a part of `baton up`"
            )
        try:
            async with channel(controller.address) as link:
                yield admin_pb2_grpc.AdminStub(link)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, controller) from error


def _typed(error: grpc.aio.AioRpcError, controller: ControllerInfo) -> BatonError:
    if is_lost(error):
        return NoController(
            f"the controller at {controller.address} does not answer; `baton up` starts it again within seconds: "
            "look at `baton status`, then try again"
        )
    return from_rpc_error(error, f"the controller at {controller.address}")
