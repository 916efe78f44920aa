from __future__ import annotations

import pytest
import torch

from baton.errors import ConfigError
from kvstore.transfer.faults import FaultInjector, Faults, parse_faults
from kvstore.transfer.plan import Chunk

CHUNK = Chunk(0, 0, 2, 0, 2, 64)


def test_faults_are_parsed_and_off_by_default() -> None:
    assert parse_faults("") == Faults()
    assert parse_faults("corrupt_chunk=3, swap_blocks=1") == Faults(corrupt_chunk=3, swap_blocks=1)


@pytest.mark.parametrize("spec", ["corrupt_chunk", "corrupt_chunk=0", "corrupt_chunk=x", "burn=1"])
def test_a_fault_that_does_not_exist_is_named(spec: str) -> None:
    with pytest.raises(ConfigError, match=spec):
        parse_faults(spec)


def spoiled(faults: Faults, num_chunks: int) -> list[int]:
    """Which of a pair's chunks came out changed."""
    injector, changed = FaultInjector(faults), []
    for seq in range(1, num_chunks + 1):
        payload = torch.arange(64, dtype=torch.uint8)
        injector.spoil(CHUNK, payload)
        if not torch.equal(payload, torch.arange(64, dtype=torch.uint8)):
            changed.append(seq)
    return changed


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
def test_every_nth_chunk_is_spoiled(fault: str) -> None:
    assert spoiled(Faults(**{fault: 3}), 7) == [3, 6]
    assert spoiled(Faults(), 7) == []


def test_corruption_spoils_one_row_and_a_swap_exchanges_two() -> None:
    payload = torch.zeros(64, dtype=torch.uint8)
    FaultInjector(Faults(corrupt_chunk=1)).spoil(CHUNK, payload)
    assert payload.tolist() == [0] * 32 + [0x80] * 16 + [0] * 16
    payload = torch.arange(64, dtype=torch.uint8)
    FaultInjector(Faults(swap_blocks=1)).spoil(CHUNK, payload)
    assert payload.tolist() == [*range(48, 64), *range(16, 48), *range(16)]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5])
def test_the_smallest_payloads_can_be_spoiled(num_bytes: int) -> None:
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    FaultInjector(Faults(corrupt_chunk=1)).spoil(Chunk(1, 0, 1, 0, num_bytes, num_bytes), payload)
    assert payload.any()
