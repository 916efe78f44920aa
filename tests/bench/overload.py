"""Twice the load that the cluster can bear: who is served in time, who is told so, and who is starved.

The real local cluster (one prefill and one decode worker, the small model) first shows its capacity: closed-loop
clients of one tenant, no objective. Then requests of the same kind arrive at random (Poisson) at twice that rate, nine
in ten of one tenant, one in ten of another of the same weight, with an objective for the first token.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import yaml

from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.report import Report, Table
from tests.integration.cluster import Served, running_cluster
from tests.support.operator import OPERATOR_ENTRY

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 256, 24
NUM_CLIENTS = (8, 16, 32)
"""Of the closed loop: with some number of them both workers are as busy as they can be."""
OVERLOAD = 2.0
SMALL_SHARE = 0.1
TTFT_S = 6.0
ITL_S = 1.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    tenant: str
    due_s: float
    answered_s: float = 0.0
    """From when it was due to the first token or the refusal."""
    first_token_s: float = float("inf")
    itl_s: float = 0.0
    was_refused: bool = False
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error and not self.was_refused and self.first_token_s <= TTFT_S and self.itl_s <= ITL_S


@dataclass(slots=True)
class Run:
    lasted_s: float
    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, counts: Callable[[Outcome], bool]) -> int:
        return sum(map(counts, self.outcomes))

    @property
    def served_per_s(self) -> float:
        return self.count(lambda o: not (o.error or o.was_refused)) / self.lasted_s

    @property
    def good_per_s(self) -> float:
        return self.count(lambda o: o.is_good) / self.lasted_s

    @property
    def longest_wait_s(self) -> float:
        """For a first token or a refusal."""
        return max(outcome.answered_s for outcome in self.outcomes)

    def of(self, tenant: str) -> Run:
        return Run(self.lasted_s, [outcome for outcome in self.outcomes if outcome.tenant == tenant])


def run(quick: bool) -> Report:
    capacity, overload, preemptions = measure(*((15.0, 30.0) if quick else (40.0, 120.0)))
    return Report("overload", [_table(capacity, overload, preemptions)])


def measure(closed_s: float, open_s: float) -> tuple[Run, Run, int]:
    """What `measured` finds with the real local cluster."""
    with TemporaryDirectory() as folder:
        tenants = write_tenants(Path(folder))
        with running_cluster("--prefill", "1", "--decode", "1", router_tenants_file=tenants) as cluster:
            return measured(cluster, closed_s, open_s, NUM_CLIENTS)


def write_tenants(folder: Path) -> str:
    """Writes the tenants' file, and returns its path."""
    hashes = {name: {"key_sha256": [hashlib.sha256(name.encode()).hexdigest()]} for name in ("large", "small")}
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump(hashes) + OPERATOR_ENTRY)
    return str(path)


def measured(cluster: Served, closed_s: float, open_s: float, num_clients: Sequence[int]) -> tuple[Run, Run, int]:
    """The capacity, the overload, and how often a sequence was preempted.

    Args:
        closed_s: for each number of clients.
        num_clients: of the closed loop; the number that is served most counts.
    """
    rng = random.Random(5)
    asyncio.run(_closed(cluster, rng, 8, min(8.0, closed_s / 2)))  # the workers learn what their steps take
    closed = [asyncio.run(_closed(cluster, rng, num, closed_s)) for num in num_clients]
    capacity = max(closed, key=lambda run: run.served_per_s)
    overload = asyncio.run(_open(cluster, rng, open_s, OVERLOAD * capacity.served_per_s))
    preemptions = sum(w["preemptions"] for w in cluster.wait_until_idle()["workers"])
    return capacity, overload, preemptions


def _table(capacity: Run, overload: Run, preemptions: int) -> Table:
    table = Table(
        f"Overload: {NUM_PROMPT_TOKENS} prompt and {NUM_OUTPUT_TOKENS} answer tokens, {OVERLOAD:g} times the capacity",
        ("", "value"),
        note=f"Objective: first token within {TTFT_S:g} s, {ITL_S:g} s between tokens. Goodput counts from the first "
        "arrival to the last answer.",
    )
    table.rows += [
        ("capacity, requests/s", f"{capacity.served_per_s:.2f}"),
        ("offered, requests/s", f"{len(overload.outcomes) / overload.lasted_s:.2f}"),
        ("good, requests/s", f"{overload.good_per_s:.2f}"),
        ("good, of the capacity", f"{overload.good_per_s / capacity.served_per_s:.2f}"),
        ("refused", f"{overload.count(lambda o: o.was_refused)} of {len(overload.outcomes)}"),
        ("failed otherwise", f"{overload.count(lambda o: bool(o.error))}"),
        ("served, objective missed", f"{overload.count(lambda o: not (o.error or o.was_refused or o.is_good))}"),
        ("longest wait for a token or a refusal, s", f"{overload.longest_wait_s:.1f}"),
        ("preemptions", f"{preemptions}"),
    ]
    for tenant in ("large", "small"):
        run = overload.of(tenant)
        table.rows.append(
            (f"{tenant} tenant: good of asked", f"{run.count(lambda o: o.is_good)} of {len(run.outcomes)}")
        )
    return table


async def _closed(cluster: Served, rng: random.Random, num_clients: int, seconds: float) -> Run:
    """Clients that each send one request after the other."""
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        began_s = time.monotonic()
        outcomes: list[Outcome] = []

        async def client() -> None:
            while time.monotonic() - began_s < seconds:
                outcome = Outcome(tenant="large", due_s=time.monotonic())
                await _ask(channel, rng, outcome, has_objective=False)
                outcomes.append(outcome)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return Run(time.monotonic() - began_s, outcomes)


async def _open(cluster: Served, rng: random.Random, seconds: float, rate: float) -> Run:
    """Requests that arrive whatever becomes of the others."""
    async with grpc.aio.insecure_channel(cluster.grpc) as channel, asyncio.TaskGroup() as tasks:
        began_s = due_s = time.monotonic()
        outcomes: list[Outcome] = []
        while (due_s := due_s + rng.expovariate(rate)) < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            outcomes.append(Outcome(tenant="small" if rng.random() < SMALL_SHARE else "large", due_s=due_s))
            tasks.create_task(_ask(channel, rng, outcomes[-1], has_objective=True))
    return Run(time.monotonic() - began_s, outcomes)


async def _ask(channel: grpc.aio.Channel, rng: random.Random, outcome: Outcome, *, has_objective: bool) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[rng.randrange(1000, 40_000) for _ in range(NUM_PROMPT_TOKENS)]),
        sampling=inference_pb2.SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0),
        slo=inference_pb2.ServiceLevelObjective(ttft_ms=(TTFT_S if has_objective else 600.0) * 1e3, itl_ms=ITL_S * 1e3),
    )
    stub, last_s = inference_pb2_grpc.InferenceStub(channel), 0.0
    metadata = (("authorization", f"Bearer {outcome.tenant}"),)
    try:
        async for response in stub.Generate(request, metadata=metadata):
            if response.token_ids:
                last_s = time.monotonic() - outcome.due_s
                outcome.first_token_s = min(outcome.first_token_s, last_s)
                outcome.answered_s = outcome.first_token_s
        outcome.itl_s = (last_s - outcome.first_token_s) / (NUM_OUTPUT_TOKENS - 1)
    except grpc.aio.AioRpcError as error:
        outcome.answered_s = outcome.answered_s or time.monotonic() - outcome.due_s
        outcome.was_refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        outcome.error = "" if outcome.was_refused else f"{error.code().name}: {error.details()}"
