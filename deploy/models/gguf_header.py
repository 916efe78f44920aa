"""Validates the header of a GGUF file before the library reads it, which allocates objects for all announced counts.

"GGUF" | version, 4 | number of tensors, 8 | of fields, 8 | fields | tensors: name, shape, kind, place | data
a field is a text (its name), a type, 4, and a value; a text has its length, 8, before it
an array has the type of its elements, 4, and their number, 8, before them
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from baton.plain_files import open_plain

VERSIONS = (2, 3)
MAX_FIELDS = 2**12
MAX_TENSORS = 2**16
MAX_ELEMENTS = 2**20
"""Limit on the elements of all arrays together: tokens, their kinds and their merges. The library takes some hundred
bytes for each."""
MAX_NAME_BYTES = 2**16
MAX_DIMENSIONS = 4
SCALARS = {
    GGUFValueType.UINT8: 1, GGUFValueType.INT8: 1, GGUFValueType.BOOL: 1, GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2, GGUFValueType.UINT32: 4, GGUFValueType.INT32: 4, GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8, GGUFValueType.INT64: 8, GGUFValueType.FLOAT64: 8,
}  # fmt: skip
"""Sizes in bytes of types with a fixed size."""


def check_header(path: Path) -> None:
    """Check that the file contains everything that its header announces, within the limits of a model.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not so.
    """
    with open_plain(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(_Walk(data))


def _check(walk: _Walk) -> None:
    magic, version, num_tensors, num_fields = walk.take("<4sIQQ")
    if magic != b"GGUF" or version not in VERSIONS:
        raise ValueError("it does not begin as a GGUF file of version 2 or 3 does")
    if num_fields > MAX_FIELDS or num_tensors > MAX_TENSORS:
        raise ValueError(f"it announces {num_fields} fields and {num_tensors} tensors")
    for _ in range(num_fields):
        walk.skip_text(MAX_NAME_BYTES)
        walk.skip_value()
    num_bytes = sum(_tensor_bytes(walk) for _ in range(num_tensors))
    if num_bytes > walk.num_left:
        raise ValueError(f"it announces {num_bytes} bytes of tensors, and has {walk.num_left}")


def _tensor_bytes(walk: _Walk) -> int:
    """Return the size of the next tensor, which is not read."""
    walk.skip_text(MAX_NAME_BYTES)
    (num_dimensions,) = walk.take("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"it announces a tensor of {num_dimensions} dimensions")
    num_elements = math.prod(walk.take(f"<{num_dimensions}Q"))
    kind, place = walk.take("<IQ")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    num_bytes = -(-num_elements // block_elements) * block_bytes
    if not num_elements or place + num_bytes > walk.size:
        raise ValueError(f"it announces a tensor of {num_elements} numbers at {place}, and has {walk.size} bytes")
    return int(num_bytes)


class _Walk:
    """Forward-only cursor in the file. All methods raise ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.size = len(data)
        self._data = data
        self._place = 0
        self._num_elements = 0

    @property
    def num_left(self) -> int:
        """Number of bytes after the cursor."""
        return self.size - self._place

    def take(self, layout: str) -> tuple[Any, ...]:
        """Return the values at the cursor, and move past them."""
        begin = self._place
        self._skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, begin)

    def skip_text(self, most: int) -> None:
        (num_bytes,) = self.take("<Q")
        if num_bytes > most:
            raise ValueError(f"it announces a text of {num_bytes} bytes")
        self._skip(num_bytes)

    def skip_value(self) -> None:
        """Skip a type and a value of it."""
        (kind,) = self.take("<I")
        if kind != GGUFValueType.ARRAY:
            self._skip_elements(kind, 1)
            return
        kind, count = self.take("<IQ")
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(f"it announces arrays of {self._num_elements} elements")
        self._skip_elements(kind, count)

    def _skip_elements(self, kind: int, count: int) -> None:
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                self.skip_text(self.size)
        else:
            self._skip(count * SCALARS[GGUFValueType(kind)])  # an array of arrays has no size

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self.num_left:
            raise ValueError(f"it ends within {num_bytes} bytes that it announces")
        self._place += num_bytes
