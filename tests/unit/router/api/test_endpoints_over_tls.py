"""Both endpoints of a router over TLS, over real sockets: who is admitted by a certificate, and what a new one
changes."""

import asyncio
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvicorn
from fastapi import Request

from baton.rpc import RpcServer, channel
from baton.tls import Tls
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.admission.tenants import TenantBook
from router.api.connections import BoundedProtocol
from router.api.grpc_api import CALLER, SERVICE_NAMES, AdminServicer, Authentication
from router.api.http import OPEN_PATHS, HttpServer, bound, create_app, require_certificates
from router.api.places import ConnectionLimits, OpenConnections
from router.timeline.log import RequestLog
from tests.support.builders import cluster_status
from tests.support.certificates import Authority, serial_of
from tests.support.models import operated, table_of
from tests.support.waiting import until

PATIENCE_S = 30.0
TENANTS = f"""
acme: {{key_sha256: [{hashlib.sha256(b"key-a").hexdigest()}]}}
archive: {{certificates: ["DNS:archive.example", "URI:spiffe://example/archive"]}}
operations: {{certificates: ["CN:operations", "DNS:ops.example"], operator: true}}
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


@pytest.fixture
def book(tmp_path: Path) -> TenantBook:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return TenantBook.load(path)


class _WhoAmI(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.write(inference_pb2.GenerateResponse(text=CALLER.get().id))

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id=CALLER.get().id)])

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("nobody asks")


# -- gRPC --------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _grpc_endpoint(book: TenantBook, endpoint: Tls) -> AsyncIterator[str]:
    rpc = RpcServer(SERVICE_NAMES, [Authentication(book)])
    inference_pb2_grpc.add_InferenceServicer_to_server(_WhoAmI(), rpc.server)
    admin = AdminServicer(lambda models: cluster_status(redis_ok=False), RequestLog(), operated())
    admin_pb2_grpc.add_AdminServicer_to_server(admin, rpc.server)
    port = rpc.bind("127.0.0.1", 0, endpoint)
    await rpc.start()
    yield f"127.0.0.1:{port}"
    await rpc.stop(0)


async def _grpc_caller(address: str, tls: Tls, key: str = "") -> set[str]:
    """Whose a stream and a call are, as the router sees it. Raises AioRpcError."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with channel(address, tls, [("grpc.use_local_subchannel_pool", 1)]) as connection:
        stub = inference_pb2_grpc.InferenceStub(connection)
        request = inference_pb2.GenerateRequest()
        streamed = {m.text async for m in stub.Generate(request, metadata=metadata, timeout=PATIENCE_S)}
        models = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata, timeout=PATIENCE_S)
        return streamed | {model.id for model in models.models}


async def test_a_certificate_stands_for_a_key_over_grpc(authority: Authority, book: TenantBook) -> None:
    archive = Tls(authority.sign("somebody", ["archive.example"]))
    operations = Tls(authority.sign("operations", ["localhost"]))
    unknown = Tls(authority.sign("unknown", ["other.example"]))
    both = Tls(authority.sign("both", ["archive.example", "ops.example"]))
    async with _grpc_endpoint(book, Tls(authority.sign("endpoint"), clients="required")) as address:
        assert await _grpc_caller(address, archive) == {"archive"}
        assert await _grpc_caller(address, archive, "key-a") == {"acme"}, "a key wins"
        assert await _grpc_caller(address, unknown, "key-a") == {"acme"}
        for stranger, key in ((unknown, ""), (both, ""), (archive, "key-of-nobody")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _grpc_caller(address, stranger, key)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with channel(address, unknown) as connection:
            for method in ("Inference/ListModels", "Inference/Generate", "Admin/DrainWorker"):
                begun: Any = connection.stream_stream(f"/baton.v1.{method}")(timeout=PATIENCE_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await begun.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, "no message has been sent"
        for client, code in ((archive, "PERMISSION_DENIED"), (operations, "UNAVAILABLE"), (unknown, "UNAUTHENTICATED")):
            async with channel(address, client) as connection:
                order = admin_pb2.DrainWorkerRequest(worker_id="decode-0")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await admin_pb2_grpc.AdminStub(connection).DrainWorker(order, timeout=PATIENCE_S)
                assert caught.value.code().name == code


# -- HTTP --------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _http_client(book: TenantBook, endpoint: Tls) -> AsyncIterator[int]:
    app = create_app(table_of(), book, lambda: "", lambda: b"")
    if endpoint.clients == "required":
        require_certificates(app)

    @app.get("/whose")
    async def whose_is_it(request: Request) -> dict[str, str]:
        return {"tenant": request.state.tenant.id}

    open_connections = OpenConnections(limits=ConnectionLimits(max_connections=100, max_per_client=100))
    protocol: Any = partial(BoundedProtocol, open_connections)
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off")
    sockets = bound("127.0.0.1", 0, shares_port=False)
    server = HttpServer(config, sockets, open_connections, endpoint)
    serving = asyncio.create_task(server.serve_all())
    await until(lambda: server.started)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def _http(port: int, client: ssl.SSLContext, path: str = "/whose", key: str = "") -> tuple[int, str, int]:
    """The answer's status and body, and the serial number of the certificate that the router showed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
    async with asyncio.timeout(PATIENCE_S):
        shown = writer.get_extra_info("peercert") or {"serialNumber": "0"}
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n{bearer}connection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
    if not answer:
        raise ConnectionError("the router hung up")
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body, int(shown["serialNumber"], 16)


@pytest.mark.parametrize("clients", ["optional", "required"])
async def test_a_certificate_stands_for_a_key_over_http(authority: Authority, book: TenantBook, clients: str) -> None:
    archive = Tls(authority.sign("client", ["spiffe://example/archive"])).client_context()
    unknown = Tls(authority.sign("unknown", ["other.example"])).client_context()
    without = ssl.create_default_context(cafile=authority.path)
    async with _http_client(book, Tls(authority.sign("endpoint"), clients=clients)) as port:
        assert json.loads((await _http(port, archive))[1]) == {"tenant": "archive"}
        assert json.loads((await _http(port, archive, key="key-a"))[1]) == {"tenant": "acme"}
        assert (await _http(port, unknown))[0] == 401
        status, body, _ = await _http(port, without, key="key-a")
        assert (status, "certificate is required" in body) == ((200, False) if clients == "optional" else (401, True))
        assert {(await _http(port, without, path))[0] for path in OPEN_PATHS} == {200}, "probes have no certificate"
        other = Authority.make(authority.folder, "other")
        stranger = ssl.create_default_context(cafile=authority.path)
        foreign = other.sign("foreign", ["archive.example"])
        stranger.load_cert_chain(foreign.certificate, foreign.key)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await _http(port, stranger)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n")
        assert b"HTTP" not in await reader.read(), "plain text gets no answer"
        writer.close()


async def test_new_connections_see_the_new_certificate_and_old_ones_go_on(
    authority: Authority, book: TenantBook
) -> None:
    files = authority.sign("endpoint")
    client = ssl.create_default_context(cafile=authority.path)
    async with _http_client(book, Tls(files)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
        ask = b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n"
        for _ in range(3):
            authority.sign("endpoint")
            assert (await _http(port, client, "/healthz"))[::2] == (200, serial_of(files.certificate))
            writer.write(ask)
            assert b"200 OK" in await reader.readuntil(b"}")
        writer.close()
