"""Clients of the gRPC port that mean harm: what they send, in one connection or many. See `tests.chaos.attackers`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Iterable
from typing import Any

from tests.chaos.http_attackers import MIB
from tests.support import http2

TOKENIZE, GENERATE = "/baton.v1.Inference/Tokenize", "/baton.v1.Inference/Generate"
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNKNOWN = "/baton.v1.Inference/Nothing"
ALMOST_WHOLE = http2.message(4 * MIB)[:-1]


async def _at_once(*clients: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*clients, return_exceptions=True)


async def _keeps_back(address: str, method: str, num: int, data: bytes = ALMOST_WHOLE) -> None:
    """Sends what the server takes of so many messages on one connection, each again when its call has ended."""

    async def one(connection: http2.Connection) -> None:
        while not connection.is_closed:
            stream = connection.call(method)
            await connection.send(stream, data)
            await connection.status(stream)

    async with http2.connected(address) as connection:
        await _at_once(*(one(connection) for _ in range(num)))


async def _floods(address: str, frames: Iterable[bytes], *, reads: bool = True) -> None:
    """Sends frames until the server closes the connection."""
    async with http2.connected(address) as connection:
        if not reads:
            connection.pause_reading()
        for each in frames:
            connection.write(each)
            await connection.drain()


async def half_messages(grpc: str) -> None:
    """Messages that lack their last byte, for all methods."""
    methods = (TOKENIZE, GENERATE, UNKNOWN)
    await _at_once(*(_keeps_back(grpc, method, 60) for method in methods for _ in range(5)))


async def half_open_messages(grpc: str) -> None:
    """The same for what needs no key."""
    await _at_once(*(_keeps_back(grpc, method, 60) for method in (HEALTH, WATCH, REFLECTION) for _ in range(5)))


async def unsent_messages(grpc: str) -> None:
    """Calls of which no message comes, or the first byte."""
    calls = itertools.product((TOKENIZE, GENERATE, HEALTH, REFLECTION), (b"", b"\0"))
    await _at_once(*(_keeps_back(grpc, method, 250, data) for method, data in calls))


async def pings(grpc: str) -> None:
    """Pings, whose answers are read or not, and answers to none: 16 MiB on a connection."""
    for flags, reads in ((0, True), (0, False), (http2.ACK, True)):
        some = http2.frame(http2.PING, flags, payload=bytes(8)) * 4096
        floods = [_floods(grpc, itertools.repeat(some, 16 * MIB // len(some)), reads=reads) for _ in range(2)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_at_once(*floods), 3.0)


ATTACKS = (half_messages, half_open_messages, unsent_messages, pings)
