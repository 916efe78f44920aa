"""What permits cost: a pull between two workers with a secret against the same pull without one, and a router's share.

The two workers and the router are in one process, with real gRPC and transports. The arithmetic engine's KV is tiny, so
a pull here is little more than what permits add to: of a real model's, whose KV takes 50 ms and more, they are nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role, Worker
from baton.config import RouterConfig
from baton.telemetry.instruments import Instruments
from baton.trust import KeyFile, Principal, draw_secret, write_private
from engine.testing import ArithmeticRunner
from kvstore.index import Mirror
from router.placement.pool_view import HintTracker, PoolView
from router.serve.selector import WorkerSelector
from tests.bench.report import Report, Table
from tests.bench.stats import Spread, interleaved, ratio, spread
from tests.support import builders
from tests.unit.kvstore.transfer import peers

NUM_TOKENS = 2000
ARMS = ("without", "with a permit")
GATE = 0.95


@dataclass(frozen=True, slots=True)
class Pair:
    """A puller and a source, and the router that names the one to the other."""

    puller: peers.Worker
    source: peers.Worker
    router: WorkerSelector

    async def pull(self, number: int) -> tuple[float, float]:
        """Seconds of one pull of a prompt that nobody had before, and CPU seconds of the router's part."""
        spec = peers.make_spec(range(number, number + NUM_TOKENS), request_id=str(number))
        await self.source.generate(spec)
        prompt, leases = self.router.prompt(spec), [leased(self.source), leased(self.puller)]
        cpu_s = time.thread_time()
        source = self.router.source(prompt, leases[0], leases[1], NUM_TOKENS)
        cpu_s = time.thread_time() - cpu_s
        began_s = time.perf_counter()
        num_tokens = await self.puller.kv.prefixes.fetch(spec, source, time.monotonic(), Context())
        assert num_tokens == (NUM_TOKENS - 1) // 16 * 16
        return time.perf_counter() - began_s, cpu_s


def leased(worker: peers.Worker) -> Worker:
    known, incarnation = wire.KNOWN_FIELDS, f"{worker.id}.1"
    return builders.worker(worker.id, Role.DECODE, address=worker.address, incarnation=incarnation, known_fields=known)


@contextlib.asynccontextmanager
async def pair_of(transport: str, secret: Path | None) -> AsyncIterator[Pair]:
    config = peers.with_link(transport, slot_bytes=2**20, pull_timeout_s=60.0)
    keys = KeyFile(secret, Principal.WORKER) if secret else None
    hints = HintTracker(Mirror(), Instruments(builders.cluster_status))
    router = WorkerSelector(
        pools=PoolView(lambda keys: {}, time.monotonic),
        hints=hints,
        config=RouterConfig(),
        keys=KeyFile(secret, Principal.ROUTER) if secret else None,
    )
    async with (
        peers.engine_worker("puller", ArithmeticRunner(4096), config, step_tokens=2048, keys=keys) as puller,
        peers.engine_worker("source", ArithmeticRunner(4096), config, step_tokens=2048, keys=keys) as source,
    ):
        yield Pair(puller, source, router)


def run(quick: bool) -> Report:
    num_rounds = 20 if quick else 100
    return Report("permits", [asyncio.run(_table(num_rounds))])


async def _table(num_rounds: int) -> Table:
    table = Table(
        f"A pull of {NUM_TOKENS} tokens of almost no bytes, {num_rounds} rounds",
        ("transport", "ms without", "ms with a permit", f"speed (gate {GATE})", "router CPU us more"),
    )
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        write_private(secret, draw_secret())
        for transport in ("tcp", "shm"):
            table.rows.append((transport, *await _row(transport, secret, num_rounds)))
    return table


async def _row(transport: str, secret: Path, num_rounds: int) -> tuple[Spread, ...]:
    wall: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
    async with pair_of(transport, None) as without, pair_of(transport, secret) as permitted:
        pairs = dict(zip(ARMS, (without, permitted), strict=True))
        for pair in pairs.values():
            await pair.pull(0)
        for number, arm in enumerate(interleaved(ARMS, num_rounds), 1):
            wall_s, cpu_s = await pairs[arm].pull(number)
            wall[arm].append(wall_s * 1e3)
            cpu[arm].append(cpu_s * 1e6)
    more = [b - a for a, b in zip(cpu["without"], cpu["with a permit"], strict=True)]
    return (
        spread(wall["without"]),
        spread(wall["with a permit"]),
        ratio(wall["without"], wall["with a permit"]),
        spread(more),
    )
