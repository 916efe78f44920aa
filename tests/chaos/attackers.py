"""Clients that mean harm, at nice 19: python -m tests.chaos.attackers KIND GRPC HTTP SECONDS.

They print a line when they begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos import grpc_attackers, http_attackers
from tests.chaos.http_attackers import MIB

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
Attack = Callable[[str, str], Coroutine[Any, Any, None]]


@functools.cache
def _say_begins() -> None:
    """Prints a line, once: what is sent has been made."""
    print("begins", flush=True)


async def _http(address: str, *pieces: bytes, pause_s: float = 0.0, reads: bool = True) -> None:
    """Sends pieces, and reads what comes, if at all."""
    _say_begins()
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        await (reader.read() if reads else asyncio.Event().wait())
    finally:
        writer.close()


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


async def _generate(address: str, message: inference_pb2.GenerateRequest, *, reads: bool = True) -> None:
    _say_begins()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(message)
        if not reads:
            await asyncio.Event().wait()
        async for _ in call:
            pass


async def heads(grpc_address: str, http: str) -> None:
    """Heads of 100 MiB."""
    await _http(http, b"GET / HTTP/1.1\r\nx: ", *[b"x" * MIB] * 100)


async def slow_heads(grpc_address: str, http: str) -> None:
    """300 heads that come a byte a second."""
    head = b"GET /healthz HTTP/1.1\r\nx: " + b"x" * 600
    await asyncio.gather(*(_http(http, *[bytes([each]) for each in head], pause_s=1.0) for _ in range(300)))


async def ids(grpc_address: str, http: str) -> None:
    """64 MiB of token ids: in one message, in four as long as may be, in four of as many as may be, and over HTTP."""
    messages = {num: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[300] * num)) for num in (
        32 * MIB, 2 * MIB - 100, MIB
    )}  # fmt: skip
    bodies = {num: _post("/v1/completions", b'{"prompt":[%b]}' % b",".join([b"5"] * num)) for num in (
        32 * MIB, 4 * MIB - 100, MIB
    )}  # fmt: skip
    calls = [_generate(grpc_address, messages[num]) for num in (32 * MIB, *[2 * MIB - 100, MIB] * 4)]
    posts = [_http(http, bodies[num]) for num in (32 * MIB, *[4 * MIB - 100, MIB] * 4)]
    await asyncio.gather(*posts, *calls, return_exceptions=True)


async def messages(grpc_address: str, http: str) -> None:
    """Chats of 200,000 messages, eight at a time."""
    body = b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"a"}'] * 200_000)
    message = inference_pb2.GenerateRequest()
    message.chat.messages.extend([inference_pb2.ChatMessage(role="user", content="a")] * 200_000)
    posts = [_http(http, _post("/v1/chat/completions", body)) for _ in range(4)]
    await asyncio.gather(*posts, *(_generate(grpc_address, message) for _ in range(4)), return_exceptions=True)


async def prompts(grpc_address: str, http: str) -> None:
    """Prompts as long as may be, full of special tokens, sixteen at a time."""
    message = inference_pb2.GenerateRequest()
    message.chat.messages.add(role="user", content="<|im_end|>" * 60_000)
    await asyncio.gather(*(_generate(grpc_address, message) for _ in range(16)), return_exceptions=True)


async def readers(grpc_address: str, http: str) -> None:
    """600 clients that never read their answers, of more than gRPC sends unread, 60 of them over HTTP."""
    sampling = inference_pb2.SamplingParams(max_tokens=250, ignore_eos=True, logprobs=20)
    message = inference_pb2.GenerateRequest(text="hello", sampling=sampling)
    body = b'{"prompt":"hello","max_tokens":250,"ignore_eos":true,"logprobs":20,"stream":true}'
    posts = [_http(http, _post("/v1/completions", body), reads=False) for _ in range(60)]
    await asyncio.gather(*posts, *(_generate(grpc_address, message, reads=False) for _ in range(540)))


def _over_http(attack: Callable[[str], Coroutine[Any, Any, None]]) -> Attack:
    def run(grpc_address: str, http: str) -> Coroutine[Any, Any, None]:
        _say_begins()
        return attack(http)

    return run


def _over_grpc(attack: Callable[[str], Coroutine[Any, Any, None]]) -> Attack:
    def run(grpc_address: str, http: str) -> Coroutine[Any, Any, None]:
        _say_begins()
        return attack(grpc_address)

    return run


OVER_HTTP = {each.__name__: _over_http(each) for each in http_attackers.ATTACKS}
OVER_GRPC = {each.__name__: _over_grpc(each) for each in grpc_attackers.ATTACKS}
ATTACKS: dict[str, Attack] = {
    **{each.__name__: each for each in (heads, slow_heads, ids, messages, readers, prompts)},
    **OVER_HTTP,
    **OVER_GRPC,
}


async def main(kind: str, grpc_address: str, http: str, seconds: float) -> None:
    os.nice(19)
    until_s = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while time.monotonic() < until_s:
                with contextlib.suppress(OSError, grpc.RpcError):
                    await ATTACKS[kind](grpc_address, http)
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
