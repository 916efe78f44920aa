from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import NotAMember
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.rpc.doors import MemberDoor, member_metadata
from baton.trust import KeyFile, Principal, ProofBook, draw_secret, write_private

METHOD, OPEN = "/test.Closed/Call", "/test.Open/Call"


class Doors:
    """A server with a closed and an open service, and what reached them."""

    def __init__(self, secret: Path) -> None:
        self.secret = secret
        self.parsed: list[bytes] = []

    def parse(self, message: bytes) -> bytes:
        self.parsed.append(message)
        return message

    async def call(self, method: str, metadata: Any, message: bytes = b"hello") -> bytes:
        async with channel(self.address) as link:
            answer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.unary_unary(method)
            try:
                return await answer(message, metadata=metadata, timeout=20)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, "the server") from error

    address = ""


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    secret = tmp_path / "secret"
    write_private(secret, draw_secret())
    found = Doors(secret)
    book = ProofBook(KeyFile(secret, Principal.WORKER), "a1")
    rpc = RpcServer((), [MemberDoor(book, {"test.Closed": {Principal.ROUTER}})])

    async def answer(request: bytes, context: Any) -> bytes:
        return request * 2

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=found.parse
    )
    for name in ("test.Closed", "test.Open"):
        rpc.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Call": handler})])
    found.address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    yield found
    await rpc.stop(0)


async def test_a_member_comes_in_and_a_stranger_does_not_even_have_its_message_read(doors: Doors) -> None:
    router = KeyFile(doors.secret, Principal.ROUTER)
    assert await doors.call(METHOD, member_metadata(router, METHOD, "a1")) == b"hellohello"
    doors.parsed.clear()
    used = member_metadata(router, METHOD, "a1")
    await doors.call(METHOD, used, b"once")
    for metadata in (
        (),
        used,
        member_metadata(router, METHOD, "b2"),
        member_metadata(KeyFile(doors.secret, Principal.WORKER), METHOD, "a1"),
        (("baton-proof-bin", b"\0" * 97),),
        (("baton-proof", "text"),),
    ):
        with pytest.raises(NotAMember):
            await doors.call(METHOD, metadata)
    assert doors.parsed == [b"once"]


async def test_what_is_not_closed_is_open(doors: Doors) -> None:
    assert await doors.call(OPEN, ()) == b"hellohello"
    assert member_metadata(None, METHOD, "a1") == ()
