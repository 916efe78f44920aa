"""Conversion of a GGUF file to a folder in Hugging Face's layout, for the architectures of `gguf_architectures`.

Weights are dequantised to float32, a part of a tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import require_runnable
from deploy.models.gguf_architectures import ARCHITECTURES, Architecture
from deploy.models.gguf_header import check_header
from deploy.models.gguf_metadata import Metadata
from deploy.models.gguf_quants import dequantize
from deploy.models.gguf_tokenizer import write_tokenizer
from deploy.models.progress import OnModelProgress, Progress
from deploy.models.safetensors_file import write_float32

Array = npt.NDArray[np.float32]

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; all are 1 for plain RoPE."""
PART_NUMBERS = 2**21
"""Numbers that are dequantised at a time: 8 MiB of them, and codes on the way."""


def write_folder(
    gguf_file: Path, folder: Path, sampling: dict[str, float], progress: OnModelProgress, *, weights: bool = True
) -> None:
    """Write config.json, model.safetensors, generation_config.json, tokenizer.json and tokenizer_config.json.

    Args:
        sampling: recommended defaults for generation_config.json.
        weights: write model.safetensors, too.

    Raises:
        ModelLoadError: the file is no GGUF file, of another architecture, has scaled rotary embeddings or an
            unknown tokenizer.
        OSError: a file cannot be written, for instance because the disk is full.
    """
    try:
        _write_folder(gguf_file, folder, sampling, progress, weights)
    except (ModelLoadError, OSError):
        raise
    except Exception as error:  # the libraries raise no narrower class
        raise ModelLoadError(f"{gguf_file.name} is not a readable GGUF file: {in_one_line(error)}") from error


def _write_folder(
    gguf_file: Path, folder: Path, sampling: dict[str, float], progress: OnModelProgress, weights: bool
) -> None:
    check_header(gguf_file)
    reader = gguf.GGUFReader(gguf_file)
    metadata = Metadata(reader)
    name = metadata["general.architecture"]
    if (architecture := ARCHITECTURES.get(name)) is None:
        known = " and ".join(ARCHITECTURES)
        raise ModelLoadError(f"{gguf_file.name} holds a {name} model; only {known} are converted.")
    if (scaling := metadata.get(f"{name}.rope.scaling.type", "none")) != "none":
        raise ModelLoadError(f"{gguf_file.name} has RoPE scaling of type {scaling}; only plain RoPE is converted.")
    folder.mkdir(parents=True)
    special_ids = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    is_tied = "output.weight" not in {tensor.name for tensor in reader.tensors}
    config = architecture.config(metadata, name, is_tied) | special_ids
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids | sampling)
    write_tokenizer(metadata, folder, metadata[f"{name}.context_length"])
    require_runnable(folder)
    if weights:
        _write_weights(reader.tensors, architecture, metadata, folder, progress)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    tensors: list[Any], architecture: Architecture, metadata: Metadata, folder: Path, progress: OnModelProgress
) -> None:
    num_heads = metadata[f"{architecture.name}.attention.head_count"]
    heads = {"attn_q": num_heads, "attn_k": metadata.get(f"{architecture.name}.attention.head_count_kv", num_heads)}
    named = {}
    for tensor in tensors:
        if tensor.name != ROPE_FACTORS:
            named[architecture.hugging_face_name(tensor.name)] = tensor
        elif (dequantize(tensor.data, tensor.tensor_type) != 1).any():
            raise ModelLoadError(
                "The GGUF file scales its rotary frequencies (rope_freqs); only plain RoPE is converted."
            )
    num_done = 0

    def parts_of(name: str) -> Iterator[Array]:
        nonlocal num_done
        tensor = named[name]
        part = tensor.name.split(".")[-2]
        yield from _parts(tensor, heads.get(part, 0) if architecture.permutes_heads else 0, _shift(part, architecture))
        num_done += 1
        progress(Progress(stage="dequantise", done=num_done, total=len(named), unit="tensors", detail=tensor.name))

    write_float32(folder / "model.safetensors", {name: _shape(tensor) for name, tensor in named.items()}, parts_of)


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape as torch has it, `[out, in]`; GGUF has the innermost dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _shift(part: str, architecture: Architecture) -> float:
    return architecture.norm_shift if part.endswith("_norm") else 0.0


def _parts(tensor: Any, num_heads: int, shift: float) -> Iterator[Array]:
    """Yield the numbers of a tensor, some rows at a time.

    Args:
        num_heads: heads whose rows llama.cpp permuted; 0: it did not.
        shift: what llama.cpp added to each number.
    """
    # Blocks lie within rows, so rows change places before they are dequantised.
    rows = undo_permutation(tensor.data, num_heads) if num_heads else tensor.data
    num_rows = max(1, PART_NUMBERS // math.prod(_shape(tensor)[1:]))
    for begin in range(0, len(rows), num_rows):
        part = dequantize(rows[begin : begin + num_rows], tensor.tensor_type)
        yield part - np.float32(shift) if shift else part


def undo_permutation(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of a query or key projection from llama.cpp's order into Hugging Face's; see `gguf_architectures`."""
    num_rows = weight.shape[0]
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
