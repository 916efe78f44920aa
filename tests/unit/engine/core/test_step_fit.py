"""What steps, pulls and KV transfers cost: the model, and how its coefficients are learned."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.costs import ALIKE, FASTEST, PRIOR, StepCosts, StepFit, StepSize, believed, least_of, lifted, typical
from baton.fit import CostFit
from baton.sampling import SamplingParams
from engine.core.runner import StepInput, StepPart
from router.placement import DEFAULT_PRICES, PriceFit
from tests.support.builders import step_costs

COSTS = StepCosts(
    s_overhead=1.0, s_per_token=0.5, s_per_pair=0.25, s_weights=8.0, s_per_sequence=2.0, s_per_kv_token=0.125
)


def near(expected: float | SequenceOf[float], share: float = 0.05) -> object:
    return pytest.approx(expected, rel=share)


# The model.


def test_a_step_reads_the_weights_while_it_computes() -> None:
    assert COSTS.step_s(1, 0, 1, 16) == 1 + 8 + 2 + 2, "0.5 s of computing hides behind the weights"
    assert COSTS.step_s(20, 100, 0, 0) == 1 + (10 + 25)
    assert COSTS.step_s(22, 100, 2, 16) == 1 + (11 + 25) + 4 + 2
    assert COSTS.decoding_s(2, 16) == 6


def test_what_one_worker_has_not_measured_is_what_it_is_for_the_others() -> None:
    assert typical([]) == typical([PRIOR, PRIOR]) == believed(PRIOR, PRIOR) == PRIOR
    slow = replace(COSTS, s_per_token=500.0)
    assert typical([PRIOR, COSTS, COSTS, slow]) == COSTS, "the median of those that know"
    assert believed(PRIOR, COSTS) == COSTS
    assert believed(slow, COSTS) == slow
    only_decodes = replace(slow, s_per_token=PRIOR.s_per_token, s_per_pair=PRIOR.s_per_pair)
    assert believed(only_decodes, COSTS) == COSTS
    assert typical([only_decodes]).s_per_token == PRIOR.s_per_token


def test_workers_that_differ_a_little_are_taken_to_be_alike() -> None:
    def times(factor: float) -> StepCosts:
        return StepCosts(**{name: factor * value for name, value in asdict(COSTS).items()})

    for factor in (1.01 / ALIKE, 1.0, 0.99 * ALIKE):
        assert believed(times(factor), COSTS) == COSTS
    for factor in (0.99 / ALIKE, 1.01 * ALIKE):
        assert believed(times(factor), COSTS) == times(factor)
    only_decodes_slower = replace(COSTS, s_per_kv_token=2 * COSTS.s_per_kv_token)
    assert believed(only_decodes_slower, COSTS) == only_decodes_slower
    free = step_costs()
    assert believed(free, free) == free
    assert believed(COSTS, free) == COSTS


def test_no_worker_is_believed_to_be_much_faster_than_all_others() -> None:
    def times(factor: float) -> StepCosts:
        return StepCosts(**{name: factor * value for name, value in asdict(COSTS).items()})

    for honest in ([COSTS], [COSTS, times(1.5), times(2)], [COSTS, times(2), times(4), PRIOR]):
        for liar in (step_costs(), times(1e-9), times(0.99 / FASTEST)):
            taken = lifted(liar, least_of([*honest, liar]))
            assert taken.prefill_s(1000, 0, 100) >= COSTS.prefill_s(1000, 0, 100) / FASTEST
            assert taken.decode_step_s(8, 8000) >= COSTS.decode_step_s(8, 8000) / FASTEST
            assert all(lifted(each, least_of([*honest, liar])) is each for each in honest)
    for factor in (1.01 / FASTEST, 0.5, 1.0, 3.0):
        mixed = [times(factor), COSTS, COSTS]
        assert [lifted(each, least_of(mixed)) for each in mixed] == mixed, "honest, of another kind"
    assert lifted(PRIOR, times(1e9)) is PRIOR, "nothing is measured: it is as the others"
    assert lifted(step_costs(), least_of([step_costs()])) == step_costs()
    assert least_of([]) == least_of([PRIOR]) == step_costs()


def test_a_prompt_alone_is_computed_in_chunks() -> None:
    assert COSTS.prefill_s(100, 100, 10) == 0.0
    # 20 tokens attend to 10 on average: 200 pairs.
    assert COSTS.prefill_s(20, 0, 10) == 2 * 1 + 10 + 50
    # The last 10 of 20 attend to 15.
    assert COSTS.prefill_s(20, 10, 10) == 1 + 5 + 37.5
    assert COSTS.prefill_s(21, 0, 10) == 3 * 1 + 10.5 + 55
    assert COSTS.prefill_s(2, 0, 1) == 2 * (1 + 8), "each chunk reads the weights"


def test_what_a_step_has_left_for_prompts() -> None:
    """Of 20 s, 1 is overhead, 6 decoding, and 1 computing the 2 tokens of those that decode."""
    assert COSTS.computing_room_s(20.0, 2, 16) == 12
    assert COSTS.computing_room_s(8.0, 2, 16) == 7, "what hides behind the weights is free"


@settings(max_examples=60)
@given(
    computing_s=st.floats(0.0, 100.0),
    num_context=st.integers(0, 50),
    at_most=st.integers(1, 100),
    s_per_pair=st.sampled_from([0.0, 0.25]),
)
def test_as_many_tokens_are_computed_as_the_time_allows(
    computing_s: float, num_context: int, at_most: int, s_per_pair: float
) -> None:
    costs = step_costs(s_per_token=0.5, s_per_pair=s_per_pair)
    num_tokens = costs.tokens_within(computing_s, num_context, at_most)
    assert 0 <= num_tokens <= at_most
    took_s = costs.step_s(num_tokens, num_tokens * (2 * num_context + num_tokens) // 2, 0, 0)
    assert took_s <= computing_s + 1e-9
    if not s_per_pair:
        assert num_tokens == min(at_most, int(computing_s / 0.5))
    if num_tokens == at_most - 1:  # one more attends to no more than is assumed
        assert took_s + 0.5 + s_per_pair * (num_context + at_most) > computing_s


def test_who_computes_for_nothing_computes_all() -> None:
    costs = step_costs(s_overhead=1.0, s_weights=1.0, s_per_sequence=1.0, s_per_kv_token=1.0)
    assert costs.tokens_within(0.0, 10, 7) == 7


# The fit.


def test_before_anything_was_measured_the_prior_holds() -> None:
    fit = CostFit((2.0, 3.0))
    assert fit.coefficients == (2.0, 3.0)
    assert fit.predict((1.0, 10.0)) == 32.0
    for seconds in (0.0, -1.0):
        fit.observe((1.0, 10.0), seconds)
    assert (fit.coefficients, fit.num_observations) == ((2.0, 3.0), 0), "what took no time teaches nothing"


def test_the_first_measurement_tells_how_large_the_costs_are_and_the_prior_how_they_compare() -> None:
    fit = CostFit((2.0, 3.0))
    fit.observe((1.0, 10.0), 16.0)
    assert fit.coefficients == pytest.approx((1.0, 1.5))
    free = CostFit((0.0, 0.0))
    free.observe((1.0, 10.0), 16.0)
    assert free.predict((1.0, 10.0)) >= 0.0, "a prior of nothing has no scale"


def test_a_few_measurements_outweigh_the_prior() -> None:
    fit = CostFit((1.0, 1.0))
    for x in (1.0, 2.0, 5.0, 1.0, 2.0, 5.0):
        fit.observe((1.0, x), 10.0 + 2.0 * x)
    assert fit.coefficients == near((10.0, 2.0))


TRUE = (3e-3, 2e-5, 4e-9)
WRONG = (1e-3, 1e-4, 1e-9)


def measured(rng: random.Random, true: SequenceOf[float], noise: float) -> tuple[tuple[float, ...], float]:
    num_tokens = rng.randrange(16, 4096)
    features = (1.0, float(num_tokens), num_tokens * (rng.randrange(8192) + num_tokens / 2))[: len(true)]
    seconds = sum(c * x for c, x in zip(true, features, strict=True))
    return features, seconds * rng.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_true_costs_are_found_under_noise(noise: float) -> None:
    rng = random.Random(1)
    fit = CostFit(WRONG)
    for _ in range(1000):
        fit.observe(*measured(rng, TRUE, noise))
    assert fit.coefficients == near(TRUE, 0.1 if noise else 0.01)
    for _ in range(20):
        features, seconds = measured(rng, TRUE, 0.0)
        assert fit.predict(features) == near(seconds, 0.05)


def test_an_absurd_first_measurement_is_forgotten() -> None:
    """A worker's first step compiles kernels."""
    rng = random.Random(1)
    fit = CostFit(WRONG)
    features, seconds = measured(rng, TRUE, 0.0)
    fit.observe(features, 1000 * seconds)
    for _ in range(30):
        fit.observe(*measured(rng, TRUE, 0.05))
    features, seconds = measured(rng, TRUE, 0.0)
    assert fit.predict(features) == near(seconds, 0.1)


def test_costs_that_change_are_learned_anew() -> None:
    rng = random.Random(1)
    fit = CostFit(WRONG)
    for _ in range(2000):
        fit.observe(*measured(rng, TRUE, 0.05))
    doubled = tuple(2 * c for c in TRUE)
    for _ in range(1000):
        fit.observe(*measured(rng, doubled, 0.05))
    assert fit.coefficients == near(doubled, 0.1)


def test_short_and_long_ones_count_alike() -> None:
    """Errors are relative: 1 s of 10 is as bad as 1 ms of 10."""
    fit = CostFit((1.0, 1e-3))
    for _ in range(200):
        fit.observe((0.0, 1.0), 9e-3)
        fit.observe((0.0, 1.0), 11e-3)
        fit.observe((1.0, 0.0), 9.0)
        fit.observe((1.0, 0.0), 11.0)
    assert fit.coefficients == near((10.0, 10e-3), 0.02)


def test_the_same_measured_again_and_again_leaves_what_it_cannot_tell_to_the_prior() -> None:
    fit = CostFit((1.0, 2.0, 4.0))
    for _ in range(20_000):
        fit.observe((1.0, 100.0, 10_000.0), 7.0)
    assert fit.predict((1.0, 100.0, 10_000.0)) == near(7.0, 1e-3)
    assert min(fit.coefficients) > 0.0


MEASUREMENTS = st.lists(
    st.tuples(st.tuples(st.just(1.0), st.floats(0.0, 1e4), st.floats(0.0, 1e8)), st.floats(1e-4, 1e2)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(MEASUREMENTS)
@example([((1.0, 0.0, 0.0), 18.0), ((1.0, 815.0, 34051520.0), 0.0001)])  # the prior is lost in rounding
def test_no_cost_is_ever_negative(measurements: list[tuple[tuple[float, ...], float]]) -> None:
    fit = CostFit((5e-4, 1e-4, 2e-9))
    for features, seconds in measurements:
        fit.observe(features, seconds)
        assert min(fit.coefficients) >= 0.0
        assert len(fit.coefficients) == 3
        assert fit.predict((1.0, 100.0, 5000.0)) < 1e6


def test_costs_that_nothing_tells_apart_any_more_are_one() -> None:
    """The second measurement is so much smaller that rounding leaves nothing of the prior, which told them apart."""
    fit = CostFit((1.0, 1.0, 1.0))
    fit.observe((2.0, 2.0, 2.0), 1.0)
    assert fit.coefficients == pytest.approx((1 / 6,) * 3)
    fit.observe((2.0, 2.0, 2.0), 1e-9)
    assert fit.coefficients == pytest.approx((0.5e-9, 0.0, 0.0))


def test_a_cost_that_measurements_contradict_is_nothing() -> None:
    """It takes less, the more there is: the best line that does not fall is flat."""
    fit = CostFit((1.0, 1.0))
    for x in [1.0, 2.0, 3.0] * 100:
        fit.observe((1.0, x), 10.0 - x)
    constant, slope = fit.coefficients
    assert slope == 0.0
    assert constant == near(7.9)  # (1/9 + 1/8 + 1/7) / (1/81 + 1/64 + 1/49)


# What is fitted.


def test_moving_kv_costs_what_it_has_cost() -> None:
    rng = random.Random(1)
    fit = PriceFit()
    assert fit.prices == DEFAULT_PRICES
    for _ in range(500):
        num_tokens = rng.randrange(100, 8000)
        fit.pulled(num_tokens, (1e-3 + 2e-6 * num_tokens) * rng.uniform(0.9, 1.1))
        fit.transferred(num_tokens, 5e-3 * rng.uniform(0.9, 1.1))
    assert (fit.prices.pull_s, fit.prices.pull_s_per_token) == near((1e-3, 2e-6), 0.1)
    assert fit.prices.exposed_s == near(5e-3, 0.05)
    assert fit.prices.exposed_s_per_token < 1e-7


def test_kv_transfers_say_nothing_of_pulls() -> None:
    fit = PriceFit()
    fit.transferred(1000, 0.5)
    assert (fit.prices.pull_s, fit.prices.pull_s_per_token) == (DEFAULT_PRICES.pull_s, DEFAULT_PRICES.pull_s_per_token)
    assert fit.prices.exposed_s == near(0.5)


def test_kv_transfers_that_take_longer_the_longer_the_prompt_are_learned_as_such() -> None:
    rng = random.Random(1)
    fit = PriceFit()
    for _ in range(500):
        num_tokens = rng.randrange(100, 8000)
        fit.transferred(num_tokens, (1e-3 + 2e-6 * num_tokens) * rng.uniform(0.9, 1.1))
    assert (fit.prices.exposed_s, fit.prices.exposed_s_per_token) == near((1e-3, 2e-6), 0.1)


def part(num_known: int, num_prompt: int, start: int, num_tokens: int) -> StepPart:
    return StepPart(
        sequence_key=0,
        token_ids=(7,) * num_tokens,
        num_computed_tokens=start,
        block_ids=((),),
        num_kv_tokens=(start + num_tokens,),
        sample=False,
        is_decoding=num_tokens == 1 and num_known > num_prompt,
        sampling=SamplingParams(),
        choice_index=0,
        num_prompt_tokens=num_prompt,
    )


def test_the_size_of_a_step_is_that_of_its_parts() -> None:
    decoding = part(101, 90, 100, 1), part(51, 50, 50, 1)
    assert StepInput(decoding).size() == StepSize(num_new=2, num_decoding=2, num_kv_tokens=152)
    chunk = part(60, 60, 10, 20)  # each of 20 tokens attends to 20 on average
    assert StepInput((*decoding, chunk)).size() == StepSize(
        num_new=22, num_pairs=400, num_decoding=2, num_kv_tokens=152
    )
    last_token_of_a_prompt = part(30, 30, 29, 1)
    assert StepInput((last_token_of_a_prompt,)).size() == StepSize(num_new=1, num_pairs=29)
    in_its_first_canvas = StepInput((last_token_of_a_prompt._replace(sample=True), chunk))
    assert in_its_first_canvas.size(denoises=True) == StepSize(
        num_new=1 + len(chunk.token_ids),
        num_pairs=StepInput((chunk,)).size().num_pairs,
        num_decoding=1,
        num_kv_tokens=last_token_of_a_prompt.num_computed_tokens + 1,
    )
    assert StepInput((last_token_of_a_prompt._replace(sample=False),)).size(denoises=True).num_decoding == 0


TRUE_COSTS = StepCosts(
    s_overhead=2e-3, s_per_token=5e-5, s_per_pair=5e-9, s_weights=6e-3, s_per_sequence=3e-4, s_per_kv_token=6e-8
)


def step_of(rng: random.Random, kind: str) -> StepSize:
    num_decoding = rng.randrange(1, 33) if kind != "prompt" else 0
    num_kv_tokens = num_decoding * rng.randrange(100, 4000)
    if kind == "decode":
        return StepSize(num_new=num_decoding, num_decoding=num_decoding, num_kv_tokens=num_kv_tokens)
    num_new = rng.randrange(1, 100) if kind == "small" else rng.randrange(256, 2048)
    return StepSize(
        num_new=num_decoding + num_new,
        num_pairs=num_new * rng.randrange(1, 4096),
        num_decoding=num_decoding,
        num_kv_tokens=num_kv_tokens,
    )


def seconds_of(size: StepSize, costs: StepCosts = TRUE_COSTS) -> float:
    return costs.step_s(size.num_new, size.num_pairs, size.num_decoding, size.num_kv_tokens)


def fitted(kinds: SequenceOf[str], num_steps: int = 2000, noise: float = 0.05) -> StepFit:
    rng = random.Random(1)
    fit = StepFit()
    for _ in range(num_steps):
        size = step_of(rng, rng.choice(kinds))
        fit.observe(size, seconds_of(size) * rng.uniform(1 - noise, 1 + noise))
    return fit


@pytest.mark.parametrize(
    "kinds",
    [
        ["decode", "mixed", "prompt"],
        ["decode", "mixed"],
        ["decode", "small", "mixed", "prompt"],
        ["decode", "small", "small", "small", "mixed"],
    ],
    ids=",".join,
)
def test_a_worker_learns_what_its_steps_cost(kinds: list[str]) -> None:
    """Also where many prompts hide behind the reading of the weights, and say nothing of computing."""
    costs = fitted(kinds).costs
    assert costs.s_per_token == near(TRUE_COSTS.s_per_token, 0.1)
    assert costs.s_per_pair == near(TRUE_COSTS.s_per_pair, 0.15)
    assert costs.s_per_sequence == near(TRUE_COSTS.s_per_sequence, 0.1)
    assert costs.s_per_kv_token == near(TRUE_COSTS.s_per_kv_token, 0.1)
    assert costs.s_overhead + costs.s_weights == near(TRUE_COSTS.s_overhead + TRUE_COSTS.s_weights, 0.05)
    rng = random.Random(2)
    for kind in ("decode", "mixed", "prompt"):
        for _ in range(20):
            size = step_of(rng, kind)
            assert seconds_of(size, costs) == near(seconds_of(size), 0.1)


def test_steps_are_predicted_after_a_few() -> None:
    costs = fitted(["decode", "mixed", "prompt"], num_steps=20).costs
    rng = random.Random(2)
    for kind in ("decode", "mixed", "prompt"):
        size = step_of(rng, kind)
        assert seconds_of(size, costs) == near(seconds_of(size), 0.25)


def test_before_any_step_the_prior_holds() -> None:
    assert StepFit().costs == PRIOR
    other = StepCosts(
        s_overhead=1.0, s_per_token=2.0, s_per_pair=3.0, s_weights=4.0, s_per_sequence=5.0, s_per_kv_token=6.0
    )
    assert StepFit(other).costs == other


def test_prompts_that_hide_behind_the_weights_change_nothing() -> None:
    fit = fitted(["decode", "prompt"])
    before = fit.costs
    for _ in range(100):
        fit.observe(StepSize(num_new=10, num_pairs=100), 8e-3)
    assert fit.costs == before


def test_decoding_says_nothing_of_computing() -> None:
    fit = StepFit()
    for num_decoding in range(1, 30):
        size = StepSize(num_new=num_decoding, num_decoding=num_decoding, num_kv_tokens=1000 * num_decoding)
        fit.observe(size, seconds_of(size))
    assert (fit.costs.s_per_token, fit.costs.s_per_pair) == (PRIOR.s_per_token, PRIOR.s_per_pair)
    assert fit.costs.s_per_sequence == near(TRUE_COSTS.s_per_sequence, 0.5)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4096), st.integers(0, 10**7), st.integers(0, 64), st.integers(0, 10**6), st.floats(1e-4, 10)
        ),
        max_size=30,
    )
)
def test_whatever_is_measured_no_cost_is_negative(steps: list[tuple[int, int, int, int, float]]) -> None:
    fit = StepFit()
    for num_prompt, num_pairs, num_decoding, num_kv_tokens, took_s in steps:
        is_decoding = num_decoding and num_pairs % 2
        num_new = num_decoding if is_decoding else num_decoding + num_prompt
        size = StepSize(
            num_new=num_new,
            num_pairs=0 if is_decoding else num_pairs,
            num_decoding=num_decoding,
            num_kv_tokens=num_kv_tokens if num_decoding else 0,
        )
        fit.observe(size, took_s)
        costs = fit.costs
        assert min(costs.s_overhead, costs.s_per_token, costs.s_per_pair) >= 0.0
        assert min(costs.s_weights, costs.s_per_sequence, costs.s_per_kv_token) >= 0.0


@pytest.mark.parametrize("times", [0.05, 1.0, 20.0])
def test_a_worker_that_never_decodes_learns_what_prompts_take(times: float) -> None:
    """A prefill worker: what reading the weights takes at most, its steps show as well."""
    true = StepCosts(**{name: value / times for name, value in asdict(TRUE_COSTS).items()})
    rng = random.Random(1)
    fit = StepFit()
    for _ in range(1000):
        size = step_of(rng, "prompt")
        fit.observe(size, seconds_of(size, true) * rng.uniform(0.95, 1.05))
    assert fit.costs.prefill_s(8192, 0, 512) == near(true.prefill_s(8192, 0, 512), 0.2)


def test_an_overhead_that_prompts_show_is_not_bounded_by_decoding_that_was_never_seen() -> None:
    true = step_costs(s_overhead=5e-2, s_per_token=5e-5, s_per_pair=5e-9)
    rng = random.Random(1)
    fit = StepFit()
    for _ in range(1000):
        size = step_of(rng, "prompt")
        fit.observe(size, seconds_of(size, true) * rng.uniform(0.95, 1.05))
    assert fit.costs.s_overhead == near(5e-2, 0.1)


def test_a_step_with_drafts_changes_no_cost() -> None:
    fit = fitted(["decode", "prompt"], num_steps=50)
    before = fit.costs
    fit.observe(StepSize(num_new=1, num_decoding=1, num_kv_tokens=100, num_drafts=4), 5.0)
    assert fit.costs == before
