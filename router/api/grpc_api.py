"""The gRPC API: `baton.v1.Inference` and `baton.v1.Admin` over the router's service."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from baton import wire
from baton.api import GenerateChunk
from baton.cluster import ClusterStatus
from baton.errors import BatonError, Forbidden, Unauthenticated
from baton.rpc.arrivals import streaming
from baton.rpc.errors import CallContext, refusal
from baton.tasks import seen_through
from baton.telemetry import tracing
from baton.timelines import DEFAULT_LIMIT
from baton.tls import names_in_call
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.admission import MAX_REQUEST_ID
from router.admission.tenants import Tenant, TenantBook, api_key_of, require_operator
from router.api.delivery import GRPC, AnswerPadding, ReadAhead, deliver
from router.api.sessions import SESSION, opening_of_message
from router.models.operated import OperatedModels
from router.models.table import ModelTable
from router.service import RouterService
from router.timeline.log import UNKNOWN_INGRESS, Ingress, RefusedBody, RequestFilter, RequestLog

MAX_MESSAGE_BYTES = 4 * 2**20
"""Longest message of a client: the default of gRPC servers. The call is admitted before its message is received, and
the message is received whole before it is parsed."""
SERVICE_NAMES = ("baton.v1.Inference", "baton.v1.Admin")
INFERENCE, ADMIN = (f"/{name}/" for name in SERVICE_NAMES)
CALLER: ContextVar[Tenant] = ContextVar("caller")
"""The tenant of the current call. Every call runs in its own task, and so has its own context."""


class Authentication(grpc.aio.ServerInterceptor):
    """Interceptor that identifies the tenant of a call, or refuses the call before its message is read.

    `Admin` needs an operator's key. Health and reflection need no key: they reveal nothing about this cluster.
    """

    def __init__(self, tenants: TenantBook) -> None:
        self._tenants = tenants

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith((INFERENCE, ADMIN)):
            api_key, is_admin = api_key_of(details.invocation_metadata), details.method.startswith(ADMIN)
            if not api_key and self._tenants.knows_certificates:
                handler = await continuation(details)
                return handler and self._by_certificate(handler, is_admin)
            try:
                self._admit(api_key, (), is_admin)
            except (Unauthenticated, Forbidden) as error:
                return refusal(error)
        return await continuation(details)

    def _admit(self, api_key: str | None, certificate: Sequence[str], is_admin: bool) -> None:
        """Record the tenant of the call. Raises Unauthenticated and Forbidden."""
        caller = self._tenants.identify(api_key, certificate)
        if is_admin:
            require_operator(caller)
        CALLER.set(caller)

    def _by_certificate(self, handler: Any, is_admin: bool) -> Any:
        """Return the handler behind a check of the client's certificate, which is known only when the call starts."""
        method = handler.stream_stream or handler.stream_unary

        async def admitted(messages: Any, context: CallContext) -> Any:
            self._admit(None, names_in_call(context.auth_context()), is_admin)
            return await method(messages, context)

        return streaming(handler, admitted)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The service `baton.v1.Inference`.

    Args:
        ingress: address and port on which it serves.
        stall_s: a call is ended if its client does not read for this long, in seconds.
    """

    def __init__(self, models: ModelTable, ingress: Ingress = UNKNOWN_INGRESS, *, stall_s: float = math.inf) -> None:
        self._models = models
        self._ingress = ingress
        self._stall_s = stall_s
        self._ahead = ReadAhead(is_crowded=lambda: models.is_crowded())

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        generate: Any = grpc.unary_stream_rpc_method_handler(
            self.Generate, request_deserializer=inference_pb2.GenerateRequest.FromString
        )  # its messages are serialized already
        service, _ = SERVICE_NAMES
        server.add_registered_method_handlers(service, {"Generate": generate})

    async def Generate(  # type: ignore[override]  # noqa: N802 - the generated name
        self, request: inference_pb2.GenerateRequest, context: CallContext
    ) -> None:
        """Stream an answer. Writes instead of yielding, so that a call can be ended while its client does not read."""
        arrived_s, metadata = time.monotonic(), context.invocation_metadata()
        trace = tracing.from_metadata(metadata)
        padding = AnswerPadding(GRPC, self._ahead.is_crowded)
        is_first = True

        async def write(message: bytes) -> None:
            nonlocal is_first
            message += _padded_by(padding.of_next(len(message)))
            if not is_first:
                await context.write(message)
                return
            # If the first message were cancelled half-way, gRPC could not end the call with a status.
            is_first = False
            writing = asyncio.create_task(context.write(message))
            await seen_through(writing)
            writing.result()

        service = self._generating(request, arrived_s, context)
        asked = wire.generate_request_from_pb(request, service.facts.max_model_len - 1)
        with self._models.calls.conflict_when_taken_over():
            messages = self._messages(service.generate(asked, trace, CALLER.get(), self._ingress))
            await deliver(messages, write, size=sys.getsizeof, ahead=self._ahead, stall_s=self._stall_s)

    def _generating(
        self, request: inference_pb2.GenerateRequest, arrived_s: float, context: CallContext
    ) -> RouterService:
        """Return the service that generates an answer. A refusal is recorded here, since no model records it.

        Raises:
            ModelNotFound, InvalidRequest: see `ModelTable.service`.
        """
        try:
            return self._service(request, context)
        except BatonError as error:
            refused = RefusedBody(
                request_id=request.request_id[:MAX_REQUEST_ID],
                tenant=CALLER.get().id,
                model=self._models.name_for("", CALLER.get()),
                operation="chat" if request.HasField("chat") else "text_completion",
                arrived_s=arrived_s,
                error=error,
                field="model",
            )
            self._models.requests.refused(refused)
            raise

    def _service(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, context: CallContext
    ) -> RouterService:
        """Return the service that serves a request. Raises ModelNotFound, InvalidRequest: see `ModelTable.service`."""

        def opening() -> str:
            named = (value for key, value in context.invocation_metadata() or () if key == SESSION)
            return str(next(named, "")) or opening_of_message(request)

        return self._models.service(request.model, CALLER.get(), opening)

    async def _messages(self, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        """Yield the messages, serialized because that takes the least memory while they are read ahead.

        Raises:
            Conflict: another call has taken the request over in the meantime. See `RouterService.generate` too.
        """
        with self._models.calls.conflict_when_taken_over():
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield wire.generate_response(chunk).SerializeToString()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        service = self._service(request, context)
        prompt = wire.tokenize_request_from_pb(request)
        return wire.tokenize_response(await service.tokenize(prompt, CALLER.get()), service.facts.max_model_len)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: CallContext
    ) -> inference_pb2.ListModelsResponse:
        return wire.list_models_response(self._models.cards(CALLER.get()))


def _padded_by(num_bytes: int) -> bytes:
    """Return padding to append to a serialized response: this many bytes and a short field header."""
    return inference_pb2.GenerateResponse(padding=bytes(num_bytes)).SerializeToString()


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """The service `baton.v1.Admin`: shows the state of the cluster, and carries out or forwards operators' orders."""

    def __init__(
        self, status: Callable[[Collection[str]], ClusterStatus], requests: RequestLog, models: OperatedModels
    ) -> None:
        self._status = status
        self._requests = requests
        self._models = models

    def _status_of(self, model: str) -> ClusterStatus:
        """Return the status of one model, or of all. Raises ModelNotFound."""
        contents = [each.model.content_id for each in self._models.named(model)] if model else ()
        return self._status(contents)

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: CallContext
    ) -> admin_pb2.GetStatusResponse:
        return wire.status_response(self._status_of(request.model))

    async def ListPools(  # noqa: N802
        self, request: admin_pb2.ListPoolsRequest, context: CallContext
    ) -> admin_pb2.ListPoolsResponse:
        return wire.pools_response(self._status_of(request.model))

    async def ListWorkers(  # noqa: N802
        self, request: admin_pb2.ListWorkersRequest, context: CallContext
    ) -> admin_pb2.ListWorkersResponse:
        return wire.workers_response(self._status_of(request.model))

    async def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: CallContext
    ) -> admin_pb2.ExplainResponse:
        return wire.explain_response(self._requests.explain(request.request_id, request.tenant))

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: CallContext
    ) -> admin_pb2.ListRequestsResponse:
        wanted = RequestFilter(
            tenant=request.tenant,
            slo_class=request.slo_class,
            outcomes=tuple(request.outcomes),
            model=request.model,
            limit=request.limit or DEFAULT_LIMIT,
        )
        return wire.requests_response(self._requests.listed(wanted))

    async def ScalePool(  # noqa: N802
        self, request: admin_pb2.ScalePoolRequest, context: CallContext
    ) -> admin_pb2.ScalePoolResponse:
        return await self._models.one(request.model).controller.scale(request)

    async def DrainWorker(  # noqa: N802
        self, request: admin_pb2.DrainWorkerRequest, context: CallContext
    ) -> admin_pb2.DrainWorkerResponse:
        return await self._models.one(request.model).controller.drain(request)

    async def SetWorkerRole(  # noqa: N802
        self, request: admin_pb2.SetWorkerRoleRequest, context: CallContext
    ) -> admin_pb2.SetWorkerRoleResponse:
        return await self._models.one(request.model).controller.set_role(request)

    async def AddAdapter(  # noqa: N802
        self, request: admin_pb2.AddAdapterRequest, context: CallContext
    ) -> admin_pb2.AddAdapterResponse:
        model = self._models.one(request.model)
        registered, is_replaced = await model.adapters.add(request.name, request.path)
        adapter = wire.registered_adapter(registered, model.model.facts.id)
        return admin_pb2.AddAdapterResponse(adapter=adapter, is_replaced=is_replaced)

    async def RemoveAdapter(  # noqa: N802
        self, request: admin_pb2.RemoveAdapterRequest, context: CallContext
    ) -> admin_pb2.RemoveAdapterResponse:
        await self._models.one(request.model).adapters.remove(request.name)
        return admin_pb2.RemoveAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: admin_pb2.ListAdaptersRequest, context: CallContext
    ) -> admin_pb2.ListAdaptersResponse:
        models = self._models.named(request.model)
        return wire.adapters_response({each.model.facts.id: each.adapters.adapters for each in models})

    async def WakeModel(  # noqa: N802
        self, request: admin_pb2.WakeModelRequest, context: CallContext
    ) -> admin_pb2.WakeModelResponse:
        return await self._models.one(request.model).controller.wake(request)
