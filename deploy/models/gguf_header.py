"""Reader of the header of a GGUF file, within the limits of a model.

The `gguf` library has one too, which makes several arrays for each token: 262,144 tokens take it 20 s and 0.7 GB.

"GGUF" | version, 4 | number of tensors, 8 | of fields, 8 | fields | tensors: name, shape, kind, place | data
a field is a text (its name), a type, 4, and a value; a text has its length, 8, before it
an array has the type of its elements, 4, and their number, 8, before them
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from baton.plain_files import open_plain

VERSIONS = (2, 3)
MAX_FIELDS = 2**12
MAX_TENSORS = 2**16
MAX_ELEMENTS = 2**20
"""Limit on the elements of all arrays together: tokens, their kinds, their scores and their merges."""
MAX_NAME_BYTES = 2**16
MAX_DIMENSIONS = 4
ALIGNMENT = 32
"""The data of tensors begin at a multiple of it, unless `general.alignment` names another."""
SCALARS = {
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.BOOL: "?", GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2", GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip
"""numpy's names of types with a fixed size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor that the header describes."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order, `[out, in]`; GGUF has the innermost dimension first."""
    kind: GGMLQuantizationType
    begin: int
    """Byte of the file at which it starts."""
    num_bytes: int


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Return the fields of the header, and the tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain everything that its header announces, or exceeds the limits of a model.
    """
    with open_plain(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Walk(data))


def _read(walk: _Walk) -> tuple[dict[str, Any], list[TensorInfo]]:
    magic, version, num_tensors, num_fields = walk.take("<4sIQQ")
    if magic != b"GGUF" or version not in VERSIONS:
        raise ValueError("it does not begin as a GGUF file of version 2 or 3 does")
    if num_fields > MAX_FIELDS or num_tensors > MAX_TENSORS:
        raise ValueError(f"it announces {num_fields} fields and {num_tensors} tensors")
    fields = _named((walk.text(MAX_NAME_BYTES), walk.value()) for _ in range(num_fields))
    tensors = _named((each.name, each) for each in [_tensor(walk) for _ in range(num_tensors)])
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    if num_bytes > walk.num_left:
        raise ValueError(f"it announces {num_bytes} bytes of tensors, and has {walk.num_left}")
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"it announces an alignment of {alignment!r:.20}, which is no power of two")
    begin = -(-walk.place // alignment) * alignment
    placed = [replace(tensor, begin=begin + tensor.begin) for tensor in tensors.values()]
    for tensor in placed:
        if tensor.begin + tensor.num_bytes > walk.size:
            raise ValueError(f"it announces a tensor at {tensor.begin}, and has {walk.size} bytes")
    return fields, placed


def _named(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name} twice")
        found[name] = value
    return found


def _tensor(walk: _Walk) -> TensorInfo:
    """Return the next tensor, whose begin is counted from the first tensor's."""
    name = walk.text(MAX_NAME_BYTES)
    (num_dimensions,) = walk.take("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"it announces a tensor of {num_dimensions} dimensions")
    shape = walk.take(f"<{num_dimensions}Q")[::-1]
    num_elements = math.prod(shape)
    kind, begin = walk.take("<IQ")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    num_bytes = -(-num_elements // block_elements) * block_bytes
    if not num_elements or begin + num_bytes > walk.size:
        raise ValueError(f"it announces a tensor of {num_elements} numbers at {begin}, and has {walk.size} bytes")
    return TensorInfo(name=name, shape=shape, kind=GGMLQuantizationType(kind), begin=begin, num_bytes=num_bytes)


class _Walk:
    """Forward-only cursor in the file. All methods raise ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.size = len(data)
        self.place = 0
        """The cursor: a byte of the file."""
        self._data = data
        self._num_elements = 0

    @property
    def num_left(self) -> int:
        """Number of bytes after the cursor."""
        return self.size - self.place

    def take(self, layout: str) -> tuple[Any, ...]:
        """Return the values at the cursor, and move past them."""
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def text(self, most: int) -> str:
        """Return the text at the cursor, of at most so many bytes."""
        (num_bytes,) = self.take("<Q")
        if num_bytes > most:
            raise ValueError(f"it announces a text of {num_bytes} bytes")
        return self._bytes(num_bytes).decode()

    def value(self) -> Any:
        """Return the value at the cursor, which follows its type: a number, a text, or a list of them."""
        (kind,) = self.take("<I")
        if kind != GGUFValueType.ARRAY:
            return self._elements(kind, 1)[0]
        kind, count = self.take("<IQ")
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(f"it announces arrays of {self._num_elements} elements")
        return self._elements(kind, count)

    def _elements(self, kind: int, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.text(self.size) for _ in range(count)]
        scalar = np.dtype(SCALARS[GGUFValueType(kind)])  # an array of arrays has no size
        found: list[Any] = np.frombuffer(self._bytes(count * scalar.itemsize), dtype=scalar).tolist()
        return found

    def _bytes(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_left:
            raise ValueError(f"it ends within {num_bytes} bytes that it announces")
        self.place += num_bytes
        return self._data[self.place - num_bytes : self.place]
