"""Order of a row's values. Among equal values the lower token id comes first.

`topk` returns any of equal values, and different ones if another row of the batch asks for more.
"""

from __future__ import annotations

import torch


def falling(values: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the values that are at least `least`, in descending order, and these values.

    Args:
        values: values of one row, `[vocab_size]`.
        least: lower bound.
    """
    ids = (values >= least).nonzero()[:, 0]
    kept, order = values[ids].sort(descending=True, stable=True)
    return ids[order], kept
