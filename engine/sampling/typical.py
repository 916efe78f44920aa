"""Locally typical sampling: keeps the tokens whose surprisal is closest to the entropy (Meister et al., 2023).

The weights are probabilities up to a common factor, so a token's surprisal is the logarithm of that factor minus the
token's log weight. The tokens closest to the entropy are thus those whose log weight is closest to the mean log weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.sampling import SamplingParams
from engine.sampling.masses import PrefixSums
from engine.sampling.weights import Buffers, WeightBounds
from engine.uploads import uploaded

TINY = torch.finfo(torch.float32).tiny
INFINITE = 0x7F800000
"""Bits of an infinite float32. For positive numbers the order of the bits is the order of the numbers."""
SHIFTS = (26, 21, 16, 11, 6, 1)
"""Shifts that select five of these bits at a time, from the highest; one bit is left."""


def typical(rising: torch.Tensor, params: Sequence[SamplingParams], buffers: Buffers) -> WeightBounds:
    """Return the bounds of the remaining weights.

    Args:
        rising: weights in ascending order, `[rows, vocab_size]`.
        params: the rows' parameters.
        buffers: memory for two arrays of that shape.
    """
    shares = uploaded(torch.tensor([p.typical_p for p in params], dtype=torch.float64), rising.device)
    sums = PrefixSums(rising)
    wanted = (shares * sums.total)[:, None]
    logs = torch.clamp(rising, min=TINY, out=buffers.like("logs", rising)).log_()  # log of 0 takes ten times as long
    products = torch.mul(rising, logs, out=buffers.like("products", rising))
    mean = (products.sum(-1, dtype=torch.float64) / sums.total).float()[:, None]
    # Search for the least distance that contains the share: five bits at a time, over all prefixes of a number.
    bits = torch.zeros(len(params), 1, dtype=torch.int64, device=rising.device)
    for shift, width in (*((shift, 32) for shift in SHIFTS), (0, 2)):
        largest = bits + (torch.arange(1, width + 1, device=rising.device) << shift) - 1
        before, through = sums.until(torch.cat(_window(logs, mean, largest), -1)).chunk(2, -1)
        is_enough = through - before >= wanted
        bits += (~is_enough).sum(-1, keepdim=True) << shift
    begin, end = _window(logs, mean, bits)
    lower = rising.gather(1, begin.clamp(max=rising.shape[-1] - 1))[:, 0]
    upper = rising.gather(1, (end - 1).clamp(min=0))[:, 0]
    is_asked = shares < 1
    return WeightBounds(torch.where(is_asked, lower, 0.0), torch.where(is_asked, upper, torch.inf))


def _window(logs: torch.Tensor, mean: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end of the logs within given distances of the mean; distances are float32 bits."""
    distance = bits.clamp(max=INFINITE).to(torch.int32).view(torch.float32)
    return torch.searchsorted(logs, mean - distance), torch.searchsorted(logs, mean + distance, right=True)
