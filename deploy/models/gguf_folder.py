"""Conversion of a GGUF file of the llama architecture to a folder in Hugging Face's layout.

Weights are dequantised to float32. llama.cpp stores the rows of the query and key projections so that the two halves
of a rotary pair are adjacent; Hugging Face's models expect all first halves before all second halves. For a head:

    llama.cpp     0 d/2 1 d/2+1 2 d/2+2 ...      (convert_hf_to_gguf.py, LlamaModel.permute)
    Hugging Face  0 1 2 ... d/2 d/2+1 d/2+2 ...
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import require_runnable
from deploy.models.gguf_header import check_header
from deploy.models.gguf_metadata import Metadata
from deploy.models.gguf_tokenizer import write_tokenizer
from deploy.models.progress import OnModelProgress, Progress

Array = npt.NDArray[np.float32]

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; all are 1 for plain RoPE."""


def write_folder(
    gguf_file: Path, folder: Path, sampling: dict[str, float], progress: OnModelProgress, *, weights: bool = True
) -> None:
    """Write config.json, model.safetensors, generation_config.json, tokenizer.json and tokenizer_config.json.

    Args:
        sampling: recommended defaults for generation_config.json.
        weights: write model.safetensors, too.

    Raises:
        ModelLoadError: the file is no GGUF file, not of the llama architecture, has scaled rotary embeddings or an
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
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ModelLoadError(
            f"{gguf_file.name} holds a {architecture} model; only the llama architecture is converted."
        )
    if (scaling := metadata.get("llama.rope.scaling.type", "none")) != "none":
        raise ModelLoadError(f"{gguf_file.name} has RoPE scaling of type {scaling}; only plain RoPE is converted.")
    folder.mkdir(parents=True)
    special_ids = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    is_tied = "output.weight" not in {tensor.name for tensor in reader.tensors}
    config = _config(metadata, tied=is_tied) | special_ids
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids | sampling)
    write_tokenizer(metadata, folder)
    require_runnable(folder)
    if weights:
        _write_weights(_weights(reader.tensors, metadata, progress), folder, progress)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(weights: dict[str, Array], folder: Path, progress: OnModelProgress) -> None:
    num_bytes = sum(array.nbytes for array in weights.values())
    progress(Progress(stage="write", done=0, total=num_bytes, detail="model.safetensors"))
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it has no errno; a full disk is one
        raise OSError(f"model.safetensors: {error}") from error
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600; a cache may be shared
    progress(Progress(stage="write", done=num_bytes, total=num_bytes, detail="model.safetensors"))


def _weights(tensors: list[Any], metadata: Metadata, progress: OnModelProgress) -> dict[str, Array]:
    """Return the weights: Hugging Face's name -> float32 array in torch's shape, [out, in]."""
    num_heads = metadata["llama.attention.head_count"]
    heads = {"attn_q": num_heads, "attn_k": metadata.get("llama.attention.head_count_kv", num_heads)}
    weights: dict[str, Array] = {}
    for done, tensor in enumerate(tensors, start=1):
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = undo_permutation(array, heads[part])
        if tensor.name != ROPE_FACTORS:
            weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(array)
        elif (array != 1).any():
            raise ModelLoadError(
                "The GGUF file scales its rotary frequencies (rope_freqs); only plain RoPE is converted."
            )
        progress(Progress(stage="dequantise", done=done, total=len(tensors), unit="tensors", detail=tensor.name))
    return weights


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        if match[2] in LAYER_NAMES:
            return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    elif name.removesuffix(".weight") in OUTER_NAMES:
        return f"{OUTER_NAMES[name.removesuffix('.weight')]}.weight"
    raise ModelLoadError(f"The GGUF file holds {name}, which the llama architecture does not have.")


def undo_permutation(weight: Array, num_heads: int) -> Array:
    """Rows of a query or key projection from llama.cpp's order into Hugging Face's; see the top of this file."""
    num_rows = weight.shape[0]
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    hidden_size, num_heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 1e4))},
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """GGUF keeps float32: 9.999999747378752e-06 was written as 1e-05, and is the same float32."""
    return float(str(np.float32(value)))
