"""Which workers serve a request: a pure function over a snapshot of the pools."""

from router.placement.policy import DEFAULT_WEIGHTS, Candidate, Mode, Placement, Prompt, Weights, place

__all__ = ["DEFAULT_WEIGHTS", "Candidate", "Mode", "Placement", "Prompt", "Weights", "place"]
