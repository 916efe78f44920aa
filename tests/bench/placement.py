"""The router's own cost of a decision, as workers and cached blocks grow: no network, no engine.

A decision is what the driver does for a request before it calls a worker: look its block keys up in the mirror, see
the workers as they are now, weigh them, ask admission, and count the request where it goes; the oldest request ends
meanwhile. Every worker holds the first block, and otherwise keys of its own. Beside it stand hashing the keys, which
comes before, and how fast the mirror takes events.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop

from baton import wire
from baton.blocks import block_keys
from baton.cluster import BlockCounts, Role, Worker
from kvstore.index import Mirror
from kvstore.index.events import BlockEvent, Op
from router.admission import Gate, QueueEntry
from router.admission.tenants import DEFAULT_TENANT
from router.placement import Job, Objective, Prompt, place
from router.placement.pool_view import PoolView
from tests.bench.report import Report, Table
from tests.bench.stats import spread
from tests.support import builders

BLOCK = 16
EVENT_KEYS = 64
CACHED_BLOCKS, MOST_BLOCKS = 1_000, 1_000_000
"""Blocks of each worker, and of all together."""
CASES = ((8, 256), (64, 256), (64, 1000), (256, 256), (1024, 1000), (4096, 1000), (10_000, 1000))
"""Workers, and blocks of the prompt."""
NUM_PROMPTS = 16
MOST_RUNNING = 16
OBJECTIVE = Objective(60.0, 0.1)
GATES_US = {1024: 1_000, 10_000: 2_000}


def run(quick: bool) -> Report:
    return uvloop.run(_measure(3 if quick else 7, 50 if quick else 200))


async def _measure(num_rounds: int, num_decisions: int) -> Report:
    rng = random.Random(7)
    decisions = Table(
        f"Placement: microseconds of CPU a decision, p50 of {num_decisions}, {num_rounds} rounds",
        ("workers, blocks of prompt", "look-up", "decision", "p99", "hashing the keys", "gate"),
        note="Half prefill, half decode, queues and batches of random length; "
        f"{CACHED_BLOCKS:,} cached blocks a worker, or fewer so that all have {MOST_BLOCKS:,}; no two workers have the "
        f"same but for the first, which is everybody's. {NUM_PROMPTS} prompts, half of each is one worker's.",
    )
    for num_workers, num_blocks in CASES:
        rows = await _decisions(rng, num_workers, num_blocks, num_rounds, num_decisions)
        gate = f"{GATES_US[num_workers]:,}" if num_workers in GATES_US else ""
        decisions.rows.append((f"{num_workers:,}, {num_blocks:,}", *map(spread, rows), gate))
    return Report("placement", [decisions, _events(rng, num_rounds)])


async def _decisions(
    rng: random.Random, num_workers: int, num_blocks: int, num_rounds: int, num_decisions: int
) -> tuple[list[float], ...]:
    """Microseconds of a look-up, a decision, the slowest hundredth of them, and hashing the keys, by round."""
    first = [rng.randrange(32_000) for _ in range(BLOCK)]
    texts = [first + [rng.randrange(32_000) for _ in range((num_blocks - 1) * BLOCK)] for _ in range(NUM_PROMPTS)]
    prompts = [Prompt(len(tokens), tuple(block_keys(b"bench", tokens, BLOCK))) for tokens in texts]
    mirror, pools = await _cluster(rng, num_workers, [prompt.block_keys for prompt in prompts])
    gate, cycle, running = Gate(), itertools.cycle(prompts), collections.deque[contextlib.ExitStack]()

    def decide() -> None:
        prompt = next(cycle)
        entry = QueueEntry(tenant=DEFAULT_TENANT, priority=0, ttft_s=OBJECTIVE.ttft_s)
        candidates = pools.candidates(prompt, (0, False))
        placement = place(prompt, candidates, objective=OBJECTIVE, rotates=not pools.is_large)
        assert placement is not None
        entry.is_placed(placement)
        gate.admit(entry, placement.prediction)
        gate.left(entry)
        request, job = contextlib.ExitStack(), _job(rng)
        request.enter_context(pools.decoding(pools.get(placement.decode_worker), job))
        request.enter_context(pools.computing(pools.get(placement.computes), job))
        running.append(request)
        if len(running) > MOST_RUNNING:
            running.popleft().close()

    work: tuple[tuple[Callable[[], object], int, float], ...] = (
        (lambda: mirror.lookup(next(cycle).block_keys), num_decisions, 0.5),
        (decide, num_decisions, 0.5),
        (decide, num_decisions, 0.99),
        (lambda: block_keys(b"bench", texts[0], BLOCK), num_decisions // 10, 0.5),
    )
    return tuple([_quantile_us(what, times, at) for _ in range(num_rounds)] for what, times, at in work)


async def _cluster(
    rng: random.Random, num_workers: int, prompts: Sequence[tuple[bytes, ...]]
) -> tuple[Mirror, PoolView]:
    mirror = Mirror()
    pools = PoolView(mirror.lookup, time.monotonic)
    workers = [_worker(rng, index) for index in range(num_workers)]
    num_own = min(CACHED_BLOCKS, MOST_BLOCKS // num_workers)
    held = {rng.randrange(num_workers): keys[: len(keys) // 2] for keys in prompts}
    for index, worker in enumerate(workers):
        own = [rng.randbytes(16) for _ in range(num_own)]
        _store(mirror, worker.info.id, [*held.get(index, prompts[0][:1]), *own])
    await pools.update(workers)
    for worker in workers:
        for _ in range(rng.randrange(4)):
            job = _job(rng)
            pools.computing(worker, job).__enter__()
            if worker.info.role is Role.DECODE:
                pools.decoding(worker, job).__enter__()
    return mirror, pools


def _job(rng: random.Random) -> Job:
    return Job(turn=(0, False), compute_s=rng.random(), num_prompt_tokens=4000, num_expected_tokens=256)


def _worker(rng: random.Random, index: int) -> Worker:
    role = Role.DECODE if index % 2 else Role.PREFILL
    load = replace(builders.READY, blocks=BlockCounts(total=100_000, free=100_000), running=rng.randrange(8))
    return builders.worker(
        f"worker-{index}",
        role,
        load,
        block_size=BLOCK,
        max_model_len=10**6,
        known_fields=wire.KNOWN_FIELDS,
        chunk_tokens=2048,
    )


def _store(mirror: Mirror, worker_id: str, keys: list[bytes], op: Op = Op.STORED, seq: int = 0) -> int:
    for start in range(0, len(keys), EVENT_KEYS):
        seq += 1
        mirror.apply(
            BlockEvent(worker_id=worker_id, epoch=1, seq=seq, op=op, keys=tuple(keys[start : start + EVENT_KEYS]))
        )
    return seq


def _events(rng: random.Random, num_rounds: int) -> Table:
    table = Table(
        f"Mirror: million block events a second, {num_rounds} rounds",
        ("", "M/s"),
        note=f"{EVENT_KEYS} blocks an event, 8 workers. New: blocks nobody had; shared: that another worker has; "
        "removed: of those that nobody else has.",
    )
    rates: dict[str, list[float]] = {"new": [], "shared": [], "removed": []}
    for _ in range(num_rounds):
        mirror = Mirror()
        keys = [rng.randbytes(16) for _ in range(100_000)]
        for name, worker, op, seq in (
            ("new", "w0", Op.STORED, 0),
            ("shared", "w1", Op.STORED, 0),
            ("removed", "w1", Op.REMOVED, -(-len(keys) // EVENT_KEYS)),
        ):
            began_s = time.perf_counter()
            _store(mirror, worker, keys, op, seq)
            rates[name].append(len(keys) / (time.perf_counter() - began_s) / 1e6)
    table.rows += [(name, spread(values)) for name, values in rates.items()]
    return table


def _quantile_us(work: Callable[[], object], times: int, quantile: float) -> float:
    taken = []
    for _ in range(max(times, 5)):
        began_s = time.thread_time()
        work()
        taken.append(time.thread_time() - began_s)
    return sorted(taken)[int(len(taken) * quantile)] * 1e6
