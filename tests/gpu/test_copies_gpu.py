"""The kernels that copy chunks, on a GPU: the same bits and sums as torch's."""

from __future__ import annotations

import time

import pytest
import torch

from kvstore.transfer.copy import kernel_choice
from tests.support import copied
from tests.unit.kvstore.transfer.copy.test_copy_kernels import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", CASES)
def test_every_bit_and_every_sum_is_torchs(name: str) -> None:
    kernel_choice.choose_kernels(device(), 1)
    assert kernel_choice.kernels_of(device()) is not None
    assert copied.same_on(device(), CASES[name])


def test_a_chunk_moves_at_the_rate_of_the_memory() -> None:
    """The rate is printed; `first_hour.py` has the limits."""
    kernel_choice.choose_kernels(device(), 1)
    kernels = kernel_choice.kernels_of(device())
    assert kernels is not None
    pages = torch.randint(2**62, (16, 128, 8192), device=device())
    index = torch.randperm(128, device=device())[:32]
    payload = torch.zeros(16 * 32 * 8192, dtype=torch.int64, device=device())
    sums = torch.zeros(kernels.NUM_SUMS, dtype=torch.int64, pin_memory=True)
    span = kernels.ChunkRuns(pages, 65536, index, 0, 32, 0)
    for name in ("gather", "scatter"):
        kernels.launch(getattr(kernels, name), span, payload, sums)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            kernels.launch(getattr(kernels, name), span, payload, sums)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / 50
        rate = 2 * 8 * len(payload) / seconds / 1e9
        print(f"{name}: 32 MiB in {seconds * 1e6:.0f} us, {rate:.0f} GB/s read and written")
    assert payload.view(16, 32, -1).equal(pages[:, index])
