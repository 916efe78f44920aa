"""Client connection of the load generator. Messages of a stream stay bytes until their request has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.api import GenerateRequest, TokenIds
from baton.rpc import channel
from baton.rpc.server import CHANNEL_OPTIONS
from baton.tls import Tls
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from deploy.operator.client import host_port, metadata_of, typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.api import GenerateChunk
    from baton.costs import StepCosts
    from baton.errors import BatonError
    from router.placement import Objective

CALL_TIMEOUT_S = 10.0
"""Timeout of calls that only read, in seconds."""
GENERATE = "/baton.v1.Inference/Generate"
NOT_FOR_CLIENTS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(frozen=True, slots=True)
class BenchedModel:
    id: str
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorker:
    """A ready worker, from the cluster's status."""

    id: str
    role: str
    costs: StepCosts
    """Cost model of its steps, fitted to the steps so far."""
    num_blocks: int
    block_tokens: int
    chunk_tokens: int


class BenchConnection:
    """One channel for all requests. Its methods raise the router's typed errors.

    Args:
        address: host:port of a router.
        api_key: API key sent with every call; empty: none.
        tls: trusted authorities and client credentials; None: plain text.

    Raises:
        InvalidRequest: the key cannot be sent, or the port is invalid.
    """

    def __init__(self, address: str, api_key: str = "", tls: Tls | None = None) -> None:
        self.address = host_port(address)
        self._channel = channel(self.address, tls, CHANNEL_OPTIONS)
        self._metadata = metadata_of(api_key)
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(GENERATE)

    async def model(self) -> BenchedModel:
        """Return the served model. Raise NoWorker if no router responds."""
        stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        request = inference_pb2.ListModelsRequest()
        try:
            answer = await stub.ListModels(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self.typed(error) from None
        return BenchedModel(answer.models[0].id, answer.models[0].max_model_len)

    async def workers(self) -> list[ServingWorker]:
        """Return the ready workers; none if this client may not read the status."""
        stub: Any = admin_pb2_grpc.AdminStub(self._channel)
        request = admin_pb2.GetStatusRequest()
        try:
            status = await stub.GetStatus(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in NOT_FOR_CLIENTS:
                return []
            raise self.typed(error) from None
        return [
            ServingWorker(
                id=w.id,
                role=w.role,
                costs=wire.step_costs(w.costs),
                num_blocks=w.blocks.total,
                block_tokens=w.block_size,
                chunk_tokens=w.chunk_tokens,
            )
            for w in status.workers
            if w.state == "ready"
        ]

    def generate(self, message: bytes) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        """Start a call, which yields messages for `chunk`."""
        return self._generate(message, metadata=self._metadata)

    def typed(self, error: grpc.aio.AioRpcError) -> BatonError:
        return typed(error, self.address)

    async def close(self) -> None:
        await self._channel.close()


def message_of(token_ids: Sequence[int], num_output_tokens: int, objective: Objective) -> bytes:
    """Return a request with the objective for exactly `num_output_tokens` greedy tokens, without their text."""
    sampling = {"max_tokens": num_output_tokens, "ignore_eos": True, "temperature": 0.0}
    request = GenerateRequest(
        prompt=TokenIds(tuple(token_ids)),
        sampling=sampling,
        skip_text=True,
        ttft_ms=objective.ttft_s * 1e3,
        itl_ms=objective.itl_s * 1e3,
    )
    return wire.generate_request(request).SerializeToString()


def chunk_of(message: bytes) -> GenerateChunk:
    return wire.generate_chunk(inference_pb2.GenerateResponse.FromString(message))
