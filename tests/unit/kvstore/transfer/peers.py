"""Both sides of a KV transfer, over real gRPC and real links; what the tests of the KV transfer share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import torch

from baton.config import TestingConfig, TransferConfig
from baton.kv_layout import KvLayout
from baton.messages import PrefixSource, SequenceSpec, Ticket, Transferred
from baton.rpc.arrivals import Arrivals
from baton.rpc.errors import ErrorInterceptor, MalformedCount
from baton.rpc.member_auth import WORKERS_RULES, member_auth
from baton.rpc.server import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from baton.tasks import cancel_and_wait
from baton.tls import Tls
from baton.trust import KeyFile
from baton.v1 import kv_pb2_grpc
from engine.core.engine import Engine
from engine.core.loop import EngineLoop, SequenceHandle
from engine.core.outputs import Generated, OnEngineEvent
from engine.core.runner import BlockTables, KVSpec, LayerGroup, StateSpec
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner
from kvstore.transfer.copy.blocks import choose_copies
from kvstore.transfer.endpoint import KvEndpoint, WorkerContext
from kvstore.transfer.local_worker import LocalWorker
from kvstore.transfer.protocol.plan import heads_of
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender, OutgoingTransfer
from tests.support.builders import sequence_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

torch.set_num_threads(1)

HOST = "127.0.0.1"
SPEC = KVSpec(
    (
        LayerGroup(name="global", layers=(0, 1, 2), num_kv_heads=2, k_dim=8, v_dim=8, block_size=16, dtype="bfloat16"),
        LayerGroup(name="window", layers=(3, 4), num_kv_heads=1, k_dim=8, v_dim=4, block_size=16, dtype="float32"),
    ),
    (StateSpec("conv", (33,), "float32"),),
)
"""Two groups of layers and a state: a transfer of 100 tokens is some ten chunks of CONFIG's slots."""
CONFIG = TransferConfig(
    slot_bytes=4096, window=3, open_timeout_s=5.0, op_timeout_s=10.0, ping_s=0.5, resend_s=0.3, lease_s=20.0
)
SOON_S = 15.0
"""Shorter than CONFIG's lease, with which everything goes in the end."""
NUM_BLOCKS = 64


def with_link(link: str, config: TransferConfig = CONFIG, **changes: Any) -> TransferConfig:
    return dataclasses.replace(config, transports=(link,), **changes)


def tables_of(
    side: KvSender | KvReceiver | OutgoingTransfer, block_ids: Iterable[int], state_slot: int = 0
) -> BlockTables:
    """Block tables of a sequence with the same blocks in every layer group, and the state in `state_slot`."""
    layout = side._sender.layout if isinstance(side, OutgoingTransfer) else side.layout
    return (tuple(block_ids),) * len(layout.groups) + (((state_slot,),) if layout.states else ())


# -- what is in a cache ----------------------------------------------------------------------------------------------


def filled_cache(seed: int, spec: KVSpec = SPEC, num_blocks: int = NUM_BLOCKS, device: str = "cpu") -> KVCache:
    cache = KVCache(spec, num_blocks, max_num_seqs=8, device=torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.groups, *cache.states.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def same_blocks(a: KVCache, a_ids: Sequence[int], b: KVCache, b_ids: Sequence[int]) -> bool:
    """Bit by bit."""
    pairs = zip(a.groups, b.groups, strict=True)
    return all(torch.equal(x[:, list(a_ids)].view(torch.uint8), y[:, list(b_ids)].view(torch.uint8)) for x, y in pairs)


def is_blank(cache: KVCache, block_ids: Sequence[int], layers: slice = slice(None), group: int = 0) -> bool:
    return not cache.groups[group][layers, list(block_ids)].any()


def tokens_in(
    layout: KvLayout, caches: Sequence[KVCache], block_ids: Sequence[int], num_tokens: int
) -> list[torch.Tensor]:
    """K and V of every group, `[layers, heads, tokens, dim]`, of all ranks together; read without plan or rows."""
    found = []
    size, blocks = layout.block_size, list(block_ids[: -(-num_tokens // layout.block_size)])
    for number, group in enumerate(layout.groups):
        ks: list[torch.Tensor] = []
        vs: list[torch.Tensor] = []
        for rank, cache in enumerate(caches):
            num_heads = len(heads_of(group, layout.tp_size, rank))
            rows = cache.groups[number][:, blocks].view(len(group.layers), len(blocks), num_heads, -1)
            at = size * group.k_dim
            for page, dim, out in ((rows[..., :at], group.k_dim, ks), (rows[..., at:], group.v_dim, vs)):
                by_token = page.reshape(len(group.layers), len(blocks), num_heads, size, dim).transpose(1, 2)
                out.append(by_token.flatten(2, 3)[:, :, :num_tokens])
        found += [torch.cat(ks, dim=1), torch.cat(vs, dim=1)]
    return found


# -- the two sides ---------------------------------------------------------------------------------------------------

Watch = Callable[[str, Any], bool]
"""Told the kind of a session's message, as in `>offer` or `<grant`, and the message. False: it gets lost."""


class Endpoint(kv_pb2_grpc.KvControlServicer):
    """The server side of sessions, where every message can be counted, and lost.

    Attributes:
        messages: how many of each kind have passed.
    """

    def __init__(self, receiver: KvReceiver) -> None:
        self.messages: Counter[str] = Counter()
        self.watch: Watch = lambda kind, message: True
        self._receiver = receiver

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        await self._receiver.session(self._requests(request_iterator), _Answers(context, self))

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no sender behind this endpoint")

    async def _requests(self, requests: Any) -> AsyncGenerator[Any]:
        async for request in requests:
            if self.passes(">", request):
                yield request

    def passes(self, direction: str, message: Any) -> bool:
        kind = f"{direction}{message.WhichOneof('message')}"
        self.messages[kind] += 1
        return self.watch(kind, message)

    def lose(self, kind: str, times: int = 1) -> None:
        """The next `times` messages of a kind get lost."""
        left = times

        def watch(passing: str, message: Any) -> bool:
            nonlocal left
            left -= passing == kind
            return passing != kind or left < 0

        self.watch = watch


class _Answers:
    """A handler's context."""

    def __init__(self, context: Any, endpoint: Endpoint) -> None:
        self._context = context
        self._endpoint = endpoint

    def peer(self) -> str:
        peer: str = self._context.peer()
        return peer

    async def write(self, message: Any) -> None:
        if self._endpoint.passes("<", message):
            await self._context.write(message)


@dataclass(frozen=True)
class Decode:
    receiver: KvReceiver
    caches: tuple[KVCache, ...]
    endpoint: Endpoint

    @property
    def cache(self) -> KVCache:
        (cache,) = self.caches
        return cache

    @property
    def num_pairs_ever(self) -> int:
        return self.receiver._num_connections_ever


@dataclass(frozen=True)
class Prefill:
    sender: KvSender
    caches: tuple[KVCache, ...]

    @property
    def cache(self) -> KVCache:
        (cache,) = self.caches
        return cache


@contextlib.asynccontextmanager
async def served(
    servicer: kv_pb2_grpc.KvControlServicer,
    endpoints: Sequence[grpc.aio.ServerInterceptor] = (),
    tls: Tls | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """The address at which it answers, and the server."""
    interceptors = [ErrorInterceptor(MalformedCount()), *endpoints, Arrivals(MAX_MESSAGE_BYTES)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    kv_pb2_grpc.add_KvControlServicer_to_server(servicer, server)
    if tls is None:
        address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    else:
        address = f"{HOST}:{server.add_secure_port(f'{HOST}:0', tls.server_credentials())}"
    await server.start()
    try:
        yield address, server
    finally:
        await server.stop(0.5)


def local_worker(
    name: str,
    incarnation: int,
    caches: Sequence[KVCache],
    compat: str = "kind-a",
    heads: Sequence[int] = (),
    *,
    tls: Tls | None = None,
    keys: KeyFile | None = None,
    faults: str = "",
) -> LocalWorker:
    choose_copies(caches)
    return LocalWorker(
        worker_id=name,
        incarnation=f"{name}.{incarnation}",
        caches=caches,
        wire_compat=compat,
        host=HOST,
        num_kv_heads=heads,
        tls=tls,
        keys=keys,
        testing=TestingConfig(faults=faults),
    )


@contextlib.asynccontextmanager
async def decode_side(
    config: TransferConfig = CONFIG,
    name: str = "decode-0",
    *,
    incarnation: int = 1,
    compat: str = "kind-a",
    caches: Sequence[KVCache] = (),
    heads: Sequence[int] = (),
    tls: Tls | None = None,
) -> AsyncIterator[Decode]:
    caches = tuple(caches) or (KVCache(SPEC, NUM_BLOCKS, 8),)
    receiver = KvReceiver(local_worker(name, incarnation, caches, compat, heads, tls=tls), config)
    endpoint = Endpoint(receiver)
    async with served(endpoint, tls=tls) as (address, _):
        receiver.kv_address = address
        try:
            yield Decode(receiver, tuple(caches), endpoint)
        finally:
            receiver.check()
            await receiver.close()


@contextlib.asynccontextmanager
async def prefill_side(
    config: TransferConfig = CONFIG,
    faults: str = "",
    name: str = "prefill-0",
    *,
    incarnation: int = 1,
    caches: Sequence[KVCache] = (),
    heads: Sequence[int] = (),
    tls: Tls | None = None,
) -> AsyncIterator[Prefill]:
    caches = tuple(caches) or (filled_cache(1),)
    sender = KvSender(local_worker(name, incarnation, caches, heads=heads, tls=tls, faults=faults), config)
    try:
        yield Prefill(sender, tuple(caches))
    finally:
        await sender.close()


async def send(
    prefill: Prefill, ticket: Ticket, block_ids: Sequence[int], first_token: int | None = 1234, state_slot: int = 3
) -> Transferred:
    """A prompt that is computed already."""
    async with prefill.sender.transfer(ticket) as transfer:
        transfer.extend(tables_of(transfer, block_ids, state_slot))
        return await transfer.finish(first_token)


async def kv_transfer(
    prefill: Prefill, decode: Decode, source: Sequence[int], target: Sequence[int], num_tokens: int = 0, name: str = "t"
) -> Transferred:
    """One transfer from beginning to end, of whole blocks where `num_tokens` is not given; its blocks are compared."""
    num_tokens = num_tokens or len(source) * prefill.sender.layout.block_size
    ticket = decode.receiver.expect(name, num_tokens, 0, tables_of(decode.receiver, target, 3))
    transferred = await send(prefill, ticket, source)
    arrival = await decode.receiver.wait_committed(ticket)
    assert (arrival.num_tokens, arrival.first_token) == (num_tokens, 1234)
    assert (await decode.receiver.release(ticket))[0] == tuple(target)
    assert same_blocks(prefill.cache, source, decode.cache, target)
    decode.receiver.check()
    return transferred


# -- workers with an engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Worker:
    id: str
    incarnation: str
    loop: EngineLoop
    kv: KvEndpoint
    runner: ArithmeticRunner
    running: asyncio.Task[None]
    server: grpc.aio.Server

    @property
    def context(self) -> WorkerContext:
        return WorkerContext(self.id, self.loop, self.kv)

    @property
    def address(self) -> str:
        return self.kv.receiver.kv_address

    def source(self, num_tokens: int) -> PrefixSource:
        return PrefixSource(
            worker_id=self.id, address=self.address, num_tokens=num_tokens, incarnation=self.incarnation
        )

    async def generate(self, spec: SequenceSpec) -> list[int]:
        async with self.loop.sequence(spec, Purpose.GENERATE) as handle:
            return await read_all(handle)

    async def check_idle(self) -> None:
        """Nothing is held or pinned, and every block is free or in the cache."""
        await until(lambda: self.loop.engine.is_idle, SOON_S)
        self.loop.engine.check()
        self.kv.receiver.check()
        assert self.loop.engine.pool.counts().in_use == 0
        await until(lambda: self.kv.counts().slots_in_use == 0, SOON_S)
        assert self.kv.counts().unsent_bytes == 0


@contextlib.asynccontextmanager
async def engine_worker(
    name: str,
    runner: ArithmeticRunner,
    config: TransferConfig = CONFIG,
    faults: str = "",
    step_tokens: int = 64,
    *,
    incarnation: int = 1,
    on_event: OnEngineEvent = lambda event: None,
    keys: KeyFile | None = None,
    endpoint: Callable[[KvEndpoint], kv_pb2_grpc.KvControlServicer] = lambda kv: kv,
) -> AsyncIterator[Worker]:
    """A worker with an engine that runs; at the end it must still be running.

    Args:
        endpoint: what other workers reach in the place of its endpoint.
        keys: by which it proves who it is, and asks others to.
    """
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=step_tokens,
        output_reservation=0,
    )
    loop = EngineLoop(Engine(runner, limits), 100)
    local = local_worker(name, incarnation, runner.caches, keys=keys, faults=faults)
    kv = KvEndpoint(local, loop, config)
    running = asyncio.create_task(loop.run(on_event))
    async with served(endpoint(kv), member_auth(keys, local.incarnation, WORKERS_RULES)) as (address, server):
        kv.receiver.kv_address = address
        try:
            yield Worker(
                id=name,
                incarnation=local.incarnation,
                loop=loop,
                kv=kv,
                runner=runner,
                running=running,
                server=server,
            )
        finally:
            await kv.close()
    assert not running.done()
    await cancel_and_wait((running,))


def make_spec(prompt: Sequence[int], num_tokens: int = 4, request_id: str = "r") -> SequenceSpec:
    return sequence_spec(prompt, request_id, max_tokens=num_tokens)


async def read_all(handle: SequenceHandle) -> list[int]:
    tokens = list[int]()
    while True:
        output = await handle.next()
        assert isinstance(output, Generated)
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens


# -- what is left ------------------------------------------------------------------------------------------------------


def footprint() -> tuple[int, list[str]]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(t.name for t in threading.enumerate())  # noqa: PTH208


def scattered(count: int, seed: int) -> list[int]:
    """Blocks in no order, as a pool that has been in use gives them out."""
    return random.Random(seed).sample(range(NUM_BLOCKS), count)
