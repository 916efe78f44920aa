"""Packed weights in a file that is mapped read-only, so that all processes of a host share one copy in memory.

    "baton-w1" | bytes of the header, 8 | digest of the header, 32 | header: JSON | tensor | tensor | ...
                                                                     each tensor at a multiple of 64 bytes

The header describes the source of the weights (`about`), the positions of the tensors, how they form the weights, and
the file's length. A file is written to a temporary file and renamed, so a file of that name is complete. A file with
another length, or whose header does not match its digest, is refused all the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from baton.own_files import open_own
from engine.native.weights import EmbeddingRows, Form, PackedLayer, PackedMatrix, PackedWeights

MAGIC = b"baton-w1"
DIGEST_BYTES = 32
PREFIX_BYTES = len(MAGIC) + 8 + DIGEST_BYTES
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector load."""
KINDS = {kind.__name__: kind for kind in (PackedWeights, PackedLayer, PackedMatrix, EmbeddingRows)}
"""Types of which the weights consist, in addition to tensors, by their name in a header."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Content of a file. The tensors are views of the read-only mapping, which exists while one of them lives."""

    about: Mapping[str, Any]
    weights: PackedWeights


def write(path: Path, about: Mapping[str, Any], weights: PackedWeights) -> None:
    """Write a file; readers see all of it or nothing.

    Raises:
        OSError: it cannot be written. No part of it is left.
    """
    tensors: list[torch.Tensor] = []
    tree = _encoded(weights, tensors)
    places: list[tuple[int, str, list[int]]] = []
    end = 0
    for tensor in tensors:
        begin = _aligned(end)
        end = begin + tensor.nbytes
        places.append((begin, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
    header = json.dumps({"about": about, "tensors": places, "weights": tree, "bytes": end}).encode()
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + _digest(header) + header)
            base = _aligned(file.tell())
            for (begin, _, _), tensor in zip(places, tensors, strict=True):
                file.write(bytes(base + begin - file.tell()))
                file.write(tensor.contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        Path(made).chmod(0o644)
        Path(made).replace(path)
    finally:
        Path(made).unlink(missing_ok=True)


def read_about(path: Path) -> Mapping[str, Any]:
    """Return the description of a file's source.

    Raises:
        OSError: it cannot be read, or another user may have written it.
        ValueError: it is not a file of packed weights, or incomplete.
    """
    with open_own(path) as file:
        about: Mapping[str, Any] = _header(file)[0]["about"]
    return about


def read(path: Path) -> PackedFile:
    """Map a file.

    Raises:
        OSError, ValueError: see `read_about`.
    """
    with open_own(path) as file:
        header, base = _header(file)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapping) != base + header["bytes"]:
        raise ValueError(f"it has {len(mapping)} bytes of {base + header['bytes']}")
    mapping.madvise(mmap.MADV_WILLNEED)
    # Torch expects writable memory, but this mapping is read-only: a write would end the process.
    data = (ctypes.c_uint8 * len(mapping)).from_address(np.frombuffer(mapping, np.uint8).ctypes.data)
    weakref.finalize(data, mapping.close).atexit = False  # a step may be running when the interpreter exits
    whole = torch.frombuffer(data, dtype=torch.uint8)
    tensors = []
    for begin, dtype, shape in header["tensors"]:
        kind = getattr(torch, dtype)
        num_bytes = kind.itemsize * int(np.prod(shape))
        tensors.append(whole[base + begin : base + begin + num_bytes].view(kind).view(shape))
    return PackedFile(header["about"], _decoded(header["weights"], tensors))


def _header(file: BinaryIO) -> tuple[Any, int]:
    """Return a file's header, and the offset from which on tensors are stored."""
    prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise ValueError("it is no file of packed weights")
    num_bytes = int.from_bytes(prefix[len(MAGIC) : -DIGEST_BYTES], "little")
    if num_bytes > os.fstat(file.fileno()).st_size:
        raise ValueError("it ends within its header")
    header = file.read(num_bytes)
    if _digest(header) != prefix[-DIGEST_BYTES:]:
        raise ValueError("its header is not the one that was written")
    return json.loads(header), _aligned(PREFIX_BYTES + num_bytes)


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES).digest()


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _encoded(value: object, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, with tensors replaced by their index in `tensors`, to which they are appended."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case Form():
            return {"form": value.name}
        case Mapping():
            return {"of": {name: _encoded(one, tensors) for name, one in value.items()}}
        case str() | int() | float() | None:
            return value
        case Sequence():
            return [_encoded(one, tensors) for one in value]
    assert is_dataclass(value), f"a {type(value).__name__} has no place in a file"
    assert type(value).__name__ in KINDS, f"a {type(value).__name__} has no place in a file"
    parts = {field.name: _encoded(getattr(value, field.name), tensors) for field in fields(value)}
    return {"kind": type(value).__name__, "of": parts}


def _decoded(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    match value:
        case {"tensor": place}:
            return tensors[place]
        case {"form": name}:
            return Form[name]
        case {"kind": name, "of": parts}:
            return KINDS[name](**{part: _decoded(one, tensors) for part, one in parts.items()})
        case {"of": parts}:
            return {name: _decoded(one, tensors) for name, one in parts.items()}
        case list():
            return [_decoded(one, tensors) for one in value]
    return value
