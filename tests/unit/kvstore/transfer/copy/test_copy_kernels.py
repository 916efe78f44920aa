"""The kernels that copy chunks, in Triton's interpreter, against torch's copies."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor

import pytest

from tests.support import copied
from tests.support.copied import CopyCase

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
CASES = {
    "whole rows": CopyCase(),
    "a ragged last block": CopyCase(num_tokens=149, block_sizes=(16, 32)),
    "smaller blocks there": CopyCase(num_tokens=77, skip_tokens=32, block_sizes=(64, 16)),
    "some heads": CopyCase(tp=(1, 3)),
    "from some heads": CopyCase(tp=(3, 1), block_sizes=(16, 32), skip_tokens=32),
    "runs of odd words": CopyCase(dim=5, dtype="float32"),
    "a window": CopyCase(num_empty=4, skip_tokens=64),
    "one token": CopyCase(num_tokens=1),
    "whole numbers": CopyCase(dtype="int64", dim=1),
    "long rows": CopyCase(dim=96, chunk_bytes=2**18),
    "converted": CopyCase(dtype="float32", wire="bfloat16", by_kernels=False),
    "int8": CopyCase(wire="int8", by_kernels=False),
    "the shortest runs": CopyCase(dtype="int8", dim=1, tp=(1, 6), block_sizes=(16, 32)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_and_every_sum_is_torchs(name: str, interpreter: Executor) -> None:
    num_launches, is_same = interpreter.submit(copied.same_moves, CASES[name]).result()
    assert is_same
    assert (num_launches > 0) == CASES[name].by_kernels


@pytest.mark.parametrize("name", ["some heads", "smaller blocks there", "whole numbers"])
def test_no_transfer_needs_a_kernel_that_was_not_tried_when_the_worker_began(name: str, interpreter: Executor) -> None:
    """Whatever heads, block sizes and ranks its peer has: it would be compiled while the first chunk waits."""
    chosen, used = interpreter.submit(copied.constants_of, CASES[name]).result()
    assert used
    assert used <= chosen


def test_kernels_are_tried_before_their_first_use(interpreter: Executor) -> None:
    assert interpreter.submit(copied.are_right).result()
