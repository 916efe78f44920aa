"""Clients of the HTTP port that mean harm: what they send, in one connection or many. See `tests.chaos.attackers`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

MIB = 2**20
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"


def post(path: str, body: bytes, *fields: bytes) -> bytes:
    """A request with a body."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, which sends at once what it is given."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    opened: socket.socket = writer.get_extra_info("socket")
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _says(address: str, pieces: Iterable[bytes], *, pause_s: float = 0.0, reads: bool = True) -> None:
    """Sends pieces, then waits until the other side ends it, if it reads, or for ever."""
    async with connected(address) as (reader, writer):
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        await (reader.read() if reads else asyncio.Event().wait())


async def _at_once(*clients: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*clients, return_exceptions=True)


async def upgrades(http: str) -> None:
    """Upgrades to WebSocket and HTTP/2, each on a connection of its own that is closed at once."""
    for protocol in (b"websocket", b"h2c"):
        head = b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: %b\r\n" % protocol
        for _ in range(20):
            async with connected(http) as (_, writer):
                writer.write(head + b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
                await asyncio.sleep(0.002)


async def trailers(http: str) -> None:
    """Bodies with trailers of 60 MiB: many, and one."""
    many = itertools.chain([CHUNKED + b"2\r\n{}\r\n0\r\n"], itertools.repeat(b"x: y\r\n" * 10_000, MIB // 1000))
    one = itertools.chain([CHUNKED + b"2\r\n{}\r\n0\r\nx: "], itertools.repeat(b"y" * MIB, 60))
    await _at_once(_says(http, many), _says(http, one))


async def extensions(http: str) -> None:
    """Chunks whose lines have extensions: of 60 MiB, and a million of some bytes."""
    long = itertools.chain([CHUNKED + b"2;"], itertools.repeat(b"x" * MIB, 60))
    many = itertools.chain([CHUNKED], itertools.repeat(b"1;a=bcdefgh\r\n{\r\n" * 4_000, 250))
    await _at_once(_says(http, long), *(_says(http, many) for _ in range(8)))


async def standing_bodies(http: str) -> None:
    """Bodies of 8 MiB that lack their last byte."""
    body = post("/v1/completions", b'{"prompt":"%b"}' % (b"x" * (8 * MIB - 100)))
    await _at_once(*(_says(http, [body[:-1]]) for _ in range(40)))


async def trickled_bodies(http: str) -> None:
    """Bodies of 8 MiB that come at once, but for the last few bytes, which come one a second."""
    body = post("/v1/completions", b'{"prompt":"%b"}' % (b"x" * (8 * MIB - 100)))
    pieces = [body[:-100], *(body[number : number + 1] for number in range(len(body) - 100, len(body) - 1))]
    await _at_once(*(_says(http, pieces, pause_s=1.0) for _ in range(40)))


async def crumbs(http: str) -> None:
    """Bodies in chunks of one byte."""
    pieces = [CHUNKED, *[b"1\r\n \r\n" * 40_000] * 25, b"0\r\n\r\n"]
    await _at_once(*(_says(http, pieces) for _ in range(16)))


async def segments(http: str) -> None:
    """Bodies in packets of one byte."""
    body = post("/v1/completions", b'{"prompt":"%b"}' % (b"x" * 100_000))
    await _at_once(*(_says(http, (body[at : at + 1] for at in range(len(body)))) for _ in range(200)))


async def pipelines(http: str) -> None:
    """Thousands of requests in a connection that reads no answer."""
    await _at_once(*(_says(http, [GET * 6_000], reads=False) for _ in range(30)))


async def read_pipelines(http: str) -> None:
    """Thousands of requests in a connection that reads its answers."""
    ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    await _at_once(*(_says(http, [ask * 6_000]) for _ in range(30)))


async def unread_answers(http: str) -> None:
    """Long answers that nobody reads."""
    asks = [GET, GET.replace(b"openapi.json", b"metrics"), GET.replace(b"openapi.json", b"page/uPlot.iife.min.js")]
    await _at_once(*(_says(http, [ask], reads=False) for ask in asks * 100))


async def many_fields(http: str) -> None:
    """Heads of as many fields as may be, and addresses of as many parameters."""
    fields = b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 16_000 + b"\r\n"
    query = b"GET /healthz?" + b"a&" * 30_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    escapes = b"GET /" + b"%41" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    cookies = b"GET /healthz HTTP/1.1\r\nhost: x\r\ncookie: " + b"a=b;" * 15_000 + b"\r\n\r\n"
    await _at_once(*(_says(http, [ask] * 20) for ask in (fields, query, escapes, cookies) * 10))


BODIES = {
    "items": ("/v1/responses", b'{"input":[%b]}' % b",".join([b'{"role":"user","content":"a"}'] * 30_000)),
    "names": ("/v1/chat/completions", b"{%b}" % b",".join(b'"a%d":1' % number for number in range(600_000))),
    "biases": (
        "/v1/completions",
        b'{"prompt":"a","logit_bias":{%b}}' % b",".join(b'"%d":1' % number for number in range(500_000)),
    ),
    "wrong messages": ("/v1/chat/completions", b'{"messages":[%b]}' % b",".join([b"5"] * MIB)),
    "wrong tokens": ("/detokenize", b'{"tokens":[%b]}' % b",".join([b"1.5"] * MIB)),
    "parts": (
        "/v1/messages",
        b'{"model":"","max_tokens":1,"messages":[{"role":"user","content":[%b]}]}'
        % b",".join([b'{"type":"text","text":"a"}'] * 4_000),
    ),
    "numbers": ("/v1/completions", b'{"prompt":[%b]}' % b",".join([b"123456"] * MIB)),
    "a number": ("/v1/completions", b'{"prompt":"a","max_tokens":%b}' % (b"9" * 8_000_000)),
    "small objects": ("/v1/responses", b'{"input":[%b]}' % b",".join([b"{}"] * 12_000)),
    "a name": ("/v1/completions", b'{"prompt":"a","%b":1}' % (b"x" * 8_000_000)),
}


async def heavy_bodies(http: str) -> None:
    """Bodies that cost much to read, in all kinds, three of each at a time."""
    await _at_once(*(_says(http, [post(*each, b"connection: close")]) for each in BODIES.values() for _ in range(3)))


async def floods(http: str) -> None:
    """Small requests as fast as they are answered."""
    asks = [b"%b %b HTTP/1.1\r\nhost: x\r\n\r\n" % each for each in (
        (b"GET", b"/healthz"), (b"HEAD", b"/"), (b"OPTIONS", b"/v1/responses"), (b"GET", b"/nothing"), (b"BREW", b"/"),
        (b"GET", b"/metrics"), (b"GET", b"/openapi.json"),
    )]  # fmt: skip

    async def one(ask: bytes) -> None:
        async with connected(http) as (reader, writer):
            for _ in range(200):
                writer.write(ask)
                if not await reader.read(65536):
                    return

    await _at_once(*(one(ask) for ask in asks * 15))


async def churn(http: str) -> None:
    """Connections that are closed at once, in all ways."""

    async def one(said: bytes) -> None:
        for _ in range(50):
            async with connected(http) as (_, writer):
                writer.write(said)

    await _at_once(*(one(said) for said in (b"", b"GET", b"\x16\x03\x01\x00", POST + b"content-length: 9\r\n\r\n") * 8))


async def too_many(http: str) -> None:
    """More connections than a client may have, which stay."""
    await _at_once(*(_says(http, [b"GET"]) for _ in range(1_500)))


async def silent(http: str) -> None:
    """Connections that keep their place for as long as may be, in all ways, with as little as may be."""
    expects = POST + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n"
    answered = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    dribbled = itertools.chain([answered], itertools.repeat(b"\r\n", 100))
    half = post("/v1/completions", b'{"prompt":"hello","max_tokens":2000,"ignore_eos":true}')

    async def half_closed() -> None:
        async with connected(http) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(half)
            writer.write_eof()
            await asyncio.Event().wait()

    await _at_once(
        *(_says(http, [each]) for each in (expects, b"", b"GET", answered) for _ in range(50)),
        *(_says(http, dribbled, pause_s=1.0) for _ in range(50)),
        *(half_closed() for _ in range(20)),
    )


ATTACKS = (
    upgrades, trailers, extensions, standing_bodies, trickled_bodies, crumbs, segments, pipelines, read_pipelines,
    unread_answers, many_fields, heavy_bodies, floods, churn, too_many, silent,
)  # fmt: skip
