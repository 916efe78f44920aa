"""Why requests went where they went: the latest placements, kept to be explained."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.api import Explanation, Option
from baton.messages import SequenceSpec
from router.admission import Claim
from router.placement import Placement, Prediction

KEPT = 256
"""Placements that are kept; one on a large pool holds some tens of KiB."""


@dataclass(slots=True, kw_only=True)
class PlacementDecision:
    """How one choice was first placed."""

    request_id: str
    choice_index: int
    num_prompt_tokens: int
    claim: Claim
    placement: Placement
    prediction: Prediction
    num_expected_tokens: int
    outcome: str = "let in"
    """What became of it: admitted, or why it was not, or not for long."""
    ttft_s: float = 0.0
    """Measured time to the first token, from the placement on; 0: not known yet."""


class DecisionLog:
    """The last KEPT decisions, by request."""

    def __init__(self) -> None:
        self._decisions: OrderedDict[tuple[str, str, int], PlacementDecision] = OrderedDict()

    def note(self, spec: SequenceSpec, claim: Claim, placement: Placement, prediction: Prediction) -> PlacementDecision:
        """Keeps a new placement."""
        decision = PlacementDecision(
            request_id=spec.request_id,
            choice_index=spec.choice_index,
            num_prompt_tokens=spec.num_prompt_tokens,
            claim=claim,
            placement=placement,
            prediction=prediction,
            num_expected_tokens=spec.num_expected_tokens,
        )
        key = claim.tenant.id, spec.request_id, spec.choice_index
        self._decisions[key] = decision
        self._decisions.move_to_end(key)
        if len(self._decisions) > KEPT:
            self._decisions.popitem(last=False)
        return decision

    def explain(self, request_id: str) -> list[PlacementDecision]:
        """The placements of a request's choices, as far as they are still known, whatever the tenant."""
        return [decision for (_, known, _), decision in self._decisions.items() if known == request_id]


def explained(decision: PlacementDecision) -> Explanation:
    """A placement in plain values, the quickest worker first."""
    claim, placement = decision.claim, decision.placement
    options = [
        Option(
            worker_id=terms.worker_id,
            role=terms.role,
            num_cached_tokens=terms.num_cached_tokens,
            wait_s=terms.wait_s,
            pull_s=terms.pull_s,
            compute_s=terms.compute_s,
            room_s=terms.room_s,
            exposed_s=terms.exposed_s,
            step_s=terms.step_s,
            cost_s=terms.first_s,
        )
        for terms in sorted(placement.considered, key=lambda terms: terms.first_s)
    ]
    return Explanation(
        request_id=decision.request_id,
        choice_index=decision.choice_index,
        tenant=claim.tenant.id,
        slo_class=claim.slo_class,
        priority=claim.priority,
        ttft_objective_s=claim.objective.ttft_s,
        itl_objective_s=claim.objective.itl_s,
        num_prompt_tokens=decision.num_prompt_tokens,
        num_expected_tokens=decision.num_expected_tokens,
        mode=placement.mode,
        prefill_worker=placement.prefill_worker,
        decode_worker=placement.decode_worker,
        source=placement.source,
        source_tokens=placement.source_tokens,
        outcome=decision.outcome,
        predicted_ttft_s=decision.prediction.ttft_s,
        measured_ttft_s=decision.ttft_s,
        options=tuple(options),
    )
