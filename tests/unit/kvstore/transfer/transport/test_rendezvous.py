"""What a peer may say while a link is opened, and what becomes of a worker whose peer says something else.

The worker is a process of its own: a value that a library cannot read may end it without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch

from baton import wire
from baton.errors import BatonError, transfer_error_of
from baton.messages import Hello, Rendezvous, SessionFailed, Welcome
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.connection.control_stream import open_channel
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import StagingPool
from tests.unit.kvstore.transfer.child import Child, child
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    decode_side,
    kv_transfer,
    prefill_side,
    send,
    served,
    tables_of,
    with_link,
)
from tests.unit.kvstore.transfer.transport.ends import transport_end

pytestmark = pytest.mark.timeout(60)

KINDS = ("tcp", "shm")
SOON_S = 5.0
"""For an error that needs no wait, on a machine whose processors others use too."""


def said(kind: str) -> dict[int, tuple[str, bytes]]:
    """What the two ranks of a link say while it is opened."""
    values: dict[int, tuple[str, bytes]] = {}
    stores: list[RendezvousStore] = []

    def publish(rank: int) -> Callable[[str, bytes], None]:
        def say(key: str, value: bytes) -> None:
            values[rank] = key, value
            stores[1 - rank].deliver(key, value)

        return say

    stores += [RendezvousStore(publish(SENDER)), RendezvousStore(publish(RECEIVER))]
    with ThreadPoolExecutor(2) as threads:
        staging = StagingPool(2, 100, torch.device("cpu"))
        opening = [
            threads.submit(opens, kind, transport_end(store, staging, 2))
            for opens, store in zip((open_sender, open_receiver), stores, strict=True)
        ]
        for link in [each.result() for each in opening]:
            link.close()
    return values


def damaged(kind: str, value: bytes) -> Iterator[bytes]:
    """No longer of the form that it had."""
    rng = random.Random(7)
    if value:
        yield b""
    yield from (rng.randbytes(length) for length in (1, 7, 8, 41, 48, 168, 170, 1024, 4096) if length != len(value))
    yield from (bytes(length) for length in (8, 170, 4096))
    yield value + b"\0"
    yield value * 100 or bytes(4096)
    if not value:
        return
    yield from (value[:length] for length in (1, 8, len(value) // 2))
    for place in (0, 1, 10, 20, 31, len(value) - 1):
        yield value[:place] + bytes([value[place] ^ 0x80]) + value[place + 1 :]


async def answers(address: str, hello: Hello, *rendezvous: Rendezvous) -> tuple[list[Any], float]:
    """What a worker says to a session, until it fails it, and after how long."""
    heard: list[Any] = []
    async with open_channel(address) as channel, asyncio.timeout(30):
        stub: Any = kv_pb2_grpc.KvControlStub(channel)
        call = stub.Session()
        requests: tuple[Hello | Rendezvous, ...] = (hello, *rendezvous)
        for message in requests:
            await call.write(wire.session_request(message))
        start = time.monotonic()
        async for answer in call:
            heard.append(wire.session_response_from_pb(answer))
            if isinstance(heard[-1], SessionFailed):
                break
        call.cancel()
    return heard, time.monotonic() - start


async def hello_of(config: Any) -> Hello:
    async with prefill_side(config) as prefill:
        return prefill.sender._connections._hello


@pytest.mark.parametrize("kind", KINDS)
async def test_no_value_of_a_sender_ends_a_worker(kind: str) -> None:
    config = with_link(kind, CONFIG, open_timeout_s=20.0)
    hello = await hello_of(config)
    key, value = said(kind)[SENDER]
    async with child("decode", config) as decode, prefill_side(config) as prefill:
        ticket = await decode.expect("t", 160, list(range(10)))
        for garbage in damaged(kind, value):
            heard, took_s = await answers(ticket.kv_address, hello, Rendezvous(key, garbage))
            assert f"the peer sent {len(garbage)} bytes as '{key}'" in heard[-1].reason, heard
            assert type(transfer_error_of(heard[-1].reason)).__name__ in heard[-1].reason
            assert took_s < SOON_S
        for others in (said(kind)[RECEIVER][0], "", "0/7", "k" * 4000):
            heard, took_s = await answers(ticket.kv_address, hello, Rendezvous(others, value))
            assert "which no such transport sends" in heard[-1].reason
            assert took_s < SOON_S
        await send(prefill, ticket, list(range(10)))
        assert await decode.ask("outcome")
        assert decode.process.is_alive()


class Impostor(kv_pb2_grpc.KvControlServicer):
    """A receiver that welcomes whom it likes, and says what it likes."""

    def __init__(self, welcome: Welcome, *rendezvous: Rendezvous) -> None:
        self.says: tuple[Welcome | Rendezvous, ...] = (welcome, *rendezvous)

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        for message in self.says:
            await context.write(wire.session_response(message))
        with contextlib.suppress(grpc.aio.InternalError):
            async for _ in request_iterator:
                pass

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing is pulled here")


@contextlib.asynccontextmanager
async def sending_to_an_impostor(kind: str) -> AsyncIterator[tuple[Child, Impostor, Any]]:
    config = with_link(kind, CONFIG, open_timeout_s=20.0)
    impostor = Impostor(Welcome("decode-0.1", kind, 1))
    async with (
        decode_side(config) as decode,
        served(impostor) as (address, _),
        child("prefill", config) as prefill,
    ):
        ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, list(range(10)), 3))
        yield prefill, impostor, dataclasses.replace(ticket, kv_address=address)
        await decode.receiver.release(ticket)
        good = decode.receiver.expect("good", 160, 0, tables_of(decode.receiver, list(range(10)), 3))
        assert await prefill.ask("send", good, list(range(10)), 160, 5, 1) == "committed"
        await decode.receiver.release(good)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_value_of_a_receiver_ends_a_worker(kind: str) -> None:
    key, value = said(kind)[RECEIVER]
    async with sending_to_an_impostor(kind) as (prefill, impostor, ticket):
        for garbage in damaged(kind, value):
            impostor.says = (impostor.says[0], Rendezvous(key, garbage))
            start = time.monotonic()
            assert await prefill.ask("send", ticket, list(range(10)), 160, 5, 1) == "TransferError"
            assert time.monotonic() - start < SOON_S


def at_another_host(value: bytes, port: int) -> bytes:
    """What a sender says of itself, with 127.0.0.2 and that port in it."""
    return b"%b 127.0.0.2 %d" % (value.split()[0], port)


@contextlib.contextmanager
def waiting_for_callers() -> Iterator[socket.socket]:
    """Listens where nobody shall come."""
    with socket.create_server(("127.0.0.2", 0)) as listener:
        yield listener
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


async def test_a_worker_connects_to_no_host_that_only_its_sender_names() -> None:
    config = with_link("tcp")
    hello = await hello_of(config)
    key, value = said("tcp")[SENDER]
    async with decode_side(config) as decode:
        with waiting_for_callers() as listener:
            elsewhere = Rendezvous(key, at_another_host(value, listener.getsockname()[1]))
            heard, took_s = await answers(decode.receiver.kv_address, hello, elsewhere)
            assert "they name another host than the peer's" in heard[-1].reason
            assert took_s < SOON_S


async def test_values_of_the_right_form_that_lead_nowhere_end_in_time() -> None:
    config = with_link("tcp", CONFIG, open_timeout_s=0.3)
    hello = await hello_of(config)
    key, value = said("tcp")[SENDER]
    token, host, port = value.split()
    async with child("decode", config) as decode:
        ticket = await decode.expect("t", 160, list(range(10)))
        for place in (1, 2):
            astray = b"%b %b %d" % (token, host, int(port) ^ place)
            heard, took_s = await answers(ticket.kv_address, hello, Rendezvous(key, astray))
            assert isinstance(heard[-1], SessionFailed)
            assert took_s < config.open_timeout_s + 2 * SOON_S
        assert decode.process.is_alive()


# -- which kind it is --------------------------------------------------------------------------------------------------


async def test_a_kind_is_for_those_who_ask_for_it() -> None:
    """A worker takes no kind that it has not configured, in either role, and says which it has."""
    ours = dataclasses.replace(CONFIG, transports=("tcp",))
    hello = await hello_of(with_link("shm"))
    async with decode_side(ours) as decode:
        decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, list(range(10)), 3))
        heard, _ = await answers(decode.receiver.kv_address, hello, Rendezvous("0/0", b""))
        assert heard[-1] == SessionFailed(
            "TransferRefused: worker prefill-0 offers the transports shm, worker decode-0 can use tcp"
        )
        async with prefill_side(dataclasses.replace(CONFIG, transports=("shm", "tcp"))) as prefill:
            await kv_transfer(prefill, decode, [4, 5], [20, 21])
            assert [pair.transport_kind for pair in prefill.sender._connections._alive] == ["tcp"], (
                "what both have is used"
            )


async def test_a_receiver_chooses_among_what_it_was_offered() -> None:
    impostor = Impostor(Welcome("decode-0.1", "shm", 1), Rendezvous("0/1", b""))
    async with (
        decode_side(with_link("tcp")) as decode,
        prefill_side(with_link("tcp")) as prefill,
        served(impostor) as (address, _),
    ):
        ticket = decode.receiver.expect("t", 160, 0, tables_of(decode.receiver, list(range(10)), 3))
        with pytest.raises(BatonError, match="worker decode-0 chose a 'shm' transport, this worker offered tcp"):
            await send(prefill, dataclasses.replace(ticket, kv_address=address), list(range(10)))
        await decode.receiver.release(ticket)
        await kv_transfer(prefill, decode, [4, 5], [20, 21])
