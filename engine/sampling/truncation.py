"""Top-k, top-p and min-p: compute the least weight that remains.

Each takes weights in ascending order (`weights.TokenWeights.rising`), with 0 for tokens that earlier stages have
excluded, and returns bounds. Rows that do not use a stage are not changed by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.sampling import SamplingParams
from engine.sampling.masses import first_beyond
from engine.sampling.weights import WeightBounds
from engine.uploads import uploaded


def top_k(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the k likeliest tokens."""
    vocab_size = rising.shape[-1]
    kept = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    places = uploaded(torch.tensor([vocab_size - k for k in kept]), rising.device)
    return WeightBounds(rising.gather(1, places[:, None])[:, 0])


def top_p(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the smallest set of likeliest tokens with a total probability of at least p (Holtzman et al., 2020)."""
    rest = uploaded(torch.tensor([1 - p.top_p for p in params], dtype=torch.float64), rising.device)
    return WeightBounds(rising.gather(1, first_beyond(rising, rest)[:, None])[:, 0])


def min_p(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the tokens that are at least p times as likely as the best one (Nguyen et al., 2024)."""
    return WeightBounds(uploaded(torch.tensor([p.min_p for p in params]), rising.device) * rising[:, -1])
