"""What the client commands need of a running cluster, over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from baton import wire
from baton.api import Explanation, GenerateChunk, GenerateRequest
from baton.errors import BatonError, InvalidRequest, NoWorker
from baton.rpc import from_rpc_error
from baton.rpc.errors import ERROR_KEY
from baton.rpc.server import CHANNEL_OPTIONS
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc

STATUS_TIMEOUT_S = 10.0
Metadata = tuple[tuple[str, str], ...]


def metadata_of(api_key: str) -> Metadata:
    """What goes with every call; nothing for an empty key. InvalidRequest where the key cannot be sent."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key may hold printable ASCII characters only", "api_key")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def typed(error: grpc.RpcError, address: str) -> BatonError:
    """The router's own error, or NoWorker when nobody answers at `address`."""
    call: Any = error
    is_typed = any(key == ERROR_KEY for key, _ in call.trailing_metadata() or ())
    if not is_typed and call.code() is grpc.StatusCode.UNAVAILABLE:
        return NoWorker(f"no router answers at {address}; start one with `baton up`, or name another with --address")
    return from_rpc_error(error, f"the router at {address}")


class Client:
    """Calls a router. Every method raises the router's own typed errors, or NoWorker when nobody answers."""

    def __init__(self, address: str, api_key: str = "") -> None:
        """Args:
        api_key: the tenant's; empty: none is sent, which suffices where no tenants are configured.
        """
        self._address = address
        self._metadata = metadata_of(api_key)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def generate(self, request: GenerateRequest) -> Iterator[GenerateChunk]:
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        try:
            message = wire.generate_request(request)
        except (ValueError, UnicodeError) as error:  # protobuf's own checks of ranges and of text
            raise InvalidRequest(f"the request cannot be sent: {error}") from error
        call = stub.Generate(message, metadata=self._metadata)
        try:
            for response in call:
                yield wire.generate_chunk(response)
        except grpc.RpcError as error:
            raise typed(error, self._address) from None
        finally:
            call.cancel()

    def status(self) -> dict[str, Any]:
        """`baton status --json`."""
        stub = admin_pb2_grpc.AdminStub(self._channel)
        try:
            return wire.status_as_json(stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S))
        except grpc.RpcError as error:
            raise typed(error, self._address) from None

    def explain(self, request_id: str) -> list[Explanation]:
        """How a request's choices were placed; none: the router does not know it, or not any more."""
        stub = admin_pb2_grpc.AdminStub(self._channel)
        try:
            return wire.explanations(
                stub.Explain(admin_pb2.ExplainRequest(request_id=request_id), timeout=STATUS_TIMEOUT_S)
            )
        except grpc.RpcError as error:
            raise typed(error, self._address) from None

    def close(self) -> None:
        self._channel.close()
