"""The order of a row's values. Of equal ones the lower token id is first.

`topk` takes any of equal ones, and others where a neighbour in the batch asks for more.
"""

from __future__ import annotations

import torch


def falling(values: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of the values that are at least so large, in falling order, and these values.

    Args:
        values: of one row, `[vocab_size]`.
        least: a number.
    """
    ids = (values >= least).nonzero()[:, 0]
    kept, order = values[ids].sort(descending=True, stable=True)
    return ids[order], kept
