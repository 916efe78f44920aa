"""When a model may sleep: single observations by hand, sequences of them by what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import ClusterStatus, PoolStatus, Role, RoutedModel, RouterInfo, Worker, WorkerLoad, WorkerState
from deploy.scaling.idleness import UNKNOWN, Idleness, activity_of, observed
from deploy.scaling.window import of_model
from tests.support.builders import cluster_status, worker

IDLE_S = 100.0
OURS = "ours"
READY = WorkerLoad(state=WorkerState.READY, computed_tokens=5)


def router(router_id: str = "r", pid: int = 1, **counts: int) -> RouterInfo:
    """A router with these counts of our model, and many of another one."""
    models = (RoutedModel(content_id=OURS, **counts), RoutedModel(content_id="other", met=1_000, in_flight=9, held=9))
    found = RouterInfo(id=router_id, pid=pid, grpc="", http="", mirror_lag_s=0.0, met=2_000, models=models)
    return of_model(found, OURS)


def status(*routers: RouterInfo, workers: tuple[Worker, ...] | None = None, desired: int = 1) -> ClusterStatus:
    pools = {"prefill": PoolStatus(0, 0), "decode": PoolStatus(desired, 1)}
    return cluster_status(
        *((worker("d", Role.DECODE, READY),) if workers is None else workers), pools=pools, routers=routers
    )


def after(*statuses: tuple[float, ClusterStatus | None]) -> Idleness:
    """The memory after these observations, None where the cluster could not be observed."""
    memory = UNKNOWN
    for now_s, seen in statuses:
        memory = UNKNOWN if seen is None else observed(memory, activity_of(seen), now_s)
    return memory


QUIET = status(router(met=3))


def test_the_time_without_a_request_begins_with_the_first_observation() -> None:
    assert after((10.0, QUIET)).seconds(10.0) == 0.0
    assert after((10.0, QUIET), (50.0, QUIET), (110.0, QUIET)).seconds(110.0) == 100.0


@pytest.mark.parametrize(
    "seen",
    [
        status(router(met=4)),
        status(router(met=3, missed=1)),
        status(router(met=3, rejected=1)),
        status(router(met=2)),
        status(router(met=3, in_flight=1)),
        status(router(met=3, held=1)),
        status(router("other", met=3)),
        status(router(pid=2, met=3)),
        status(router(met=3), router("new", met=1)),
        status(),
        status(router(met=3), workers=(worker("d", Role.DECODE, replace(READY, running=1)),)),
        status(router(met=3), workers=(worker("d", Role.DECODE, replace(READY, waiting=1)),)),
        status(router(met=3), workers=(worker("d", Role.DECODE, replace(READY, computed_tokens=6)),)),
        status(router(met=3), desired=0),
        None,
    ],
)
def test_demand_or_a_gap_of_evidence_begins_it_again(seen: ClusterStatus | None) -> None:
    memory = after((0.0, QUIET), (90.0, seen), (95.0, QUIET), (100.0, QUIET))
    assert memory.seconds(100.0) <= 10.0


def test_what_shows_no_demand_does_not() -> None:
    """A router that joins, and a worker that is replaced."""
    joined = status(router(met=3), router("new"))
    replaced = status(router(met=3), router("new"), workers=(worker("d", Role.DECODE, READY, epoch=2),))
    assert after((0.0, QUIET), (50.0, joined), (100.0, replaced)).seconds(100.0) == 100.0


def test_after_a_wake_up_the_time_begins_when_a_decode_worker_is_ready() -> None:
    asleep = status(router(met=3), workers=(), desired=0)
    waking = status(router(met=3), workers=())
    memory = after((0.0, asleep), (200.0, waking), (300.0, waking))
    assert memory.seconds(300.0) == 100.0, "a model that does not wake need not try for ever"
    assert after((0.0, asleep), (200.0, waking), (290.0, QUIET), (300.0, QUIET)).seconds(300.0) == 10.0


def test_a_router_of_an_earlier_release_counts_with_all_of_its_requests() -> None:
    earlier = RouterInfo(id="r", pid=1, grpc="", http="", mirror_lag_s=0.0, met=3)
    assert of_model(earlier, OURS) == earlier
    busy = status(replace(earlier, met=4))
    assert after((0.0, status(earlier)), (100.0, status(earlier))).seconds(100.0) == 100.0
    assert after((0.0, status(earlier)), (100.0, busy)).seconds(100.0) == 0.0


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "seconds": st.floats(1.0, 40.0),
            "met": st.integers(0, 1),
            "in_flight": st.integers(0, 1),
            "held": st.integers(0, 1),
            "is_seen": st.booleans(),
        }
    ),
    max_size=30,
)


@given(STEPS)
def test_it_never_sleeps_with_a_request_in_the_window_and_always_after_the_silence(steps: list[dict[str, Any]]) -> None:
    memory, now_s, met, asked_s = UNKNOWN, 0.0, 0, 0.0
    for step in steps:
        now_s += step["seconds"]
        met += step["met"]
        if step["met"] or step["in_flight"] or step["held"]:
            asked_s = now_s
        if step["is_seen"]:
            seen = status(router(met=met, in_flight=step["in_flight"], held=step["held"]))
            memory = observed(memory, activity_of(seen), now_s)
        else:
            memory = UNKNOWN
        assert memory.seconds(now_s) <= now_s - asked_s
    for _ in range(12):
        now_s += 10.0
        memory = observed(memory, activity_of(status(router(met=met))), now_s)
    assert memory.seconds(now_s) >= IDLE_S
