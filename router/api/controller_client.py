"""Forwards operators' orders to the controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from baton.cluster import ControllerInfo
from baton.errors import BatonError, NoController, NotAMember
from baton.rpc import channel, from_rpc_error
from baton.rpc.errors import is_lost
from baton.rpc.member_auth import member_metadata
from baton.tls import Tls
from baton.trust import KeyFile
from baton.v1 import admin_pb2, admin_pb2_grpc


class ControllerClient:
    """Client of the current controller. Every method raises the controller's own typed errors.

    Args:
        known: returns the controller that is known now, if any.
        keys: authenticates the router to the controller; None: the cluster has no secret.

    Raises:
        NoController: no controller is known, or it does not answer, or it refuses this router.
    """

    def __init__(
        self, known: Callable[[], ControllerInfo | None], keys: KeyFile | None = None, tls: Tls | None = None
    ) -> None:
        self._known = known
        self._keys = keys
        self._tls = tls

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        answer: admin_pb2.ScalePoolResponse = await self._order("ScalePool", request)
        return answer

    async def drain(self, request: admin_pb2.DrainWorkerRequest) -> admin_pb2.DrainWorkerResponse:
        answer: admin_pb2.DrainWorkerResponse = await self._order("DrainWorker", request)
        return answer

    async def set_role(self, request: admin_pb2.SetWorkerRoleRequest) -> admin_pb2.SetWorkerRoleResponse:
        answer: admin_pb2.SetWorkerRoleResponse = await self._order("SetWorkerRole", request)
        return answer

    async def _order(self, method: str, request: Any) -> Any:
        """Send one order over a new channel: orders are rare, and a controller may restart at another address."""
        if (controller := self._known()) is None:
            raise NoController(
                "no controller is known, so the pools cannot be changed now; `baton up` or Kubernetes starts it again, "
                "which takes up to a minute if Ray has failed: try again then"
            )
        try:
            async with channel(controller.address, self._tls) as opened:
                proof = member_metadata(self._keys, f"/baton.v1.Admin/{method}", controller.incarnation)
                return await getattr(admin_pb2_grpc.AdminStub(opened), method)(request, metadata=proof)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, controller) from error


def _typed(error: grpc.aio.AioRpcError, controller: ControllerInfo) -> BatonError:
    if is_lost(error):
        return NoController(
            f"the controller at {controller.address} does not answer; `baton up` or Kubernetes starts it again, "
            "which takes up to a minute if Ray has failed: try again then"
        )
    typed = from_rpc_error(error, f"the controller at {controller.address}")
    if isinstance(typed, NotAMember):
        return NoController(f"the controller at {controller.address} does not take orders of this router: {typed}")
    return typed
