"""Checksums are of the bytes, not of how they were taken in."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvstore.transfer.copy.checksum import Xxh3, digest_of, word_sum

torch.set_num_threads(1)

Digest = Callable[..., int]
"""The checksum of a payload, of one part or several."""


def xxh3(*parts: torch.Tensor) -> int:
    checksum = Xxh3()
    for part in parts:
        checksum.update(part)
    return checksum.digest()


def words(*parts: torch.Tensor) -> int:
    """The one for GPUs sums a CPU's payload as well."""
    return digest_of(word_sum(torch.cat(parts))[None].numpy())


@pytest.fixture(params=[xxh3, words])
def digest(request: pytest.FixtureRequest) -> Digest:
    chosen: Digest = request.param
    return chosen


def payload(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


@pytest.mark.parametrize("num_bytes", [1, 8, 13, 4096, 100_003])
def test_parts_give_what_the_whole_gives(digest: Digest, num_bytes: int) -> None:
    whole = payload(num_bytes)
    cuts = sorted(8 * random.Random(num_bytes).randint(0, num_bytes // 8) for _ in range(3))
    parts = torch.tensor_split(whole, torch.tensor(cuts))
    assert digest(*parts) == digest(whole)
    assert 0 <= digest(whole) < 2**64


def test_changes_are_seen(digest: Digest) -> None:
    """Of any one byte, of the same bit of any two words, and of the order of the parts."""
    whole = payload(512)
    right = digest(whole)
    for byte in range(len(whole)):
        assert digest(flipped(whole, byte)) != right
    for bit in (1, 0x80):
        for byte in (0, 7):
            for other in range(byte + 8, len(whole), 8):
                assert digest(flipped(whole, byte, other, bit=bit)) != right
    first, *rest = torch.tensor_split(whole, 4)
    assert digest(*rest, first) != right


def flipped(whole: torch.Tensor, *at: int, bit: int = 1) -> torch.Tensor:
    changed = whole.clone()
    changed[list(at)] ^= bit
    return changed


def test_shares_of_a_sum_may_be_added_up_in_any_order_and_beyond_64_bits() -> None:
    assert digest_of(np.array([2**63 - 1, 2**63 - 1, 4])) == 2
    assert digest_of(np.array([-1])) == 2**64 - 1
    assert digest_of(np.array([], dtype=np.int64)) == 0
