"""Shapes from a transformers configuration: the KV layout and the longest sequence. Does not need transformers."""

from __future__ import annotations

import logging
from typing import Any

from baton.errors import ModelLoadError
from engine.core.kv_spec import INT8, INT8_SCALE_BYTES, KVSpec, LayerGroup

logger = logging.getLogger(__name__)
KEYS = "layers.*.self_attn.k_proj"
"""Name in a tensor-parallel plan that determines the split of the key projection."""
BY_HEAD = "colwise"


def longest_sequence(config: Any, asked: int) -> int:
    """Return the maximum sequence length: `asked`, or the model's if that is 0, limited by its RoPE.

    For `longrope` (Ding et al., 2024) and `dynamic`, transformers chooses the frequencies once per forward pass, by the
    highest position in it. A forward pass here contains many sequences, and cached K keeps its rotation. So sequences
    are limited to the length up to which the frequencies do not change: `longrope` then uses its short factors, and
    `dynamic` is plain RoPE.

    Raises:
        ModelLoadError: the frequencies for sequences of this length are not supported.
    """
    rope = config.rope_parameters
    kind = rope["rope_type"]
    num_tokens: int = asked or config.max_position_embeddings
    if kind == "dynamic" and num_tokens > config.max_position_embeddings:
        raise ModelLoadError(
            f"engine.max_model_len is {asked}, but with RoPE of type dynamic this model is computed up to its "
            f"max_position_embeddings only; set it to {config.max_position_embeddings} at most"
        )
    return min(num_tokens, int(rope["original_max_position_embeddings"])) if kind == "longrope" else num_tokens


def report_longest(config: Any, asked: int, found: int) -> None:
    """Log that sequences are shorter than requested, or than the model's limit, and why.

    Args:
        config: configuration; see `longest_sequence`.
        asked: requested length in tokens; 0: the model's limit.
        found: the result of `longest_sequence`.
    """
    if found < (wanted := asked or config.max_position_embeddings):
        logger.warning(
            "max_model_len is %d, the model's original_max_position_embeddings, not %d: with RoPE of type longrope "
            "longer sequences would change the frequencies of all sequences in the same step",
            found,
            wanted,
        )


def arithmetic_dtype(config: Any, asked: str, on_gpu: bool) -> str:
    """Return the data type in which a model computes: `asked`, or for auto float32 on a CPU.

    On a GPU auto means the checkpoint's data type.
    """
    if asked != "auto":
        return asked
    return str(config.dtype or "bfloat16").removeprefix("torch.") if on_gpu else "float32"


def cache_spec(config: Any, block_size: int, dtype: str, num_ranks: int) -> KVSpec:
    """Return the KV layout of one rank of a dense model: one group of all layers, no state.

    Args:
        dtype: data type of the pages.

    Raises:
        ModelLoadError: the heads cannot be divided evenly among the ranks.
    """
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if num_ranks > 1 and (config.base_model_tp_plan or {}).get(KEYS) != BY_HEAD:
        raise ModelLoadError(
            f"transformers does not split the heads of a model of type {config.model_type!r}; "
            "set engine.tensor_parallel to 1"
        )
    if num_kv_heads % num_ranks or num_heads % num_ranks:
        raise ModelLoadError(
            f"engine.tensor_parallel is {num_ranks}, which does not divide the model's {num_heads} heads and "
            f"{num_kv_heads} KV heads"
        )
    layers = tuple(range(config.num_hidden_layers))
    page_dim = head_dim + (INT8_SCALE_BYTES if dtype == INT8 else 0)
    group = LayerGroup(
        name="all",
        layers=layers,
        block_size=block_size,
        num_kv_heads=num_kv_heads // num_ranks,
        k_dim=page_dim,
        v_dim=page_dim,
        dtype=dtype,
    )
    return KVSpec((group,))
