"""Conversion of a GGUF file to a folder in Hugging Face's layout, for the architectures of `gguf_architectures`.

Weights are dequantised to float32, a part of a tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import require_runnable
from deploy.models.gguf_architectures import ARCHITECTURES, Architecture
from deploy.models.gguf_header import TensorInfo, read_header
from deploy.models.gguf_metadata import Metadata
from deploy.models.gguf_tokenizer import write_tokenizer
from deploy.models.progress import OnModelProgress, Progress
from deploy.models.safetensors_file import Array, write_float32

Rows = npt.NDArray[Any]

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; all are 1 for plain RoPE."""
NUMBERS = {GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F32: "<f4"}
"""Formats that are not quantized, by numpy's names. The library takes the others as bytes."""
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
    fields, tensors = read_header(gguf_file)
    metadata = Metadata(fields)
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
    is_tied = "output.weight" not in {tensor.name for tensor in tensors}
    config = architecture.config(metadata, name, is_tied) | special_ids
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids | sampling)
    write_tokenizer(metadata, folder, metadata[f"{name}.context_length"])
    require_runnable(folder)
    if weights:
        file = np.memmap(gguf_file, mode="r")
        stored = [(tensor, rows_of(tensor, file)) for tensor in tensors]
        _write_weights(stored, architecture, metadata, folder, progress)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    stored: list[tuple[TensorInfo, Rows]],
    architecture: Architecture,
    metadata: Metadata,
    folder: Path,
    progress: OnModelProgress,
) -> None:
    num_heads = metadata[f"{architecture.name}.attention.head_count"]
    heads = {"attn_q": num_heads, "attn_k": metadata.get(f"{architecture.name}.attention.head_count_kv", num_heads)}
    named = {}
    for tensor, rows in stored:
        if tensor.name != ROPE_FACTORS:
            named[architecture.hugging_face_name(tensor.name)] = tensor, rows
        elif (dequantize(rows, tensor.kind) != 1).any():
            raise ModelLoadError(
                "The GGUF file scales its rotary frequencies (rope_freqs); only plain RoPE is converted."
            )
    num_done = 0

    def parts_of(name: str) -> Iterator[Array]:
        nonlocal num_done
        tensor, rows = named[name]
        part = tensor.name.split(".")[-2]
        if part in heads and architecture.permutes_heads:
            rows = undo_permutation(rows, heads[part])  # blocks lie within rows, so they need not be dequantised for it
        shift = architecture.norm_shift if part.endswith("_norm") else 0.0
        num_rows = max(1, PART_NUMBERS // math.prod(tensor.shape[1:]))
        for begin in range(0, len(rows), num_rows):
            numbers: Array = dequantize(rows[begin : begin + num_rows], tensor.kind).astype(np.float32, copy=False)
            yield numbers - np.float32(shift) if shift else numbers
        num_done += 1
        progress(Progress(stage="dequantise", done=num_done, total=len(named), unit="tensors", detail=tensor.name))

    shapes = {name: tensor.shape for name, (tensor, _) in named.items()}
    write_float32(folder / "model.safetensors", shapes, parts_of)


def rows_of(tensor: TensorInfo, file: npt.NDArray[np.uint8]) -> Rows:
    """Return a view of a tensor in a mapped file: numbers, or bytes, `[rows, bytes of a row]`, if it is quantized."""
    data = file[tensor.begin : tensor.begin + tensor.num_bytes]
    if (numbers := NUMBERS.get(tensor.kind)) is not None:
        return data.view(numbers).reshape(tensor.shape)
    return data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))


def undo_permutation(weight: Rows, num_heads: int) -> Rows:
    """Rows of a query or key projection from llama.cpp's order into Hugging Face's; see `gguf_architectures`."""
    num_rows = weight.shape[0]
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
