"""Workers that answer at once and remember prefixes: `python -m tests.bench.caching_workers`, all in one process.

They compute nothing. Each has the production block pool, so it finds and forgets prefixes as a worker does, and tells
the index of it. An answer holds no blocks while it is sent: what is measured is where requests go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import uvloop
from opentelemetry.context import Context

from baton import wire
from baton.blocks import block_keys, content_id
from baton.cluster import BlockCounts, Role, WorkerInfo, WorkerLoad, WorkerState
from baton.costs import StepCosts
from baton.messages import DecodeRequest, Event, NewTokens, PrefillReport
from baton.rpc import RpcServer
from baton.sampling import FinishReason
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2_grpc
from engine.core.block_pool import BlockPool, Stored
from kvstore.index import IndexPublisher, RedisConnection, RedisIndex
from kvstore.leases import LeaseKeeper, RedisLeases
from tests.bench.peer import serve
from worker.calls import CallServicer

HOST = "127.0.0.1"
BLOCK_SIZE = 64
USUAL = StepCosts(
    s_overhead=5e-6, s_per_token=1e-6, s_per_pair=2e-11, s_weights=1e-4, s_per_sequence=1e-6, s_per_kv_token=2e-10
)
COSTS = [
    StepCosts(**{name: factor * value for name, value in asdict(USUAL).items()}) for factor in (0.9, 1.0, 0.95, 1.1)
]
"""Of each worker, which are never quite the same. A prompt of this trace takes 3 ms: about what it takes from router to
worker and back."""


class _Worker:
    """One lease, one address, one cache."""

    def __init__(self, worker_id: str, costs: StepCosts, redis_url: str, content: str, num_blocks: int) -> None:
        self.num_requests = self.num_prompt_blocks = self.num_found = 0
        self._id = worker_id
        self._costs = costs
        self._redis_url = redis_url
        self._content = content
        self._pool = BlockPool(num_blocks)
        self._publisher: IndexPublisher | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            rpc = RpcServer(("baton.v1.WorkerCalls",))
            servicer = CallServicer(decode=self._decode)
            worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, rpc.server)
            address = f"{HOST}:{rpc.bind(HOST, 0)}"
            await rpc.start()
            stack.push_async_callback(rpc.stop, 0.0)
            leases = RedisLeases(RedisConnection(self._redis_url), self._content)
            stack.push_async_callback(leases.close)
            index = RedisIndex(RedisConnection(self._redis_url), self._content)
            stack.push_async_callback(index.close)
            keeper = LeaseKeeper(leases, self._id, renew_s=1.0)
            info = WorkerInfo(
                id=self._id,
                role=Role.DECODE,
                address=address,
                pid=os.getpid(),
                node=socket.gethostname(),
                epoch=await keeper.acquire(),
                content_id=self._content,
                wire_compat="bench",
                block_size=BLOCK_SIZE,
                max_model_len=8192,
                known_fields=wire.KNOWN_FIELDS,
            )
            self._publisher = IndexPublisher(index, self._id, info.epoch, self._pool.keys)
            load = WorkerLoad(
                state=WorkerState.READY,
                costs=self._costs,
                blocks=BlockCounts(self._pool.num_blocks, free=self._pool.num_blocks),
            )
            await asyncio.gather(keeper.run(lambda: (info, load)), self._publisher.run())

    async def _decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        spec = request.sequence
        keys = block_keys(spec.cache_seed, spec.token_ids, BLOCK_SIZE)
        num_found = remember(self._pool, keys)
        assert self._publisher is not None
        for event in self._pool.take_events():
            (self._publisher.stored if isinstance(event, Stored) else self._publisher.removed)([event.key])
        self.num_requests += 1
        self.num_prompt_blocks += len(keys)
        self.num_found += num_found
        yield NewTokens(
            token_ids=(spec.token_ids[0],) * spec.max_tokens,
            finish_reason=FinishReason.LENGTH,
            report=PrefillReport(num_cached_tokens=num_found * BLOCK_SIZE),
        )


def remember(pool: BlockPool, keys: list[bytes]) -> int:
    """Looks a prompt up and keeps it; returns the blocks found. Nothing else may hold blocks."""
    found = pool.match(keys)
    blocks = pool.reuse(found, len(keys) - len(found))
    assert blocks is not None, "a prompt is longer than the cache"
    for n in range(len(found), len(keys)):
        blocks[n] = pool.register(blocks[n], keys[n])
    pool.release(blocks)
    return len(found)


async def _main() -> None:
    workers: list[_Worker] = []
    tasks: list[asyncio.Task[None]] = []

    async def start(redis_url: str, revision: str, num_blocks: int) -> dict[str, Any]:
        content = content_id(revision)
        workers.extend(_Worker(f"decode-{n}", c, redis_url, content, num_blocks) for n, c in enumerate(COSTS))
        tasks.extend(asyncio.create_task(worker.run()) for worker in workers)
        return {}

    async def counts() -> dict[str, Any]:
        return {
            "requests": [worker.num_requests for worker in workers],
            "prompt_blocks": sum(worker.num_prompt_blocks for worker in workers),
            "found": sum(worker.num_found for worker in workers),
        }

    await serve({"start": start, "counts": counts})
    await cancel_and_wait(tasks)


if __name__ == "__main__":
    uvloop.run(_main())
