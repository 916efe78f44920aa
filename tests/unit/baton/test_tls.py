"""Certificates as files that change, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.config import ClusterConfig, Config, RouterConfig
from baton.errors import ConfigError, NotAMember
from baton.rpc import RpcServer, channel, from_rpc_error, members_only
from baton.tls import CertificateFiles, Tls, endpoint_tls, member_tls, names_in_call, names_in_connection
from tests.support.certificates import Authority, cluster_settings, copy, serial_of

WAIT_S = 30.0


async def _who(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return " ".join(names_in_call(context.auth_context())).encode()


@contextlib.asynccontextmanager
async def _server(tls: Tls | None) -> AsyncIterator[str]:
    rpc = RpcServer(())
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Who": grpc.unary_unary_rpc_method_handler(_who)}
    rpc.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Tls", handlers)])
    port = rpc.bind("127.0.0.1", 0, tls)
    await rpc.start()
    yield f"127.0.0.1:{port}"
    await rpc.stop(0)


async def _asked(address: str, tls: Tls | None) -> str:
    """What the server sees of the client. Raises AioRpcError."""
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with channel(address, tls, own) as connection:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.unary_unary("/test.Tls/Who")
        return (await call(b"", timeout=WAIT_S)).decode()


def _member(files: CertificateFiles) -> Tls:
    made = member_tls(ClusterConfig(**cluster_settings(files)))
    assert made is not None
    return made


async def test_members_know_each_other_by_the_authority_and_the_name(tmp_path: Path) -> None:
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "stranger")
    member = _member(authority.sign("member", ["baton", "spiffe://here/member"]))
    nobody = Tls(CertificateFiles(certificate="", key="", authorities=(authority.path,)), name="baton")
    stranger = Tls(
        CertificateFiles(
            certificate=other.sign("member-of-others").certificate,
            key=str(tmp_path / "member-of-others.key"),
            authorities=(authority.path,),
        ),
        name="baton",
    )
    async with _server(member) as address:
        assert await _asked(address, member) == "CN:member DNS:baton URI:spiffe://here/member"
        for intruder in (None, nobody, stranger):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _asked(address, intruder)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for wrong in (other.sign("stranger-server"), authority.sign("tenant", ["tenant.example"])):
        server = Tls(CertificateFiles(certificate=wrong.certificate, key=wrong.key, authorities=(authority.path,)))
        async with _server(server) as address:
            with pytest.raises(grpc.aio.AioRpcError):
                await _asked(address, member)


async def _streamed(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    yield await _who(request, context)


async def _first(method: Any, request: Any) -> bytes:
    return bytes(await anext(aiter(method(request, timeout=WAIT_S))))


async def test_a_certificate_of_the_same_authority_makes_no_member(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    member = _member(authority.sign("member"))
    tenant = Tls(authority.sign("tenant", ["tenant.example"]), name="baton")
    rpc = RpcServer((), members_only(member))
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Who": grpc.unary_unary_rpc_method_handler(_who),
        "Whole": grpc.unary_stream_rpc_method_handler(_streamed),
        "Session": grpc.stream_stream_rpc_method_handler(_streamed),
    }
    rpc.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("baton.v1.Test", handlers)])
    port = rpc.bind("127.0.0.1", 0, member)
    await rpc.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(rpc.stop, 0)
        for tls in (member, tenant):
            async with channel(f"127.0.0.1:{port}", tls) as connection:
                one: Any = connection.unary_unary("/baton.v1.Test/Who")
                many: Any = connection.unary_stream("/baton.v1.Test/Whole")
                both: Any = connection.stream_stream("/baton.v1.Test/Session")
                calls: list[Callable[[], Awaitable[bytes]]] = [
                    partial(one, b"", timeout=WAIT_S),
                    partial(_first, many, b""),
                    partial(_first, both, [b""]),
                ]
                for call in calls:
                    if tls is member:
                        assert b"DNS:baton" in await call()
                        continue
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call()
                    assert type(from_rpc_error(refused.value, "member")) is NotAMember
        for method in ("Who", "Whole", "Session"):
            async with channel(f"127.0.0.1:{port}", tenant) as connection:
                begun: Any = connection.stream_stream(f"/baton.v1.Test/{method}")(timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await begun.read()
                assert type(from_rpc_error(refused.value, "member")) is NotAMember, "no message has been sent"
    assert members_only(None) == []


async def test_new_connections_use_what_the_files_hold_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority.make(tmp_path)
    member = _member(authority.sign("member"))
    async with _server(member) as address:
        await _asked(address, member)
        (tmp_path / "member.crt").write_text("half of a certi")
        with caplog.at_level(logging.ERROR):
            await _asked(address, member)
        assert "member.crt" in caplog.text
        assert "stay in use" in caplog.text
        begin_s, end_s = member.now().term_s
        assert begin_s < time.time() < end_s == pytest.approx(begin_s + 4 * 86_400)
        authority = Authority.make(tmp_path)  # of the same name, so its file is another one now
        old = member.channel_credentials()
        authority.sign("member")
        await _asked(address, member)
        async with grpc.aio.secure_channel(
            address, old, [*member.channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        ) as past:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = past.unary_unary("/test.Tls/Who")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=WAIT_S)


async def _seen(port: int, client: ssl.SSLContext) -> tuple[int, str]:
    """The serial number of the server's certificate, and what the server answers. Raises ssl.SSLError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
    try:
        shown = writer.get_extra_info("peercert")
        return int(shown["serialNumber"], 16), (await reader.read()).decode()
    finally:
        writer.close()


async def test_a_server_on_ssl_goes_on_with_new_files_and_asks_for_the_client(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    files = authority.sign("endpoint")
    endpoint = Tls(files, clients="optional")
    tenant = Tls(authority.sign("tenant", ["tenant.example", "spiffe://x/tenant", "127.0.0.9"]))
    anonymous = ssl.create_default_context(cafile=authority.path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(" ".join(names_in_connection(writer.get_extra_info("peercert"))).encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=endpoint.server_context()) as server:
        port = server.sockets[0].getsockname()[1]
        names = "CN:tenant DNS:tenant.example URI:spiffe://x/tenant IP:127.0.0.9"
        assert await _seen(port, tenant.client_context()) == (serial_of(files.certificate), names)
        assert await _seen(port, anonymous) == (serial_of(files.certificate), "")
        before = serial_of(files.certificate)
        other = Authority.make(tmp_path, "other")
        authority.sign("endpoint")
        assert before != serial_of(files.certificate)
        assert await _seen(port, anonymous) == (serial_of(files.certificate), "")
        copy(other.path, authority.path)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # its authority is not believed any more
            await _seen(port, tenant.client_context())


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (CertificateFiles(certificate="missing.crt", key="member.key"), "No such file"),
        (CertificateFiles(certificate="member.crt", key="other.key"), "member.crt and other.key are not"),
        (CertificateFiles(certificate="member.crt", key="member.key", authorities=("member.key",)), "authorities"),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: CertificateFiles, why: str
) -> None:
    authority = Authority.make(tmp_path)
    authority.sign("member")
    authority.sign("other")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        Tls(files)


def test_settings_that_need_each_other(tmp_path: Path) -> None:
    assert member_tls(ClusterConfig()) is None
    assert endpoint_tls(Config()) is None
    for part in ("tls_certificate", "tls_key", "tls_ca"):
        settings: dict[str, Any] = {"tls_certificate": "a", "tls_key": "b", "tls_ca": "c"} | {part: ""}
        with pytest.raises(ConfigError, match="need each other"):
            member_tls(ClusterConfig(**settings))
    with pytest.raises(ConfigError, match="need each other"):
        endpoint_tls(Config(router=RouterConfig(tls_key="a.key")))
    with pytest.raises(ConfigError, match="needs a certificate"):
        endpoint_tls(Config(router=RouterConfig(tls_client_certificates="required", tls_client_ca="ca.pem")))
    with pytest.raises(ConfigError, match="and authorities"):
        endpoint_tls(Config(router=RouterConfig(tls_client_certificates="optional", tls_certificate="a", tls_key="b")))
    files = Authority.make(tmp_path).sign("member")
    own = Authority.make(tmp_path, "public").sign("endpoint")
    config = Config(
        cluster=ClusterConfig(**cluster_settings(files)),
        router=RouterConfig(tls_certificate=own.certificate, tls_key=own.key, tls_client_certificates="required"),
    )
    endpoint = endpoint_tls(config)
    assert endpoint is not None
    assert endpoint.now().certificate == Path(own.certificate).read_bytes()
    assert endpoint.now().authorities == Path(files.authorities[0]).read_bytes(), "of clients: the cluster's"


def test_the_commands_of_the_page_make_what_members_need(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/tls.md").read_text()
    make, change = (block for block in page.split("```\n") if block.startswith("openssl"))
    subprocess.run(["sh", "-e", "-c", make], cwd=tmp_path, check=True, capture_output=True)
    certificate, key, ca = (str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt"))
    tls = member_tls(ClusterConfig(tls_certificate=certificate, tls_key=key, tls_ca=ca))
    assert tls is not None
    before = tls.now()
    subprocess.run(["sh", "-e", "-c", change], cwd=tmp_path, check=True, capture_output=True)
    assert tls.now() is not before
