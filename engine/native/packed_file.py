"""Packed weights in a file that is mapped read-only: all processes of a host that read it share one copy in memory.

    "baton-w1" | bytes of the header, 8 | digest of the header, 32 | header: JSON | tensor | tensor | ...
                                                                     each tensor at a multiple of 64 bytes

The header says what the file is of (`about`), where the tensors lie, how they make up the weights, and how long the
file is. A file is written beside its place and moved there, so that one of that name is whole; what is shorter, longer
or of another header than it was written with is refused all the same.
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
"""Bytes of a cache line, and of the widest vector that is loaded."""
KINDS = {kind.__name__: kind for kind in (PackedWeights, PackedLayer, PackedMatrix, EmbeddingRows)}
"""What the weights are made of beside tensors, by the name that a header has for it."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file's content. The tensors lie in the file: they must not be written to, and the memory is mapped while one of
    them lives.
    """

    about: Mapping[str, Any]
    weights: PackedWeights


def write(path: Path, about: Mapping[str, Any], weights: PackedWeights) -> None:
    """Writes a file; those who look see all of it or nothing.

    Raises:
        OSError: it cannot be written. Nothing is left of it.
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
    """Returns what a file is of.

    Raises:
        OSError: it cannot be read, or another user may have written it.
        ValueError: it is not such a file, or not a whole one.
    """
    with open_own(path) as file:
        about: Mapping[str, Any] = _header(file)[0]["about"]
    return about


def read(path: Path) -> PackedFile:
    """Maps a file.

    Raises:
        OSError, ValueError: see `read_about`.
    """
    with open_own(path) as file:
        header, base = _header(file)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapping) != base + header["bytes"]:
        raise ValueError(f"it has {len(mapping)} bytes of {base + header['bytes']}")
    mapping.madvise(mmap.MADV_WILLNEED)
    # Torch wants memory that may be written, and this may not: whatever tries ends the process.
    data = (ctypes.c_uint8 * len(mapping)).from_address(np.frombuffer(mapping, np.uint8).ctypes.data)
    weakref.finalize(data, mapping.close).atexit = False  # a step may be under way when the interpreter ends
    whole = torch.frombuffer(data, dtype=torch.uint8)
    tensors = []
    for begin, dtype, shape in header["tensors"]:
        kind = getattr(torch, dtype)
        num_bytes = kind.itemsize * int(np.prod(shape))
        tensors.append(whole[base + begin : base + begin + num_bytes].view(kind).view(shape))
    return PackedFile(header["about"], _decoded(header["weights"], tensors))


def _header(file: BinaryIO) -> tuple[Any, int]:
    """Returns a file's header, and where its first tensor may lie."""
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
    """Returns a value as JSON, with tensors by their place in `tensors`, where they are put."""
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
