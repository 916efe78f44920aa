"""Weight files in a model's folder: the choice of files to load, and their headers. Needs no torch.

A safetensors file is `header length (8 bytes) | header: JSON | tensors`. The header, and the index of a checkpoint of
several files, are untrusted. This module checks both against the files before it allocates memory or opens another
file because of them.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelLoadError
from baton.plain_files import LFS_POINTER, NOT_FETCHED, open_plain, parse_json, read_plain

SUFFIX = ".safetensors"
WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
MAX_HEADER_BYTES = 64 * 2**20
"""The library itself rejects headers of over 100 MB."""
MAX_DIMENSIONS = 16
MAX_DIMENSION = 2**48


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A header's description of one tensor."""

    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which it starts, counted from the end of the header."""
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def _index(folder: Path) -> dict[str, str] | None:
    """Return the file name of each tensor from the folder's index; None: the folder has no index.

    Raises:
        ModelLoadError: the index cannot be read, or names something other than safetensors files in the folder.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        index = parse_json(read_plain(path, MAX_HEADER_BYTES))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ModelLoadError(f"{path} has no weight_map.")
    named = {tensor: _text(name) for tensor, name in index["weight_map"].items()}
    if not named:
        raise ModelLoadError(f"{path} has an empty weight_map.")
    for name in named.values():
        if not _is_file_of_weights(name):
            raise ModelLoadError(
                f"{path} names {name!r} as a file of weights; each has to be a {SUFFIX} file of the same folder."
            )
    return named


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value!r:.100}"


def _is_file_of_weights(name: str) -> bool:
    return name == Path(name).name and name.endswith(SUFFIX) and "\0" not in name


def loaded_files(folder: Path) -> list[Path]:
    """Return the files that are loaded, sorted by name. Others in the folder are ignored.

    They are the files that the index names. Without an index, they are `model.safetensors`, all shards of a set whose
    names number them, or the only file.

    Raises:
        ModelLoadError: there is none, one is missing, or the choice is ambiguous.
    """
    index = _index(folder)
    found = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    if index is not None:
        named = sorted(set(index.values()))
        if missing := [name for name in named if name not in found]:
            others = [name for name in found if name not in named]
            raise ModelLoadError(
                f"The model folder {folder} lacks {missing[0]}, which {INDEX_FILE} names ({len(missing)} of "
                f"{len(named)} are missing)"
                + (
                    f", and has {others[0]}, which it does not name: if that is the model, remove the index, else "
                    if others
                    else "; "
                )
                + "fetch what is missing, for the download was probably interrupted."
            )
        return [folder / name for name in named]
    if not found:
        raise ModelLoadError(
            f"The model folder {folder} has no {SUFFIX} file; Baton reads no other format of weights. "
            "Convert them with transformers' save_pretrained."
        )
    if WHOLE_FILE in found:
        return [folder / WHOLE_FILE]
    shards = [match for name in found if (match := _SHARD.fullmatch(name))]
    sets = {(match["name"], match["count"]) for match in shards}
    if len(sets) == 1:
        numbers = {int(match["number"]) for match in shards}
        if lacking := sorted(set(range(1, int(shards[0]["count"]) + 1)) - numbers):
            raise ModelLoadError(
                f"The model folder {folder} lacks shard {lacking[0]} of {shards[0]['count']} ({len(lacking)} missing), "
                f"and has no {INDEX_FILE}; fetch what is missing."
            )
        return [folder / match.string for match in shards]
    if len(found) == 1:
        return [folder / found[0]]
    raise ModelLoadError(
        f"The model folder {folder} has {found[0]} and {len(found) - 1} more {SUFFIX} files, but neither {WHOLE_FILE} "
        f"nor {INDEX_FILE}, so it is not clear which ones are the model; keep its files alone, or add the index."
    )


def placed_tensors(folder: Path, advice: str = "copy or download it again") -> dict[str, tuple[Path, TensorHead]]:
    """Return for each tensor of a model the file from which it is loaded, and its description in the file's header.

    If a tensor is in several files, the index decides.

    Args:
        advice: what to do about a damaged file.

    Raises:
        ModelLoadError: as in `loaded_files`, a file does not match its header, the index names a tensor that its file
            lacks, or a tensor that it does not name is in several files.
    """
    index = _index(folder) or {}
    placed: dict[str, tuple[Path, TensorHead]] = {}
    for path in loaded_files(folder):
        try:
            heads = read_header(path)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} is damaged: {error}; {advice}.") from error
        for name, head in heads.items():
            if index.get(name, path.name) != path.name:
                continue
            if name in placed:
                raise ModelLoadError(
                    f"{placed[name][0]} and {path.name} both hold {name[:100]!r}, and no {INDEX_FILE} says which one "
                    "counts; remove the file that is not the model's, or add the index."
                )
            placed[name] = (path, head)
    if lacking := sorted(index.keys() - placed.keys()):
        name = lacking[0]
        raise ModelLoadError(
            f"{folder / INDEX_FILE} says that {name[:100]!r} is in {index[name]}, which lacks it ({len(lacking)} "
            "tensors): index and files are of different models, or of different downloads; fetch the model again."
        )
    return placed


def read_header(path: Path) -> dict[str, TensorHead]:
    """Return the description of each tensor in the header of a safetensors file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: its header does not describe it.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(NOT_FETCHED)
        file.seek(0)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError("it has no header of safetensors")
        content = file.read(length)
    try:
        header = parse_json(content)
    except ValueError as error:
        raise ValueError(f"it has no header of safetensors: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("it has no header of safetensors")
    heads = {name: _head(name, said) for name, said in header.items() if name != "__metadata__"}
    described = 8 + length
    for head in sorted(heads.values(), key=lambda head: (head.begin, head.end)):
        if head.begin != described - 8 - length:
            raise ValueError("it has no header of safetensors: its tensors do not lie behind each other")
        described += head.num_bytes
    if described != size:
        raise ValueError(f"it has {size:,} bytes, and its header describes {described:,}")
    return heads


def _head(name: str, said: Any) -> TensorHead:
    match said:
        case {"shape": list(shape), "data_offsets": [int(begin), int(end)]} if _are_sizes(shape) and 0 <= begin <= end:
            # The narrowest type has half a byte, the widest sixteen.
            if end - begin <= 16 * math.prod(shape) <= 32 * (end - begin):
                return TensorHead(tuple(shape), begin, end)
    raise ValueError(f"it has no header of safetensors: what it says of {name[:100]!r} cannot be")


def _are_sizes(shape: list[Any]) -> bool:
    return len(shape) <= MAX_DIMENSIONS and all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in shape)
