"""Thousands of clients that leave, at every moment of a request's life: nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import grpc
import pytest

from baton import wire
from baton.api import GenerateRequest
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import inference_pb2_grpc
from tests.chaos import asks
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import is_idle
from tests.support.asking import prompt_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

NUM_CANCELS = 10_000 if "CHAOS_SECONDS" in os.environ else 1_000
"""Over both modes together."""
NUM_AT_ONCE = 48
NUM_BLOCKS = 640
"""Of a worker: too few for all prompts at once, so some are queued."""
ENDED = "ended by itself"
MAX_IN_FLIGHT = 256
"""Choices; those of NUM_AT_ONCE requests stay below."""
SHARED_PREFIXES = [prompt_of(900 + number, 800) for number in range(8)]
"""Long enough to be pulled by a worker that has none of them."""


class Moment(StrEnum):
    """When a client leaves."""

    AT_ONCE = "at once"
    SOON = "after a random time"
    """Mostly before the first token: queued, reserved, prefilling, pulling or transferring."""
    FIRST_TOKEN = "at the first token"
    LATER = "while decoding"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Plan:
    request: GenerateRequest
    moment: Moment
    delay_s: float
    """For SOON."""
    num_tokens: int
    """For LATER: heard before."""


@dataclass(slots=True)
class Seen:
    """What the clients have met."""

    moments: Counter[str]
    """Of those who left in time."""
    num_before_first: int
    """Who left without having heard a token."""
    wrong: list[str]
    others: list[str]
    """Ends of calls that nobody asked for."""


def plan(rng: random.Random) -> Plan:
    prompt = prompt_of(rng.randrange(10**9), rng.choice((5, 40, 300, 900)))
    if rng.random() < 0.4:
        prompt = rng.choice(SHARED_PREFIXES) + prompt
    request = asks.greedy(prompt, rng.randrange(2, 60))
    request = replace(request, sampling={**request.sampling, "n": rng.choice((1, 1, 2, 3))})
    (moment,) = rng.choices(list(Moment), (10, 45, 15, 25, 5))
    return Plan(request, moment, rng.random() * 0.25, rng.randrange(2, 40))


async def run(stub: inference_pb2_grpc.InferenceAsyncStub, plan: Plan, seen: Seen) -> None:
    call = stub.Generate(wire.generate_request(plan.request), timeout=120)
    tokens: dict[int, list[int]] = {}
    left = asyncio.get_running_loop().call_later(plan.delay_s, call.cancel) if plan.moment is Moment.SOON else None
    if plan.moment is Moment.AT_ONCE:
        await asyncio.sleep(0)
        call.cancel()
    num_tokens, is_cancelled = 0, False
    try:
        async for part in call:
            tokens.setdefault(part.choice_index, []).extend(part.token_ids)
            num_tokens += len(part.token_ids)
            if plan.moment is Moment.FIRST_TOKEN or (plan.moment is Moment.LATER and num_tokens >= plan.num_tokens):
                call.cancel()
    except asyncio.CancelledError:
        is_cancelled = True
    except grpc.aio.AioRpcError as error:
        is_cancelled = error.code() is grpc.StatusCode.CANCELLED
        if not is_cancelled:
            seen.others.append(f"{plan.moment}: {error.code()}: {error.details()}")
    if left is not None:
        left.cancel()
    if plan.moment is Moment.NEVER and is_cancelled:
        seen.others.append("cancelled, and nobody had asked")
    seen.moments[plan.moment if is_cancelled else ENDED] += 1
    seen.num_before_first += is_cancelled and not tokens
    (expected,) = {*asks.expected(plan.request)}
    wrong = [index for index, heard in tokens.items() if tuple(heard) != expected[: len(heard)]]
    if wrong or (plan.moment is Moment.NEVER and {len(heard) for heard in tokens.values()} != {len(expected)}):
        seen.wrong.append(f"{plan.request.sampling}: {tokens}")


async def run_all(address: str, num_cancels: int, seed: int) -> Seen:
    """NUM_AT_ONCE requests at any time, until so many have been cancelled."""
    rng = random.Random(seed)
    seen = Seen(Counter(), 0, [], [])

    async def client(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        while seen.moments.total() - seen.moments[ENDED] < num_cancels:
            await run(stub, plan(rng), seen)

    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(client(stub) for _ in range(NUM_AT_ONCE)))
    return seen


def wait_until_nothing_is_held(fleet: Fleet) -> None:
    def is_clean() -> bool:
        workers = fleet.client.status()["workers"]
        transfers = [worker["transfers"] for worker in workers]
        return all(
            is_idle(w) and w["blocks"]["free"] + w["blocks"]["cached"] == NUM_BLOCKS for w in workers
        ) and not any(counts["slots_in_use"] or counts["unsent_bytes"] for counts in transfers)

    wait_until(is_clean, every_s=0.1, seen=lambda: fleet.client.status()["workers"])


def check_books(fleet: Fleet) -> None:
    """The router believes that nobody computes or decodes, and takes exactly as many choices as it may.

    Exactly 0: what it forgot to strike out it believes to be done long ago, but for what rounding leaves.
    """
    probe = replace(asks.greedy(prompt_of(1, 33), 1), request_id="probe")
    fleet.inference.Generate(wire.generate_request(probe), timeout=30).__next__()
    (placed,) = fleet.client.explain("probe")
    assert {(option.wait_s, option.room_s) for option in placed.options} == {(0.0, 0.0)}, placed.options

    async def fill() -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(fleet.routers[0].grpc) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            return await asyncio.gather(*(_refusal(stub, number) for number in range(MAX_IN_FLIGHT // 16 + 1)))

    refusals = asyncio.run(fill())
    assert sorted(refusals, key=str) == [grpc.StatusCode.OK] * (MAX_IN_FLIGHT // 16) + [
        grpc.StatusCode.RESOURCE_EXHAUSTED
    ]


async def _refusal(stub: inference_pb2_grpc.InferenceAsyncStub, number: int) -> grpc.StatusCode:
    request = asks.greedy(prompt_of(number, 8), 200)
    request = replace(request, sampling={**request.sampling, "n": 16})
    call = stub.Generate(wire.generate_request(request), timeout=120)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_random_cancels_leave_nothing(mode: str) -> None:
    router = RouterConfig(mode=mode, max_in_flight=MAX_IN_FLIGHT, cache_secret="cancel")
    with running_fleet(TransferConfig(), router, num_blocks=NUM_BLOCKS, lease_s=10.0, step_ms=2.0) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in Role for _ in range(2)))
        began_s = time.monotonic()
        seen = asyncio.run(run_all(fleet.routers[0].grpc, NUM_CANCELS // 2, seed=len(mode)))
        took_s = time.monotonic() - began_s
        print(
            f"{mode}, {took_s:.1f} s: {seen.moments.total()} requests, {seen.num_before_first} left before the "
            f"first token: { {str(moment): number for moment, number in seen.moments.items()} }"
        )
        assert not seen.wrong, seen.wrong[0]
        assert not seen.others, seen.others[:5]
        assert all(seen.moments[moment] > NUM_CANCELS // 100 for moment in Moment if moment is not Moment.NEVER)
        wait_until_nothing_is_held(fleet)
        check_books(fleet)
        metrics = fleet.routers[0].metrics()
        pulled = sum(value for name, value in metrics if name.startswith("baton_kv_pulled_tokens_total"))
        print(f"{pulled:.0f} tokens pulled")
        assert pulled, "no cancel can have met a pull"
