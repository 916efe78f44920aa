"""gRPC client of the routers, for the commands of the CLI."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from baton import wire
from baton.addresses import MAX_PORT, has_no_port
from baton.api import Explanation, GenerateChunk, GenerateRequest
from baton.errors import BatonError, InvalidRequest, NoWorker, Overloaded
from baton.registered_adapters import CHECK_S
from baton.rpc import from_rpc_error
from baton.rpc.errors import is_lost
from baton.rpc.server import CHANNEL_OPTIONS
from baton.timelines import DEFAULT_LIMIT, RequestSummary, RequestTimeline
from baton.tls import Tls
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc

T = TypeVar("T")
STATUS_TIMEOUT_S = 10.0
ORDER_TIMEOUT_S = 30.0
ADAPTER_TIMEOUT_S = 4 * CHECK_S
"""Timeout for adding an adapter: up to three workers are asked in turn."""
ROLE_TIMEOUT_S = 600.0
"""Timeout for a change of role: the worker is drained first, within the cluster's own time limit."""
FIRST_TRIES = 5
"""Attempts to reach a router before a stream has started; at least one for each address. A refused channel does not
reconnect within 0.2 s and fails calls until then, so three of these attempts reach an address, within a second."""
TRIES = 10
"""Consecutive attempts without a new message, after a stream has started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""First and longest pause between attempts; each pause is twice the previous one."""
PLAIN_SCHEMES = ("http", "grpc")
HTTP_IS_SPOKEN = "http1.x server"
"""Text in gRPC's error if an HTTP/1 server answers."""
StatusJson = Mapping[str, Any]
"""A cluster's status, as `baton status --json` prints it."""
CallMetadata = tuple[tuple[str, str], ...]


def metadata_of(api_key: str) -> CallMetadata:
    """Return the metadata of every call; none for an empty key. Raises InvalidRequest if the key cannot be sent."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key may hold printable ASCII characters only", "api_key")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def host_port(address: str) -> str:
    """Return the address as gRPC expects it, without a plain-text scheme such as http://.

    Raises:
        InvalidRequest: the address has no port, an invalid port, or a scheme that implies TLS, which --tls selects.
    """
    scheme, separator, rest = address.rpartition("://")
    bare = rest.rstrip("/")
    if scheme.lower() in ("https", "grpcs"):
        raise InvalidRequest(
            f"the address {address} must be host:port; set {bare}, and --tls for an encrypted connection", "address"
        )
    if has_no_port(bare):
        raise InvalidRequest(f"the port of the address {address} must be a number of 0 to {MAX_PORT}", "address")
    if ":" not in bare:
        raise InvalidRequest(f"the address {address} must be host:port, such as {bare or 'localhost'}:50051", "address")
    return bare if separator and scheme.lower() in PLAIN_SCHEMES else address


def typed(error: grpc.RpcError, address: str) -> BatonError:
    """Return the router's own error, or NoWorker with the end of gRPC's message if no router answers at `address`."""
    if is_lost(error):
        details = error.details() or "no reason is known"
        if HTTP_IS_SPOKEN in details:
            return NoWorker(
                f"{address} is an HTTP port, but this command uses gRPC; set the port after grpc= in the line BATON "
                "READY (BATON_GRPC_PORT, 50051 by default)"
            )
        cause = details.rpartition(": ")[2]
        if "handshake failed" in details or cause == "Socket closed":
            cause = "TLS handshake failed: check --tls, --ca, --certificate and --key"
        return NoWorker(
            f"no router answers at {address} ({cause}); start one with `baton up`, or name another with --address"
        )
    return from_rpc_error(error, f"the router at {address}")


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials of a client."""

    api_key: str = ""
    """API key of a tenant; empty: none is sent."""
    tls: Tls | None = None
    """Trusted authorities, and the client's certificate; None: plain text."""


OPEN = Access()
"""Access without API key and TLS."""


def opened(address: str, tls: Tls | None) -> grpc.Channel:
    """Open a client's channel to a router; the caller must close it."""
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), options=[*CHANNEL_OPTIONS, *tls.channel_options()])


class Client:
    """Client of one or several routers. Methods raise the router's own typed errors, or NoWorker if none answers."""

    def __init__(self, address: str, api_key: str = "", tls: Tls | None = None, *, model: str = "") -> None:
        """Create a client without connecting it.

        Args:
            address: host:port of one or several routers; several addresses are separated by commas.
            api_key: API key; all methods except `generate` need an operator key. Empty: none is sent, which suffices if
                no tenants are configured.
            tls: trusted authorities, and the client's certificate; None: plain text.
            model: model of all queries and orders: its name, its release or its content id. Empty: the only model; in
                queries all models.

        Raises:
            InvalidRequest: an address is not host:port, or its port is invalid.
        """
        self._addresses = [host_port(each) for each in address.split(",")]
        self._metadata = metadata_of(api_key)
        self._model = model
        self._channels = [opened(each, tls) for each in self._addresses]
        self._turn = 0
        """Index of the next address to call: the one that answered last."""

    @property
    def _address(self) -> str:
        return self._addresses[self._turn % len(self._addresses)]

    @property
    def _channel(self) -> grpc.Channel:
        return self._channels[self._turn % len(self._channels)]

    def generate(self, request: GenerateRequest) -> Iterator[GenerateChunk]:
        """Yield the response as one unbroken stream: after a lost connection, another router continues it.

        A choice that has finished may appear once more, without tokens, in the message with the usage.
        """
        request = request if request.request_id else replace(request, request_id=f"req-{uuid.uuid4().hex}")
        stream = _AnswerStream(request)
        turn, num_failures = self._turn, 0
        while True:
            address = self._addresses[turn % len(self._addresses)]
            call = self._call(stream.rest, turn)
            try:
                for response in call:
                    self._turn, num_failures = turn, 0
                    if (chunk := stream.new(wire.generate_chunk(response))) is not None:
                        yield chunk
                return
            except grpc.RpcError as error:
                if stream.is_whole:
                    return
                num_failures += 1
                tries = TRIES if stream.has_begun else max(FIRST_TRIES, len(self._addresses))
                failure = typed(error, address)
                pause_s = min(FIRST_PAUSE_S * 2 ** (num_failures - 1), LONGEST_PAUSE_S)
                if stream.has_begun and isinstance(failure, Overloaded):
                    pause_s = max(pause_s, failure.retry_after_s)  # a second refusal would lose the stream
                elif not is_lost(error):
                    raise failure from None
                if num_failures >= tries:
                    raise failure from None
                stream.breaks()
                turn += 1
            finally:
                call.cancel()
            time.sleep(pause_s)

    def _call(self, request: GenerateRequest, turn: int) -> Any:
        stub = inference_pb2_grpc.InferenceStub(self._channels[turn % len(self._channels)])
        try:
            message = wire.generate_request(request)
        except (ValueError, UnicodeError) as error:  # protobuf checks ranges and text
            raise InvalidRequest(f"the request cannot be sent: {error}") from error
        return stub.Generate(message, metadata=self._metadata)

    def status(self) -> dict[str, Any]:
        """Return the cluster's status, as `baton status --json` prints it."""
        message = admin_pb2.GetStatusRequest(model=self._model)
        with self._admin() as admin:
            return wire.status_as_json(admin.GetStatus(message, timeout=STATUS_TIMEOUT_S, metadata=self._metadata))

    def explain(self, request_id: str) -> list[Explanation]:
        """Return the placement of each choice of a request; empty if the router does not know it, or no longer."""
        message = admin_pb2.ExplainRequest(request_id=request_id)
        with self._admin() as admin:
            return wire.explanations(admin.Explain(message, timeout=STATUS_TIMEOUT_S, metadata=self._metadata))

    def timelines(self, request_id: str) -> list[RequestTimeline]:
        """Return the timeline of each call with this id, the latest first; empty if no router knows it, or no longer.

        Each router knows only the requests that it served, so all addresses are called. Addresses that do not answer
        are ignored if another one answers.
        """
        message = admin_pb2.ExplainRequest(request_id=request_id)
        answers = self._of_each(lambda admin, **how: admin.Explain(message, **how))
        found = [each for answer in answers for each in wire.timelines(answer)]
        return sorted(found, key=lambda each: -each.summary.arrived_s)

    def requests(
        self, *, tenant: str = "", slo_class: str = "", outcomes: Sequence[str] = (), limit: int = DEFAULT_LIMIT
    ) -> list[RequestSummary]:
        """Return the latest requests of the routers at all addresses, the latest first; see `timelines`.

        Args:
            tenant, slo_class, outcomes: filters; empty: all requests.
        """
        message = admin_pb2.ListRequestsRequest(tenant=tenant, slo_class=slo_class, outcomes=outcomes, limit=limit)
        answers = self._of_each(lambda admin, **how: admin.ListRequests(message, **how))
        found = [each for answer in answers for each in wire.request_list(answer).requests]
        return sorted(found, key=lambda each: -each.arrived_s)[:limit]

    def _of_each(self, ask: Callable[..., T]) -> list[T]:
        """Return the responses of all addresses that answer. Raises the error of the first address if none answers."""
        answers: list[T] = []
        failures: list[BatonError] = []
        for address, channel in zip(self._addresses, self._channels, strict=True):
            try:
                admin = admin_pb2_grpc.AdminStub(channel)
                answers.append(ask(admin, timeout=STATUS_TIMEOUT_S, metadata=self._metadata))
            except grpc.RpcError as error:
                failures.append(typed(error, address))
        if not answers:
            raise failures[0]
        return answers

    def scale(self, pool: str, num_workers: int, is_forced: bool = False) -> None:
        """Set the desired size of a pool, and return at once; `status` shows when the pool has reached it.

        Args:
            pool: prefill or decode.
            num_workers: new size.
            is_forced: accept the size even if the workers would not fit on the one machine that runs them all.
        """
        message = admin_pb2.ScalePoolRequest(pool=pool, desired=num_workers, force=is_forced, model=self._model)
        with self._admin() as admin:
            admin.ScalePool(message, timeout=ORDER_TIMEOUT_S, metadata=self._metadata)

    def drain(self, worker_id: str) -> None:
        """Start draining a worker, and return at once; `status` shows when it is gone."""
        message = admin_pb2.DrainWorkerRequest(worker_id=worker_id, model=self._model)
        with self._admin() as admin:
            admin.DrainWorker(message, timeout=ORDER_TIMEOUT_S, metadata=self._metadata)

    def set_role(self, worker_id: str, role: str) -> None:
        """Set a worker's role, and return when the worker has it."""
        message = admin_pb2.SetWorkerRoleRequest(worker_id=worker_id, role=role, model=self._model)
        with self._admin() as admin:
            admin.SetWorkerRole(message, timeout=ROLE_TIMEOUT_S, metadata=self._metadata)

    def wake(self) -> None:
        """Start the workers of the model, if it sleeps, and return at once; `status` shows when it is ready."""
        message = admin_pb2.WakeModelRequest(model=self._model)
        with self._admin() as admin:
            admin.WakeModel(message, timeout=ORDER_TIMEOUT_S, metadata=self._metadata)

    def add_adapter(self, name: str, path: str) -> tuple[dict[str, Any], bool]:
        """Register a LoRA adapter, and return it, and whether it replaces one of the same name.

        Args:
            path: absolute path of its folder, on the workers' machines.
        """
        message = admin_pb2.AddAdapterRequest(name=name, path=path, model=self._model)
        with self._admin() as admin:
            answer = admin.AddAdapter(message, timeout=ADAPTER_TIMEOUT_S, metadata=self._metadata)
        return wire.adapter_as_json(answer.adapter), answer.is_replaced

    def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; running requests complete."""
        message = admin_pb2.RemoveAdapterRequest(name=name, model=self._model)
        with self._admin() as admin:
            admin.RemoveAdapter(message, timeout=ORDER_TIMEOUT_S, metadata=self._metadata)

    def adapters(self) -> list[dict[str, Any]]:
        """Return the registered LoRA adapters, ordered by name."""
        with self._admin() as admin:
            message = admin_pb2.ListAdaptersRequest(model=self._model)
            answer = admin.ListAdapters(message, timeout=STATUS_TIMEOUT_S, metadata=self._metadata)
        return [wire.adapter_as_json(each) for each in answer.adapters]

    @contextlib.contextmanager
    def _admin(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        try:
            yield admin_pb2_grpc.AdminStub(self._channel)
        except grpc.RpcError as error:
            raise typed(error, self._address) from None

    def close(self) -> None:
        for each in self._channels:
            each.close()


class _AnswerStream:
    """State of a response stream: the tokens that arrived, and the request for the rest after a lost connection."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_tokens = Counter(request.resume_from)
        self._ended: set[int] = set()
        self.rest = request
        """Request for the missing part."""
        self.has_begun = False
        self.is_whole = False

    def breaks(self) -> None:
        """Update `rest` after a lost connection.

        Choice 0 is always named in it, because the lost router may still serve the request.
        """
        self.rest = replace(self._request, resume_from={0: 0, **self._num_tokens})

    def new(self, chunk: GenerateChunk) -> GenerateChunk | None:
        """Record a chunk and return it; None if it only repeats that a choice has finished."""
        self.has_begun = True
        self.is_whole = chunk.usage is not None
        self._num_tokens[chunk.choice_index] += len(chunk.token_ids)
        if chunk.choice_index in self._ended and not self.is_whole:
            return None
        if chunk.finish_reason is not None:
            self._ended.add(chunk.choice_index)
        return chunk
