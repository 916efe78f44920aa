"""The client of the commands, against a real gRPC server that comes late or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import wire
from baton.api import GenerateRequest, TokenIds
from baton.errors import ConfigError, InvalidRequest, NoWorker
from baton.timelines import RequestList, RequestTimeline
from baton.tls import Tls
from baton.v1 import admin_pb2, inference_pb2
from deploy.operator.client import Client
from deploy.operator.trust import TrustOptions
from lab.bench.connection import BenchConnection
from tests.integration.cluster import free_port
from tests.support.certificates import Authority
from tests.support.proxy import Proxy
from tests.unit.deploy.operator.test_explain import SUMMARY

REQUEST = GenerateRequest(prompt=TokenIds((1, 2, 3)))


def answer(request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
    yield inference_pb2.GenerateResponse(token_ids=[7], finish_reason="length", usage=inference_pb2.Usage())


def new_router() -> grpc.Server:
    """A server whose answers have one token, and which does not listen yet."""
    generate = grpc.unary_stream_rpc_method_handler(
        answer, inference_pb2.GenerateRequest.FromString, inference_pb2.GenerateResponse.SerializeToString
    )
    router = grpc.server(ThreadPoolExecutor(1))
    router.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.Inference", {"Generate": generate}),)
    )
    return router


def test_a_router_that_comes_while_the_client_tries_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens once the first attempt has been refused: one of those that follow must be more than a repetition."""
    address, sleep, router = f"127.0.0.1:{free_port()}", time.sleep, new_router()
    pauses: list[float] = []

    def first_comes_the_router(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 1:
            assert router.add_insecure_port(address)
            router.start()
        sleep(pause_s)

    monkeypatch.setattr("deploy.operator.client.time.sleep", first_comes_the_router)
    try:
        with contextlib.closing(Client(address)) as client:
            assert [chunk.token_ids for chunk in client.generate(REQUEST)] == [(7,)]
    finally:
        router.stop(0).wait(30)


def test_a_router_that_is_slow_to_take_a_connection_is_waited_for() -> None:
    """On a busy machine it may be seconds late; a member of the cluster would try another one after 5 s."""
    router = new_router()
    with Proxy(router.add_insecure_port("127.0.0.1:0")) as proxy:
        router.start()
        proxy.cut()
        healing = threading.Timer(6.0, proxy.heal)
        healing.start()
        try:
            with contextlib.closing(Client(f"127.0.0.1:{proxy.port}")) as client:
                assert [chunk.token_ids for chunk in client.generate(REQUEST)] == [(7,)]
        finally:
            healing.join()
            router.stop(0).wait(30)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("https://here:50051", "the address https://here:50051 must be host:port; set here:50051, and --tls"),
        ("localhost", "the address localhost must be host:port, such as localhost:50051"),
        ("http://here", "the address http://here must be host:port, such as here:50051"),
        ("here:70000", "the port of the address here:70000 must be a number of 0 to 65535"),
    ],
)
def test_what_is_no_address_is_refused_with_one_that_is(address: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        Client(address)


@pytest.mark.parametrize("scheme", ["", "http://", "grpc://", "HTTP://"])
def test_the_port_of_http_is_recognised_with_a_scheme_and_without(scheme: str) -> None:
    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.closing(Client(f"{scheme}{address}/" if scheme else address)) as client:
            with pytest.raises(NoWorker, match=f"^{address} is an HTTP port, but this command uses gRPC; set the port"):
                client.status()
            with pytest.raises(NoWorker, match="is an HTTP port"):
                list(client.generate(REQUEST))
        server.shutdown(socket.SHUT_RDWR)


def test_an_address_where_nobody_answers_is_given_up_with_the_reason() -> None:
    address = f"127.0.0.1:{free_port()}"
    sentence = rf"no router answers at {address} \(Connection refused\); start one with `baton up`"
    with contextlib.closing(Client(address)) as client, pytest.raises(NoWorker, match=sentence):
        list(client.generate(REQUEST))


def test_a_client_over_tls_reaches_its_own_routers_alone(tmp_path: Path) -> None:
    """One without TLS, or whose authority has not signed the router's certificate, hears of that."""
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "other")
    files = authority.sign("router")
    router = new_router()
    port = router.add_secure_port("127.0.0.1:0", Tls(files).server_credentials())
    router.start()
    address, ask = f"127.0.0.1:{port}", REQUEST
    with contextlib.closing(Client(address, tls=TrustOptions(ca=authority.path).read())) as client:
        assert len(list(client.generate(ask))) == 1
    for trust in (TrustOptions(), TrustOptions(tls=True), TrustOptions(ca=other.path)):
        with (
            contextlib.closing(Client(address, tls=trust.read())) as client,
            pytest.raises(NoWorker, match="TLS handshake failed"),
        ):
            list(client.generate(ask))
    router.stop(None).wait()
    with pytest.raises(ConfigError, match="need each other"):
        TrustOptions(certificate=files.certificate).read()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:70000", "127.0.0.1:50051,127.0.0.1:65536", "[::1]:99999", "localhost:-1"]
)
def test_a_number_that_is_no_port_is_not_counted_around(address: str) -> None:
    """gRPC takes the rest of a division by 65536, and would connect to whoever listens there."""
    for client in (Client, BenchConnection):
        with pytest.raises(InvalidRequest, match=r"^the port of the address .+ must be a number of 0 to 65535$"):
            client(address)
    for good in ("127.0.0.1:65535", "localhost:1", "[::1]:1", "unix:/tmp/x", "dns:///host:443"):
        Client(good).close()


def test_all_routers_are_asked_for_a_request_since_each_knows_its_own() -> None:
    """One that does not answer is passed over where others do."""

    def router_of(*arrivals: float) -> tuple[grpc.Server, str]:
        found = [RequestTimeline(summary=dataclasses.replace(SUMMARY, arrived_s=at_s)) for at_s in arrivals]
        explain = grpc.unary_unary_rpc_method_handler(
            lambda request, context: wire.explain_response(found if request.request_id == "r" else []),
            admin_pb2.ExplainRequest.FromString,
            admin_pb2.ExplainResponse.SerializeToString,
        )

        def listed(request: Any, context: Any) -> Any:
            kept = RequestList(router="a", now_s=9.0, num_kept=9, requests=tuple(each.summary for each in found))
            return wire.requests_response(kept if request.tenant == "acme" else dataclasses.replace(kept, requests=()))

        requests = grpc.unary_unary_rpc_method_handler(
            listed, admin_pb2.ListRequestsRequest.FromString, admin_pb2.ListRequestsResponse.SerializeToString
        )
        handlers: dict[str, Any] = {"Explain": explain, "ListRequests": requests}
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Admin", handlers),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        return server, address

    (first, first_address), (second, second_address) = router_of(2.0, 1.0), router_of(3.0)
    nobody = f"127.0.0.1:{free_port()}"
    try:
        with contextlib.closing(Client(f"{nobody},{first_address},{second_address}")) as client:
            assert [each.summary.arrived_s for each in client.timelines("r")] == [3.0, 2.0, 1.0]
            assert client.timelines("another") == []
            assert [each.arrived_s for each in client.requests(tenant="acme", limit=2)] == [3.0, 2.0]
            assert client.requests() == []
        with contextlib.closing(Client(nobody)) as client, pytest.raises(NoWorker, match="no router answers"):
            client.timelines("r")
    finally:
        for server in (first, second):
            server.stop(0).wait(30)


def test_every_query_and_order_names_the_model_of_the_client() -> None:
    """The router refuses an order without a model if it serves several."""
    asked: list[tuple[str, str]] = []
    answers: dict[str, Any] = {
        **{name: getattr(admin_pb2, f"{name}Response")() for name in ("ScalePool", "DrainWorker", "SetWorkerRole")},
        **{name: getattr(admin_pb2, f"{name}Response")() for name in ("AddAdapter", "RemoveAdapter", "ListAdapters")},
        "WakeModel": admin_pb2.WakeModelResponse(),
        "GetStatus": admin_pb2.GetStatusResponse(redis=admin_pb2.Redis()),
    }

    def handler(name: str) -> grpc.RpcMethodHandler[Any, Any]:
        def answer(request: Any, context: Any) -> Any:
            asked.append((name, request.model))
            return answers[name]

        kind = getattr(admin_pb2, f"{name}Request")
        return grpc.unary_unary_rpc_method_handler(answer, kind.FromString, type(answers[name]).SerializeToString)

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {name: handler(name) for name in answers}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Admin", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        for model in ("small", ""):
            with contextlib.closing(Client(address, model=model)) as client:
                client.status()
                client.scale("decode", 2)
                client.drain("worker-0")
                client.set_role("worker-0", "prefill")
                client.wake()
                client.add_adapter("a", "/a")
                client.remove_adapter("a")
                client.adapters()
            assert sorted(asked) == sorted((name, model) for name in answers)
            asked.clear()
    finally:
        server.stop(0).wait(30)
