"""Redis over TLS: whom a connection believes, and that it takes new certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.config import ClusterConfig
from baton.errors import StoreUnavailable
from baton.tls import CertificateFiles, Tls, member_tls
from kvstore.index import RedisConnection
from tests.support.certificates import Authority, cluster_settings


async def _pong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every command alike."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            num_parts = int((await reader.readuntil(b"\r\n"))[1:])
            for _ in range(num_parts):
                length = int((await reader.readuntil(b"\r\n"))[1:])
                await reader.readexactly(length + 2)
            writer.write(b"+PONG\r\n")
    writer.close()


@contextlib.asynccontextmanager
async def _redis(files: CertificateFiles) -> AsyncIterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.authorities[0])
    context.verify_mode = ssl.CERT_REQUIRED
    async with await asyncio.start_server(_pong, "127.0.0.1", 0, ssl=context) as server:
        yield f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        server.close()


def _member(files: CertificateFiles) -> Tls:
    found = member_tls(ClusterConfig(**cluster_settings(files)))
    assert found is not None
    return found


async def _asked(url: str, tls: Tls | None) -> object:
    connection = RedisConnection(url, tls=tls)
    try:
        return await connection.call("PING")
    finally:
        await connection.close()


async def test_members_show_their_certificate_and_believe_their_authority(tmp_path: Path) -> None:
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "other")
    member, stranger = _member(authority.sign("member")), _member(other.sign("stranger"))
    async with _redis(authority.sign("redis", ["127.0.0.1"])) as url:
        assert await _asked(url, member) is True
        for no_member in (None, stranger):
            with pytest.raises(StoreUnavailable):
                await _asked(url, no_member)
        files = authority.sign("of-the-url")
        options = f"ssl_ca_certs={authority.path}&ssl_certfile={files.certificate}&ssl_keyfile={files.key}"
        assert await _asked(f"{url}?{options}", stranger) is True, "the URL's own options win"
    async with _redis(authority.sign("redis", ["elsewhere.example"])) as url:
        with pytest.raises(StoreUnavailable, match="certificate"):
            await _asked(url, member)


async def test_a_connection_that_is_opened_again_takes_the_new_certificates(tmp_path: Path) -> None:
    member = _member(Authority.make(tmp_path).sign("member"))
    connection = RedisConnection("rediss://127.0.0.1:1/0", tls=member)
    pool = connection._redis.connection_pool
    link = pool.make_connection()
    before = link._connection_arguments()["ssl"]
    assert link._connection_arguments()["ssl"] is before
    Authority.make(tmp_path).sign("member")
    assert link._connection_arguments()["ssl"] is not before
    await connection.close()
