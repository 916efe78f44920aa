"""Dequantization of GGUF's block formats Q4_K, Q5_0, Q6_K and Q8_0.

The formulas are those of `dequantize_row_*` in llama.cpp's ggml-quants.c. A block has a float16 scale `d`, and codes of
a few bits. In memory:

    Q8_0   32 numbers,  34 bytes   d | 32 codes of 8 bits, signed
    Q5_0   32 numbers,  22 bytes   d | 32 fifth bits | 16 bytes: low halves are numbers 0 to 15, high halves 16 to 31
    Q4_K  256 numbers, 144 bytes   d, dmin | 12 bytes: scales and minima of 8 groups in 6 bits each | 128 bytes codes
    Q6_K  256 numbers, 210 bytes   128 bytes of low four bits | 64 of high two | 16 signed scales of 16 numbers each | d

The `gguf` library dequantizes the other formats. It has these as well, at a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize as library
from gguf.quants import quant_shape_to_byte_shape

from deploy.models.gguf_header import TensorInfo
from deploy.models.safetensors_file import Array

Bytes = npt.NDArray[np.uint8]
NUMBERS = {Kind.F16: "<f2", Kind.F32: "<f4"}
"""Formats that are not quantized, by numpy's names. The library takes the others as bytes."""


def rows_of(tensor: TensorInfo, file: Bytes) -> npt.NDArray[np.generic]:
    """Return a view of a tensor in a mapped file: numbers, or bytes, `[rows, bytes of a row]`, if it is quantized."""
    data = file[tensor.begin : tensor.begin + tensor.num_bytes]
    if (numbers := NUMBERS.get(tensor.kind)) is not None:
        return data.view(numbers).reshape(tensor.shape)
    return data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))


def dequantize(data: npt.NDArray[np.generic], kind: Kind) -> Array:
    """Return the numbers of whole rows of a tensor, as float32.

    Args:
        data: bytes of the rows, `[rows, bytes of a row]`, or numbers as `rows_of` returns them.
    """
    if kind not in BLOCKS:
        return np.asarray(library(data, kind), dtype=np.float32)
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(-1, num_bytes)
    numbers: Array = BLOCKS[kind](blocks).reshape(*data.shape[:-1], -1)
    return numbers


def _q8_0(blocks: Bytes) -> Array:
    return _scale(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _q5_0(blocks: Bytes) -> Array:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low, high = _halves(blocks[:, 6:])
    codes: Bytes = np.concatenate([low, high], axis=1) | fifth << 4
    return _scale(blocks[:, :2]) * (codes.astype(np.int8) - 16)


def _q4_k(blocks: Bytes) -> Array:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    # 32 bytes hold two groups of 32 numbers: the low halves are the first.
    codes = np.stack(_halves(blocks[:, 16:].reshape(-1, 4, 32)), axis=2).reshape(-1, 8, 32)
    scale = (_scale(blocks[:, :2]) * scales)[..., None]
    least = (_scale(blocks[:, 2:4]) * minima)[..., None]
    return (scale * codes - least).reshape(-1, 256)


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the scales and the minima of a block's 8 groups, of 6 bits each: `get_scale_min_k4`.

    byte 0 to 3   scale 0 to 3 in six bits, two high bits of scale 4 to 7 above them
    byte 4 to 7   the same with minima
    byte 8 to 11  four low bits of scale 4 to 7, and of minimum 4 to 7 above them
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    low, high = _halves(third)
    scales = np.concatenate([first & 63, low | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, high | (second >> 6) << 4], axis=1)
    return scales, minima


def _q6_k(blocks: Bytes) -> Array:
    # A block has two halves of 128 numbers in four groups of 32. 64 bytes have the low bits of groups 0 and 1, and
    # above them those of 2 and 3. 32 bytes have the high bits of all four, those of group 0 lowest.
    low = np.concatenate(_halves(blocks[:, :128].reshape(-1, 2, 64)), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).astype(np.int8) - 32
    scales = _scale(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def _scale(column: Bytes) -> Array:
    """Return the float16 in two bytes a block as float32, `[blocks, 1]`."""
    return np.ascontiguousarray(column).view(np.float16).astype(np.float32)


def _halves(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the low and the high four bits of each byte."""
    return packed & np.uint8(15), packed >> np.uint8(4)


BLOCKS: dict[Kind, Callable[[Bytes], Array]] = {Kind.Q4_K: _q4_k, Kind.Q5_0: _q5_0, Kind.Q6_K: _q6_k, Kind.Q8_0: _q8_0}
