"""The baselines, by cases small enough to work out by hand. Blocks have 100 tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate.baselines import BASELINES
from lab.simulate.policy import Policy, WorkerView
from lab.traces.trace import TraceRequest

BLOCK_TOKENS = 100
SEEDS = range(20)
REQUEST = TraceRequest(0.0, num_prompt_tokens=1000, num_output_tokens=10, block_ids=tuple(range(10)))


def worker(
    index: int,
    *,
    cached: int = 0,
    queued: int = 0,
    requests: int = 0,
    waiting: int = 0,
    used: int = 0,
    tokens_per_s: float = 1000.0,
) -> WorkerView:
    return WorkerView(
        index=index,
        num_cached_tokens=cached,
        queued_tokens=queued,
        reserved_tokens=queued,
        num_requests=requests,
        num_waiting=waiting,
        used_blocks=used,
        num_blocks=1000,
        tokens_per_s=tokens_per_s,
    )


def policy(name: str, seed: int = 0) -> Policy:
    return BASELINES[name](seed, BLOCK_TOKENS)


def chosen(name: str, workers: Sequence[WorkerView], request: TraceRequest = REQUEST) -> set[int]:
    """What fresh instances choose over many seeds: all of those that tie."""
    return {policy(name, seed).choose(request, workers) for seed in SEEDS}


def chosen_decode(name: str, workers: Sequence[WorkerView]) -> set[int]:
    return {policy(name, seed).choose_decode(REQUEST, workers) for seed in SEEDS}


def loads(*num_requests: int) -> list[WorkerView]:
    return [worker(i, requests=n) for i, n in enumerate(num_requests)]


def sessions(num_sessions: int) -> list[TraceRequest]:
    """A system prompt in common, then a block of their own."""
    return [TraceRequest(0.0, 300, 1, (0, session, 10_000 + session)) for session in range(1, num_sessions + 1)]


# The textbook


def test_random_reaches_every_worker_evenly() -> None:
    rule = policy("random")
    counts = Counter(rule.choose(REQUEST, loads(9, 0, 5, 5)) for _ in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert all(900 < count < 1100 for count in counts.values())  # 1000 expected, sigma 27


def test_round_robin_goes_on_where_it_was_when_workers_come_and_go() -> None:
    rule = policy("round_robin")
    pool = [worker(i) for i in (2, 5, 7)]
    assert [rule.choose(REQUEST, pool) for _ in range(4)] == [2, 5, 7, 2]
    assert rule.choose(REQUEST, [worker(2), worker(7)]) == 7
    assert rule.choose(REQUEST, [worker(2), worker(7), worker(9)]) == 9
    assert rule.choose(REQUEST, [worker(2), worker(7), worker(9)]) == 2


def test_least_load_counts_tokens_before_requests_and_no_prefix() -> None:
    pool = [worker(0, queued=100, requests=1, cached=1000), worker(1, queued=90, requests=9)]
    assert chosen("least_load", pool) == {1}
    assert chosen("vllm_router", pool) == {0}  # (1 + 100) * 2 < (1000 + 90) * 10
    assert chosen("least_load", [worker(0, queued=90, requests=9), worker(1, queued=90, requests=8)]) == {1}


def test_session_hash_ignores_caches_and_loads_and_what_follows_the_second_block() -> None:
    empty = loads(0, 0, 0, 0)
    busy = [worker(i, requests=100 * i, cached=100 * i, queued=100 * i) for i in range(4)]
    for request in sessions(50):
        longer = TraceRequest(7.0, 900, 5, (*request.block_ids[:2], 77, 78))
        assert chosen("session_hash", empty, request) == chosen("session_hash", busy, longer)


def test_session_hash_moves_only_the_share_of_a_worker_that_joins() -> None:
    rule, requests = policy("session_hash"), sessions(2000)
    before = [rule.choose(request, loads(*[0] * 8)) for request in requests]
    after = [rule.choose(request, loads(*[0] * 9)) for request in requests]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {8}
    assert 160 < len(moved) < 285  # 2000 / 9 = 222, sigma 14
    assert all(190 < count < 310 for count in Counter(before).values())  # 2000 / 8 = 250, sigma 15


def test_session_hash_of_short_prompts() -> None:
    rule, pool = policy("session_hash"), loads(*[0] * 8)
    one_block = {rule.choose(TraceRequest(float(t), 100 + t, 1, (4,)), pool) for t in range(30)}
    assert len(one_block) == 1
    no_block = {rule.choose(TraceRequest(float(t), 50, 1, ()), pool) for t in range(100)}
    assert no_block == set(range(8))


@pytest.mark.parametrize(("name", "expected"), [("greedy_1", 1), ("greedy_4", 2), ("greedy_8", 0)])
def test_the_weight_of_greedy_is_what_an_uncached_token_costs_in_queued_ones(name: str, expected: int) -> None:
    # cost = queued + weight * uncached     weight 1   weight 4   weight 8
    pool = [
        worker(0, queued=5600, cached=1000),  # 5600       5600       5600
        worker(1, queued=0, cached=0),  #         1000       4000       8000
        worker(2, queued=1000, cached=300),  #    1700       3800       6600
    ]
    assert chosen(name, pool) == {expected}


@pytest.mark.parametrize("name", ["random", "round_robin", "least_load", "session_hash", "greedy_1", "greedy_8"])
def test_the_textbook_decodes_where_least_of_the_pool_is_in_use(name: str) -> None:
    assert chosen_decode(name, [worker(0, used=300, requests=1), worker(1, used=299, requests=9)]) == {1}


# Other stacks


def test_dynamo_adds_what_decoding_holds_to_the_work_of_the_prompt() -> None:
    # (queued + 1000 - cached) / 100 + used:  (300 + 200) / 100 + 9 = 14;  (0 + 1000) / 100 + 3 = 13
    pool = [worker(0, queued=300, cached=800, used=9), worker(1, used=3)]
    assert chosen("dynamo", pool) == {1}
    assert chosen("greedy_1", pool) == {0}  # 500 < 1000
    assert chosen("dynamo", [worker(0, queued=300, cached=800, used=8), worker(1, used=3)]) == {0, 1}
    assert chosen("dynamo", [worker(0, queued=300, cached=800, used=7), worker(1, used=3)]) == {0}


def test_dynamo_decodes_by_load_alone() -> None:
    assert chosen_decode("dynamo", [worker(0, cached=1000, used=5), worker(1, used=4)]) == {1}
    assert chosen_decode("dynamo", [worker(0, queued=200, used=3), worker(1, used=4)]) == {1}  # 15 > 14


def test_llm_d_weighs_prefix_queue_and_memory() -> None:
    # 3 * prefix + 2 * queue + 2 * (1 - use)
    owner = worker(0, cached=700, waiting=3, used=500)  # 2.1 + 0 + 1.0 = 3.1
    idle = worker(1, waiting=1, used=400)  #              0 + 2 + 1.2 = 3.2
    between = worker(2, cached=200, waiting=2, used=700)  # 0.6 + 1 + 0.6 = 2.2
    assert chosen("llm_d", [owner, idle, between]) == {1}
    assert chosen("smg", [owner, idle, between]) == {0}
    assert chosen("llm_d", [worker(0, cached=800, waiting=3, used=500), idle, between]) == {0}  # 3.4
    assert chosen_decode("llm_d", [owner, idle, between]) == {1}


def test_llm_d_prefers_empty_memory_to_a_short_prefix() -> None:
    # 3 * 0.4 + 2 * 0.3 = 1.8 < 2 * 1 < 3 * 0.5 + 2 * 0.3 = 2.1
    assert chosen("llm_d", [worker(0, cached=400, used=700), worker(1)]) == {1}
    assert chosen("llm_d", [worker(0, cached=500, used=700), worker(1)]) == {0}


def test_llm_d_scores_equal_queues_alike_and_whole_blocks_only() -> None:
    assert chosen("llm_d", [worker(0, cached=199, waiting=5), worker(1, cached=101, waiting=5)]) == {0, 1}
    assert chosen("llm_d", loads(0, 0), TraceRequest(0.0, 50, 1, ())) == {0, 1}


@pytest.mark.parametrize(
    ("owner", "others", "expected"),
    [
        (5, [3, 0, 0, 0, 0, 0, 0], 0),  # mean 1: over 1.5, not over 1 + max(4, 2) = 5
        (6, [2, 0, 0, 0, 0, 0, 0], 1),
        (7, [5, 0, 0], 0),  # mean 3: over 1.5 * 3 = 4.5, not over 3 + max(4, ceil(3.46)) = 7
        (8, [4, 0, 0], 1),
        (15, [7, 7, 7], 0),  # mean 9: over 13.5, not over 9 + ceil(2 * 3) = 15
        (16, [7, 7, 6], 1),
        (150, [100, 80, 70], 0),  # mean 100: over 100 + 20, not over 150
        (151, [100, 80, 69], 1),
    ],
)
def test_smg_leaves_an_owner_that_is_overloaded(owner: int, others: list[int], expected: int) -> None:
    """Worker 1 has the least expected wait: nothing is queued there."""
    pool = [worker(0, cached=500, queued=50, requests=owner)]
    pool += [worker(i, queued=100 * (i - 1), requests=n) for i, n in enumerate(others, start=1)]
    assert chosen("smg", pool) == {expected}


def test_smg_waits_for_tokens_and_for_memory() -> None:
    # queued / tokens_per_s + 0.15 * k / (1 - k)
    slow = worker(0, queued=300, tokens_per_s=500)  #         0.6 + 0
    full = worker(1, queued=100, used=800)  #                 0.1 + 0.15 * 4 = 0.7
    fast = worker(2, queued=1000, used=500, tokens_per_s=2500)  # 0.4 + 0.15 * 1 = 0.55
    assert chosen("smg", [slow, full, fast]) == chosen_decode("smg", [slow, full, fast]) == {2}
    assert chosen("smg", [slow, full]) == {0}
    assert chosen_decode("smg", [worker(0, used=1000), worker(1, queued=149_000)]) == {1}  # 149.85 > 149
    assert chosen("least_load", [slow, full, fast]) == {1}


def test_smg_takes_the_least_loaded_of_equal_owners() -> None:
    pool = [worker(0, cached=500, requests=2), worker(1, cached=500, requests=1, queued=900), worker(2)]
    assert chosen("smg", pool) == {1}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 64, 0),  # differ by 64
        (0, 65, 1),  # by 65, and 65 > 0
        (130, 195, 0),  # by 65, and 195 = 1.5 * 130
        (130, 196, 1),
    ],
)
def test_the_sglang_router_leaves_prefixes_when_imbalanced(low: int, high: int, expected: int) -> None:
    assert chosen("sglang_router", [worker(0, cached=900, requests=high), worker(1, requests=low)]) == {expected}


def test_the_sglang_router_follows_a_match_above_its_threshold_else_the_smallest_tree() -> None:
    assert chosen("sglang_router", [worker(0, cached=300, requests=9), worker(1)]) == {0, 1}  # both trees are empty
    assert chosen("sglang_router", [worker(0, cached=400, requests=9), worker(1)]) == {0}
    assert chosen("smg", [worker(0, cached=300, requests=4), worker(1)]) == {0}
    for seed in SEEDS:
        rule = policy("sglang_router", seed)
        first = rule.choose(REQUEST, loads(0, 0))  # its tree: 1000
        second = 1 - first
        held = [worker(i, cached=900 if i == second else 0) for i in range(2)]
        assert rule.choose(TraceRequest(0.0, 300, 1, (1, 2, 3)), loads(0, 0)) == second  # 300
        assert rule.choose(REQUEST, held) == second  # a match of 0.9, and a tree of 300 + 100
        assert rule.choose(REQUEST, loads(0, 0)) == second  # 1400
        assert rule.choose(REQUEST, loads(0, 0)) == first


def test_the_sglang_router_takes_the_least_loaded_of_equal_owners() -> None:
    pool = [worker(0, cached=500, requests=2), worker(1, cached=500, requests=1), worker(2)]
    assert chosen("sglang_router", pool) == {1}


def test_the_vllm_router_multiplies_tokens_by_requests() -> None:
    # (uncached + queued) * (requests + 1):  (400 + 0) * 3 = 1200;  1000 * 1 = 1000
    pool = [worker(0, cached=600, requests=2), worker(1)]
    assert chosen("vllm_router", pool) == {1}
    assert chosen("greedy_1", pool) == {0}
    assert chosen("vllm_router", [worker(0, cached=700, requests=2), worker(1)]) == {0}  # 900
    assert chosen("vllm_router", [worker(0, cached=600, requests=2), worker(1, queued=300)]) == {0}  # 1200 < 1300


def test_the_vllm_router_never_credits_the_last_token() -> None:
    # A hit in full: 1 * (1 + 1) against 1 * (0 + 1), and not 0 against 0.
    assert chosen("vllm_router", [worker(0, cached=1000, requests=1), worker(1, cached=1000)]) == {1}


def test_aibrix_lets_a_hundredth_of_prefix_outweigh_a_tenth_of_load() -> None:
    # (100 - match%) * 0.1 + requests / 10
    pool = [worker(0, cached=100, requests=10), worker(1, requests=1), worker(2, requests=5)]
    assert chosen("aibrix", pool) == {0}  # 9 + 1 against 10 + 0.1
    assert chosen("vllm_router", pool) == {1}
    pool = [worker(0, cached=80, requests=10), worker(1, requests=1), worker(2, requests=5)]
    assert chosen("aibrix", pool) == {1}  # 9.2 + 1 against 10.1


def test_aibrix_drops_workers_two_deviations_above_the_mean() -> None:
    # Of n workers one with x requests, the others with none: mean x / n, sigma x / n * sqrt(n - 1); x is above
    # mean + 2 sigma where sqrt(n - 1) > 2.
    assert chosen("aibrix", [worker(0, cached=900, requests=50), *[worker(i) for i in range(1, 5)]]) == {0}
    assert chosen("aibrix", [worker(0, cached=900, requests=50), *[worker(i) for i in range(1, 6)]]) == {1, 2, 3, 4, 5}


def test_aibrix_decodes_by_requests_speed_and_room() -> None:
    # (requests / 8 + 1 - speed / 1000) / (free / 0.8)
    crowded = worker(0, requests=8, used=200)  #                    1 / 1 = 1
    nearly_full = worker(1, requests=4, used=840)  #                0.5 / 0.2 = 2.5
    slow = worker(2, requests=2, used=360, tokens_per_s=500)  #     (0.25 + 0.5) / 0.8 = 0.94
    assert chosen_decode("aibrix", [crowded, nearly_full, slow]) == {2}
    assert chosen_decode("aibrix", [crowded, nearly_full]) == {0}
    assert chosen_decode("aibrix", [worker(0, requests=4), worker(1, requests=3, tokens_per_s=500)]) == {0}  # 1 < 1.25
    assert chosen_decode("vllm_router", [crowded, nearly_full, slow]) == {2}
    assert chosen_decode("vllm_router", [crowded, nearly_full]) == {1}
    assert chosen_decode("aibrix", [worker(0, requests=1, used=1000), worker(1, requests=3)]) == {1}  # 333 > 1


def test_production_stack_turns_each_leg_on_its_own() -> None:
    rule, pool = policy("production_stack"), [worker(1, used=9), worker(4, cached=900), worker(6)]
    assert [rule.choose(REQUEST, pool) for _ in range(4)] == [1, 4, 6, 1]
    assert [rule.choose_decode(REQUEST, pool) for _ in range(4)] == [1, 4, 6, 1]
    assert rule.choose(REQUEST, pool) == 4


def test_ray_chooses_between_two_when_the_queues_differ_by_more_than_ten() -> None:
    assert chosen("ray_prefix_affinity", [worker(0, cached=900, requests=10), worker(1)]) == {0}
    assert chosen("ray_prefix_affinity", [worker(0, cached=900, requests=11), worker(1)]) == {1}
    # Of three, the pairs (0, 1), (0, 2) and (1, 2): the busiest never wins, the second loses to the idle one only.
    pool = [worker(0, cached=900, requests=20), worker(1, requests=5), worker(2)]
    assert chosen("ray_prefix_affinity", pool) == chosen_decode("ray_prefix_affinity", pool) == {1, 2}


def test_ray_follows_a_tenth_of_prefix_else_the_smallest_tenant() -> None:
    assert chosen("ray_prefix_affinity", [worker(0, cached=100, requests=9), worker(1)]) == {0}
    assert chosen("ray_prefix_affinity", [worker(0, cached=99, requests=9), worker(1)]) == {1}  # equal, shorter queue
    assert chosen("sglang_router", [worker(0, cached=100, requests=9), worker(1)]) == {0, 1}
    rule = policy("ray_prefix_affinity")
    assert rule.choose(REQUEST, loads(0, 1)) == 0  # equal: 0
    assert rule.choose(TraceRequest(0.0, 300, 1, (1, 2, 3)), loads(0, 1)) == 1  # 0 < 1000
    assert rule.choose(REQUEST, [worker(0), worker(1, cached=900)]) == 1  # the owner, at 300 + 100
    assert rule.choose(REQUEST, loads(0, 1)) == 1  # 400 < 1000
    assert rule.choose(REQUEST, loads(1, 0)) == 0  # 1000 < 1400


def test_ray_takes_the_shorter_queue_of_equal_owners() -> None:
    pool = [worker(0, cached=500, requests=2), worker(1, cached=500, requests=1), worker(2)]
    assert chosen("ray_prefix_affinity", pool) == {1}


@pytest.mark.parametrize("name", ["sglang_router", "vllm_router"])
def test_decoding_by_requests(name: str) -> None:
    assert chosen_decode(name, [worker(0, requests=2), worker(1, requests=1, used=900)]) == {1}


# All of them


@pytest.mark.parametrize("name", BASELINES)
def test_a_policy_is_called_what_the_table_calls_it(name: str) -> None:
    assert policy(name).name == name


@pytest.mark.parametrize("name", sorted(BASELINES.keys() - {"round_robin", "production_stack", "session_hash"}))
def test_ties_go_to_every_worker(name: str) -> None:
    assert chosen(name, loads(3, 3, 3)) == {0, 1, 2}


@pytest.mark.parametrize("name", sorted(BASELINES.keys() - {"production_stack"}))
def test_ties_of_decoding_go_to_every_worker(name: str) -> None:
    assert chosen_decode(name, loads(3, 3, 3)) == {0, 1, 2}


@pytest.mark.parametrize("name", BASELINES)
def test_a_seed_decides_everything(name: str) -> None:
    def run(seed: int) -> list[int]:
        rule = policy(name, seed)
        return [leg(r, loads(*[5] * 8)) for r in sessions(40) for leg in (rule.choose, rule.choose_decode)]

    assert run(1) == run(1)
    if name != "production_stack":
        assert run(1) != run(2)


@st.composite
def pools(draw: st.DrawFn) -> list[WorkerView]:
    indices = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=9, unique=True))
    count = st.integers(0, 300)
    return [
        WorkerView(
            index=index,
            num_cached_tokens=100 * draw(st.integers(0, 10)),
            queued_tokens=draw(st.integers(0, 10**6)),
            reserved_tokens=draw(st.integers(0, 10**6)),
            num_requests=draw(count),
            num_waiting=draw(count),
            used_blocks=draw(count),
            num_blocks=300,
            tokens_per_s=draw(st.floats(1.0, 1e6)),
        )
        for index in sorted(indices)
    ]


@pytest.mark.parametrize("name", BASELINES)
@given(turns=st.lists(pools(), min_size=1, max_size=3), num_blocks=st.integers(0, 10), seed=st.integers())
@settings(max_examples=30)
def test_a_policy_chooses_a_given_worker(name: str, turns: list[list[WorkerView]], num_blocks: int, seed: int) -> None:
    rule = policy(name, seed)
    request = TraceRequest(1.0, 1000, 1, tuple(range(num_blocks)))
    for pool in turns:
        indices = {w.index for w in pool}
        assert rule.choose(request, pool) in indices
        assert rule.choose_decode(request, pool) in indices
