"""Draws on CPUs, a row at a time, from the few tokens that stay: what `truncation` and `masses` define, for less.

No vocabulary is sorted, and nothing is added up that was excluded: a cut below all that stays leaves hundreds of
50,000 tokens. The sums are taken in another order than the definition's and differ from them by rounding, which is less
than a share `DOUBT` of a row's sum. Where so little could lead to another token, there is no quick draw, and the
definition decides. So every draw is the definition's, and a function of its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sampling import xtc
from baton.engine.sampling.masses import BLOCK
from baton.engine.sampling.row import Row
from baton.sampling import SamplingParams

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

DOUBT = 1e-9
"""A share of a row's sum: millions of additions in float64 round by less."""
CUTS = 16.0, 0.9
"""Cuts for top-p, in units of what goes, shared out among all tokens. What is lighter than the last one is less than goes
even if that is the whole vocabulary; the first one leaves fewer tokens, and most often all that stay too."""
LEAST_POSITIVE = float(np.finfo(np.float32).smallest_subnormal)


def best(logits: torch.Tensor) -> list[int]:
    """Returns the likeliest token of each row; of equal ones the first.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
    """
    is_quick = _is_quick(logits)  # numpy has vector instructions for it: an eighth of what torch takes
    tokens: list[int] = logits.numpy().argmax(-1).tolist() if is_quick else logits.argmax(-1).tolist()
    return tokens


class QuickDraws:
    """Draws tokens for one model. It keeps the memory of one row."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def drawn(
        self, logits: torch.Tensor, rows: Sequence[Row], temperatures: Sequence[float], numbers: Sequence[float]
    ) -> list[int | None]:
        """Returns the token of each row; None: the definition has to draw it.

        Args:
            logits: `[rows, vocab_size]`, any floating dtype.
            rows: they say what truncates them.
            temperatures: those of the rows, all positive.
            numbers: the random numbers of the rows.
        """
        if not _is_quick(logits):
            return [None] * len(rows)
        each = zip(logits.unbind(), rows, temperatures, numbers, strict=True)
        return [
            None if _is_rare(row) else token_of(self._weights(of_row, temperature), row.sampling, number)
            for of_row, row, temperature, number in each
        ]

    def _weights(self, logits: torch.Tensor, temperature: float) -> Floats:
        """Returns the weights of one row as `TokenWeights.fill` makes them, to the bit; valid until the next call."""
        if len(self._memory) != len(logits):
            self._memory = torch.empty(len(logits))
        weights = self._memory
        if temperature == 1:  # softmax itself takes the best one off
            torch.softmax(logits, -1, out=weights)
        else:
            torch.sub(logits, logits.amax(), out=weights).div_(torch.tensor(temperature))
            torch.softmax(weights, -1, out=weights)
        found: Floats = weights.numpy()
        return found


def token_of(weights: Floats, params: SamplingParams, number: float) -> int | None:
    """Returns the token that a row draws by top-k, top-p and min-p; None: rounding might decide.

    Args:
        weights: the row's, `[vocab_size]`.
        params: the row's.
        number: the random number.
    """
    if 0 < params.top_k < len(weights):
        place = len(weights) - params.top_k
        return _of_those_above(np.partition(weights, place)[place], weights, None, params, number)
    if params.top_p < 1:
        total = float(weights.sum(dtype=np.float64))
        mean = (1 - params.top_p) * total / len(weights)
        tokens = (_of_those_above(np.float32(cut * mean), weights, total, params, number) for cut in CUTS)
        return next((token for token in tokens if token is not None), None)
    if params.min_p > 0:
        return _of_those_above(_least_by_min_p(weights, params), weights, None, params, number)
    return _of_all(weights, number)


def _is_quick(logits: torch.Tensor) -> bool:
    return logits.dtype is torch.float32 and logits.device.type == "cpu"


def _is_rare(row: Row) -> bool:
    return row.sampling.typical_p < 1 or xtc.is_asked(row)


def _of_those_above(
    cut: np.float32, weights: Floats, total: float | None, params: SamplingParams, number: float
) -> int | None:
    """Returns the token that a row draws, of those whose weight is at least so large.

    Args:
        cut: nothing lighter stays; if something might, there is no token.
        weights: the row's.
        total: sum of all that top-p is to see; None: it sees those above the cut.
        params: the row's.
        number: the random number.
    """
    ids = np.flatnonzero(weights >= max(cut, LEAST_POSITIVE))
    if not len(ids):
        return None
    kept = weights[ids]
    least = np.float32(0) if params.top_p == 1 else _least_by_top_p(kept, total, params)
    if least is None:
        return None
    least = max(least, _least_by_min_p(kept, params))
    if least > cut:
        stays = kept >= least
        ids, kept = ids[stays], kept[stays]
    sums = kept.cumsum(dtype=np.float64)
    place = _place(sums, number * sums[-1], sums[-1])
    return None if place is None else int(ids[place])


def _least_by_top_p(weights: Floats, total: float | None, params: SamplingParams) -> np.float32 | None:
    """Returns the least weight that top-p keeps; None: it is not among these, or rounding might decide."""
    kept = weights.sum(dtype=np.float64)
    total, rest = (kept, 0.0) if total is None else (total, total - kept)
    wanted, doubt = (1 - params.top_p) * total, DOUBT * total
    if not rest <= wanted - doubt:
        return None
    rising = np.sort(weights)
    sums = rest + rising.cumsum(dtype=np.float64)
    first, last = sums.searchsorted((wanted - doubt, wanted + doubt), side="right")
    least: np.float32 = rising[first]
    return least if least == rising[min(last, len(rising) - 1)] else None


def _least_by_min_p(weights: Floats, params: SamplingParams) -> np.float32:
    """Returns the least weight that min-p keeps."""
    return np.float32(params.min_p) * weights.max() if params.min_p > 0 else np.float32(0)


def _of_all(weights: Floats, number: float) -> int | None:
    """Returns the token that a row draws of all tokens: first the block in which it is."""
    whole = len(weights) // BLOCK * BLOCK
    blocks = np.einsum("ij->i", weights[:whole].reshape(-1, BLOCK), dtype=np.float64)  # fastest of all ways to add
    sums = np.append(blocks, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted, total = number * sums[-1], sums[-1]
    if (block := _place(sums, wanted, total)) is None:
        return None
    before = sums[block - 1] if block else 0.0
    within = before + weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    place = _place(within, wanted, total)
    return None if place is None else block * BLOCK + place


def _place(sums: Sums, wanted: float, total: float) -> int | None:
    """Returns the index of the first running sum that exceeds what is wanted; None: rounding might decide."""
    first, last = sums.searchsorted((wanted - DOUBT * total, wanted + DOUBT * total), side="right")
    return int(first) if first == last < len(sums) else None
