"""One side of a KV transfer in a process of its own, which can be killed or stopped.

Children are forked by a server process that has imported everything before, so that each starts within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import MappingProxyType
from typing import Any

import torch

from baton.config import TransferConfig
from baton.errors import BatonError
from baton.messages import Ticket
from engine.model.kv_cache import KVCache
from tests.unit.kvstore.transfer.peers import (
    NUM_BLOCKS,
    SPEC,
    Decode,
    Prefill,
    decode_side,
    filled_cache,
    prefill_side,
    tables_of,
)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Child:
    process: ForkServerProcess
    pipe: Connection

    async def ask(self, *question: Any) -> Any:
        """Raises EOFError where the child dies before it answers."""
        self.pipe.send(question)
        return await asyncio.to_thread(self.pipe.recv)

    async def expect(self, name: str, num_tokens: int, blocks: Sequence[int]) -> Ticket:
        ticket = await self.ask("expect", name, num_tokens, list(blocks))
        assert isinstance(ticket, Ticket)
        return ticket

    def signal(self, number: signal.Signals) -> float:
        """When it was sent, on the monotonic clock, which is the same in all processes."""
        assert self.process.pid
        now = time.monotonic()
        os.kill(self.process.pid, number)
        return now

    def kill(self) -> float:
        return self.signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def child(
    role: str,
    config: TransferConfig,
    incarnation: int = 1,
    die_at: str = "",
    faults: str = "",
    *,
    device: str = "cpu",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Child]:
    """`decode-9` or `prefill-9`, until the block is left. Kills itself at the message `die_at`, having said when."""
    ours, theirs = _CONTEXT.Pipe()
    cache = partial(_cache, role, device)
    args = (theirs, role, config, incarnation, die_at, faults, cache, dict(environment))
    process = _CONTEXT.Process(target=_main, args=args, daemon=True)
    await asyncio.to_thread(process.start)
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        ours.close()


def _cache(role: str, device: str) -> KVCache:
    return filled_cache(1, device=device) if role == "prefill" else KVCache(SPEC, NUM_BLOCKS, 8, torch.device(device))


def _main(
    pipe: Connection,
    role: str,
    config: TransferConfig,
    incarnation: int,
    die_at: str,
    faults: str,
    make_cache: Callable[[], KVCache],
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    with contextlib.suppress(EOFError):
        asyncio.run(_serve(pipe, role, config, incarnation, die_at, faults, make_cache()))


async def _serve(
    pipe: Connection,
    role: str,
    config: TransferConfig,
    incarnation: int,
    die_at: str,
    faults: str,
    cache: KVCache,
) -> None:
    if role == "decode":
        async with decode_side(config, "decode-9", incarnation=incarnation, caches=[cache]) as decode:
            decode.endpoint.watch = lambda kind, message: kind != die_at or _die(pipe)
            await _serve_decode(pipe, decode)
    else:
        async with prefill_side(config, faults, "prefill-9", incarnation=incarnation, caches=[cache]) as prefill:
            await _serve_prefill(pipe, prefill)


def _die(pipe: Connection) -> bool:
    pipe.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)
    return False


async def _serve_decode(pipe: Connection, decode: Decode) -> None:
    ticket: Ticket | None = None
    while True:
        match await asyncio.to_thread(pipe.recv):
            case ("expect", name, num_tokens, blocks):
                ticket = decode.receiver.expect(name, num_tokens, 0, tables_of(decode.receiver, blocks, 3))
                pipe.send(ticket)
            case ("outcome",):
                assert ticket
                try:
                    pipe.send(await decode.receiver.wait_committed(ticket))
                except BatonError as error:
                    pipe.send(type(error).__name__)
            case ("release",):
                assert ticket
                pipe.send(await decode.receiver.release(ticket))
            case ("blocks", blocks):
                pipe.send([group[:, blocks].clone().view(-1).float().tolist() for group in decode.cache.groups])


async def _serve_prefill(pipe: Connection, prefill: Prefill) -> None:
    """Sends as far as `num_layers` of the first `num_tokens` say, and finishes where there is a first token."""
    while True:
        match await asyncio.to_thread(pipe.recv):
            case ("send", ticket, blocks, num_tokens, num_layers, first_token):
                try:
                    async with prefill.sender.transfer(ticket) as transfer:
                        transfer.extend(tables_of(transfer, blocks, 3))
                        transfer.advance(num_tokens, num_layers)
                        if first_token is None:
                            await asyncio.Event().wait()
                        await transfer.finish(first_token)
                    pipe.send("committed")
                except BatonError as error:
                    pipe.send(type(error).__name__)
