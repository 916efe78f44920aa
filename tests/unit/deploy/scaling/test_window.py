"""What a window measures, and what restarts leave of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.cluster import (
    BlockCounts,
    ClusterStatus,
    PoolStatus,
    Role,
    RoutedModel,
    RouterInfo,
    Worker,
    WorkerLoad,
    WorkerState,
)
from deploy.scaling.window import measure, of_model
from tests.support.builders import cluster_status, step_costs, worker

COSTS = step_costs(s_per_token=1e-3, s_weights=0.01, s_per_sequence=1e-3)
READY = WorkerLoad(state=WorkerState.READY, blocks=BlockCounts(total=100), costs=COSTS)


def status(*workers: Worker, routers: tuple[RouterInfo, ...] = (), prefill: int = 1, decode: int = 1) -> ClusterStatus:
    pools = {"prefill": PoolStatus(prefill, 0), "decode": PoolStatus(decode, 0)}
    return cluster_status(*workers, pools=pools, routers=routers)


def router(router_id: str, met: int, missed: int = 0, rejected: int = 0, pid: int = 1) -> RouterInfo:
    return RouterInfo(
        id=router_id, pid=pid, grpc="", http="", mirror_lag_s=0.0, met=met, missed=missed, rejected=rejected
    )


def busy(busy_s: float, num_tokens: int, **more: int) -> WorkerLoad:
    return replace(READY, busy_s=busy_s, computed_tokens=num_tokens, **more)  # type: ignore[arg-type]


def test_prefill_is_busy_with_prompts_alone() -> None:
    before = status(worker("a", Role.PREFILL, busy(100.0, 50_000)))
    after = status(worker("a", Role.PREFILL, busy(108.0, 54_000, queued_tokens=700)))
    pool = measure(before, after, 10.0).prefill
    assert (pool.desired, pool.ready, pool.queued_tokens) == (1, 1, 700)
    assert pool.prompt_load == pytest.approx(0.8)
    assert pool.tokens_per_s == pytest.approx(500), "as measured, not the 1,000 of the fit"


def test_without_prompts_the_rate_is_that_of_the_fit() -> None:
    same = status(worker("a", Role.PREFILL, busy(100.0, 50_000)))
    pool = measure(same, same, 10.0).prefill
    assert pool.prompt_load == 0.0
    assert pool.tokens_per_s == pytest.approx(1000)


def test_decoding_is_taken_out_of_a_decode_workers_time() -> None:
    """10 sequences: steps of 20 ms. 400 of them in 8 s decode 4,000 tokens and leave 2 s for 2,000 of prompts."""
    before = status(worker("a", Role.DECODE, busy(0.5, 100, running=10, waiting=2)))
    blocks = BlockCounts(total=100, in_use=30)
    load = replace(busy(10.5, 100 + 4000 + 2000, running=10, waiting=2, queued_tokens=510), blocks=blocks)
    pool = measure(before, status(worker("a", Role.DECODE, load)), 10.0).decode
    assert pool.prompt_load == pytest.approx(0.2)
    assert pool.queued_tokens == 500, "each that decodes has a token which is not computed"
    assert pool.num_sequences == 12
    assert pool.kv_use == pytest.approx(0.3)
    assert pool.num_context_tokens == pytest.approx(30 * 16 / 12)
    alone = status(worker("a", Role.DECODE, busy(10.5, 100 + 5000, running=10)))
    assert measure(before, alone, 10.0).decode.prompt_load == pytest.approx(0.0, abs=0.02)


def test_a_worker_that_began_anew_counts_from_its_beginning() -> None:
    before = status(worker("a", Role.PREFILL, busy(100.0, 50_000)), worker("b", Role.PREFILL, busy(100.0, 50_000)))
    after = status(
        worker("a", Role.PREFILL, busy(3.0, 1500), epoch=2), worker("b", Role.PREFILL, busy(2.0, 1000)), prefill=2
    )
    assert measure(before, after, 10.0).prefill.prompt_load == pytest.approx(0.5)
    long_ago = status(worker("c", Role.PREFILL, busy(400.0, 1000)))
    assert measure(before, long_ago, 10.0).prefill.prompt_load == pytest.approx(1.0), "no more than the window"


def test_workers_that_are_not_ready_are_counted_as_what_they_are() -> None:
    after = status(
        worker("a", Role.PREFILL, READY),
        worker("b", Role.PREFILL, replace(READY, state=WorkerState.STARTING)),
        worker("c", Role.DECODE, replace(READY, state=WorkerState.DRAINING)),
        prefill=3,
    )
    found = measure(after, after, 10.0)
    assert (found.prefill.desired, found.prefill.ready, found.prefill.draining) == (3, 1, 0)
    assert (found.decode.ready, found.decode.draining) == (0, 1)


def test_requests_are_those_of_the_window_whatever_becomes_of_routers() -> None:
    before = status(routers=(router("a", 100, 10, 1), router("b", 3), router("c", 20), router("gone", 1000)))
    after = status(routers=(router("a", 130, 12, 4), router("b", 7, 1, pid=2), router("c", 4), router("new", 5)))
    found = measure(before, after, 10.0)
    assert (found.met, found.missed, found.rejected) == (30 + 7 + 4 + 5, 2 + 1, 3)
    assert found.goodput == pytest.approx(46 / 52)
    assert measure(status(), status(), 10.0).goodput == 1.0


def test_of_a_router_with_several_models_one_model_s_requests_count() -> None:
    other = RoutedModel(content_id="other", met=900, missed=90, rejected=9, ready_workers=9, in_flight=9, held=9)

    def seen(met: int, missed: int, rejected: int) -> RouterInfo:
        own = RoutedModel(content_id="own", met=met, missed=missed, rejected=rejected, ready_workers=2)
        return of_model(replace(router("a", 1000, 100, 10), models=(other, own)), "own")

    assert seen(5, 2, 1).ready_workers == 2
    measured = measure(status(routers=(seen(5, 2, 1),)), status(routers=(seen(9, 3, 3),)), 10.0)
    assert (measured.met, measured.missed, measured.rejected) == (4, 1, 2)
    elsewhere = of_model(replace(router("a", 1000), models=(other,)), "own")
    assert (elsewhere.met, elsewhere.models) == (0, (RoutedModel(content_id="own"),))
    earlier = router("a", 1000)
    assert of_model(earlier, "own") == earlier, "a release that serves one model names none"


@pytest.mark.parametrize(
    "before", [router("r", 9, 1, 1), router("r", 0, 9, 0), router("r", 0, 0, 9), router("r", 1, pid=2)]
)
def test_a_router_that_has_loaded_the_model_again_or_was_restarted_counts_from_zero(before: RouterInfo) -> None:
    """After a load its process is the same one. A negative number of requests would follow from the old counts."""
    measured = measure(status(routers=(before,)), status(routers=(router("r", 2, 1, 1),)), 10.0)
    assert (measured.met, measured.missed, measured.rejected) == (2, 1, 1)
