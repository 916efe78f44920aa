"""Why a request went where it went: the latest decisions, kept to be explained."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.api import Explanation, Option
from baton.messages import SequenceSpec
from router.admission import Claim
from router.placement import Placement, Prediction

KEPT = 256
"""Decisions; one on a large pool holds some tens of KiB."""


@dataclass(slots=True)
class Decision:
    """About one choice, when it was first placed."""

    request_id: str
    choice_index: int
    num_prompt_tokens: int
    claim: Claim
    placement: Placement
    prediction: Prediction
    num_expected_tokens: int
    outcome: str = "let in"
    """Or why it was not, or not for long."""
    ttft_s: float = 0.0
    """Measured, from the placement on; 0: not yet."""


class DecisionLog:
    """The last KEPT decisions, by request."""

    def __init__(self) -> None:
        self._decisions: OrderedDict[tuple[str, str, int], Decision] = OrderedDict()

    def note(self, spec: SequenceSpec, claim: Claim, placement: Placement, prediction: Prediction) -> Decision:
        decision = Decision(
            spec.request_id,
            spec.choice_index,
            spec.num_prompt_tokens,
            claim,
            placement,
            prediction,
            spec.num_expected_tokens,
        )
        key = claim.tenant.id, spec.request_id, spec.choice_index
        self._decisions[key] = decision
        self._decisions.move_to_end(key)
        if len(self._decisions) > KEPT:
            self._decisions.popitem(last=False)
        return decision

    def explain(self, request_id: str) -> list[Decision]:
        """One for each choice, as far as they are still known, whatever the tenant."""
        return [decision for (_, known, _), decision in self._decisions.items() if known == request_id]


def explained(decision: Decision) -> Explanation:
    """In plain values, the quickest worker first."""
    claim, placement = decision.claim, decision.placement
    options = [
        Option(
            terms.worker_id,
            terms.role,
            terms.num_cached_tokens,
            terms.wait_s,
            terms.pull_s,
            terms.compute_s,
            terms.room_s,
            terms.exposed_s,
            terms.step_s,
            terms.first_s,
        )
        for terms in sorted(placement.considered, key=lambda terms: terms.first_s)
    ]
    return Explanation(
        decision.request_id,
        decision.choice_index,
        claim.tenant.id,
        claim.slo_class,
        claim.priority,
        claim.objective.ttft_s,
        claim.objective.itl_s,
        decision.num_prompt_tokens,
        decision.num_expected_tokens,
        placement.mode,
        placement.prefill_worker,
        placement.decode_worker,
        placement.source,
        placement.source_tokens,
        decision.outcome,
        decision.prediction.ttft_s,
        decision.ttft_s,
        tuple(options),
    )
