"""Which workers serve a request: a pure function over a snapshot of the pools."""

from router.placement.load import Job, LoadBook, Residence, Turn
from router.placement.policy import (
    DEFAULT_PRICES,
    DEFAULT_WEIGHTS,
    NO_OBJECTIVE,
    Candidate,
    Mode,
    Objective,
    Placement,
    Prediction,
    Prices,
    Prompt,
    Terms,
    Weights,
    place,
)
from router.placement.prices import PriceFit

__all__ = [
    "DEFAULT_PRICES",
    "DEFAULT_WEIGHTS",
    "NO_OBJECTIVE",
    "Candidate",
    "Job",
    "LoadBook",
    "Mode",
    "Objective",
    "Placement",
    "Prediction",
    "PriceFit",
    "Prices",
    "Prompt",
    "Residence",
    "Terms",
    "Turn",
    "Weights",
    "place",
]
