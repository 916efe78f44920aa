from __future__ import annotations

from dataclasses import replace

import pytest

from baton.api import Option, PlacementSeconds
from baton.cluster import Role
from router.admission import Claim
from router.admission.tenants import Tenant
from router.placement import Candidate, Objective, Placement, Prices, Prompt, Weights, place
from router.serve.decisions import KEPT, DecisionLog, PlacementDecision, explained
from tests.support.builders import claim, sequence_spec, step_costs

SPEC = sequence_spec(range(100), max_tokens=50, ignore_eos=False, priority=3, num_expected_tokens=40)
CLAIM = claim(
    tenant=Tenant(id="acme"), priority=3, slo_class="interactive", objective=Objective(0.5, 0.05), arrived_s=7.0
)
COSTS = step_costs(s_per_token=1e-3)
POOL = [
    Candidate(worker_id="slow", role=Role.PREFILL, num_cached_tokens=0, wait_s=2.0, costs=COSTS),
    Candidate(worker_id="quick", role=Role.PREFILL, num_cached_tokens=20, costs=COSTS),
    Candidate(worker_id="d", role=Role.DECODE, num_decoding=1, room_tokens=40, freed_tokens_per_s=100, costs=COSTS),
]


def placement() -> Placement:
    found = place(
        Prompt(100, (), 40),
        POOL,
        "disaggregated",
        weights=Weights(1.0, 0.05),
        prices=Prices(0.0, 0.0, 5e-3, 0.0),
        pull_above_tokens=1,
    )
    assert found is not None
    return found


def noted(log: DecisionLog, request_id: str, choice_index: int = 0, claim: Claim = CLAIM) -> PlacementDecision:
    found = placement()
    return log.note(replace(SPEC, request_id=request_id, choice_index=choice_index), claim, found, found.prediction)


def test_what_became_of_a_decision_shows() -> None:
    decision = noted(DecisionLog(), "r")
    assert (decision.outcome, decision.ttft_s) == ("admitted", 0.0)
    decision.outcome, decision.ttft_s = "refused: too late", 0.7
    decision.measured.wait_s, decision.measured.exposed_s = 0.5, 0.0
    explanation = explained(decision)
    assert (explanation.outcome, explanation.measured_ttft_s) == ("refused: too late", 0.7)
    assert explanation.measured == PlacementSeconds(wait_s=0.5, exposed_s=0.0)


def test_the_last_ones_keep_their_candidates() -> None:
    log = DecisionLog()
    decisions = [noted(log, f"r{i}") for i in range(KEPT + 3)]
    have_candidates = [bool(explained(decision).options) for decision in decisions]
    assert have_candidates == [False] * 3 + [True] * KEPT
    assert explained(decisions[0]).prefill_worker == "quick", "the rest stays"


def test_an_explanation_says_what_was_asked_and_what_was_chosen() -> None:
    explanation = explained(noted(DecisionLog(), "r", 1))
    assert (explanation.request_id, explanation.choice_index) == ("r", 1)
    assert (explanation.tenant, explanation.slo_class, explanation.priority) == ("acme", "interactive", 3)
    assert (explanation.ttft_objective_s, explanation.itl_objective_s) == (0.5, 0.05)
    assert (explanation.num_prompt_tokens, explanation.num_expected_tokens) == (100, 40)
    assert (explanation.mode, explanation.prefill_worker, explanation.decode_worker) == ("disaggregated", "quick", "d")
    assert (explanation.source, explanation.source_tokens) == ("", 0)
    assert explanation.predicted_ttft_s == 1.08, "the room comes after 1 s"
    assert (explanation.outcome, explanation.measured_ttft_s) == ("admitted", 0.0)
    assert explanation.measured == PlacementSeconds()
    assert explanation.predicted == PlacementSeconds(
        wait_s=0.0, room_s=1.0, pull_s=0.0, compute_s=0.08, exposed_s=0.005, step_s=0.002
    )


def test_an_explanation_lists_what_spoke_for_each_worker_the_quickest_first() -> None:
    decode, quick, slow = sorted(explained(noted(DecisionLog(), "r")).options, key=lambda option: option.worker_id)
    # "slow" and "d" would pull 20 tokens in no time, and then hold them a second time.
    assert quick == Option(
        worker_id="quick",
        role="prefill",
        num_cached_tokens=20,
        wait_s=0.0,
        pull_s=0.0,
        compute_s=0.08,
        room_s=0.0,
        exposed_s=0.0,
        step_s=0.0,
        cost_s=0.08,
    )
    assert slow == Option(
        worker_id="slow",
        role="prefill",
        num_cached_tokens=0,
        wait_s=2.0,
        pull_s=0.0,
        compute_s=0.08,
        room_s=0.0,
        exposed_s=0.0,
        step_s=0.0,
        cost_s=2.1,
    )
    assert decode == Option(
        worker_id="d",
        role="decode",
        num_cached_tokens=0,
        wait_s=0.0,
        pull_s=0.0,
        compute_s=0.08,
        room_s=1.0,
        exposed_s=0.005,
        step_s=0.002,
        cost_s=decode.cost_s,
    )
    assert decode.cost_s == pytest.approx(1.104), "room, computing, a second copy, and a twentieth of computing"
    costs = [option.cost_s for option in explained(noted(DecisionLog(), "r")).options]
    assert costs == sorted(costs)
    assert costs[0] == 0.08
