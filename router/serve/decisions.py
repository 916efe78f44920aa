"""Records of placements: candidates, predictions and measured times, for `baton status --explain`."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace

from baton.api import Explanation, Option, PlacementSeconds
from baton.messages import SequenceSpec
from router.admission import Claim
from router.placement import Placement, Prediction

KEPT = 256
"""Number of latest placements that keep their candidates. On a large pool those take some tens of KiB each."""


@dataclass(slots=True, kw_only=True)
class MeasuredSeconds:
    """Measured times of a placement, named as in the prediction; None: not known yet."""

    wait_s: float | None = None
    room_s: float | None = None
    pull_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    step_s: float | None = None


@dataclass(slots=True, kw_only=True)
class PlacementDecision:
    """The first placement of one choice."""

    request_id: str
    choice_index: int
    num_prompt_tokens: int
    claim: Claim
    placement: Placement
    prediction: Prediction
    num_expected_tokens: int
    outcome: str = "admitted"
    """Either `admitted`, or why the choice was refused or preempted."""
    ttft_s: float = 0.0
    """Measured time from the placement to the first token; 0: not known yet."""
    measured: MeasuredSeconds = field(default_factory=MeasuredSeconds)


class DecisionLog:
    """Log of placements, of which only the last KEPT keep their candidates."""

    def __init__(self) -> None:
        self._latest: deque[PlacementDecision] = deque()

    def note(self, spec: SequenceSpec, claim: Claim, placement: Placement, prediction: Prediction) -> PlacementDecision:
        """Return the record of a new placement; the oldest record drops its candidates."""
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
    """Return a placement as plain values; its candidates are ordered by predicted time, fastest first."""
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
            load_s=terms.load_s,
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
    """Return a prediction as span attributes."""
    seconds = {**asdict(_seconds(prediction)), "ttft_s": prediction.ttft_s}
    return {f"baton.predicted.{name}": value for name, value in seconds.items()}


def _seconds(of: Prediction | MeasuredSeconds) -> PlacementSeconds:
    return PlacementSeconds(**{each.name: getattr(of, each.name) for each in fields(PlacementSeconds)})
