"""Ports are exclusive, unless several routers are to stand behind one address."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from baton.errors import ConfigError
from baton.rpc import RpcServer
from router.server import bound

HOST = "127.0.0.1"


def port_of(sockets: list[socket.socket]) -> int:
    port: int = sockets[0].getsockname()[1]
    return port


@pytest.mark.parametrize("shares_port", [True, False])
def test_http_ports_are_shared_only_if_asked(shares_port: bool) -> None:
    with ExitStack() as stack:
        first = bound(HOST, 0, shares_port)
        stack.enter_context(closing(first[0]))
        first[0].listen()
        if shares_port:
            stack.enter_context(closing(bound(HOST, port_of(first), True)[0]))
        with pytest.raises(ConfigError, match="is another program using the port"):
            bound(HOST, port_of(first), False)


@pytest.mark.parametrize("shares_port", [True, False])
async def test_grpc_ports_are_shared_only_if_asked(shares_port: bool) -> None:
    servers = [RpcServer((), shares_port=shares_port) for _ in range(2)]
    port = servers[0].bind(HOST, 0)
    await servers[0].start()
    if shares_port:
        assert servers[1].bind(HOST, port) == port
    else:
        with pytest.raises(ConfigError, match="is another program using the port"):
            servers[1].bind(HOST, port)
    exclusive = RpcServer(())
    with pytest.raises(ConfigError):
        exclusive.bind(HOST, port)
    for server in (*servers, exclusive):
        await server.stop(0)


def test_a_program_that_shares_nothing_keeps_its_port() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is another program using the port"):
            bound(HOST, taken.getsockname()[1], True)
        with pytest.raises(ConfigError):
            bound("host.invalid", 0, False)
