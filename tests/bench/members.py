"""What a cluster's secret costs a router: CPU of a request with proofs, signed leases and permits, and without.

Two routers, each with a Redis and workers of its own that answer instantly; see `tests.bench.router`. They take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvloop

from baton.config import ClusterConfig, Config, IndexConfig, ModelConfig, RouterConfig, TelemetryConfig, load
from baton.trust import draw_secret, write_private
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench import router
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.router_clients import Grpc, Http
from tests.bench.stats import interleaved, ratio, spread
from tests.bench.stub_worker import INSTANT

ARMS = ("without", "with a secret")
ENDPOINTS = ("gRPC", "HTTP")
NUM_CLIENTS, NUM_TOKENS = 8, 4
GATE = 1.05


@contextlib.contextmanager
def served(config: Config, token_ids: list[int]) -> Iterator[dict[str, router.Arm]]:
    """A router, its workers and its Redis. Yields how it is asked, by endpoint."""
    with EmbeddedRedis() as redis, Peer("tests.bench.stub_worker") as stub:
        revision, secret = config.model.revision, config.cluster.secret
        stub.ask("start", redis_url=redis.url, revision=revision, token_ids=token_ids, secret=secret)
        config = replace(config, index=IndexConfig(redis_url=redis.url))
        with router.running_router(config, "aggregated") as at:
            yield {
                "gRPC": router.Arm(lambda: Grpc(at.grpc), at.pid),
                "HTTP": router.Arm(lambda: Http(at.http, stream=False), at.pid),
            }


def run(quick: bool) -> Report:
    num_rounds, num_requests = (6, 50) if quick else (40, 200)
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    tokenizer = Tokenizer.load(model.path)
    config = Config(
        model=ModelConfig(path=str(model.path), served_name=model.served_name, revision=model.revision),
        router=RouterConfig(cache_secret="bench"),
        telemetry=TelemetryConfig(log_level="warning"),
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        secret = Path(folder) / "secret"
        write_private(secret, draw_secret())
        configs = (config, replace(config, cluster=ClusterConfig(secret=str(secret))))
        token_ids = (tokenizer.encode(router.ANSWER) * NUM_TOKENS)[:NUM_TOKENS]
        arms = {arm: stack.enter_context(served(each, token_ids)) for arm, each in zip(ARMS, configs, strict=True)}
        prompts = router.prompts_of(tokenizer)
        cpu_ms: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(ENDPOINTS, ARMS)}
        for number, arm in enumerate(interleaved(ARMS, num_rounds + 1)):
            for endpoint in ENDPOINTS:
                taken = list(itertools.islice(prompts, num_requests))
                done = uvloop.run(router.load_with(arms[arm][endpoint], taken, NUM_CLIENTS, NUM_TOKENS, INSTANT))
                if number >= len(ARMS):  # the first round warms up
                    cpu_ms[endpoint, arm].append(done.router_cpu_s / num_requests * 1e3)
    table = Table(
        f"Router CPU of a request, ms; {NUM_CLIENTS} clients, {NUM_TOKENS} tokens, {num_rounds} rounds in turns",
        ("endpoint", *ARMS, f"ratio (gate {GATE})"),
    )
    for endpoint in ENDPOINTS:
        without, with_secret = (cpu_ms[endpoint, arm] for arm in ARMS)
        table.rows.append((endpoint, spread(without), spread(with_secret), ratio(with_secret, without)))
    return Report("members", [table])
