from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.blocks import block_keys
from baton.cluster import Role
from baton.costs import PRIOR
from router.placement import (
    Candidate,
    ImageCosts,
    Mode,
    Objective,
    Placement,
    Prices,
    Prompt,
    Weights,
    place,
    policy,
)
from tests.support.builders import step_costs

NUM_WORKERS = 8
COSTS = step_costs(s_per_token=1e-3)
"""A token takes a millisecond, of a prompt or of an answer."""
PRICES = Prices(0.0, 5e-5, 0.0, 1e-5)
"""Twenty tokens are pulled, and a hundred transferred, in the time of computing one."""
WEIGHTS = Weights(affinity=1.0, interference=0.05)


def prompt_of(tokens: list[int], num_expected_tokens: int = 0) -> Prompt:
    return Prompt(len(tokens), tuple(block_keys(b"seed", tokens)), num_expected_tokens)


def decode(worker_id: str, wait_s: float = 0.0, num_cached_tokens: int = 0, **others: Any) -> Candidate:
    return Candidate(
        worker_id=worker_id,
        role=Role.DECODE,
        num_cached_tokens=num_cached_tokens,
        wait_s=wait_s,
        **({"costs": COSTS} | others),
    )


def prefill(worker_id: str, wait_s: float = 0.0, num_cached_tokens: int = 0, **others: Any) -> Candidate:
    return Candidate(
        worker_id=worker_id,
        role=Role.PREFILL,
        num_cached_tokens=num_cached_tokens,
        wait_s=wait_s,
        **({"costs": COSTS} | others),
    )


PROMPT = prompt_of(list(range(1000)))


def placed(pool: list[Candidate], mode: str = "auto", prompt: Prompt = PROMPT, **others: Any) -> Placement:
    asked: dict[str, Any] = {"prices": PRICES, "weights": WEIGHTS} | others
    placement = place(prompt, pool, mode, **asked)
    assert placement is not None
    return placement


def chosen(pool: list[Candidate], mode: str = "auto", **others: Any) -> tuple[str, str]:
    """Who computes, and who decodes."""
    placement = placed(pool, mode, **others)
    return placement.computes, placement.decode_worker


def source_of(pool: list[Candidate], mode: str = "disaggregated", **others: Any) -> tuple[str, int]:
    placement = placed(pool, mode, **others)
    return placement.source, placement.source_tokens


def test_the_owner_wins_when_loads_are_equal() -> None:
    pool = [prefill(f"p{i}", 0.5, 640 if i == 5 else 0) for i in range(8)]
    pool += [decode(f"d{i}", 0.3, 64 if i == 2 else 0) for i in range(8)]
    assert chosen(pool, "disaggregated") == ("p5", "d2"), "d2 gets less transferred"
    assert chosen(pool, "aggregated") == ("d2", "d2")


def test_load_beats_a_smaller_overlap_and_not_a_larger_one() -> None:
    def computes(wait_of_owner: float, **others: Any) -> str:
        pool = [decode("d"), prefill("owner", wait_of_owner, 160), prefill("idle")]
        return chosen(pool, "disaggregated", **others)[0]

    # The idle one computes 840 tokens as well, pulls 160 in 8 ms and holds them a second time: 840 + 8 + 160.
    assert computes(0.155) == "owner"
    assert computes(0.180) == "idle"
    # Without pulling it computes all 1,000, and holds the 160 a second time just as well: 1,160 against 840.
    assert computes(0.305, pull_above_tokens=1000) == "owner"
    assert computes(0.335, pull_above_tokens=1000) == "idle"


def test_costs_that_hardly_differ_are_equal() -> None:
    """Which of them is chosen is the session's affair."""
    pool = [decode(f"d{i}", 0.0 if i == 3 else 0.009) for i in range(8)]
    prompts = [prompt_of([start] * 1000) for start in range(40)]
    assert {chosen(pool, prompt=prompt)[0] for prompt in prompts} > {"d3"}
    further = [decode(f"d{i}", 0.0 if i == 3 else 0.011) for i in range(8)]
    assert {chosen(further, prompt=prompt)[0] for prompt in prompts} == {"d3"}


def test_every_weight_has_its_say() -> None:
    pool = [decode("owner", 0.1, 160), decode("idle")]
    assert placed(pool).computes == "owner", "940 against 840 + 8 + 160"
    without = placed(pool, weights=Weights(0.0, 0.05))
    assert (without.computes, without.source, without.source_tokens) == ("idle", "owner", 160), "940 against 848"
    decoding = [decode("owner", 0.0, 160, num_decoding=5), decode("idle")]
    assert placed(decoding).computes == "idle", "840 + 5 * 5 % of 840 against 1,008"
    assert placed(decoding, weights=Weights(1.0, 0.03)).computes == "owner", "966 against 1,008"


def test_who_only_decodes_is_chosen_by_what_it_decodes() -> None:
    """Aggregated, the queue counts; split, the sequences that share the steps."""
    costs = step_costs(s_per_token=1e-3, s_per_kv_token=1e-5)
    queue = decode("queue", 0.5, num_decoding=1, num_kv_tokens=600, costs=costs)
    batch = decode("batch", num_decoding=5, num_kv_tokens=3000, costs=costs)
    prompt = prompt_of(list(range(1000)), 5)  # in steps of 18 and of 46 ms
    assert chosen([queue, batch], prompt=prompt) == ("batch", "batch")
    assert chosen([queue, batch, prefill("p")], "disaggregated", prompt=prompt) == ("p", "queue")


def test_a_prefix_that_everybody_holds_attracts_nobody() -> None:
    pool = [decode(f"d{i}", wait_s, 640) for i, wait_s in enumerate([0.03, 0.01, 0.02])]
    placement = placed(pool)
    assert (placement.computes, placement.source) == ("d1", "")
    assert placement.prediction.ttft_s == pytest.approx(0.37)


@pytest.mark.parametrize(
    ("mode", "pool", "expected"),
    [
        ("auto", "pd", Mode.DISAGGREGATED),
        ("auto", "d", Mode.AGGREGATED),
        ("auto", "p", None),
        ("auto", "", None),
        ("disaggregated", "pd", Mode.DISAGGREGATED),
        ("disaggregated", "d", None),
        ("disaggregated", "p", None),
        ("aggregated", "pd", Mode.AGGREGATED),
        ("aggregated", "d", Mode.AGGREGATED),
        ("aggregated", "p", None),
    ],
)
def test_the_mode_by_who_is_there(mode: str, pool: str, expected: Mode | None) -> None:
    candidates = [{"p": prefill("p0"), "d": decode("d0")}[kind] for kind in pool]
    placement = place(PROMPT, candidates, mode)
    assert (placement and placement.mode) == expected
    if placement is not None:
        assert placement.decode_worker == "d0"
        assert placement.prefill_worker == ("p0" if expected is Mode.DISAGGREGATED else "")


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, Mode.AGGREGATED), (160, Mode.DISAGGREGATED)])
def test_at_rest_a_prompt_is_transferred_if_that_is_worth_it(num_tokens: int, expected: Mode) -> None:
    """A KV transfer takes 7 ms, and a prompt beside those that decode next counts a twentieth of its computing."""
    prices = Prices(0.0, 5e-5, 7e-3, 0.0)
    pool = [prefill("p"), decode("d")]
    assert placed(pool, prompt=prompt_of([0] * num_tokens), prices=prices).mode is expected
    assert placed(pool, "disaggregated", prompt=prompt_of([0] * num_tokens), prices=prices).mode is Mode.DISAGGREGATED


def test_disaggregated_against_aggregated_goes_by_seconds() -> None:
    """The decode worker computes 100 tokens in 108 ms, as its 8 sequences take 8 ms of a step whose chunk takes 100.
    They count 5 % of 100 ms each, and the next ones 5 % of 108: 153.4 ms against 101 ms and the prefill worker's queue.
    """
    costs = step_costs(s_per_token=1e-3, s_per_sequence=1e-3)
    busy = decode("d", num_decoding=8, costs=costs, chunk_tokens=100)
    prompt = prompt_of([0] * 100)
    assert chosen([prefill("p", 0.051), busy], prompt=prompt) == ("p", "d")
    assert chosen([prefill("p", 0.054), busy], prompt=prompt) == ("d", "d")
    idle = decode("idle", costs=costs)
    assert chosen([prefill("p", 0.054), busy, idle], prompt=prompt) == ("idle", "idle")


def test_a_short_uncached_rest_is_computed_where_it_decodes() -> None:
    pool = [prefill("p"), decode("d", 0.0, 960)]
    assert chosen(pool) == ("d", "d")
    assert chosen(pool, "disaggregated") == ("p", "d")


def test_the_prediction_is_that_of_the_workers_chosen() -> None:
    costs = step_costs(s_overhead=2e-3, s_per_token=1e-3, s_weights=4e-3, s_per_sequence=3e-3, s_per_kv_token=1e-6)
    prompt = prompt_of(list(range(1000)), 128)
    p = prefill("p", 0.5, 200, costs=costs, chunk_tokens=100)
    d = decode("d", 0.25, 400, num_decoding=2, num_kv_tokens=3000, room_tokens=600, freed_tokens_per_s=64, costs=costs)
    prices = Prices(1e-2, 1e-4, 2e-2, 1e-5)
    split = placed([p, d], "disaggregated", prompt, prices=prices)
    # 200 tokens are pulled; 600 computed in 6 steps. The decode worker lacks 600 + 128 - 600 tokens of room, gets 600
    # transferred, and then decodes 3 sequences over 4,000 tokens, while it reads its weights.
    assert astuple(split.prediction) == pytest.approx((0.5, 2.0, 0.03, 0.612, 0.026, 0.019, 0.0))
    assert split.prediction.ttft_s == pytest.approx(2.642), "the room comes after the queue"
    aggregated = placed([p, d], "aggregated", prompt, prices=prices)
    # 600 tokens, in one step of 2 ms and 600; those that decode take 11 ms of each step, besides a chunk of 2,048.
    stretch = 1 + 0.011 / 2.048
    expected = (0.25 * stretch, 2.0, 0.0, 0.602 * stretch, 0.0, 0.019, 0.0)
    assert astuple(aggregated.prediction) == pytest.approx(expected)
    assert [terms.worker_id for terms in aggregated.considered] == ["d"]
    assert {terms.worker_id for terms in split.considered} == {"p", "d"}


@pytest.mark.parametrize(("itl_s", "stretch"), [(math.inf, 1.2), (0.1, 1 + 0.02 / 0.07), (0.02, 2.6)])
def test_who_decodes_holds_a_prompt_up_by_its_objective(itl_s: float, stretch: float) -> None:
    """Sequences take 20 ms of a step; a chunk of 100 ms is cut to what 90 % of the objective leaves, and to an eighth
    at least."""
    costs = step_costs(s_per_token=1e-3, s_per_sequence=1e-2)
    worker = decode("d", 0.5, num_decoding=2, costs=costs, chunk_tokens=100)
    prediction = placed([worker], objective=Objective(itl_s=itl_s)).prediction
    assert prediction.wait_s == pytest.approx(0.5 * stretch)
    assert prediction.compute_s == pytest.approx(1.0 * stretch)


def test_steps_above_the_objective_come_after_all_others() -> None:
    """128 tokens in steps of 60 ms take 7.7 s, and if that breaks the objective by 10 ms 12.8 more; in steps of 40 ms
    5.1 s, after 10 s without room."""
    costs = step_costs(s_per_sequence=1e-2)
    prompt = prompt_of(list(range(1000)), 128)
    crowded = decode("crowded", num_decoding=5, costs=costs)
    full = decode("full", num_decoding=3, costs=costs, room_tokens=128, freed_tokens_per_s=100)
    pool = [crowded, full, prefill("p")]
    assert chosen(pool, "disaggregated", prompt=prompt) == ("p", "crowded")
    assert chosen(pool, "disaggregated", prompt=prompt, objective=Objective(itl_s=0.0601)) == ("p", "crowded")
    assert chosen(pool, "disaggregated", prompt=prompt, objective=Objective(itl_s=0.05)) == ("p", "full")


def test_room_is_waited_for_while_the_queue_is() -> None:
    """1,000 tokens where none fits: 10 s."""
    for wait_s, expected in ((4.0, 11.0), (13.0, 14.0)):
        (full, roomy) = (
            decode("d", wait_s, room_tokens=room_tokens, freed_tokens_per_s=100) for room_tokens in (0, 1000)
        )
        assert placed([full]).prediction.ttft_s == pytest.approx(expected)
        assert placed([full, prefill("p", wait_s)], "disaggregated").prediction.ttft_s == pytest.approx(expected)
        assert placed([roomy]).prediction.ttft_s == pytest.approx(wait_s + 1.0)
    both = decode("both", 10.0, room_tokens=0, freed_tokens_per_s=100)
    assert placed([both, decode("queue", 12.0)]).computes == "both", "11 s against 13"
    half = decode("half", 0.0, 500, room_tokens=0, freed_tokens_per_s=100)
    assert placed([half]).prediction.room_s == pytest.approx(5.0), "what is cached is there"


def test_disaggregated_or_not_the_decode_workers_room_is_waited_for() -> None:
    """10 s, and then 0.1 s for what it lacks; the other one would have to pull 400 tokens first."""
    full = decode("d", 0.0, 900, room_tokens=0, freed_tokens_per_s=10)
    assert chosen([prefill("p", 0.0, 500), full]) == ("d", "d")
    assert chosen([prefill("p", 0.0, 500), full, decode("roomy")]) == ("p", "roomy")


def test_a_longer_answer_needs_more_room() -> None:
    worker = decode("d", room_tokens=1128, freed_tokens_per_s=100)
    for num_expected_tokens, room_s in ((128, 0.0), (328, 2.0)):
        prompt = prompt_of(list(range(1000)), num_expected_tokens)
        assert placed([worker], prompt=prompt).prediction.room_s == pytest.approx(room_s)


def test_a_slower_worker_gets_less() -> None:
    slow = step_costs(s_per_token=2e-3)
    pool = [prefill("slow", costs=slow), prefill("quick", 0.5), decode("d")]
    assert chosen(pool, "disaggregated")[0] == "quick"
    assert chosen([*pool[:1], prefill("quick", 1.1), decode("d")], "disaggregated")[0] == "slow"


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_the_source_is_the_longest_prefix_elsewhere_of_either_role(mode: str) -> None:
    """Whoever computes is busy elsewhere, so that the owners are not chosen themselves."""
    pool = [prefill("p"), decode("d"), prefill("p-owner", 5.0, 320), decode("d-owner", 5.0, 640)]
    assert source_of(pool, mode) == ("d-owner", 640)
    assert source_of([*pool, prefill("longest", 9.0, 656)], mode) == ("longest", 656)


def test_the_source_is_compared_with_the_worker_that_computes() -> None:
    """In disaggregated mode with the prefill worker's prefix, in aggregated mode with the decode worker's."""
    pool = [prefill("p", 0.0, 480), decode("d", 0.0, 640)]
    assert source_of(pool, "disaggregated", pull_above_tokens=160) == ("d", 640)
    assert source_of(pool, "disaggregated", pull_above_tokens=161) == ("", 0)
    assert source_of(pool, "aggregated", pull_above_tokens=1) == ("", 0)
    assert source_of([prefill("p", 0.0, 800), decode("d", 0.0, 640)], "aggregated", pull_above_tokens=1) == ("p", 800)
    assert source_of([prefill("p"), decode("d")], "disaggregated", pull_above_tokens=1) == ("", 0)


@pytest.mark.parametrize(
    ("prices", "num_held", "is_pulled"),
    [
        (Prices(0.0, 0.9e-3), 320, True),
        (Prices(0.0, 1.1e-3), 320, False),
        (Prices(0.2, 0.0), 320, True),
        (Prices(0.2, 0.0), 160, False),
    ],
)
def test_a_prefix_is_pulled_only_where_that_is_quicker(prices: Prices, num_held: int, is_pulled: bool) -> None:
    pool = [prefill("p"), decode("d"), decode("owner", 9.0, num_held)]
    placement = placed(pool, "disaggregated", prices=prices)
    assert placement.source == ("owner" if is_pulled else "")
    seconds = prices.pull_s + num_held * prices.pull_s_per_token if is_pulled else 0.0
    assert placement.prediction.pull_s == pytest.approx(seconds)
    assert placement.prediction.compute_s == pytest.approx(1.0 - is_pulled * num_held / 1000)


def test_pairs_of_tokens_make_pulling_worth_more() -> None:
    """320 tokens of prefix take 0.32 s, and 102 ms more in which each attends to 160 others on average."""
    pool = [
        prefill(
            "p",
            costs=step_costs(s_per_token=1e-3, s_per_pair=2e-6),
        ),
        decode("d"),
        decode("owner", 9.0, 320),
    ]
    assert source_of(pool, prices=Prices(0.42, 0.0)) == ("owner", 320)
    assert source_of(pool, prices=Prices(0.43, 0.0)) == ("", 0)


def test_sources_that_hold_the_same_go_by_load_and_then_by_session() -> None:
    pool = [prefill("p"), decode("d"), *(decode(f"owner{i}", 9.0 + (i != 3), 640) for i in range(6))]
    assert source_of(pool) == ("owner3", 640)
    pool = [prefill("p"), decode("d"), *(decode(f"owner{i}", 9.0, 640, num_kv_tokens=9 - i) for i in range(6))]
    assert source_of(pool) == ("owner5", 640)
    equal = [prefill("p"), decode("d"), *(decode(f"owner{i}", 9.0, 640) for i in range(6))]
    sources = set()
    for start in range(100):
        prompt = prompt_of([start] * 800)
        placements = [placed(pool, "disaggregated", prompt=prompt) for pool in (equal, equal[::-1])]
        assert placements[0] == placements[1], "the order of the pool decides nothing"
        sources.add(placements[0].source)
    assert sources == {f"owner{i}" for i in range(6)}


def test_a_source_that_is_ruled_out_is_replaced_by_the_next_best() -> None:
    pool = [prefill("p"), decode("d"), decode("best", 9.0, 640), decode("next", 9.0, 320)]
    assert source_of(pool, not_from={"best"}) == ("next", 320)
    assert source_of(pool, not_from={"best", "next"}) == ("", 0)
    own = [prefill("p", 0.0, 640), decode("d")]
    assert chosen(own, "disaggregated", not_from={"p"}) == ("p", "d"), (
        "it may compute, and what it holds it need not pull"
    )
    assert placed(own, "disaggregated", not_from={"p"}).prediction.compute_s == pytest.approx(0.36)


def test_a_prefix_that_has_to_be_pulled_anyway_is_pulled_to_where_it_is_decoded() -> None:
    """Auto: the same 40 tokens are left to compute, on either worker."""
    owner = prefill("owner", 9.0, 960)
    pool = [prefill("p"), decode("d"), owner]
    assert (chosen(pool), source_of(pool, "auto")) == (("d", "d"), ("owner", 960))
    free = Prices(0.0, 5e-5, 0.0, 0.0)
    assert chosen(pool, prices=free) == ("p", "d"), "at equal costs the pools keep to their roles"
    assert chosen([prefill("p", 0.0, 960), decode("d"), owner]) == ("p", "d"), "transferred anyway"
    assert source_of([prefill("p", 0.0, 960), decode("d"), owner], "auto") == ("", 0)
    assert chosen([prefill("p"), decode("d", 0.0, 960)]) == ("d", "d")


def test_ties_go_by_session_whatever_the_order() -> None:
    """A session's later turns share its first two blocks; the same worker is chosen although no cache is known."""
    rng = random.Random(1)
    pool = [decode(f"d{i}") for i in range(NUM_WORKERS)]
    homes = Counter[str]()
    for _ in range(400):
        start = [rng.randrange(1000) for _ in range(32)]
        turns = set()
        for length in (0, 5, 40, 300):
            rng.shuffle(pool)
            turns.add(placed(pool, prompt=prompt_of(start + [rng.randrange(1000) for _ in range(length)])).computes)
        (worker,) = turns
        homes[worker] += 1
    assert set(homes) == {f"d{i}" for i in range(NUM_WORKERS)}
    assert max(homes.values()) < 2 * 400 / NUM_WORKERS


def test_of_a_sessions_first_two_the_one_that_computed_less_lately_is_taken() -> None:
    """So that equal costs even out, and a session still knows only two places."""
    ids = [f"d{i}" for i in range(NUM_WORKERS)]
    swapped = 0
    for start in range(50):
        prompt = prompt_of([start] * 100)
        order = [placed([decode(i) for i in ids], prompt=prompt).computes]
        order.append(placed([decode(i) for i in ids if i not in order], prompt=prompt).computes)
        busy = [decode(i, recent_s=5.0 if i == order[0] else 4.0 if i == order[1] else 0.0) for i in ids]
        assert placed(busy, prompt=prompt).computes == order[1]
        less = [decode(i, recent_s=4.0 if i == order[0] else 5.0 if i == order[1] else 0.0) for i in ids]
        assert placed(less, prompt=prompt).computes == order[0]
        cheaper = [decode(i, 0.0 if i == order[0] else 0.1, recent_s=9.0 * (i == order[0])) for i in ids]
        assert placed(cheaper, prompt=prompt).computes == order[0], "a matter of equal costs only"
        swapped += order[0] > order[1]
    assert 10 < swapped < 40, "it is no order of names"


def test_a_worker_that_goes_moves_only_its_own_sessions() -> None:
    prompts = [prompt_of([i] * 32) for i in range(200)]
    pool = [decode(f"d{i}") for i in range(NUM_WORKERS)]
    before = [placed(pool, prompt=prompt).computes for prompt in prompts]
    after = [placed(pool[1:], prompt=prompt).computes for prompt in prompts]
    moved = [a for a, b in zip(before, after, strict=True) if a != b]
    assert moved
    assert set(moved) == {"d0"}


SECONDS, TOKENS = st.floats(0.0, 1e3), st.integers(0, 1000)
CANDIDATES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(Role),
        "num_cached_tokens": TOKENS,
        "wait_s": SECONDS,
        "recent_s": st.sampled_from([0.0, 1.0, 2.0]),
        "num_decoding": st.integers(0, 3),
        "num_kv_tokens": TOKENS,
        "room_tokens": st.integers(-2000, 2000),
        "freed_tokens_per_s": st.sampled_from([0.0, 100.0, math.inf]),
        "costs": st.sampled_from([COSTS, PRIOR, step_costs()]),
        "chunk_tokens": st.sampled_from([1, 512]),
    }
)


@settings(max_examples=60)
@given(
    fields=st.lists(CANDIDATES, max_size=6),
    mode=st.sampled_from(["auto", "disaggregated", "aggregated"]),
    itl_s=st.sampled_from([1e-3, 1.0, math.inf]),
    not_from=st.sets(st.sampled_from(["w0", "w1", "w2"])),
    pull_above=st.integers(1, 200),
    seed=st.integers(0, 3),
)
def test_whatever_the_pool_the_workers_have_their_roles_and_the_order_decides_nothing(
    fields: list[dict[str, Any]], mode: str, itl_s: float, not_from: set[str], pull_above: int, seed: int
) -> None:
    def decide(pool: list[Candidate]) -> Placement | None:
        objective = Objective(itl_s=itl_s)
        return place(PROMPT, pool, mode, objective=objective, pull_above_tokens=pull_above, not_from=not_from)

    pool = [Candidate(worker_id=f"w{i}", **each) for i, each in enumerate(fields)]
    placement = decide(pool)
    shuffled = random.Random(seed).sample(pool, len(pool))
    assert placement == decide(shuffled)
    by_id = {candidate.worker_id: candidate for candidate in pool}
    roles = [candidate.role for candidate in pool]
    if placement is None:
        assert Role.DECODE not in roles or (mode == "disaggregated" and Role.PREFILL not in roles)
        return
    assert by_id[placement.decode_worker].role is Role.DECODE
    assert (placement.mode is Mode.DISAGGREGATED) == bool(placement.prefill_worker)
    assert mode in ("auto", placement.mode)
    if placement.prefill_worker:
        assert by_id[placement.prefill_worker].role is Role.PREFILL
    if placement.source:
        assert placement.source not in (placement.computes, *not_from)
        held, here = by_id[placement.source].num_cached_tokens, by_id[placement.computes].num_cached_tokens
        assert placement.source_tokens == held == max(c.num_cached_tokens for c in pool if c.worker_id not in not_from)
        assert held - here >= pull_above
    prediction = placement.prediction
    for seconds in (prediction.wait_s, prediction.room_s, prediction.pull_s, prediction.compute_s, prediction.step_s):
        assert 0.0 <= seconds < math.inf
    assert {terms.worker_id for terms in placement.considered} <= set(by_id)
    for terms in placement.considered:
        assert terms.role is by_id[terms.worker_id].role


# -- more workers than are looked at closely ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_in_a_large_pool_the_least_busy_are_found_beside_the_owners(role: Role) -> None:
    """Ten busy workers hold all of the prompt, one holds most of it, and thirty idle ones nothing."""

    def computes(*, wait_s: float) -> str:
        def worker(worker_id: str, wait_s: float = 0.0, num_cached_tokens: int = 0) -> Candidate:
            return Candidate(
                worker_id=worker_id,
                role=role,
                num_cached_tokens=num_cached_tokens,
                wait_s=wait_s,
                num_kv_tokens=int(1e3 * wait_s),
                costs=COSTS,
            )

        pool = [worker(f"owner{i}", 5.0, 992) for i in range(10)]
        pool += [worker("between", wait_s, 960)]
        pool += [worker(f"idle{i}") for i in range(30)]
        mode = Mode.DISAGGREGATED if role is Role.PREFILL else Mode.AGGREGATED
        return chosen([*pool, decode("d")] if role is Role.PREFILL else pool, mode)[0]

    assert computes(wait_s=2.0).startswith("idle"), "which pulls the prefix: 0.05 s, and 0.992 s for a second copy"
    assert computes(wait_s=0.5) == "between"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(["disaggregated", "aggregated"]))
def test_in_a_large_pool_nobody_who_is_not_looked_at_costs_less(seed: int, mode: str) -> None:
    """Among workers of one speed. Those that decode have prompts to compute, if at all, as much as they decode."""
    rng = random.Random(seed)
    pool = []
    for i in range(rng.randrange(policy.LARGE_POOL + 1, 100)):
        to_do = rng.choice([1.0, 10.0]) * rng.random()
        worker: dict[str, Any] = {"num_cached_tokens": rng.choice([0, 160, 16 * rng.randrange(63)]), "costs": PRIOR}
        if mode == "disaggregated" and i % 2:
            pool.append(prefill(f"p{i}", to_do / 10, **worker))
        else:
            worker |= {"num_decoding": int(8 * to_do), "num_kv_tokens": int(8e3 * to_do)}
            worker |= {"room_tokens": int(5e3 - 8e2 * to_do), "freed_tokens_per_s": 500.0}
            pool.append(decode(f"d{i}", 0.0 if mode == "disaggregated" else to_do / 10, **worker))
    prompt = prompt_of(list(range(1000)), 128)
    near = placed(pool, mode, prompt, pull_above_tokens=1)
    costs = policy._Costs(
        prompt, pool, objective=Objective(), weights=WEIGHTS, prices=PRICES, pull_above_tokens=1, not_from=()
    )
    pools = {role: [c for c in pool if c.role is role] for role in Role}
    decodes = {terms.worker_id: terms for terms in costs.on_decode(pools[Role.DECODE])}
    if mode == "disaggregated":
        prefills = {terms.worker_id: terms for terms in costs.on_prefill(pools[Role.PREFILL])}
        first_s = {worker_id: terms.first_s for worker_id, terms in prefills.items()}
        rest_s = {worker_id: terms.room_s + terms.exposed_s + terms.answer_s for worker_id, terms in decodes.items()}
        assert first_s[near.prefill_worker] <= (1 + policy.EQUAL_SHARE) * min(first_s.values())
    else:
        rest_s = {worker_id: terms.first_s + terms.answer_s for worker_id, terms in decodes.items()}
    assert rest_s[near.decode_worker] <= (1 + policy.EQUAL_SHARE) * min(rest_s.values())
    if near.source:
        assert near.source_tokens == max(candidate.num_cached_tokens for candidate in pool)


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_a_worker_that_holds_the_images_is_preferred_by_their_costs(mode: str) -> None:
    make = prefill if mode == "disaggregated" else decode

    def computes(wait_s: float, held: float = 1.0, num_cached_tokens: int = 0) -> str:
        images = ImageCosts(total_s=1.0, saved_s={"holder": held}, end=100)
        pool = [make("holder", wait_s), make("other", num_cached_tokens=num_cached_tokens), decode("d", 90.0)]
        return chosen(pool, mode, images=images, pull_above_tokens=5000)[0]

    assert computes(0.9) == "holder"
    assert computes(1.1) == "other"
    assert computes(0.6, held=0.5) == "other", "it holds half of them"
    assert computes(0.5, num_cached_tokens=96) == "holder"
    assert computes(0.5, num_cached_tokens=112) == "other", "it computes none of them"


def test_in_a_large_pool_the_holders_of_images_are_looked_at() -> None:
    """Others have less to do; but not by as much as the images cost."""
    pool = [prefill(f"p{i}") for i in range(40)] + [prefill("holder", 0.5), decode("d")]
    images = ImageCosts(total_s=1.0, saved_s={"holder": 1.0}, end=500)
    assert chosen(pool, "disaggregated", images=images)[0] == "holder"
    assert chosen(pool, "disaggregated")[0] != "holder"


def test_in_a_large_pool_at_rest_every_worker_gets_sessions() -> None:
    pool = [prefill(f"p{i}") for i in range(40)] + [decode(f"d{i}") for i in range(40)]
    prompts = [prompt_of([session] * 32) for session in range(400)]
    placements = [placed(pool, "disaggregated", prompt=prompt) for prompt in prompts]
    assert len({placement.prefill_worker for placement in placements}) == 40
    assert len({placement.decode_worker for placement in placements}) == 40
    assert placements == [placed(pool, "disaggregated", prompt=prompt) for prompt in prompts], (
        "and each stays where it is"
    )


class Simulation:
    """Requests arrive one a tick of a millisecond at prefill workers that compute `rate` tokens a tick and cache whole
    prompts.

    Pulling takes no time.
    """

    def __init__(self, rate: float, *, is_blind: bool = False) -> None:
        self.rate = rate
        self.is_blind = is_blind
        """To the queues."""
        self.caches: list[set[bytes]] = [set() for _ in range(NUM_WORKERS)]
        self.queued = [0.0] * NUM_WORKERS
        self.computed = [0.0] * NUM_WORKERS
        self.num_tokens = 0
        self.max_queue = 0.0

    def held(self, worker: int, prompt: Prompt) -> int:
        return 16 * sum(1 for _ in itertools.takewhile(self.caches[worker].__contains__, prompt.block_keys))

    def request(self, prompt: Prompt, num_workers: int = NUM_WORKERS) -> int:
        def wait_s(worker: int) -> float:
            return 0.0 if self.is_blind else self.queued[worker] * COSTS.s_per_token

        pool = [prefill(str(i), wait_s(i), self.held(i, prompt)) for i in range(num_workers)]
        placement = placed([*pool, decode("d")], "disaggregated", prompt=prompt)
        worker = int(placement.prefill_worker)
        uncached = prompt.num_tokens - max(self.held(worker, prompt), placement.source_tokens)
        self.caches[worker].update(prompt.block_keys)
        self.queued[worker] += uncached
        self.computed[worker] += uncached
        self.num_tokens += prompt.num_tokens
        self.max_queue = max(self.max_queue, *self.queued)
        self.queued = [max(0.0, tokens - self.rate) for tokens in self.queued]
        return worker

    @property
    def imbalance(self) -> float:
        """The busiest worker's computed tokens over the mean."""
        return max(self.computed) * NUM_WORKERS / sum(self.computed)


SYSTEM_PROMPT = list(range(800))


def replay_one_system_prompt(
    simulation: Simulation, num_requests: int = 800, *, seed: int = 2, num_workers: int = NUM_WORKERS
) -> list[int]:
    rng = random.Random(seed)
    prompts = (SYSTEM_PROMPT + [rng.randrange(1000, 9000) for _ in range(400)] for _ in range(num_requests))
    return [simulation.request(prompt_of(prompt), num_workers) for prompt in prompts]


def test_one_system_prompt_does_not_pull_everything_to_one_worker() -> None:
    simulation = Simulation(rate=52)  # 416 tokens a tick in all, for 400 uncached ones: every worker is needed
    replay_one_system_prompt(simulation)
    assert simulation.imbalance < 1.1
    assert min(simulation.computed) > 0.8 * max(simulation.computed)
    assert sum(simulation.computed) < 0.4 * simulation.num_tokens, "and the prefix is still used"
    assert simulation.max_queue < 2500


def test_longest_prefix_routing_would_collapse_in_the_same_replay() -> None:
    """Blind to the queues this is naive prefix routing: the test above is about something."""
    simulation = Simulation(rate=52, is_blind=True)
    replay_one_system_prompt(simulation)
    assert simulation.imbalance == NUM_WORKERS
    assert simulation.max_queue > 100_000


def test_a_hot_prefix_spreads_no_sooner_than_its_owner_is_busy() -> None:
    """Another worker pulls 800 tokens in 40 ms, and that it holds them once more counts 800: as much as two prompts of
    400 that wait, and 40 ms."""
    simulation = Simulation(rate=0)
    (home,) = replay_one_system_prompt(simulation, 1)
    simulation.queued = [0.0] * NUM_WORKERS
    workers = replay_one_system_prompt(simulation, 4, seed=3)
    assert workers[:3] == [home] * 3
    assert workers[3] != home


def test_a_new_worker_gets_work_at_once() -> None:
    simulation = Simulation(rate=52)
    replay_one_system_prompt(simulation, 200, num_workers=NUM_WORKERS - 1)
    assert simulation.caches[-1] == set()
    assert NUM_WORKERS - 1 in replay_one_system_prompt(simulation, 3, seed=4)
    before = sum(simulation.computed)
    replay_one_system_prompt(simulation, 200, seed=5)
    assert simulation.computed[-1] > 0.9 * (sum(simulation.computed) - before) / NUM_WORKERS


def test_sessions_stay_with_their_cache_and_are_spread() -> None:
    rng = random.Random(3)
    simulation = Simulation(rate=10)  # 80 tokens a tick in all, for 64 new ones
    sessions = [SYSTEM_PROMPT[:160] + [rng.randrange(1000, 9000) for _ in range(64)] for _ in range(60)]
    homes: list[Counter[int]] = [Counter() for _ in sessions]
    for _ in range(900):
        index = rng.randrange(len(sessions))
        sessions[index] = sessions[index] + [rng.randrange(1000, 9000) for _ in range(64)]
        homes[index][simulation.request(prompt_of(sessions[index]))] += 1
    at_home = sum(max(home.values()) for home in homes)
    assert at_home > 0.85 * 900, "turns find what the turns before them left"
    assert simulation.imbalance < 1.2
    assert sum(simulation.computed) < 0.2 * simulation.num_tokens


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated", "auto"])
def test_who_takes_no_work_is_a_source_at_most(mode: str) -> None:
    """A worker that drains, though it is idle and holds the whole prompt."""
    leaving = [decode("a", num_cached_tokens=992, takes_work=False), prefill("b", takes_work=False)]
    assert set(chosen([*leaving, decode("d", wait_s=9.0), prefill("p", wait_s=9.0)], mode)) <= {"d", "p"}
    assert place(PROMPT, leaving, mode) is None


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_the_time_to_load_an_adapter_is_part_of_the_first_token() -> None:
    pool = [prefill("p0", 0.3), prefill("p1"), decode("d0"), decode("d1")]
    assert chosen(pool, "disaggregated")[0] == "p1"
    assert chosen(pool, "disaggregated", loads_s={"p1": 0.25})[0] == "p1", "loading is faster than waiting"
    placement = placed(pool, "disaggregated", loads_s={"p1": 0.5})
    assert placement.computes == "p0"
    assert placement.prediction.load_s == 0.0
    alone = placed([pool[1], pool[2]], "disaggregated", loads_s={"p1": 0.5})
    assert alone.prediction.load_s == 0.5
    assert alone.prediction.ttft_s == pytest.approx(placed([pool[1], pool[2]], "disaggregated").prediction.ttft_s + 0.5)


def test_decode_workers_that_hold_the_adapter_are_preferred() -> None:
    pool = [prefill("p0"), decode("d0"), decode("d1"), decode("d2")]
    for holder in ("d0", "d1", "d2"):
        others = {c.worker_id: 0.5 for c in pool if c.worker_id not in ("p0", holder)}
        assert chosen(pool, "disaggregated", loads_s=others) == ("p0", holder)
        assert chosen(pool, "aggregated", loads_s=others) == (holder, holder)


def test_a_mode_is_chosen_by_where_the_adapter_is() -> None:
    """The prompt takes one second; the decode worker alone holds the adapter, or the prefill worker does too."""
    pool = [prefill("p0"), decode("d0")]
    assert placed(pool, loads_s={"p0": 2.0}).mode is Mode.AGGREGATED
    assert placed(pool, loads_s={"d0": 2.0}).mode is Mode.DISAGGREGATED
    assert placed(pool, loads_s={"p0": 2.0, "d0": 2.0}).mode is Mode.AGGREGATED, "one load is less than two"
    assert placed(pool, "disaggregated", loads_s={"p0": 2.0, "d0": 1.0}).prediction.load_s == 3.0


def test_where_the_adapter_is_shows_in_a_large_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers without it do not hide the ones that hold it, and the other way round."""
    busy = [decode(f"held-{i}", 0.2, num_kv_tokens=50) for i in range(4)]
    idle = [decode(f"idle-{i:02}") for i in range(policy.LARGE_POOL)]
    loads_s = {each.worker_id: 1.0 for each in idle}
    assert chosen([*busy, *idle], "aggregated", loads_s=loads_s)[0].startswith("held")
    quick = dict.fromkeys(loads_s, 0.05)
    assert chosen([*busy, *idle], "aggregated", loads_s=quick)[0].startswith("idle")


def test_candidates_in_the_order_of_a_session_are_not_turned() -> None:
    pool = [decode(f"w{i}") for i in range(2 * policy.LARGE_POOL)]
    prompts = [prompt_of([number] * 1000) for number in range(40)]
    first = {f"w{i}" for i in range(policy.SHORTLIST)}
    assert {placed(pool, prompt=prompt, rotates=False).decode_worker for prompt in prompts} <= first
    assert len({placed(pool, prompt=prompt).decode_worker for prompt in prompts} - first) > 10
