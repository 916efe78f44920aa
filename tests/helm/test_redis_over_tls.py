"""The chart's Redis with certificates, as its pod starts it: whom it admits, and that it follows renewed ones."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from baton.config import ClusterConfig
from baton.errors import StoreUnavailable
from baton.tls import CertificateFiles, member_tls
from kvstore.index import RedisConnection
from tests.contract import redis7
from tests.helm.chart import MATRIX, Object, render, the
from tests.helm.test_redis import command, free_port, server
from tests.support.certificates import Authority, cluster_settings, copy
from tests.support.waiting import until, wait_until

HERE = ["baton", "127.0.0.1"]
LOOK_S = "0.1"


def with_certificate(files: CertificateFiles) -> tuple[Object, ...]:
    """The chart's objects where an issuer has signed these."""
    named = {"tls.crt": files.certificate, "tls.key": files.key, "ca.crt": files.authorities[0]}
    data = {name: base64.b64encode(Path(path).read_bytes()).decode() for name, path in named.items()}
    return (*render(MATRIX["tls"]), {"kind": "Secret", "metadata": {"name": "baton-tls"}, "data": data})


def renew(files: CertificateFiles, folder: Path) -> None:
    """Has the pod's folder hold these."""
    copy(files.certificate, str(folder / "tls" / "tls.crt"))
    copy(files.key, str(folder / "tls" / "tls.key"))
    copy(files.authorities[0], str(folder / "tls" / "ca.crt"))


def serial_number(port: int, files: CertificateFiles) -> int:
    """Returns the number of the certificate that the server shows."""
    context = ssl.create_default_context(cafile=files.authorities[0])
    context.load_cert_chain(files.certificate, files.key)
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        context.wrap_socket(raw, server_hostname="baton") as over,
    ):
        shown = over.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def ask_without_a_certificate(port: int, files: CertificateFiles) -> bytes:
    context = ssl.create_default_context(cafile=files.authorities[0])
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        context.wrap_socket(raw, server_hostname="baton") as over,
    ):
        over.sendall(b"PING\r\n")
        return over.recv(100)


async def pong(objects: tuple[Object, ...], port: int, files: CertificateFiles | None, scheme: str = "rediss") -> bytes:
    password = base64.b64decode(the(objects, "Secret", "baton-redis")["data"]["router"]).decode()
    tls = member_tls(ClusterConfig(**cluster_settings(files))) if files else None
    connection = RedisConnection(f"{scheme}://router:{password}@127.0.0.1:{port}/0", tls=tls)
    try:
        answer: bytes = await connection.call("PING")
        return answer
    finally:
        await connection.close()


async def test_members_get_in_and_renewed_certificates_are_shown(tmp_path: Path) -> None:
    authority, other = Authority.make(tmp_path), Authority.make(tmp_path, "other")
    member, stranger = authority.sign("member", HERE), other.sign("stranger", HERE)
    objects = with_certificate(member)
    binary, path = redis7.binary(), f"{redis7.client().parent}:{os.environ['PATH']}"
    with server(objects, "redis", tmp_path, binary, LOOK_S=LOOK_S, PATH=path) as port:
        assert await pong(objects, port, member) in (b"PONG", True)
        for files, scheme in ((stranger, "rediss"), (None, "rediss"), (None, "redis")):
            with pytest.raises(StoreUnavailable):
                await pong(objects, port, files, scheme)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask_without_a_certificate(port, member)
        before = serial_number(port, member)
        renew(authority.sign("member", HERE), tmp_path)
        await until(lambda: serial_number(port, member) != before)
        assert await pong(objects, port, member) in (b"PONG", True)
        renew(stranger, tmp_path)  # another authority, too
        await until(lambda: serial_number(port, stranger), not_yet=(ssl.SSLError, OSError))
        assert await pong(objects, port, stranger) in (b"PONG", True)


def test_a_server_hears_of_changed_certificates_until_it_has_read_them(tmp_path: Path) -> None:
    """The server and its client are stand-ins, of which the second fails once."""
    authority = Authority.make(tmp_path)
    objects = with_certificate(authority.sign("member", HERE))
    (binaries := tmp_path / "bin").mkdir()
    for name, text in (
        ("redis-server", "sleep 60"),
        (
            "redis-cli",
            f"echo $REDISCLI_AUTH $* >> {tmp_path}/said\n[ $(wc -l < {tmp_path}/said) -gt 1 ] && echo OK || echo no",
        ),
    ):
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    words, env = command(objects, "redis", tmp_path, free_port(), binaries / "redis-server")
    env |= {"LOOK_S": LOOK_S, "PATH": f"{binaries}:{os.environ['PATH']}"}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    said = tmp_path / "said"
    try:
        assert process.stdout is not None
        acl = tmp_path / "users" / "users.acl"
        wait_until(lambda: acl.exists() and "user certificates" in acl.read_text())
        renew(authority.sign("member", HERE), tmp_path)
        assert process.stdout.readline() == "certificates have changed: no\n"
        assert process.stdout.readline() == "certificates have changed: OK\n"
        renew(authority.sign("member", HERE), tmp_path)
        assert process.stdout.readline() == "certificates have changed: OK\n"
        password, *words = said.read_text().splitlines()[0].split()
        folder = tmp_path / "tls"
        assert words == [
            *("-s", str(tmp_path / "users" / "redis.sock"), "--user", "certificates", "config", "set"),
            *("tls-cert-file", str(folder / "tls.crt"), "tls-key-file", str(folder / "tls.key")),
            *("tls-ca-cert-file", str(folder / "ca.crt")),
        ]
        assert len(password) == 64
        assert password not in acl.read_text()
    finally:
        os.killpg(process.pid, 9)
        process.communicate()
