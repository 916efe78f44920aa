"""Placement of requests on workers: a pure function over a snapshot of the pools.

`policy` compares candidates in seconds, from loads (`load`), the costs of KV transfers and cached prefixes. `pool_view`
takes the snapshot, and detects errors of the prefix index.
"""

from router.placement.load import Job, LoadTracker, Residence, Turn
from router.placement.policy import (
    DEFAULT_PRICES,
    DEFAULT_WEIGHTS,
    NO_LOADS,
    NO_OBJECTIVE,
    Candidate,
    ImageCosts,
    Mode,
    Objective,
    Placement,
    Prediction,
    PriceFit,
    Prices,
    Prompt,
    Terms,
    Weights,
    place,
)

__all__ = [
    "DEFAULT_PRICES",
    "DEFAULT_WEIGHTS",
    "NO_LOADS",
    "NO_OBJECTIVE",
    "Candidate",
    "ImageCosts",
    "Job",
    "LoadTracker",
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
