from __future__ import annotations

import pytest

from baton.api import Explanation, Option, PlacementSeconds
from baton.cluster import Role
from baton.messages import PrefillReport, Transferred
from router.admission import Claim
from router.admission.tenants import Tenant
from router.placement import Candidate, Objective, Placement, Prices, Prompt, Weights, place
from router.timeline import log
from router.timeline.events import (
    Arrived,
    Attempted,
    ChoiceTimeline,
    Computed,
    Held,
    KvTransferred,
    Placed,
    Refused,
    Reserved,
    Timeline,
)
from router.timeline.explain import timeline_of
from tests.support.builders import claim, step_costs

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


def timeline(choice: ChoiceTimeline, index: int = 0, claim: Claim = CLAIM) -> Timeline:
    """A request whose choice with that index has this timeline; the others have no events."""
    written = Timeline(
        request_id="r", tenant=claim.tenant.id, model="m", operation="chat", arrived_s=7.0, arrived_ns=0, claim=claim
    )
    written.num_prompt_tokens = 100
    written.choices = (*(ChoiceTimeline() for _ in range(index)), choice)
    written.add(Arrived(7.0))
    return written


def placed_choice() -> ChoiceTimeline:
    choice, found = ChoiceTimeline(), placement()
    choice.add(Attempted(8.0, 0, 0.0))
    choice.add(Placed(8.5, 0, 0.5, found, found.prediction, 40))
    return choice


def explained(choice: ChoiceTimeline, index: int = 0, claim: Claim = CLAIM) -> Explanation:
    (explanation,) = timeline_of(timeline(choice, index, claim), "router", now_s=12.0).placements
    return explanation


def test_what_became_of_a_placement_shows() -> None:
    choice = placed_choice()
    assert (explained(choice).outcome, explained(choice).measured_ttft_s) == ("admitted", 0.0)
    report = PrefillReport(queue_s=0.75, pull_s=0.25, prefill_s=0.125)
    choice.add(Reserved(8.75, 0, "d"))
    choice.add(Computed(9.5, 0, "quick", Role.PREFILL, 0, report))
    choice.add(KvTransferred(9.6, 0, "d", Transferred(1, 1, 0.5, 0.0)))
    choice.add(Refused(9.75, "too late"))
    choice.add(Placed(10.0, 1, 0.0, placement(), placement().prediction, 7))
    choice.add(Computed(11.0, 1, "slow", Role.PREFILL, 0, PrefillReport(prefill_s=9.0)))
    explanation = explained(choice)
    assert (explanation.outcome, explanation.measured_ttft_s) == ("refused: too late", 1.5)
    assert explanation.num_expected_tokens == 40, "of the first placement"
    assert explanation.measured == PlacementSeconds(
        room_s=0.25, wait_s=0.5, pull_s=0.25, compute_s=0.125, exposed_s=0.0
    )


def test_the_time_for_which_a_request_was_held_shows() -> None:
    """It is a part of the queue."""
    written = timeline(placed_choice())
    written.add(Held(7.75, 0.75))
    shown = timeline_of(written, "router", now_s=12.0)
    (held,) = (event for event in shown.events if event.what == "held")
    assert (held.at_s, held.text) == (0.75, "held for 0.750 s, until the model was awake")
    assert shown.phases[0].stage == "queue"
    assert shown.phases[0].end_s > 0.75


def test_a_worker_that_does_both_reports_its_wait_for_room() -> None:
    choice = placed_choice()
    choice.add(Computed(9.5, 0, "d", Role.DECODE, 0, PrefillReport(queue_s=0.75, room_s=0.5, prefill_s=0.125)))
    assert explained(choice).measured == PlacementSeconds(room_s=0.5, wait_s=0.25, pull_s=0.0, compute_s=0.125)


def test_the_last_ones_keep_their_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "WITH_CANDIDATES", 3)
    requests = log.RequestLog()
    choices = [placed_choice() for _ in range(5)]
    for choice in choices:
        requests._keep(timeline(choice))
    assert [bool(explained(choice).options) for choice in choices] == [False] * 2 + [True] * 3
    assert explained(choices[0]).prefill_worker == "quick", "the rest stays"


def test_an_explanation_says_what_was_asked_and_what_was_chosen() -> None:
    explanation = explained(placed_choice(), 1)
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
    decode, quick, slow = sorted(explained(placed_choice()).options, key=lambda option: option.worker_id)
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
    costs = [option.cost_s for option in explained(placed_choice()).options]
    assert costs == sorted(costs)
    assert costs[0] == 0.08
