from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from baton.blocks import block_keys
from baton.cluster import Role
from router.placement import DEFAULT_WEIGHTS, Candidate, Mode, Placement, Prompt, place

NUM_WORKERS = 8


def prompt_of(tokens: list[int]) -> Prompt:
    return Prompt(len(tokens), tuple(block_keys(b"seed", tokens)))


def decode(worker_id: str, queued_tokens: int = 0, num_cached_tokens: int = 0, active_tokens: int = 0) -> Candidate:
    return Candidate(worker_id, Role.DECODE, queued_tokens, active_tokens, num_cached_tokens)


def prefill(worker_id: str, queued_tokens: int = 0, num_cached_tokens: int = 0) -> Candidate:
    return Candidate(worker_id, Role.PREFILL, queued_tokens, 0, num_cached_tokens)


PROMPT = prompt_of(list(range(1000)))


def test_the_owner_wins_when_loads_are_equal() -> None:
    pool = [prefill(f"p{i}", 500, 640 if i == 5 else 0) for i in range(8)]
    pool += [decode(f"d{i}", 300, 64 if i == 2 else 0) for i in range(8)]
    assert place(PROMPT, pool) == Placement(Mode.SPLIT, "d2", "p5")


def test_load_beats_a_smaller_overlap_and_not_a_larger_one() -> None:
    def chosen(queue_of_owner: int, **settings: Any) -> str:
        pool = [decode("d"), prefill("owner", queue_of_owner, 160), prefill("idle")]
        placement = place(PROMPT, pool, **settings)
        assert placement is not None
        return placement.prefill_worker

    # The idle one computes 840 tokens as well, pulls 160 at 0.05 and holds them a second time: 840 + 8 + 160.
    assert chosen(167) == "owner"
    assert chosen(169) == "idle"
    # Without pulling it computes all 1,000, and holds the 160 a second time just as well.
    assert chosen(319, pull_above_tokens=1000) == "owner"
    assert chosen(321, pull_above_tokens=1000) == "idle"


def test_every_weight_has_its_say() -> None:
    pool = [decode("owner", 100, 160), decode("idle")]
    pulled = Placement(Mode.AGGREGATED, "idle", source="owner", source_tokens=160)
    assert place(PROMPT, pool) == Placement(Mode.AGGREGATED, "owner")
    assert place(PROMPT, pool, weights=replace(DEFAULT_WEIGHTS, load=2.0)) == pulled
    assert place(PROMPT, pool, weights=replace(DEFAULT_WEIGHTS, affinity=0.5)) == pulled, (
        "840 + 8 + 80 against 840 + 100"
    )
    assert place(PROMPT, pool, weights=replace(DEFAULT_WEIGHTS, affinity=0.5, pull=0.2)) == Placement(
        Mode.AGGREGATED, "owner"
    )
    decoding = [decode("owner", 0, 160, 5000), decode("idle")]
    assert place(PROMPT, decoding) == Placement(Mode.AGGREGATED, "owner"), "100 of active load against 168"
    assert place(PROMPT, decoding, weights=replace(DEFAULT_WEIGHTS, active=0.05)) == pulled


def test_who_only_decodes_is_chosen_by_what_it_decodes() -> None:
    """Aggregated, the queue counts; split, the sequences that share the steps."""
    pool = [decode("queue", 500, 0, 600), decode("batch", 0, 0, 3000)]
    assert place(PROMPT, pool) == Placement(Mode.AGGREGATED, "batch")
    assert place(PROMPT, [*pool, prefill("p")], "split") == Placement(Mode.SPLIT, "queue", "p")


def test_a_prefix_that_everybody_holds_attracts_nobody() -> None:
    pool = [decode(f"d{i}", load, 640) for i, load in enumerate([30, 10, 20])]
    assert place(PROMPT, pool) == Placement(Mode.AGGREGATED, "d1")


@pytest.mark.parametrize(
    ("mode", "pool", "expected"),
    [
        ("auto", "pd", Mode.SPLIT),
        ("auto", "d", Mode.AGGREGATED),
        ("auto", "p", None),
        ("auto", "", None),
        ("split", "pd", Mode.SPLIT),
        ("split", "d", None),
        ("split", "p", None),
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
        assert placement.prefill_worker == ("p0" if expected is Mode.SPLIT else "")


@pytest.mark.parametrize(("mode", "expected"), [("auto", Mode.AGGREGATED), ("split", Mode.SPLIT)])
def test_a_short_uncached_rest_is_computed_where_it_decodes(mode: str, expected: Mode) -> None:
    pool = [prefill("p"), decode("d", 0, 960)]
    at_limit = place(PROMPT, pool, mode, aggregate_below_tokens=40)
    below = place(PROMPT, pool, mode, aggregate_below_tokens=41)
    assert at_limit is not None
    assert below is not None
    assert (at_limit.mode, below.mode) == (Mode.SPLIT, expected)


def source_of(pool: list[Candidate], mode: str = "split", **settings: Any) -> tuple[str, int]:
    placement = place(PROMPT, pool, mode, **settings)
    assert placement is not None
    return placement.source, placement.source_tokens


@pytest.mark.parametrize("mode", ["split", "aggregated"])
def test_the_source_is_the_longest_prefix_elsewhere_of_either_role(mode: str) -> None:
    """Whoever computes is busy elsewhere, so that the owners are not chosen themselves."""
    pool = [prefill("p"), decode("d"), prefill("p-owner", 5000, 320), decode("d-owner", 5000, 640)]
    assert source_of(pool, mode) == ("d-owner", 640)
    assert source_of([*pool, prefill("longest", 9000, 656)], mode) == ("longest", 656)


def test_the_source_is_compared_with_the_worker_that_computes() -> None:
    """In split mode with the prefill worker's prefix, in aggregated mode with the decode worker's."""
    pool = [prefill("p", 0, 480), decode("d", 0, 640)]
    assert source_of(pool, "split", pull_above_tokens=160) == ("d", 640)
    assert source_of(pool, "split", pull_above_tokens=161) == ("", 0)
    assert source_of(pool, "aggregated", pull_above_tokens=1) == ("", 0)
    assert source_of([prefill("p", 0, 800), decode("d", 0, 640)], "aggregated", pull_above_tokens=1) == ("p", 800)
    assert source_of([prefill("p"), decode("d")], "split", pull_above_tokens=1) == ("", 0)


def test_sources_that_hold_the_same_go_by_load_and_then_by_session() -> None:
    pool = [prefill("p"), decode("d"), *(decode(f"owner{i}", 9000 + (i != 3), 640) for i in range(6))]
    assert source_of(pool) == ("owner3", 640)
    equal = [prefill("p"), decode("d"), *(decode(f"owner{i}", 9000, 640) for i in range(6))]
    chosen = set()
    for start in range(100):
        placements = [place(prompt_of([start] * 800), pool, "split") for pool in (equal, equal[::-1])]
        assert placements[0] == placements[1], "the order of the pool decides nothing"
        assert placements[0] is not None
        chosen.add(placements[0].source)
    assert chosen == {f"owner{i}" for i in range(6)}


def test_a_source_that_is_ruled_out_is_replaced_by_the_next_best() -> None:
    pool = [prefill("p"), decode("d"), decode("best", 9000, 640), decode("next", 9000, 320)]
    assert source_of(pool, not_from={"best"}) == ("next", 320)
    assert source_of(pool, not_from={"best", "next"}) == ("", 0)
    assert place(PROMPT, [prefill("p", 0, 640), decode("d")], not_from={"p"}) == Placement(Mode.SPLIT, "d", "p")


def test_a_prefix_that_has_to_be_pulled_anyway_is_pulled_to_where_it_is_decoded() -> None:
    """Auto: the same 40 tokens are left to compute, on either worker."""
    owner = decode("owner", 9000, 960)

    def placed(*pool: Candidate, limit: int = 41) -> Placement | None:
        return place(PROMPT, pool, aggregate_below_tokens=limit)

    pulled = Placement(Mode.AGGREGATED, "d", source="owner", source_tokens=960)
    assert placed(prefill("p"), decode("d"), owner) == pulled
    assert placed(prefill("p"), decode("d"), owner, limit=40) == Placement(Mode.SPLIT, "d", "p", "owner", 960)
    assert placed(prefill("p", 0, 960), decode("d"), owner) == Placement(Mode.SPLIT, "d", "p"), "handed over anyway"
    assert placed(prefill("p"), decode("d", 0, 960)) == Placement(Mode.AGGREGATED, "d")


def test_ties_go_by_session_whatever_the_order() -> None:
    """A session's later turns share its first two blocks; the same worker is chosen although no cache is known."""
    rng = random.Random(1)
    pool = [decode(f"d{i}") for i in range(NUM_WORKERS)]
    chosen = Counter[str]()
    for _ in range(400):
        start = [rng.randrange(1000) for _ in range(32)]
        turns = set()
        for length in (0, 5, 40, 300):
            rng.shuffle(pool)
            placement = place(prompt_of(start + [rng.randrange(1000) for _ in range(length)]), pool)
            assert placement is not None
            turns.add(placement.decode_worker)
        (worker,) = turns
        chosen[worker] += 1
    assert set(chosen) == {f"d{i}" for i in range(NUM_WORKERS)}
    assert max(chosen.values()) < 2 * 400 / NUM_WORKERS


def test_a_worker_that_goes_moves_only_its_own_sessions() -> None:
    prompts = [prompt_of([i] * 32) for i in range(200)]
    pool = [decode(f"d{i}") for i in range(NUM_WORKERS)]
    before = [place(prompt, pool) for prompt in prompts]
    after = [place(prompt, pool[1:]) for prompt in prompts]
    moved = [a for a, b in zip(before, after, strict=True) if a != b]
    assert moved
    assert all(placement is not None and placement.decode_worker == "d0" for placement in moved)


class Simulation:
    """Requests arrive one a tick at prefill workers that compute `rate` tokens a tick and cache whole prompts.

    Pulling takes no time.
    """

    def __init__(self, rate: float, load_weight: float = 1.0) -> None:
        self.rate = rate
        self.weights = replace(DEFAULT_WEIGHTS, load=load_weight)
        self.caches: list[set[bytes]] = [set() for _ in range(NUM_WORKERS)]
        self.queued = [0.0] * NUM_WORKERS
        self.computed = [0] * NUM_WORKERS
        self.num_tokens = 0
        self.max_queue = 0.0

    def held(self, worker: int, prompt: Prompt) -> int:
        return 16 * sum(1 for _ in itertools.takewhile(self.caches[worker].__contains__, prompt.block_keys))

    def request(self, prompt: Prompt) -> int:
        pool = [prefill(str(i), int(self.queued[i]), self.held(i, prompt)) for i in range(NUM_WORKERS)]
        placement = place(prompt, [*pool, decode("d")], "split", weights=self.weights)
        assert placement is not None
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


def replay_one_system_prompt(simulation: Simulation) -> None:
    rng = random.Random(2)
    for _ in range(800):
        simulation.request(prompt_of(SYSTEM_PROMPT + [rng.randrange(1000, 9000) for _ in range(400)]))


def test_one_system_prompt_does_not_pull_everything_to_one_worker() -> None:
    simulation = Simulation(rate=52)  # 416 tokens a tick in all, for 400 uncached ones: every worker is needed
    replay_one_system_prompt(simulation)
    assert simulation.imbalance < 1.1
    assert min(simulation.computed) > 0.8 * max(simulation.computed)
    assert sum(simulation.computed) < 0.4 * simulation.num_tokens, "and the prefix is still used"
    assert simulation.max_queue < 2500


def test_longest_prefix_routing_would_collapse_in_the_same_replay() -> None:
    """Without the weight of load this is naive prefix routing: the test above is about something."""
    simulation = Simulation(rate=52, load_weight=0.0)
    replay_one_system_prompt(simulation)
    assert simulation.imbalance == NUM_WORKERS
    assert simulation.max_queue > 100_000


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
