"""Where running sums reach a share: against sums of exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.weights import BLOCK, PrefixSums, first_beyond

SIZES = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def slowly(weights: Sequence[float], share: float) -> int:
    total, wanted = Fraction(0), Fraction(share) * sum(map(Fraction, weights))
    for index, weight in enumerate(weights):
        total += Fraction(weight)
        if total > wanted:
            return index
    raise AssertionError


@given(st.data())
def test_the_first_to_exceed_a_share(data: st.DataObject) -> None:
    """Weights are small integers, whose sums are exact, so that edges are met exactly."""
    size = data.draw(st.sampled_from(SIZES))
    weights = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), min_size=size, max_size=size).filter(any))
    share = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75]) | st.floats(0, 1, exclude_max=True, width=16))
    rows = torch.tensor([weights, [1.0] * size])  # the other row changes nothing
    assert first_beyond(rows, torch.tensor([share, 0.5], dtype=torch.float64))[0] == slowly(weights, share)


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_the_first_weights(size: int) -> None:
    weights = torch.rand(2, size, generator=torch.Generator().manual_seed(1))
    sums = PrefixSums(weights)
    assert sums.total.tolist() == pytest.approx(weights.double().sum(-1).tolist())
    counts = torch.stack([torch.arange(size + 1), torch.arange(size + 1).flip(0)])
    for row, found in enumerate(sums.until(counts).tolist()):
        assert found == pytest.approx([float(weights[row, :count].double().sum()) for count in counts[row].tolist()])


def test_rounding_never_leads_past_the_last_weight() -> None:
    """Weights from all exponents: the running sum within a block and the block's own sum are rounded apart."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-60, 1, (4000, 3 * BLOCK), generator=generator)
    weights = torch.rand(exponents.shape, generator=generator) * 2.0**exponents
    blocks = weights.view(-1, 3, BLOCK).double().sum(-1).cumsum(-1)
    for share in (blocks / blocks[:, -1:]).unbind(-1):
        for wanted in (share, share * (1 - 2**-53)):
            index = first_beyond(weights, wanted.clamp(max=1 - 2**-53))
            assert index.max() < weights.shape[-1]
            assert weights.gather(1, index[:, None]).min() > 0


@pytest.mark.parametrize("size", SIZES)
def test_every_token_is_drawn_as_often_as_it_weighs(size: int) -> None:
    weights = torch.arange(size).float() % 5 + (size == 1)
    total = int(weights.sum())
    shares = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    counts = first_beyond(weights.expand(total, -1), shares).bincount(minlength=size)
    assert counts.tolist() == weights.long().tolist()
