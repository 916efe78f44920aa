"""The controller's part of `baton.v1.Admin`: commands. Routers serve the status."""

from __future__ import annotations

from typing import Any

import grpc

from baton import wire
from baton.rpc.errors import CallContext
from baton.v1 import admin_pb2
from deploy.controller.orders import Orders


def add_orders(server: grpc.aio.Server, orders: Orders) -> None:
    """Add the commands to a gRPC server. The other methods of the service stay unimplemented.

    Routers choose the controller of a request's model, so the model's name in the requests is not read.
    """

    async def scale(request: admin_pb2.ScalePoolRequest, context: CallContext) -> admin_pb2.ScalePoolResponse:
        return wire.scale_response(await orders.scale(request.pool, request.desired, request.force))

    async def drain(request: admin_pb2.DrainWorkerRequest, context: CallContext) -> admin_pb2.DrainWorkerResponse:
        return wire.drain_response(await orders.drain(request.worker_id))

    async def set_role(
        request: admin_pb2.SetWorkerRoleRequest, context: CallContext
    ) -> admin_pb2.SetWorkerRoleResponse:
        return wire.role_response(await orders.set_role(request.worker_id, request.role))

    async def wake(request: admin_pb2.WakeModelRequest, context: CallContext) -> admin_pb2.WakeModelResponse:
        await orders.wake()
        return admin_pb2.WakeModelResponse()

    handlers = {
        "ScalePool": _handler(scale, admin_pb2.ScalePoolRequest, admin_pb2.ScalePoolResponse),
        "DrainWorker": _handler(drain, admin_pb2.DrainWorkerRequest, admin_pb2.DrainWorkerResponse),
        "SetWorkerRole": _handler(set_role, admin_pb2.SetWorkerRoleRequest, admin_pb2.SetWorkerRoleResponse),
        "WakeModel": _handler(wake, admin_pb2.WakeModelRequest, admin_pb2.WakeModelResponse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Admin", handlers),))


def _handler(method: Any, request: Any, response: Any) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )
