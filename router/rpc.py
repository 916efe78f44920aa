"""The gRPC door: `baton.v1.Inference` and `baton.v1.Admin` over the router's service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from baton import wire
from baton.cluster import ClusterStatus
from baton.errors import Unsupported
from baton.telemetry import tracing
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.admission import check_model
from router.service import RouterService

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAMES = ("baton.v1.Inference", "baton.v1.Admin")


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def Generate(  # noqa: N802 - the generated name
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        trace = tracing.from_metadata(context.invocation_metadata())
        chunks = self._service.generate(wire.generate_request_from_pb(request), trace)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield wire.generate_response(chunk)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        model, prompt = wire.tokenize_request_from_pb(request)
        check_model(model, self._service.facts)
        return wire.tokenize_response(await self._service.tokenize(prompt), self._service.facts.max_model_len)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return wire.list_models_response([self._service.card])


class AdminServicer(admin_pb2_grpc.AdminServicer):
    def __init__(self, status: Callable[[], ClusterStatus]) -> None:
        self._status = status

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        return wire.status_response(self._status())

    async def ListPools(  # noqa: N802
        self, request: admin_pb2.ListPoolsRequest, context: Context
    ) -> admin_pb2.ListPoolsResponse:
        return wire.pools_response(self._status())

    async def ListWorkers(  # noqa: N802
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        return wire.workers_response(self._status())

    async def ScalePool(self, request: admin_pb2.ScalePoolRequest, context: Context) -> NoReturn:  # noqa: N802
        raise Unsupported("ScalePool is not supported yet; start the cluster with `baton up --prefill N --decode N`")

    async def DrainWorker(self, request: admin_pb2.DrainWorkerRequest, context: Context) -> NoReturn:  # noqa: N802
        raise Unsupported("DrainWorker is not supported yet")

    async def SetWorkerRole(self, request: admin_pb2.SetWorkerRoleRequest, context: Context) -> NoReturn:  # noqa: N802
        raise Unsupported("SetWorkerRole is not supported yet")
