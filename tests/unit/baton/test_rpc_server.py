from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.rpc import RpcServer, channel


async def tell_peer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    """Tells each call which connection it came by, so many times as `request` is long, 50 ms apart."""
    for _ in request:
        yield context.peer().encode()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("age_s", [0.2, math.inf])
async def test_clients_connect_anew_after_a_while_and_streams_go_on(age_s: float) -> None:
    rpc = RpcServer((), max_connection_age_s=age_s)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Tell": grpc.unary_stream_rpc_method_handler(tell_peer)}
    rpc.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Peers", handlers)])
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        tell: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = connection.unary_stream("/test.Peers/Tell")

        async def peers(times: int) -> list[bytes]:
            return [peer async for peer in tell(bytes(times))]

        stream = asyncio.create_task(peers(30))
        others = [(await peers(1))[0] for _ in range(20)]
        streamed = await stream
    await rpc.stop(0)
    assert len(streamed) == 30
    assert set(streamed) == {others[0]}, "a stream stays on its connection"
    assert (len(set(others)) > 1) == (age_s < math.inf)
