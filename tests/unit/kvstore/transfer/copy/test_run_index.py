"""The index of a transfer's runs on a GPU: uploaded once, and what is new when its block table grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.runner import LayerGroup
from kvstore.transfer.copy.blocks import GpuIndex, runs_of
from tests.fakes.gpu import FakeGpu

GROUP = LayerGroup(name="all", layers=(0,), block_size=32, num_kv_heads=2, k_dim=4, v_dim=4, dtype="float32")
FIRST, NUM_UNITS = 2, 9


class Uploads(FakeGpu):
    """Counts what is uploaded, in numbers of 8 bytes."""

    def __init__(self) -> None:
        super().__init__(0)
        self.uploaded: list[int] = []

    def pinned_buffer(self, num_bytes: int) -> torch.Tensor:
        self.uploaded.append(num_bytes // 8)
        return super().pinned_buffer(num_bytes)


def table(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(blocks, dtype=np.int64)


def test_an_index_is_uploaded_once_and_what_is_new_when_the_table_grows() -> None:
    gpu, runs = Uploads(), runs_of(GROUP, 16, 0, 2)
    index, width = GpuIndex(gpu, runs, FIRST, NUM_UNITS), runs.of_unit.shape[1]

    def check(blocks: np.ndarray[tuple[int], np.dtype[np.int64]], unit_hi: int, uploaded: list[int]) -> None:
        found = index.until(blocks, unit_hi)[: unit_hi * width].tolist()
        assert found == runs.of_units(blocks, FIRST, FIRST + unit_hi).tolist()
        assert gpu.uploaded == [width * number for number in uploaded]

    first = table(7, 3, 9)
    check(first, 1, [4])
    check(first, 4, [4])
    check(table(7, 3, 9, 1), 4, [4])
    check(table(7, 3, 9, 1), 5, [4, 2])
    check(table(7, 3, 9, 1, 0, 5), 9, [4, 2, 3])
    check(table(5, 5, 9, 1, 0, 5), 9, [4, 2, 3, 9])
    with pytest.raises(AssertionError, match="does not reach so far"):
        GpuIndex(gpu, runs, 0, 9).until(first, 7)
