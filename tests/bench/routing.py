"""Where one router sends the conversations of many tenants, and how much of their prompts is found there.

    this process (clients) ──> router process ──> 4 workers with small caches, in one process

A tenant's conversations begin with the same long text; some tenants have many, most have one. Each conversation waits
for its answer before it goes on, and a few are in flight at a time. The workers answer at once, so queues tell the
router little: what is measured is how it uses the caches. Prompts are token ids, one for each character, in blocks of
64, so that the trace is the same for every tokenizer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
import uvloop

from baton.blocks import block_keys
from baton.config import Config, IndexConfig, ModelConfig, RouterConfig, TelemetryConfig, load
from baton.rpc.server import CHANNEL_OPTIONS
from baton.v1 import inference_pb2, inference_pb2_grpc
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from engine.core.block_pool import BlockPool
from tests.bench.caching_workers import BLOCK_SIZE, COSTS, remember
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.router import running_router
from tests.bench.stats import spread

NUM_WORKERS = len(COSTS)
NUM_BLOCKS = 384
"""Of one worker's cache: all four together hold three fifths of what is ever asked."""
NUM_AT_ONCE = 8
NUM_TENANTS, NUM_CONVERSATIONS, NUM_TURNS = 24, 96, 5
SEEDS = (3, 4, 5, 6, 7)
"""Of the traces. The first is the one on which other routers were measured."""
WORDS = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"),
    *("xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    conversation: int
    prompt: str


def trace(seed: int) -> list[Turn]:
    """Every conversation's first turn in random order, then every second one, and so on."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    beginnings = [f"system:tenant {n}: {words(320)}\n" for n in range(NUM_TENANTS)]
    so_far = [beginnings[min(int(rng.paretovariate(1.0)) - 1, NUM_TENANTS - 1)] for _ in range(NUM_CONVERSATIONS)]
    order = [n for _ in range(NUM_TURNS) for n in rng.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS)]
    asked = [iter([words(30) for _ in range(NUM_TURNS)]) for _ in range(NUM_CONVERSATIONS)]
    turns = []
    for n in order:
        question = next(asked[n])
        so_far[n] += f"user:{question}\n"
        turns.append(Turn(n, so_far[n]))
        so_far[n] += f"assistant:{question[::-1]}\n"
    return turns


@dataclass(frozen=True, slots=True)
class Found:
    hit_rate: float
    """Of the prompts' full blocks."""
    imbalance: float
    """Requests of the busiest worker over their mean."""


def run(quick: bool) -> Report:
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    config = Config(
        model=ModelConfig(path=str(model.path), served_name=model.served_name, revision=model.revision),
        router=RouterConfig(cache_secret="bench", pull_above_tokens=8192),  # the workers cannot pull
        telemetry=TelemetryConfig(log_level="warning"),
    )
    num_rounds = 1 if quick else 7
    table = Table(
        f"Routing {NUM_CONVERSATIONS} conversations of {NUM_TENANTS} tenants, {NUM_TURNS} turns each, to "
        f"{NUM_WORKERS} caches of {NUM_BLOCKS} blocks, {NUM_AT_ONCE} at once, {num_rounds} rounds",
        ("", "hit rate, %", "imbalance", "in turns", "one cache as large as all", "a cache without limit"),
        note="Hit rate: of the prompts' full blocks. Imbalance: requests of the busiest worker over the mean.",
    )
    for seed in SEEDS[:1] if quick else SEEDS:
        turns = trace(seed)
        found = [_through_router(config, turns) for _ in range(num_rounds)]
        bounds = [_offline(turns, NUM_WORKERS, NUM_BLOCKS), _offline(turns, 1, NUM_WORKERS * NUM_BLOCKS)]
        bounds.append(_offline(turns, 1, 10**5))
        table.rows.append(
            (
                f"trace {seed}",
                spread([f.hit_rate * 100 for f in found]),
                spread([f.imbalance for f in found]),
                *(f"{bound:.1%}" for bound in bounds),
            )
        )
    return Report("routing", [table])


def _through_router(config: Config, turns: Sequence[Turn]) -> Found:
    with EmbeddedRedis() as redis, Peer("tests.bench.caching_workers") as workers:
        revision = config.model.revision
        workers.ask("start", redis_url=redis.url, revision=revision, num_blocks=NUM_BLOCKS)
        config = replace(config, index=IndexConfig(redis_url=redis.url))
        with running_router(config, "aggregated") as router:
            uvloop.run(_ask_all(router.grpc, turns))
        counts = workers.ask("counts")
    requests = counts["requests"]
    assert sum(requests) == len(turns)
    return Found(counts["found"] / counts["prompt_blocks"], max(requests) / (sum(requests) / len(requests)))


async def _ask_all(address: str, turns: Sequence[Turn]) -> None:
    locks = [asyncio.Lock() for _ in range(NUM_CONVERSATIONS)]
    left = iter(turns)

    async def ask(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        for turn in left:
            async with locks[turn.conversation]:
                prompt = inference_pb2.TokenIds(ids=turn.prompt.encode())
                sampling = inference_pb2.SamplingParams(max_tokens=4)
                async for _ in stub.Generate(inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)):
                    pass

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(ask(stub) for _ in range(NUM_AT_ONCE)))


def _offline(turns: Sequence[Turn], num_workers: int, num_blocks: int) -> float:
    """The hit rate of the same caches, asked in turns."""
    pools = [BlockPool(num_blocks) for _ in range(num_workers)]
    num_found = num_all = 0
    for n, turn in enumerate(turns):
        keys = block_keys(b"", list(turn.prompt.encode()), BLOCK_SIZE)
        num_found += remember(pools[n % num_workers], keys)
        num_all += len(keys)
    return num_found / num_all
