"""Why requests went where they went: placements, and what came of them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace

from baton.api import Explanation, Option, PlacementSeconds
from baton.messages import SequenceSpec
from router.admission import Claim
from router.placement import Placement, Prediction

KEPT = 256
"""Placements whose candidates are kept; those of one on a large pool take some tens of KiB."""


@dataclass(slots=True, kw_only=True)
class MeasuredSeconds:
    """What came of a placement, where the prediction has the same names; None: not known yet."""

    wait_s: float | None = None
    room_s: float | None = None
    pull_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    step_s: float | None = None


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
    outcome: str = "admitted"
    """What became of it: admitted, or why it was not, or not for long."""
    ttft_s: float = 0.0
    """Measured time to the first token, from the placement on; 0: not known yet."""
    measured: MeasuredSeconds = field(default_factory=MeasuredSeconds)


class DecisionLog:
    """Sees to it that only the last KEPT decisions keep their candidates."""

    def __init__(self) -> None:
        self._latest: deque[PlacementDecision] = deque()

    def note(self, spec: SequenceSpec, claim: Claim, placement: Placement, prediction: Prediction) -> PlacementDecision:
        """Return a new placement, to be filled in; the oldest one loses its candidates."""
        decision = PlacementDecision(
            request_id=spec.request_id,
            choice_index=spec.choice_index,
            num_prompt_tokens=spec.num_prompt_tokens,
            claim=claim,
            placement=placement,
            prediction=prediction,
            num_expected_tokens=spec.num_expected_tokens,
        )
        self._latest.append(decision)
        if len(self._latest) > KEPT:
            oldest = self._latest.popleft()
            oldest.placement = replace(oldest.placement, considered=())
        return decision


def explained(decision: PlacementDecision) -> Explanation:
    """A placement in plain values, the quickest worker first."""
    claim, placement, prediction, measured = decision.claim, decision.placement, decision.prediction, decision.measured
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
        predicted_ttft_s=prediction.ttft_s,
        measured_ttft_s=decision.ttft_s,
        predicted=_seconds(prediction),
        measured=_seconds(measured),
        options=tuple(options),
    )


def prediction_attributes(prediction: Prediction) -> dict[str, float]:
    """A prediction as attributes of a span."""
    seconds = {**asdict(_seconds(prediction)), "ttft_s": prediction.ttft_s}
    return {f"baton.predicted.{name}": value for name, value in seconds.items()}


def _seconds(of: Prediction | MeasuredSeconds) -> PlacementSeconds:
    return PlacementSeconds(**{each.name: getattr(of, each.name) for each in fields(PlacementSeconds)})
