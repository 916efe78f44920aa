"""Fast draws on CPUs, row by row, from the few remaining tokens: equal to `truncation` and `masses` at lower cost.

The vocabulary is not sorted, and excluded tokens are not summed: a cut below the least remaining weight leaves hundreds
of 50,000 tokens. The order of summation differs from the definition's, so the sums differ by rounding errors below
`DOUBT` and `COARSE_DOUBT`. If such an error could change the token, there is no quick draw, and the definition decides.
So every draw equals the definition's, and depends only on its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.sampling import SamplingParams
from engine.sampling import xtc
from engine.sampling.masses import BLOCK
from engine.sampling.row import Row

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

DOUBT = 1e-9
"""Relative error bound of a sum in float64: millions of additions round by less."""
COARSE_DOUBT = 1e-5
"""Relative error bound of a sum in float32: a hundred successive additions round by less, and numpy adds in pairs."""
CUTS = 16.0, 0.9
"""Cuts for top-p, as multiples of the excluded mass divided by the vocabulary size. Weights below the last cut sum to
less than the excluded mass even over the whole vocabulary. The first cut leaves fewer tokens, and usually still all
that remain."""
LEAST_POSITIVE = np.finfo(np.float32).smallest_subnormal


def best(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row; among equal ones the first.

    Args:
        logits: `[rows, vocab_size]` in float32, on a CPU.
    """
    # Numpy uses vector instructions: an eighth of torch's time.
    tokens: list[int] = logits.numpy().argmax(-1).tolist()
    return tokens


class QuickDraws:
    """Fast draws of one model. It reuses the memory of one row, which stays in the CPU's cache."""

    def __init__(self) -> None:
        self._weights = torch.empty(0)

    def tokens(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
        """Return the token of each row; None: the definition must decide.

        Args:
            logits: `[rows, vocab_size]`, any floating dtype.
            rows: the rows' parameters, which define the truncation.
        """
        if logits.dtype is not torch.float32 or logits.device.type != "cpu":
            return [None] * len(rows)
        num_drawing = sum(row.draws for row in rows)
        found: list[int | None] = [*best(logits)] if num_drawing < len(rows) else [None] * len(rows)
        if not num_drawing:
            return found
        with torch.inference_mode():
            for index, of_row in enumerate(logits.unbind()):
                if rows[index].draws:
                    found[index] = self._drawn(of_row, rows[index])
        return found

    def _drawn(self, logits: torch.Tensor, row: Row) -> int | None:
        if row.sampling.typical_p < 1 or xtc.is_asked(row):
            return None
        if len(self._weights) != len(logits):
            self._weights = torch.empty(len(logits))
        self._fill(logits, row.divisor)
        return token_of(self._weights.numpy(), row.sampling, row.number)

    def _fill(self, logits: torch.Tensor, temperature: float) -> None:
        """Do what `TokenWeights.fill` does, bit for bit, for one row."""
        if temperature == 1:
            torch.softmax(logits, -1, out=self._weights)  # it subtracts the maximum itself
        else:
            torch.sub(logits, logits.amax(), out=self._weights).div_(torch.tensor(temperature))
            torch.softmax(self._weights, -1, out=self._weights)


def token_of(weights: Floats, params: SamplingParams, number: float) -> int | None:
    """Return the token that a row draws by top-k, top-p and min-p; None: rounding might decide.

    Args:
        weights: the row's weights, `[vocab_size]`.
        params: the row's parameters.
        number: the random number.
    """
    if 0 < params.top_k < len(weights):
        place = len(weights) - params.top_k
        return _of_those_above(np.partition(weights, place)[place], weights, params, number)
    if params.top_p < 1:
        mean = (1 - params.top_p) / len(weights)
        tokens = (_of_those_above(np.float32(cut * mean), weights, params, number) for cut in CUTS)
        return next((token for token in tokens if token is not None), None)
    if params.min_p > 0:
        return _of_those_above(_least_by_min_p(weights, params), weights, params, number)
    return _of_all(weights, number)


def _of_those_above(cut: np.float32, weights: Floats, params: SamplingParams, number: float) -> int | None:
    """Return the token that a row draws among those whose weight is at least `cut`.

    Args:
        cut: lower bound of the remaining weights. If a lighter token might remain, the result is None.
        weights: the row's weights.
        params: the row's parameters.
        number: the random number.
    """
    ids = (weights >= (cut if cut > 0 else LEAST_POSITIVE)).nonzero()[0]
    if not len(ids):
        return None
    kept = weights[ids]
    least = _least_by_min_p(kept, params)
    if params.top_p < 1:
        is_after_top_k = 0 < params.top_k < len(weights)
        by_top_p = _least_by_top_p(kept, 0.0 if is_after_top_k else _sum_of_others(weights, ids), params)
        if by_top_p is None:
            return None
        least = max(least, by_top_p)
    if least > cut:
        places = (kept >= least).nonzero()[0]
        ids, kept = ids[places], kept[places]
    sums = kept.cumsum(dtype=np.float64)
    place = _place(sums, number * sums[-1], sums[-1])
    return None if place is None else int(ids[place])


def _sum_of_others(weights: Floats, ids: npt.NDArray[np.intp]) -> float:
    """Return the approximate sum of all weights but these. A sum of all in float64 takes twice as long."""
    kept = weights[ids]
    weights[ids] = 0
    others = float(weights.sum())
    weights[ids] = kept
    return others


def _least_by_top_p(weights: Floats, others: float, params: SamplingParams) -> np.float32 | None:
    """Return the least weight that top-p keeps; None: it is not among these, or rounding might decide.

    Args:
        weights: the heaviest weights, in any order.
        others: sum of the other weights that top-p considers.
        params: the row's parameters.
    """
    rising = np.sort(weights)
    sums = others + rising.cumsum(dtype=np.float64)
    wanted = (1 - params.top_p) * sums[-1]
    doubt = DOUBT * sums[-1] + COARSE_DOUBT * others
    if not others <= wanted - doubt:
        return None
    first, last = sums.searchsorted((wanted - doubt, wanted + doubt), side="right")
    least: np.float32 = rising[first]
    return least if least == rising[min(last, len(rising) - 1)] else None


def _least_by_min_p(weights: Floats, params: SamplingParams) -> np.float32:
    """Return the least weight that min-p keeps."""
    return np.float32(params.min_p) * weights.max() if params.min_p > 0 else np.float32(0)


def _of_all(weights: Floats, number: float) -> int | None:
    """Return the token that a row draws among all tokens: first its block, then the token."""
    whole = len(weights) // BLOCK * BLOCK
    blocks = np.einsum("ij->i", weights[:whole].reshape(-1, BLOCK), dtype=np.float64)  # the fastest way to sum
    sums = np.append(blocks, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted, total = number * sums[-1], sums[-1]
    if (block := _place(sums, wanted, total)) is None:
        return None
    before = sums[block - 1] if block else 0.0
    within = before + weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    place = _place(within, wanted, total)
    return None if place is None else block * BLOCK + place


def _place(sums: Sums, wanted: float, total: float) -> int | None:
    """Return the index of the first running sum that exceeds `wanted`; None: rounding might decide."""
    first, last = sums.searchsorted((wanted - DOUBT * total, wanted + DOUBT * total), side="right")
    return int(first) if first == last < len(sums) else None
