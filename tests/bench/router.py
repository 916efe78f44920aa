"""What the router adds: latency, CPU and a ceiling, in front of workers that answer instantly.

    this process (clients) ──> router process ──> stub worker process      and, as the reference,
    this process (clients) ──────────────────────> stub worker process

Two real routers stand in front of the same workers, one that always aggregates and one that always disaggregates. All
of it runs on this machine, so requests/s is what router, clients and workers reach together; CPU is the router
process's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import psutil
import uvloop

from baton.api import Chat
from baton.chat import ChatMessage
from baton.config import Config, IndexConfig, ModelConfig, RouterConfig, TelemetryConfig, load
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from deploy.processes import tied
from router.prompt import Tokenizer
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.router_clients import BareRedis, Client, Direct, Grpc, Http, Prompt
from tests.bench.stats import difference, interleaved, ratio, spread
from tests.bench.stub_worker import INSTANT
from tests.integration.cluster import free_port
from tests.support.chats import encoded

HOST = "127.0.0.1"
NUM_CLIENTS = 16
SHORT_ANSWER, LONG_ANSWER = 4, 256
GAP_US = 20_000
"""Between the tokens of a paced stream: 50 tokens/s."""
PROMPT_WORDS = 80
"""Of a message."""
LONG_CHAT = 41
"""Messages of a long chat, before its next turn."""
WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "omicron",
    "sigma",
    "tau",
)
FREE_KEY, LIMITED_KEY = "key-free", "key-limited"
WARM_UP = Prompt(("hello",), (1, 2, 3))
ANSWER = (
    "The harbour lay quiet under a thin layer of fog, and the first boats were already on their way out. An old man "
    "on the quay was fixing a net; he looked up, nodded, and said that the wind would turn before noon. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_rounds: int
    alone: int
    """Requests of one client in a round."""
    crowd: int
    """Requests of all clients in a round."""
    num_long: int
    """Long answers that stream at once, in a round."""
    paced_tokens: int
    num_chats: int
    """Long ones, in a round."""


FULL = Sizes(num_rounds=5, alone=150, crowd=800, num_long=32, paced_tokens=128, num_chats=50)
QUICK = Sizes(num_rounds=2, alone=60, crowd=200, num_long=16, paced_tokens=50, num_chats=16)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask."""

    connect: Callable[[], Client]
    pid: int | None
    """Of the router on the way; None: there is none."""
    reference: str = ""
    """The arm without a router that does the same otherwise."""


@dataclass(frozen=True, slots=True)
class Load:
    wall_s: float
    router_cpu_s: float
    latencies_s: list[float]
    num_tokens: int


async def load_with(arm: Arm, prompts: list[Prompt], num_clients: int, num_tokens: int, gap_us: int) -> Load:
    """Every prompt once, by clients that each send one after the other."""
    clients = [arm.connect() for _ in range(num_clients)]
    left = list(prompts)
    latencies_s: list[float] = []
    counts: list[int] = []

    async def work(client: Client) -> None:
        while left:
            prompt = left.pop()
            start = time.perf_counter()
            counts.append(await client.ask(prompt, num_tokens, gap_us))
            latencies_s.append(time.perf_counter() - start)

    try:
        for client in clients:  # connections are not what is measured
            await client.ask(WARM_UP, 1, INSTANT)
        cpu_s, start = _cpu_s(arm.pid), time.perf_counter()
        await asyncio.gather(*(work(client) for client in clients))
        return Load(time.perf_counter() - start, _cpu_s(arm.pid) - cpu_s, latencies_s, sum(counts))
    finally:
        for client in clients:
            await client.close()


def run(quick: bool) -> Report:
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    tokenizer = Tokenizer.load(model.path)
    answer_ids = (tokenizer.encode(ANSWER) * LONG_ANSWER)[:LONG_ANSWER]
    config = Config(
        model=ModelConfig(path=str(model.path), served_name=model.served_name, revision=model.revision),
        router=RouterConfig(cache_secret="bench"),
        telemetry=TelemetryConfig(log_level="warning"),
    )
    with EmbeddedRedis() as redis, Peer("tests.bench.stub_worker") as stub:
        address = stub.ask("start", redis_url=redis.url, revision=model.revision, token_ids=answer_ids)["address"]
        config = replace(config, index=IndexConfig(redis_url=redis.url))
        with (
            running_router(config, "aggregated") as aggregated,
            running_router(config, "disaggregated") as disaggregated,
        ):
            arms = {
                "direct Decode": Arm(lambda: Direct(address, disaggregated=False), None),
                "gRPC": Arm(lambda: Grpc(aggregated.grpc), aggregated.pid, "direct Decode"),
                "HTTP": Arm(lambda: Http(aggregated.http, stream=False), aggregated.pid, "direct Decode"),
                "HTTP, SSE": Arm(lambda: Http(aggregated.http, stream=True), aggregated.pid, "direct Decode"),
                "direct Decode + Prefill": Arm(lambda: Direct(address, disaggregated=True), None),
                "gRPC, disaggregated": Arm(
                    lambda: Grpc(disaggregated.grpc), disaggregated.pid, "direct Decode + Prefill"
                ),
            }
            with limited_router(config, "aggregated") as router:
                limited = {
                    "without limits": Arm(lambda: Http(router.http, stream=False, key=FREE_KEY), router.pid),
                    "limits": Arm(lambda: Http(router.http, stream=False, key=LIMITED_KEY), router.pid),
                    "Redis": Arm(lambda: BareRedis(redis.url), None),
                }
                table = uvloop.run(_measure_limits(limited, prompts_of(tokenizer), QUICK if quick else FULL))
            report = uvloop.run(_measure(arms, prompts_of(tokenizer), QUICK if quick else FULL))
            return replace(report, tables=[*report.tables, table])


@dataclass(frozen=True, slots=True)
class RouterAddress:
    grpc: str
    http: str
    pid: int


@contextlib.contextmanager
def limited_router(config: Config, mode: str) -> Iterator[RouterAddress]:
    """A router with two tenants, one of which has every limit, none that is reached."""
    limits = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_in_flight"), 10**9)
    hashes = {key: hashlib.sha256(key.encode()).hexdigest() for key in (FREE_KEY, LIMITED_KEY)}
    tenants = {"free": {"key_sha256": [hashes[FREE_KEY]]}, "limited": {"key_sha256": [hashes[LIMITED_KEY]], **limits}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(tenants))
        file.flush()
        settings = replace(config.router, tenants_file=file.name)
        with running_router(replace(config, router=settings), mode) as router:
            yield router


async def _measure_limits(arms: dict[str, Arm], prompts: Iterator[Prompt], sizes: Sizes) -> Table:
    """The arms take turns by the request, so that all of them meet the same caches and the same neighbours."""
    clients = {name: arm.connect() for name, arm in arms.items()}
    p50_ms: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(2 * sizes.num_rounds + 1):
        latencies_s: dict[str, list[float]] = {arm: [] for arm in arms}
        for name in interleaved(tuple(arms), sizes.alone):
            prompt = next(prompts)
            start = time.perf_counter()
            await clients[name].ask(prompt, SHORT_ANSWER, INSTANT)
            latencies_s[name].append(time.perf_counter() - start)
        for name in arms if number else ():  # the first round warms up
            p50_ms[name].append(statistics.median(latencies_s[name]) * 1e3)
    for client in clients.values():
        await client.close()
    added = [with_ - without for with_, without in zip(p50_ms["limits"], p50_ms["without limits"], strict=True)]
    table = Table(
        f"Router, limits of tenants: {PROMPT_WORDS}-word chat over HTTP, 1 client, {2 * sizes.num_rounds} rounds",
        ("", "p50, ms", "added p50, ms", "added, in bare Redis round trips"),
        note="A tenant with every limit and one with none, at the same router. A bare round trip is a PING.",
    )
    table.rows.append(("without limits", spread(p50_ms["without limits"]), "-", "-"))
    table.rows.append(("limits", spread(p50_ms["limits"]), spread(added), ratio(added, p50_ms["Redis"])))
    table.rows.append(("Redis, bare round trip", spread(p50_ms["Redis"]), "-", "-"))
    return table


@contextlib.contextmanager
def running_router(config: Config, mode: str) -> Iterator[RouterAddress]:
    """The router process, ready."""
    grpc_port, http_port = free_port(), free_port()
    config = replace(
        config,
        router=replace(config.router, id=f"router-{mode}", mode=mode),
        cluster=replace(config.cluster, host=HOST, grpc_port=grpc_port, http_port=http_port),
    )
    process = subprocess.Popen(
        tied([sys.executable, "-m", "router"]),
        env={**os.environ, "BATON_CONFIG_JSON": config.to_json()},
    )
    try:
        _await_ready(f"http://{HOST}:{http_port}/readyz", process)
        yield RouterAddress(f"{HOST}:{grpc_port}", f"{HOST}:{http_port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _measure(arms: dict[str, Arm], prompts: Iterator[Prompt], sizes: Sizes) -> Report:
    async def measure(arm: str, num_prompts: int, num_clients: int, num_tokens: int, gap_us: int = INSTANT) -> Load:
        taken = list(itertools.islice(prompts, num_prompts))
        return await load_with(arms[arm], taken, num_clients, num_tokens, gap_us)

    for arm in arms:
        await measure(arm, 100, 4, SHORT_ANSWER)  # warm up
    alone: dict[str, list[Load]] = {arm: [] for arm in arms}
    crowd: dict[str, list[Load]] = {arm: [] for arm in arms}
    for arm in interleaved(tuple(arms), sizes.num_rounds):
        alone[arm].append(await measure(arm, sizes.alone, 1, SHORT_ANSWER))
        crowd[arm].append(await measure(arm, sizes.crowd, NUM_CLIENTS, SHORT_ANSWER))

    streaming = ("gRPC", "HTTP, SSE", "gRPC, disaggregated")
    burst: dict[str, list[Load]] = {arm: [] for arm in streaming}
    paced: dict[str, list[Load]] = {arm: [] for arm in streaming}
    for arm in interleaved(streaming, sizes.num_rounds):
        burst[arm].append(await measure(arm, sizes.num_long, NUM_CLIENTS, LONG_ANSWER))
        paced[arm].append(await measure(arm, NUM_CLIENTS, NUM_CLIENTS, sizes.paced_tokens, GAP_US))
    turns: dict[str, list[tuple[Load, Load]]] = {"gRPC": [], "HTTP": []}
    for arm in interleaved(tuple(turns), sizes.num_rounds):
        texts = [prompt.messages[0] for prompt in itertools.islice(prompts, (LONG_CHAT + 2) * sizes.num_chats)]
        chats = [Prompt(tuple(texts[i :: sizes.num_chats]), ()) for i in range(sizes.num_chats)]
        begun = [Prompt(chat.messages[:LONG_CHAT], ()) for chat in chats]
        turns[arm].append(
            (
                await load_with(arms[arm], begun, 1, SHORT_ANSWER, INSTANT),
                await load_with(arms[arm], chats, 1, SHORT_ANSWER, INSTANT),
            )
        )
    tables = [
        _request_table(arms, alone, crowd, sizes),
        _turn_table(turns, sizes),
        _token_table(streaming, burst, paced, crowd, sizes),
    ]
    return Report("router", tables)


def _request_table(
    arms: dict[str, Arm], alone: dict[str, list[Load]], crowd: dict[str, list[Load]], sizes: Sizes
) -> Table:
    table = Table(
        f"Router, per request: {PROMPT_WORDS}-word chat, {SHORT_ANSWER}-token answer, {sizes.num_rounds} rounds",
        ("", "p50 at 1 client, ms", "added p50, ms", f"requests/s at {NUM_CLIENTS}", "router CPU ms/request"),
        note="Added: to the same calls made to the workers directly. Router, clients and workers share the machine.",
    )
    for name, arm in arms.items():
        p50 = _p50_ms(alone[name])
        rate = spread([len(load.latencies_s) / load.wall_s for load in crowd[name]])
        cpu = spread(_cpu_ms(crowd[name]))
        if arm.pid is None:
            table.rows.append((name, spread(p50), "-", rate, "-"))
        else:
            table.rows.append((name, spread(p50), difference(p50, _p50_ms(alone[arm.reference])), rate, cpu))
    return table


def _turn_table(turns: dict[str, list[tuple[Load, Load]]], sizes: Sizes) -> Table:
    table = Table(
        f"Router, chats of {LONG_CHAT} messages of {PROMPT_WORDS} words, {sizes.num_rounds} rounds",
        ("", "p50 at 1 client, ms", "router CPU ms/request", "CPU to the same chat's when it was new"),
        note="Next turn: the same chats with two messages more.",
    )
    for name, rounds in turns.items():
        cpu = [_cpu_ms([loads[turn] for loads in rounds]) for turn in (0, 1)]
        new, following = ([loads[turn] for loads in rounds] for turn in (0, 1))
        table.rows.append((f"{name}, new", spread(_p50_ms(new)), spread(cpu[0]), "-"))
        table.rows.append((f"{name}, next turn", spread(_p50_ms(following)), spread(cpu[1]), ratio(cpu[1], cpu[0])))
    return table


def _token_table(
    streaming: tuple[str, ...],
    burst: dict[str, list[Load]],
    paced: dict[str, list[Load]],
    crowd: dict[str, list[Load]],
    sizes: Sizes,
) -> Table:
    table = Table(
        f"Router, per streamed token: {NUM_CLIENTS} streams, a message a token, {sizes.num_rounds} rounds",
        ("", "tokens/s", "router CPU us/token", "router CPU, cores"),
        note=f"All at once: {LONG_ANSWER}-token answers; the CPU of a {SHORT_ANSWER}-token answer is taken off, so "
        f"that only tokens are left. Paced: every stream gets a token each {GAP_US // 1000} ms, all at one moment, "
        "as from an engine; the CPU of the request itself is included.",
    )
    for name in streaming:
        for way, loads in (("all at once", burst[name]), ("paced", paced[name])):
            cpu_us = [load.router_cpu_s * 1e6 / load.num_tokens for load in loads]
            if way == "all at once":
                per_token = zip(loads, crowd[name], strict=True)
                cpu_us = [_cpu_us_of_a_token(long, short) for long, short in per_token]
            table.rows.append(
                (
                    f"{name}, {way}",
                    spread([load.num_tokens / load.wall_s for load in loads]),
                    spread(cpu_us),
                    spread([load.router_cpu_s / load.wall_s for load in loads]),
                )
            )
    return table


def _cpu_us_of_a_token(long: Load, short: Load) -> float:
    per_request = [load.router_cpu_s / len(load.latencies_s) for load in (long, short)]
    return (per_request[0] - per_request[1]) * 1e6 / (LONG_ANSWER - SHORT_ANSWER)


def _cpu_ms(loads: list[Load]) -> list[float]:
    """The router's, per request."""
    return [load.router_cpu_s * 1e3 / len(load.latencies_s) for load in loads]


def _p50_ms(loads: list[Load]) -> list[float]:
    return [statistics.median(load.latencies_s) * 1e3 for load in loads]


def prompts_of(tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Chats that differ from the first word on, with their token ids for those who ask without a router."""
    rng = random.Random(3)
    while True:
        text = " ".join(rng.choices(WORDS, k=PROMPT_WORDS))
        yield Prompt((text,), tuple(encoded(tokenizer, Chat(messages=(ChatMessage(role="user", content=text),)))))


def _cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _await_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with status {process.returncode}; its error is above")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the router was not ready within {timeout_s:g} s")
