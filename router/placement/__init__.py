"""Which workers serve a request: a pure function over a snapshot of the pools."""

from router.placement.policy import Candidate, Mode, Placement, Prompt, Weights, place

__all__ = ["Candidate", "Mode", "Placement", "Prompt", "Weights", "place"]
