"""Folders of LoRA adapters in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from baton.adapters import CONFIG_FILE, PREFIX, WEIGHTS_FILE, read_adapter
from baton.messages import Adapter

Shapes = Mapping[str, tuple[int, int]]
"""Width of the input and of the output of each linear map, by its name in the model."""
ONE: Shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}


def save_adapter(folder: Path, shapes: Shapes = ONE, rank: int = 4, seed: int = 0, **config: Any) -> Adapter:
    """Writes an adapter of random float32 numbers and returns it as it is registered, under the folder's name.

    Args:
        config: further fields of its configuration; `rank_pattern` is followed for whole names of modules.
    """
    draw = numpy.random.default_rng(seed)
    ranks = {module: config.get("rank_pattern", {}).get(module, rank) for module in shapes}
    tensors = {}
    for module, (num_in, num_out) in shapes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = (ranks[module], num_in)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (num_out, ranks[module])
    save_tensors(folder, {name: (shape, _numbers(shape, draw)) for name, shape in tensors.items()})
    save_config(folder, r=rank, target_modules=sorted({module.rpartition(".")[2] for module in shapes}), **config)
    return registered(folder)


def registered(folder: Path) -> Adapter:
    facts = read_adapter(str(folder))
    return Adapter(name=folder.name, path=str(folder), digest=facts.digest, rank=facts.rank)


def save_config(folder: Path, **config: Any) -> None:
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "bias": "none", **config}
    (folder / CONFIG_FILE).write_text(json.dumps(said))


def save_tensors(folder: Path, tensors: Mapping[str, tuple[Sequence[int], bytes]], dtype: str = "F32") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header, begin = {}, 0
    for name, (shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(content)]}
        begin += len(content)
    text = json.dumps(header).encode()
    content = b"".join(content for _, content in tensors.values())
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + content)


def _numbers(shape: tuple[int, int], draw: numpy.random.Generator) -> bytes:
    return draw.normal(0.0, 0.15, shape).astype("<f4").tobytes()
