from __future__ import annotations

import math

import pytest

from baton.cluster import Role, Worker
from router.cluster.registry import Readiness
from router.placement.pool_view import PoolView
from tests.unit.router.placement.test_pool_view import Clock, worker

PATIENCE_S = 30.0
PREFILL, DECODE = worker("prefill-0", role=Role.PREFILL), worker("decode-0")


class Router:
    def __init__(self, needs_prefill: bool = False, timeout_s: float = PATIENCE_S) -> None:
        self.clock = Clock()
        self.pools = PoolView(lambda keys: {}, self.clock)
        self.others: tuple[PoolView, ...] = ()
        """Of further models."""
        self.is_starting = False
        self.readiness = Readiness(
            lambda: (self.pools, *self.others),
            needs_prefill,
            timeout_s,
            self.clock,
            has_read=lambda: False,
            is_starting=lambda: self.is_starting,
        )

    async def sees(self, *workers: Worker) -> str:
        await self.pools.update(workers)
        return self.readiness.why_not()

    async def after(self, seconds: float) -> str:
        self.clock.now += seconds
        return self.readiness.why_not()


@pytest.mark.parametrize("timeout_s", [PATIENCE_S, math.inf])
async def test_a_router_is_not_ready_before_its_first_workers(timeout_s: float) -> None:
    router = Router(timeout_s=timeout_s)
    assert await router.sees() == "no decode worker is ready"
    assert await router.sees(PREFILL) == "no decode worker is ready"
    assert await router.sees(DECODE) == ""


async def test_workers_that_are_gone_are_waited_for_as_long_as_requests_wait() -> None:
    router = Router()
    await router.sees(DECODE)
    assert await router.sees() == ""
    assert await router.after(PATIENCE_S) == ""
    assert await router.after(0.1) == "no decode worker is ready"
    assert await router.sees(DECODE) == ""
    await router.after(PATIENCE_S * 2)
    assert await router.sees() == "", "the wait begins when they go"


@pytest.mark.parametrize("needs_prefill", [True, False])
async def test_prefill_workers_are_needed_where_every_prompt_goes_to_one(needs_prefill: bool) -> None:
    reason = "no prefill worker is ready, and router.mode is disaggregated" if needs_prefill else ""
    router = Router(needs_prefill)
    assert await router.sees(DECODE) == reason
    assert await router.sees(DECODE, PREFILL) == ""
    assert await router.sees(DECODE) == "", "it is waited for as well"
    assert await router.after(PATIENCE_S + 0.1) == reason


@pytest.mark.parametrize("num_desired", [0, 1])
async def test_a_router_is_ready_for_a_model_that_sleeps_or_wakes(num_desired: int) -> None:
    """Its requests are held."""
    router = Router()
    router.pools.note_sleep(is_asleep=True, num_desired=num_desired, problem="")
    assert router.readiness.why_not() == ""
    router.pools.note_sleep(is_asleep=False, num_desired=1, problem="")
    assert await router.after(PATIENCE_S) == "", "it may come back"
    assert await router.after(0.1) == "no decode worker is ready"


async def test_one_model_that_is_served_is_enough() -> None:
    router = Router()
    router.others = (PoolView(lambda keys: {}, router.clock), PoolView(lambda keys: {}, router.clock))
    assert await router.sees() == "none of 3 models can be served: no decode worker is ready"
    await router.others[1].update([DECODE])
    assert router.readiness.why_not() == ""
    await router.others[1].update([])
    router.others[0].note_sleep(is_asleep=True, num_desired=0, problem="")
    assert await router.after(PATIENCE_S * 2) == ""


def test_a_router_without_models_is_ready_when_it_knows_that_there_are_none() -> None:
    """It then answers rightly that a model does not exist."""
    read: list[bool] = []
    readiness = Readiness(tuple, False, PATIENCE_S, Clock(), has_read=lambda: bool(read), is_starting=lambda: False)
    assert readiness.why_not() == "the models of the endpoint are not known yet"
    read.append(True)
    assert readiness.why_not() == ""


async def test_a_router_is_not_ready_while_it_loads_the_announced_models() -> None:
    """It would call them unknown."""
    router = Router()
    router.is_starting = True
    assert await router.sees(DECODE) == "models of the endpoint are being loaded"
    router.is_starting = False
    assert router.readiness.why_not() == ""


async def test_a_router_that_stops_is_not_ready_at_once() -> None:
    router = Router()
    await router.sees(DECODE)
    router.readiness.stop()
    assert router.readiness.why_not() == "the router is stopping"
