"""A session in which something comes that is no message."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton import wire
from baton.messages import Hello
from baton.rpc import channel
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.transport.shm import host_id
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import decode_side


async def _read(call: AsyncIterator[bytes]) -> None:
    async for _ in call:
        pass


async def test_garbage_ends_a_session_as_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with decode_side() as decode, channel(decode.receiver.kv_address) as connection:
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id="hostile",
            incarnation="h.1",
            wire_compat="kind-a",
            transports=("shm",),
            layout=decode.receiver.layout,
            rank=0,
            peer_rank=0,
            host_id=host_id(),
        )

        async def said() -> AsyncIterator[bytes]:
            yield wire.session_request(hello).SerializeToString()
            yield b"\xff"

        sessions: Any = connection.stream_stream("/baton.v1.KvControl/Session")
        call = sessions(said(), timeout=30)
        with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message is not in protobuf's form" in (caught.value.details() or "")
        assert not [record for record in caplog.records if record.exc_info]
        await until(lambda: not decode.receiver._connections)
