"""The clients of the router benchmark, as lean as Python allows: each serves one request at a time.

`Direct` calls the workers as the router does, without a router; `Grpc` and `Http` call a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from opentelemetry.context import Context

from baton import wire
from baton.messages import FirstToken, NewTokens, SequenceSpec, Ticket
from baton.rpc.server import CHANNEL_OPTIONS
from baton.sampling import SamplingParams
from baton.v1 import inference_pb2, inference_pb2_grpc
from kvstore.index import RedisConnection
from router.serve.worker_client import WorkerClient
from tests.support.builders import worker

OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: tuple[str, ...]
    """Of user and assistant in turns; the last one is the user's."""
    token_ids: tuple[int, ...]
    """For those who ask without a router."""

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(self.messages)]


class Client(Protocol):
    async def ask(self, prompt: Prompt, num_tokens: int, gap_us: int) -> int:
        """One request to its end; returns the tokens (over HTTP: the chunks) that came."""
        ...

    async def close(self) -> None: ...


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, OWN_CONNECTION])


class Direct:
    def __init__(self, address: str, disaggregated: bool) -> None:
        self._worker = worker(address=address, known_fields=wire.KNOWN_FIELDS)
        self._calls = WorkerClient()
        self._disaggregated = disaggregated

    async def ask(self, prompt: Prompt, num_tokens: int, gap_us: int) -> int:
        length = len(prompt.token_ids)
        spec = SequenceSpec(
            request_id="r",
            choice_index=0,
            token_ids=prompt.token_ids,
            num_prompt_tokens=length,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=gap_us),
            cache_seed=b"",
        )
        count = 0
        async with contextlib.AsyncExitStack() as stack:
            decode = await stack.enter_async_context(
                self._calls.decode(self._worker, spec, await_kv=self._disaggregated, trace=Context())
            )
            if self._disaggregated:
                ticket = await decode.read()
                assert isinstance(ticket, Ticket)
                prefill = await stack.enter_async_context(
                    self._calls.prefill(self._worker, spec, ticket, source=None, trace=Context())
                )
                count += isinstance(await prefill.read(), FirstToken)
                await prefill.read()
            while count < num_tokens:
                message = await decode.read()
                assert isinstance(message, NewTokens)
                count += len(message.token_ids)
        return count

    async def close(self) -> None:
        await self._calls.close()


class Grpc:
    def __init__(self, address: str) -> None:
        self._channel = _channel(address)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    async def ask(self, prompt: Prompt, num_tokens: int, gap_us: int) -> int:
        messages = [
            inference_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in prompt.chat
        ]
        call = self._stub.Generate(
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatInput(messages=messages),
                sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, seed=gap_us, temperature=0.0),
            )
        )
        count = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            count += len(message.token_ids)
        return count

    async def close(self) -> None:
        await self._channel.close()


class BareRedis:
    """A bare round trip to Redis, as the router makes it: the smallest command that there is."""

    def __init__(self, url: str) -> None:
        self._connection = RedisConnection(url)

    async def ask(self, prompt: Prompt, num_tokens: int, gap_us: int) -> int:
        await self._connection.call("PING")
        return num_tokens

    async def close(self) -> None:
        await self._connection.close()


class Http:
    """HTTP/1.1 on a kept connection, by hand: an HTTP library would cost more than the router."""

    def __init__(self, address: str, stream: bool, key: str = "") -> None:
        self._key = key
        self._host, _, self._port = address.partition(":")
        self._stream = stream
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, prompt: Prompt, num_tokens: int, gap_us: int) -> int:
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port), limit=2**22)
        reader, writer = self._reader, self._writer
        body = json.dumps(
            {
                "messages": prompt.chat,
                "max_tokens": num_tokens,
                "seed": gap_us,
                "temperature": 0,
                "stream": self._stream,
                "stream_options": {"include_usage": True} if self._stream else None,
            }
        ).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"x-api-key: %b\r\nContent-Length: %d\r\n\r\n" % (self._key.encode(), len(body)) + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the router answered {head.decode(errors='replace')}")
        if not self._stream:
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            return int(json.loads(await reader.readexactly(length))["usage"]["completion_tokens"])
        usage = b""
        while size := int(await reader.readline(), 16):
            # The text is not parsed, as no router costs depend on it. An event may hold several tokens.
            event = await reader.readexactly(size + 2)
            usage = event if b'"completion_tokens"' in event else usage
        await reader.readline()
        return int(usage.partition(b'"completion_tokens":')[2].partition(b",")[0])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
