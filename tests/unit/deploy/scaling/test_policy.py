"""Sizes of pools: single decisions by hand, sequences of them by what must always hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import Role
from baton.config import AutoscaleConfig
from baton.errors import ConfigError
from deploy.scaling.policy import KV_LIMIT, decide, sequences_within
from deploy.scaling.values import Flips, Measured, PolicyState, PoolMeasured, ScalingDecision, Sizes
from router.placement import Objective
from tests.support.builders import step_costs

COSTS = step_costs(s_per_token=1e-3, s_weights=0.01, s_per_sequence=1e-3)
OBJECTIVE = Objective(ttft_s=5.0, itl_s=0.1)
"""A worker decodes 45 sequences in 0.9 of it: 1 ms each to compute, and 1 ms more."""
CONFIG = AutoscaleConfig(max_workers=12)


def measured(
    sizes: Sizes,
    *,
    prompts: float = 0.0,
    on_decode: float = 0.0,
    sequences: float = 0.0,
    queued_s: float = 0.0,
    kv_use: float = 0.0,
    met: int = 100,
    missed: int = 0,
    rejected: int = 0,
    draining: int = 0,
    ready: Sizes | None = None,
) -> Measured:
    """Work in workers' worth, as `Needs` has it; the queue in seconds of one worker."""
    ready = ready or sizes
    prefill = PoolMeasured(
        desired=sizes.prefill,
        ready=ready.prefill,
        draining=draining,
        prompt_load=prompts,
        queued_tokens=round(queued_s * 1000),
        tokens_per_s=1000.0,
    )
    decode = PoolMeasured(
        desired=sizes.decode,
        ready=ready.decode,
        draining=0,
        prompt_load=on_decode,
        num_sequences=sequences,
        kv_use=kv_use,
        costs=COSTS,
    )
    return Measured(prefill=prefill, decode=decode, met=met, missed=missed, rejected=rejected)


def after_cool_down(window: Measured, config: AutoscaleConfig = CONFIG) -> ScalingDecision:
    return decide(window, PolicyState(), config, OBJECTIVE, 0.0)


def test_a_worker_decodes_what_the_objective_allows() -> None:
    assert sequences_within(COSTS, 0.1, 0.0) == pytest.approx(45)
    bound_by_kv = replace(COSTS, s_per_sequence=0.0, s_per_token=0.0, s_per_kv_token=1e-6)
    assert sequences_within(bound_by_kv, 0.1, 10_000) == pytest.approx((0.09 - 0.01) / 0.01)
    assert sequences_within(COSTS, 0.001, 0.0) == 1.0, "an objective that no step keeps"
    assert math.isinf(sequences_within(COSTS, math.inf, 0.0))


def test_needs_are_work_over_what_a_worker_can_do() -> None:
    found = after_cool_down(
        measured(Sizes(2, 2), prompts=1.0, on_decode=0.5, sequences=63, queued_s=2.5, met=60, missed=20, rejected=40)
    ).needs
    refused = 120 / 80
    assert found.prefill == pytest.approx(1.5 * refused)
    assert found.decode == pytest.approx(63 / (0.7 * 45) * refused)
    assert found.backlog == pytest.approx(2.5 / 5 * refused)
    by_kv = after_cool_down(measured(Sizes(2, 2), sequences=1, kv_use=0.9)).needs
    assert by_kv.decode == pytest.approx(2 * 0.9 / KV_LIMIT)


@pytest.mark.parametrize(("met", "rejected"), [(1, 999), (0, 5)])
def test_however_many_are_refused_the_work_is_no_more_than_four_times_what_was_done(met: int, rejected: int) -> None:
    """A flood does not order all the workers that there are."""
    window = measured(Sizes(2, 2), prompts=0.4, sequences=9, met=met, rejected=rejected)
    decision = after_cool_down(window, replace(CONFIG, max_workers=100))
    assert decision.needs.prefill == pytest.approx(4 * 0.4)
    assert decision.sizes.total < 10
    assert "so there is 4.00 times the work" in " ".join(decision.reasons)


def test_a_pool_that_is_pressed_gets_the_other_ones_workers_before_new_ones() -> None:
    decision = after_cool_down(measured(Sizes(1, 7), prompts=1.0, on_decode=2.0, sequences=10))
    assert decision.sizes == Sizes(7, 1)
    assert decision.flips == Flips(6, Role.PREFILL)
    assert (decision.starts, decision.stops, decision.num_actions) == (Sizes(0, 0), Sizes(0, 0), 6)
    more = after_cool_down(measured(Sizes(1, 7), prompts=1.0, on_decode=5.0, sequences=10))
    assert more.sizes == Sizes(9, 1)
    assert (more.flips, more.starts) == (Flips(6, Role.PREFILL), Sizes(2, 0))
    back = after_cool_down(measured(Sizes(7, 1), prompts=0.5, sequences=63))
    assert back.flips is not None
    assert back.flips.role is Role.DECODE


def test_others_are_told_how_busy_each_pool_is_and_what_is_wanted() -> None:
    decision = after_cool_down(measured(Sizes(2, 4), prompts=1.8, sequences=63))
    wanted = {pool.pool: pool.wanted for pool in decision.scaling}
    assert wanted == {"prefill": decision.sizes.prefill, "decode": decision.sizes.decode}
    assert {pool.pool: round(pool.utilisation, 2) for pool in decision.scaling} == {"prefill": 0.9, "decode": 0.5}


def test_without_a_limit_workers_only_change_their_roles() -> None:
    config = AutoscaleConfig()
    pressed = after_cool_down(measured(Sizes(2, 6), prompts=20.0, sequences=10), config)
    assert pressed.sizes.total == 8
    assert pressed.flips is not None
    idle = decide(measured(Sizes(2, 6)), PolicyState(quiet_since_s=-1e6), config, OBJECTIVE, 0.0)
    assert idle.sizes == Sizes(2, 6)


def test_refusals_and_a_queue_ask_for_workers() -> None:
    calm = measured(Sizes(2, 2), prompts=1.2, sequences=20)
    assert after_cool_down(calm).sizes == Sizes(2, 2)
    refused = after_cool_down(replace(calm, rejected=100))
    assert refused.sizes.total > 4
    assert "so there is 2.00 times the work" in " ".join(refused.reasons)
    queue = replace(calm.prefill, queued_tokens=15_000)
    assert after_cool_down(replace(calm, prefill=queue)).sizes.total > 4


@pytest.mark.parametrize(("mode", "last"), [("auto", Sizes(0, 1)), ("disaggregated", Sizes(1, 1))])
def test_a_pool_without_load_keeps_its_last_decode_worker_though_the_model_may_sleep(mode: str, last: Sizes) -> None:
    """Only idleness takes it: load says nothing of the requests that are still to come."""
    config = AutoscaleConfig(enabled=True, min_prefill=0, min_decode=0, max_workers=4)
    sizes, state, now_s = Sizes(2, 2), PolicyState(), 0.0
    for _ in range(60):
        decision = decide(measured(sizes), state, config, OBJECTIVE, now_s, mode=mode)
        sizes, state, now_s = decision.sizes, decision.state, now_s + config.scale_in_s
    assert sizes == last


@pytest.mark.parametrize("sizes", [Sizes(0, 0), Sizes(2, 0)])
def test_an_empty_decode_pool_stays_empty_whatever_its_last_workers_still_do(sizes: Sizes) -> None:
    decision = after_cool_down(measured(sizes, sequences=100, queued_s=100.0, ready=Sizes(1, 1)))
    assert decision.sizes == sizes
    assert not decision.num_actions
    assert decision.state.needs is None, "the measurements after the next start count alone"


def test_reasons_name_the_measurement_the_limit_and_what_follows() -> None:
    reasons = " ".join(after_cool_down(measured(Sizes(1, 7), prompts=1.0, on_decode=2.0, sequences=10)).reasons)
    for part in ("3.00 workers' time", "2.00 of it on workers that decode", "above the target of 70%", "7:1 brings"):
        assert part in reasons


def test_nothing_changes_in_a_cool_down_or_while_a_worker_leaves_its_pool() -> None:
    pressed = measured(Sizes(1, 7), prompts=3.0, sequences=10)
    state = PolicyState.fresh(100.0)
    for now_s in (100.0, 100.0 + CONFIG.cool_down_s - 0.1):
        assert decide(pressed, state, CONFIG, OBJECTIVE, now_s).num_actions == 0
    acted = decide(pressed, state, CONFIG, OBJECTIVE, 100.0 + CONFIG.cool_down_s)
    assert acted.num_actions
    assert acted.state.acted_s == 100.0 + CONFIG.cool_down_s
    leaving = measured(Sizes(1, 7), prompts=3.0, sequences=10, draining=1)
    assert after_cool_down(leaving).num_actions == 0
    assert after_cool_down(measured(Sizes(1, 1), ready=Sizes(0, 0))).num_actions == 0


def test_nothing_is_started_while_something_is_about_to_be() -> None:
    pressed = {"prompts": 4.0, "sequences": 40.0}
    assert after_cool_down(measured(Sizes(3, 3), **pressed)).starts.total > 0  # type: ignore[arg-type]
    waiting = after_cool_down(measured(Sizes(3, 3), ready=Sizes(2, 3), **pressed))  # type: ignore[arg-type]
    assert waiting.starts.total == 0


def test_an_idle_cluster_shrinks_to_the_minimum_one_worker_at_a_time_and_not_before_its_time() -> None:
    state, sizes, stopped = PolicyState.fresh(0.0), Sizes(3, 4), []
    for window in range(1, 200):
        now_s = window * CONFIG.window_s
        decision = decide(measured(sizes, met=0), state, CONFIG, OBJECTIVE, now_s)
        if decision.num_actions:
            assert decision.stops.total == 1
            stopped.append(now_s)
        state, sizes = decision.state, decision.sizes
    assert sizes == Sizes(1, 1)
    assert stopped[0] >= CONFIG.scale_in_s
    assert all(after - before >= CONFIG.cool_down_s for before, after in itertools.pairwise(stopped))


def test_pools_of_other_sizes_are_watched_anew_before_a_worker_is_stopped() -> None:
    """Whoever changed them: here they shrink by what was decided, and an operator makes them larger at 1000 s."""
    state, sizes, stopped = PolicyState.fresh(0.0), Sizes(1, 4), []
    for window in range(1, 200):
        now_s = window * CONFIG.window_s
        if now_s == 1000.0:
            sizes = Sizes(1, 6)
        decision = decide(measured(sizes, met=0), state, CONFIG, OBJECTIVE, now_s)
        if decision.num_actions:
            stopped.append((now_s, decision.before))
        state, sizes = decision.state, decision.sizes
    assert all(after - before >= CONFIG.scale_in_s for (before, _), (after, _) in itertools.pairwise(stopped))
    first = next(now_s for now_s, before in stopped if before == Sizes(1, 6))
    assert first == 1000.0 + CONFIG.scale_in_s


def test_a_worker_is_stopped_only_where_the_others_would_be_far_below_the_target() -> None:
    """Each pool at 43 %; with a worker less one of them would be at 65 %, just below the 70 %."""
    quiet = PolicyState(quiet_since_s=-1e6)
    config = AutoscaleConfig(max_workers=6)
    busy = measured(Sizes(3, 3), prompts=1.3, sequences=1.3 * 0.7 * 45)
    decision = decide(busy, quiet, config, OBJECTIVE, 0.0)
    assert decision.num_actions == 0
    assert math.isinf(decision.state.quiet_since_s), "the time counts anew"
    assert decide(measured(Sizes(3, 3), prompts=0.9, sequences=20), quiet, config, OBJECTIVE, 0.0).stops.total == 1


def test_a_split_that_is_hardly_better_is_not_worth_a_flip() -> None:
    """8:8 has a pool at 80 %, 9:7 at 71 %; nobody can be started."""
    config = AutoscaleConfig()
    near = measured(Sizes(8, 8), prompts=6.4, sequences=5 * 0.7 * 45)
    decision = after_cool_down(near, config)
    assert decision.num_actions == 0
    assert "No split does much better (9:7: 71%)" in decision.reasons[-1]
    assert after_cool_down(replace(near, prefill=replace(near.prefill, prompt_load=8.0)), config).flips


def test_goodput_guards_workers() -> None:
    quiet = PolicyState(quiet_since_s=-1e6)
    missed = measured(Sizes(3, 4), prompts=0.1, met=90, missed=10)
    guarded = decide(missed, quiet, CONFIG, OBJECTIVE, 0.0)
    assert guarded.num_actions == 0
    assert "90.0% of the requests" in guarded.reasons[-1]
    assert decide(replace(missed, met=99, missed=1), quiet, CONFIG, OBJECTIVE, 0.0).stops.total == 1


def test_more_workers_than_there_may_be_in_all_are_outside_the_bounds() -> None:
    """Though neither pool is too large by itself."""
    config = AutoscaleConfig(max_prefill=4, max_decode=4, max_workers=6)
    assert after_cool_down(measured(Sizes(4, 4), prompts=0.5, sequences=0.5), config).sizes.total == 6


def test_one_window_does_not_decide_alone() -> None:
    few, many = (measured(Sizes(1, 3), sequences=sequences) for sequences in (10, 100))
    first = after_cool_down(few)
    second = decide(many, first.state, CONFIG, OBJECTIVE, 10.0)
    alone = after_cool_down(many)
    assert second.needs.decode == pytest.approx((first.needs.decode + alone.needs.decode) / 2)


def test_sizes_outside_the_bounds_come_inside() -> None:
    config = AutoscaleConfig(min_prefill=2, max_prefill=4, min_decode=2, max_workers=6)
    for sizes in (Sizes(0, 4), Sizes(6, 2), Sizes(1, 1), Sizes(2, 20)):
        found = after_cool_down(measured(sizes, prompts=1.0, sequences=10), config).sizes
        assert 2 <= found.prefill <= 4
        assert found.decode >= 2
        assert found.total <= 6


def test_where_routers_aggregate_prompts_are_work_for_those_that_decode() -> None:
    window = measured(Sizes(1, 3), on_decode=4.0, sequences=10)
    config = replace(CONFIG, min_prefill=0)
    found = decide(window, PolicyState(), config, OBJECTIVE, 0.0, mode="aggregated").sizes
    assert found.decode > found.prefill
    assert found.decode >= 6


@pytest.mark.parametrize("sizes", [Sizes(0, 2), Sizes(1, 3), Sizes(0, 6)])
@pytest.mark.parametrize("on_decode", [0.0, 1.0, 9.0])
def test_where_routers_aggregate_nobody_is_moved_to_the_prefill_pool(sizes: Sizes, on_decode: float) -> None:
    for config in (AutoscaleConfig(), CONFIG, AutoscaleConfig(min_prefill=1, max_decode=2, max_workers=4)):
        window = measured(sizes, on_decode=on_decode, sequences=10)
        found = decide(window, PolicyState(), config, OBJECTIVE, 0.0, mode="aggregated").sizes
        assert found.prefill <= sizes.prefill


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_decode": 0},
        {"min_prefill": -1},
        {"max_workers": 1},
        {"min_prefill": 3, "max_prefill": 2},
        {"window_s": 0.0},
        {"target_utilisation": 1.5},
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"autoscale\."):
        AutoscaleConfig(**wrong)  # type: ignore[arg-type]


# What must always hold

work = st.fixed_dictionaries(
    {
        "prompts": st.floats(0, 30),
        "on_decode": st.floats(0, 10),
        "sequences": st.floats(0, 1000),
        "queued_s": st.floats(0, 100),
        "kv_use": st.floats(0, 1),
        "met": st.integers(0, 500),
        "missed": st.integers(0, 500),
        "rejected": st.integers(0, 500),
    }
)
pool_sizes = st.builds(Sizes, st.integers(0, 10), st.integers(1, 10))
configs = st.builds(
    lambda low_p, low_d, more_p, more_d, most: AutoscaleConfig(
        min_prefill=low_p,
        min_decode=low_d,
        max_prefill=more_p and low_p + more_p,
        max_decode=more_d and low_d + more_d,
        max_workers=most and low_p + low_d + most,
    ),
    st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5), st.integers(0, 15),
)  # fmt: skip


def is_within(sizes: Sizes, config: AutoscaleConfig) -> bool:
    return (
        config.min_prefill <= sizes.prefill <= (config.max_prefill or math.inf)
        and config.min_decode <= sizes.decode <= (config.max_decode or math.inf)
        and sizes.total <= (config.max_workers or math.inf)
    )


@given(work, pool_sizes, configs)
def test_orders_reach_the_sizes_and_stay_in_bounds(
    work: dict[str, float], sizes: Sizes, config: AutoscaleConfig
) -> None:
    decision = after_cool_down(measured(sizes, **work), config)  # type: ignore[arg-type]
    assert is_within(decision.sizes, config)
    reached = {role: sizes.of(role) + decision.starts.of(role) - decision.stops.of(role) for role in Role}
    if flips := decision.flips:
        reached[flips.role] += flips.num
        reached[Role.DECODE if flips.role is Role.PREFILL else Role.PREFILL] -= flips.num
        assert not (decision.starts.total and decision.stops.total)
    assert Sizes(reached[Role.PREFILL], reached[Role.DECODE]) == decision.sizes
    grown = [role for role in Role if decision.sizes.of(role) > sizes.of(role)]
    shrunk = [role for role in Role if decision.sizes.of(role) < sizes.of(role)]
    assert bool(decision.flips) == bool(grown and shrunk), "who is not needed in one pool goes to the other"


@settings(max_examples=60)
@given(work, pool_sizes, configs, st.integers(0, 40))
def test_constant_work_is_answered_and_then_left_alone(
    work: dict[str, float], sizes: Sizes, config: AutoscaleConfig, restart: int
) -> None:
    """In every pool size the same work is measured. After at most one change and what is stopped later, all is calm."""
    state, changes = PolicyState.fresh(0.0), []
    for window in range(1, 250):
        now_s = window * config.window_s
        if window == restart:
            state = PolicyState.fresh(now_s)
        decision = decide(measured(sizes, **work), state, config, OBJECTIVE, now_s)  # type: ignore[arg-type]
        if decision.num_actions:
            changes.append((now_s, decision))
        state, sizes = decision.state, decision.sizes
    first_stop = next(
        (n for n, (_, decision) in enumerate(changes) if not decision.flips and not decision.starts.total), 0
    )
    assert len(changes[:first_stop]) <= 2
    assert all(after - before >= config.cool_down_s for (before, _), (after, _) in itertools.pairwise(changes))
    visited = [decision.sizes for _, decision in changes]
    assert len(visited) == len(set(visited)), "no sizes are come back to"


@given(work, pool_sizes, st.floats(1, 5))
def test_more_work_never_asks_for_fewer_workers(work: dict[str, float], sizes: Sizes, factor: float) -> None:
    config = AutoscaleConfig(max_workers=200)
    more = work | {name: work[name] * factor for name in ("prompts", "on_decode", "sequences", "queued_s")}
    less_sizes = after_cool_down(measured(sizes, **work), config).sizes  # type: ignore[arg-type]
    more_sizes = after_cool_down(measured(sizes, **more), config).sizes  # type: ignore[arg-type]
    assert more_sizes.total >= less_sizes.total
