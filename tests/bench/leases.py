"""Benchmark of many workers' leases: a router's CPU for an idle worker's second, and the stops of its event loop.

A router polls leases and index every second. Workers renew every three seconds (`index.renew_s`): idle ones by a link,
busy ones by a signature, and these report a load each second with an event. A ticker runs beside the poll whenever the
loop lets it; the CPU time between two ticks is a stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from baton import garbage, wire
from baton.cluster import Role, WorkerInfo, WorkerLoad
from baton.costs import PRIOR
from baton.trust import KeyFile, Principal, draw_secret, write_private
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import BlockEvent, IndexOutcome, Mirror, MirrorFollower, Op, RedisConnection, RedisIndex
from kvstore.leases import RedisLeases, ReportedLoads
from kvstore.leases.chain import SLOT_MS
from kvstore.leases.codec import encode_load
from router.placement.pool_view import PoolView
from tests.bench.report import Report, Table
from tests.bench.stats import spread
from tests.support import builders

NUM_WORKERS = (64, 256, 1024)
POLLS_A_RENEWAL = 3
LEASE_S = 600.0
"""All workers are this one process, which may take longer than a real lease to write for all of them."""
GATE_MS = 0.1
GAP_GATES_MS = {256: 10, 1024: 30}
NAMESPACE = "0" * 32
clock = time.process_time


@dataclass(slots=True)
class Cluster:
    """Workers that only hold leases, and a router that only reads them."""

    infos: list[WorkerInfo]
    writer: RedisLeases
    index: RedisIndex
    leases: RedisLeases
    pools: PoolView
    follower: MirrorFollower
    num_events: int = 0

    async def renew(self, number: int = 0) -> None:
        """Renews all leases; another number is another load."""
        for info in self.infos:
            assert await self.writer.renew(info, load(number))

    async def report(self, number: int) -> None:
        """Reports another load of each worker."""
        for info in self.infos:
            seq = self.num_events + 1
            encoded = encode_load(replace(load(number), number=2**20 + seq))
            event = BlockEvent(worker_id=info.id, epoch=info.epoch, seq=seq, op=Op.STORED, load=encoded)
            assert (await self.index.apply(event)).outcome is IndexOutcome.APPLIED
        self.num_events += 1

    async def poll(self) -> None:
        workers = await self.leases.list_workers()
        await self.leases.boot()
        await self.pools.update(workers)
        assert len(self.pools.workers) == len(self.infos)

    async def follow(self) -> None:
        await self.follower._poll()


def load(number: int) -> WorkerLoad:
    costs = replace(PRIOR, s_overhead=1e-3 * (1 + number % 7), s_per_token=1e-5 * (1 + number % 5))
    return replace(builders.READY, costs=costs, running=number, busy_s=float(number))


@contextlib.asynccontextmanager
async def cluster(num_workers: int, keys: dict[Principal, KeyFile] | None) -> AsyncIterator[Cluster]:
    with EmbeddedRedis() as redis:
        writer, events, reader, index = connections = [RedisConnection(redis.url) for _ in range(4)]
        mine = keys or {}
        leases = RedisLeases(writer, NAMESPACE, lease_s=LEASE_S, keys=mine.get(Principal.WORKER))
        infos = [
            builders.worker_info(
                f"worker-{number}",
                Role.DECODE if number % 2 else Role.PREFILL,
                epoch=await leases.acquire(f"worker-{number}"),
                address=f"10.0.{number // 256}.{number % 256}:80",
                known_fields=wire.KNOWN_FIELDS,
            )
            for number in range(num_workers)
        ]
        mirror, loads = Mirror(), ReportedLoads(reader)
        read = RedisIndex(index, NAMESPACE, keys=mine.get(Principal.ROUTER))
        yield Cluster(
            infos,
            leases,
            RedisIndex(events, NAMESPACE, keys=mine.get(Principal.WORKER)),
            RedisLeases(reader, NAMESPACE, lease_s=LEASE_S, keys=mine.get(Principal.ROUTER), loads=loads),
            PoolView(mirror.lookup, time.monotonic),
            MirrorFollower(read, mirror, on_load=loads.report),
        )
        for each in connections:
            await each.close()


async def _cpu_ms(work: Callable[[], Awaitable[None]]) -> float:
    began = clock()
    await work()
    return (clock() - began) * 1e3


async def _gap_ms(work: Callable[[], Awaitable[None]]) -> float:
    """CPU milliseconds of the longest time for which nothing else ran."""
    gaps = [0.0]

    async def tick() -> None:
        last = clock()
        while True:
            await asyncio.sleep(0)
            now = clock()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work()
    await asyncio.sleep(0)
    ticking.cancel()
    return max(gaps) * 1e3


async def _measure(num_workers: int, num_rounds: int, keys: dict[Principal, KeyFile] | None) -> list[list[float]]:
    """Returns by round: CPU of an idle worker's second and of a busy one's, gaps at changed and unchanged leases."""
    idle: list[float] = []
    busy: list[float] = []
    changed: list[float] = []
    unchanged: list[float] = []
    async with cluster(num_workers, keys) as it:
        await it.renew()
        changed.append(max(await _gap_ms(it.poll), await _gap_ms(it.follow)))
        for number in range(1, num_rounds + 1):
            await it.renew(number)
            polls = []
            for second in range(POLLS_A_RENEWAL):
                await it.report(number * POLLS_A_RENEWAL + second)
                polls.append(await _cpu_ms(it.follow) + await _cpu_ms(it.poll))
            busy.append(sum(polls) / POLLS_A_RENEWAL / num_workers)
            await it.renew(number + num_rounds)
            changed.append(max(await _gap_ms(it.poll), await _gap_ms(it.follow)))
            await asyncio.sleep(2 * SLOT_MS / 1e3)
            await it.renew(number + num_rounds)
            polls = [await _cpu_ms(it.poll) + await _cpu_ms(it.follow) for _ in range(POLLS_A_RENEWAL)]
            idle.append(sum(polls) / POLLS_A_RENEWAL / num_workers)
            unchanged.append(max(await _gap_ms(it.poll), await _gap_ms(it.follow)))
    return [idle, busy, changed, unchanged]


def run(quick: bool) -> Report:
    table = Table(
        f"CPU milliseconds of a router's loop, {3 if quick else 7} rounds",
        (
            "workers",
            f"idle worker's second (gate {GATE_MS})",
            "busy worker's",
            "longest stop, all changed",
            "unchanged",
        ),
        note="gates of the longest stop: " + ", ".join(f"{ms} ms at {num:,}" for num, ms in GAP_GATES_MS.items()),
    )
    garbage.collect_seldom()  # as in a router: a collection of all that the benchmark has imported takes 50 ms
    garbage.keep_what_is_loaded()
    with tempfile.TemporaryDirectory() as folder:
        write_private(Path(folder) / "secret", draw_secret())
        keys = {member: KeyFile(Path(folder) / "secret", member) for member in Principal}
        for num_workers in NUM_WORKERS:
            for name, mine in (("signed", keys), ("unsigned", None)):
                found = asyncio.run(_measure(num_workers, 3 if quick else 7, mine))
                table.rows.append((f"{num_workers:,} {name}", *map(spread, found)))
    return Report("leases", [table])
