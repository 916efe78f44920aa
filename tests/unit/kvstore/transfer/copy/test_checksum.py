"""Checksums are of the bytes, not of how they were taken in."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.transfer.copy.checksum import Checksum, WordSum, Xxh3, new_checksum

torch.set_num_threads(1)

KINDS = (Xxh3, WordSum)
"""The one for GPUs sums a CPU's payload as well."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[Xxh3] | type[WordSum]:
    chosen: type[Xxh3] | type[WordSum] = request.param
    return chosen


def digest(checksum: Checksum, *parts: torch.Tensor) -> int:
    for part in parts:
        checksum.update(part)
    return checksum.digest()


def payload(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


@pytest.mark.parametrize("num_bytes", [1, 8, 13, 4096, 100_003])
def test_parts_give_what_the_whole_gives(kind: type[Xxh3] | type[WordSum], num_bytes: int) -> None:
    whole = payload(num_bytes)
    cuts = sorted(8 * random.Random(num_bytes).randint(0, num_bytes // 8) for _ in range(3))
    parts = torch.tensor_split(whole, torch.tensor(cuts))
    assert digest(kind(), *parts) == digest(kind(), whole)
    assert 0 <= digest(kind(), whole) < 2**64


def test_changes_are_seen(kind: type[Xxh3] | type[WordSum]) -> None:
    """Of any one byte, of the same bit of any two words, and of the order of the parts."""
    whole = payload(512)
    right = digest(kind(), whole)
    for byte in range(len(whole)):
        assert digest(kind(), flipped(whole, byte)) != right
    for bit in (1, 0x80):
        for byte in (0, 7):
            for other in range(byte + 8, len(whole), 8):
                assert digest(kind(), flipped(whole, byte, other, bit=bit)) != right
    first, *rest = torch.tensor_split(whole, 4)
    assert digest(kind(), *rest, first) != right


def flipped(whole: torch.Tensor, *at: int, bit: int = 1) -> torch.Tensor:
    changed = whole.clone()
    changed[list(at)] ^= bit
    return changed


def test_a_gpu_sums_where_the_payload_is() -> None:
    assert isinstance(new_checksum(torch.device("cpu")), Xxh3)
    assert isinstance(new_checksum(torch.device("cuda", 0)), WordSum)
