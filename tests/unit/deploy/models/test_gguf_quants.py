"""Every number of random blocks, compared with one formula a number, as llama.cpp's ggml-quants.c writes it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize as library
from gguf.quants import quantize

from deploy.models.gguf_quants import BLOCKS, dequantize

F = np.float32
ROWS, BLOCKS_A_ROW = 3, 4


def half(block: bytes, place: int) -> np.float32:
    return F(struct.unpack_from("<e", block, place)[0])


def q8_0(block: bytes, i: int) -> np.float32:
    return half(block, 0) * F(struct.unpack_from("<b", block, 2 + i)[0])


def q5_0(block: bytes, i: int) -> np.float32:
    (fifth,) = struct.unpack_from("<I", block, 2)
    low = block[6 + i] & 15 if i < 16 else block[6 + i - 16] >> 4
    return half(block, 0) * F((low | (fifth >> i & 1) << 4) - 16)


def q4_k(block: bytes, i: int) -> np.float32:
    packed, group = block[4:16], i // 32
    if group < 4:
        scale, least = packed[group] & 63, packed[group + 4] & 63
    else:
        scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
        least = packed[group + 4] >> 4 | packed[group] >> 6 << 4
    byte = block[16 + i // 64 * 32 + i % 32]
    code = byte & 15 if group % 2 == 0 else byte >> 4
    return half(block, 0) * F(scale) * F(code) - half(block, 2) * F(least)


def q6_k(block: bytes, i: int) -> np.float32:
    begin, group, place = i // 128, i % 128 // 32, i % 32
    low = block[begin * 64 + group % 2 * 32 + place]
    low = low & 15 if group < 2 else low >> 4
    high = block[128 + begin * 32 + place] >> 2 * group & 3
    (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
    return half(block, 208) * F(scale) * F((low | high << 4) - 32)


SLOW: dict[Kind, Callable[[bytes, int], np.float32]] = {
    Kind.Q4_K: q4_k, Kind.Q5_0: q5_0, Kind.Q6_K: q6_k, Kind.Q8_0: q8_0
}  # fmt: skip
SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_0: (0,), Kind.Q6_K: (208,), Kind.Q8_0: (0,)}
"""Places of the float16 numbers in a block."""


def random_rows(kind: Kind) -> npt.NDArray[np.uint8]:
    """Rows of blocks of random bits, whose scales are finite."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(11)
    rows = random.integers(0, 256, (ROWS, BLOCKS_A_ROW, num_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = random.standard_normal((ROWS, BLOCKS_A_ROW, 1)).astype(np.float16)
        rows[..., place : place + 2] = scales.view(np.uint8)
    return rows.reshape(ROWS, -1)


def test_each_format_has_a_formula_here() -> None:
    assert set(BLOCKS) == set(SLOW)


@pytest.mark.parametrize("kind", SLOW)
def test_numbers_are_those_of_the_formula(kind: Kind) -> None:
    rows = random_rows(kind)
    num_elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    found = dequantize(rows, kind)
    assert found.dtype == np.float32
    assert found.shape == (ROWS, BLOCKS_A_ROW * num_elements)
    for row, numbers in zip(rows, found, strict=True):
        blocks = [row[i : i + num_bytes].tobytes() for i in range(0, len(row), num_bytes)]
        expected = [SLOW[kind](block, i) for block in blocks for i in range(num_elements)]
        np.testing.assert_array_equal(numbers, np.array(expected, dtype=np.float32))


@pytest.mark.parametrize("kind", SLOW)
def test_some_rows_are_those_of_the_whole(kind: Kind) -> None:
    """The conversion takes a few rows at a time, out of a file that is mapped."""
    rows = random_rows(kind)
    np.testing.assert_array_equal(dequantize(rows[1:], kind), dequantize(rows, kind)[1:])
    np.testing.assert_array_equal(dequantize(rows[::2], kind), dequantize(rows, kind)[::2])


def test_other_formats_are_the_librarys() -> None:
    weight = np.random.default_rng(3).standard_normal((2, 64), dtype=np.float32)
    coded = quantize(weight, Kind.Q4_1)
    np.testing.assert_array_equal(dequantize(coded, Kind.Q4_1), library(coded, Kind.Q4_1))
    np.testing.assert_array_equal(dequantize(weight, Kind.F32), weight)
