"""Shape of a model's attention, and the KV layout and the longest sequence that follow from it.

Does not need transformers: `asking` finds the shape by asking the model, the native step by its own description.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from baton.errors import ModelLoadError
from engine.core.runner import FP8, INT8, INT8_SCALE_BYTES, KVSpec, LayerGroup, StateSpec

logger = logging.getLogger(__name__)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in transformers' configurations."""
FIXED_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the highest position of a forward pass; see `longest_sequence`."""


class Division(Enum):
    """Division of a model's attention among several ranks. Each rank computes all that is not divided."""

    HEADS = "heads"
    """Query heads and KV heads, so that each rank keeps the KV of its heads."""
    QUERIES = "queries"
    """Query heads, over latents that every rank keeps (MLA)."""
    NONE = "none"
    """Nothing: every rank keeps the KV of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Attention of one layer as the model's own code calls it, on one rank or on all together."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Heads of the KV that the layer keeps."""
    k_dim: int
    v_dim: int
    is_latent: bool = False
    """True if the layer keeps compressed K and V, which it expands for its attention (MLA): K is the latent, and V the
    rotated part of the keys."""
    source: int | None = None
    """Layer whose KV it reads, if it keeps none of its own."""
    window: int = 0
    """Number of tokens that a token attends to, itself included; 0: all tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """States of one kind and shape that recurrent layers keep for each sequence: one tensor of all these layers."""

    name: str
    """Name of the tensor in a `KVSpec`."""
    kind: str
    """`conv` or `recurrent`, as transformers' cache names them."""
    places: tuple[tuple[int, int], ...]
    """Layer and index among the layer's states of this kind, in the order of the tensor."""
    shape: tuple[int, ...]
    """Shape of one layer's state of one sequence."""
    dtype: str = ""
    """Data type, if the model always uses the same one; empty: the data type of its computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Configuration of a model, and what its layers keep.

    Args:
        config: transformers' configuration of the model's text.
        layers: attention by layer index, ascending; a layer may have none.
    """

    config: Any
    layers: Mapping[int, AttentionLayer]
    division: Division = Division.NONE
    """Division of its attention among several ranks."""
    has_rank_plan: bool = False
    """True if transformers knows how to divide its weights among ranks."""
    has_expert_plan: bool = False
    """True if transformers knows how to divide its experts among ranks, whole experts on each."""
    honours: frozenset[str] = frozenset()
    """Further arguments of attention that change its result: `softcap`, `s_aux`."""
    states: tuple[KeptStates, ...] = ()
    """States of its recurrent layers."""

    @property
    def is_latent(self) -> bool:
        """True if some layers keep compressed K and V."""
        return any(layer.is_latent for layer in self.layers.values())

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0: the configuration names none."""
        return next((count for name in EXPERT_COUNTS if (count := getattr(self.config, name, 0))), 0)

    def cache_spec(self, block_size: int, dtype: str, num_ranks: int, computed: str = "float32") -> KVSpec:
        """Return the KV layout of one rank: a group of layers for each shape of heads and window, and all states.

        Args:
            dtype: data type of the pages.
            computed: data type of the computation, in which most states are kept.

        Raises:
            ModelLoadError: the heads cannot be divided evenly among the ranks, or pages of this type are not supported.
        """
        if dtype == FP8 and self.is_latent:
            raise ModelLoadError(
                f"engine.kv_dtype fp8 is not supported for models of type {self.config.model_type!r}: pages of 8-bit "
                "floats have no scale, and this model keeps compressed K and V; set it to auto"
            )
        groups: dict[AttentionLayer, list[int]] = {}
        is_divided = self.division is Division.HEADS
        for index, layer in self.layers.items():
            self._require_even(layer, num_ranks)
            if layer.source is None:
                groups.setdefault(layer, []).append(index)
        scale = INT8_SCALE_BYTES if dtype == INT8 else 0
        reads = tuple((index, layer.source) for index, layer in self.layers.items() if layer.source is not None)
        if not groups:  # blocks of no bytes, which name prefixes
            groups = {AttentionLayer(num_heads=1, num_kv_heads=1, k_dim=1, v_dim=1): []}
        found = [
            LayerGroup(
                name="all" if len(groups) == 1 else _name_of(layer),
                layers=tuple(indices),
                block_size=block_size,
                num_kv_heads=layer.num_kv_heads // (num_ranks if is_divided else 1),
                k_dim=layer.k_dim + scale,
                v_dim=layer.v_dim + scale,
                dtype=dtype,
                window=layer.window,
                is_replicated=num_ranks > 1 and not is_divided,
            )
            for layer, indices in groups.items()
        ]
        states = [StateSpec(each.name, (len(each.places), *each.shape), each.dtype or computed) for each in self.states]
        return KVSpec(tuple(found), tuple(states), reads)

    def require_divisible(self, num_ranks: int, *, by_experts: bool) -> None:
        """Require that transformers can divide the model among several ranks.

        Args:
            by_experts: whether each rank is to have whole experts.

        Raises:
            ModelLoadError: it cannot; the message says what to set.
        """
        if num_ranks == 1:
            return
        kind = self.config.model_type
        if by_experts and not self.has_expert_plan:
            raise ModelLoadError(
                f"transformers cannot divide the experts of a model of type {kind!r} among ranks; unset "
                "engine.expert_parallel"
            )
        if not by_experts and not self.has_rank_plan:
            other = ", or engine.expert_parallel to true" if self.has_expert_plan else ""
            raise ModelLoadError(
                f"transformers has no plan to divide a model of type {kind!r} among ranks; set engine.tensor_parallel "
                f"to 1{other}"
            )
        if by_experts and self.num_experts % num_ranks:
            raise ModelLoadError(
                f"engine.tensor_parallel is {num_ranks}, which does not divide the model's {self.num_experts} experts; "
                "set it to a divisor, or unset engine.expert_parallel"
            )

    def _require_even(self, layer: AttentionLayer, num_ranks: int) -> None:
        heads = {Division.HEADS: (layer.num_heads, layer.num_kv_heads), Division.QUERIES: (layer.num_heads,)}
        if any(number % num_ranks for number in heads.get(self.division, ())):
            raise ModelLoadError(
                f"engine.tensor_parallel is {num_ranks}, which does not divide the model's {layer.num_heads} heads "
                f"and {layer.num_kv_heads} KV heads"
            )

    def without_windows(self) -> ModelShape:
        """Return the shape whose layers keep the KV of all tokens, however far their attention looks back."""
        return replace(self, layers={index: replace(layer, window=0) for index, layer in self.layers.items()})

    def sharing(self, spec: KVSpec) -> tuple[int, ...]:
        """Return the number of query heads per KV head in each group of the layout."""
        firsts = [self.layers[group.layers[0]] if group.layers else None for group in spec.groups]
        return tuple(1 if layer is None else layer.num_heads // layer.num_kv_heads for layer in firsts)


def _name_of(layer: AttentionLayer) -> str:
    heads = f"{layer.num_kv_heads}x{layer.k_dim}+{layer.v_dim}"
    return f"{heads} window {layer.window}" if layer.window else heads


def ropes_of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each rotary embedding: one for the model, or one for each type of layer, or none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        yield from (value for value in parameters.values() if isinstance(value, dict))
    elif parameters:
        yield parameters


def longest_sequence(config: Any, asked: int) -> int:
    """Return the maximum sequence length: `asked`, or the model's if that is 0, limited by its position embeddings.

    For `longrope` (Ding et al., 2024) and `dynamic`, transformers chooses the frequencies once per forward pass, by the
    highest position in it. A forward pass here contains many sequences, and cached K keeps its rotation. So sequences
    are limited to the length up to which the frequencies do not change: `longrope` then uses its short factors, and
    `dynamic` is plain RoPE. A model without RoPE may have a table of positions, which ends.

    Raises:
        ModelLoadError: sequences of this length are not supported, or the model has no limit and none is set.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    if not (asked or most):
        raise ModelLoadError("config.json has no max_position_embeddings; set engine.max_model_len")
    ropes = list(ropes_of(config))
    kinds = {str(rope.get("rope_type")) for rope in ropes}
    is_limited = not ropes or "dynamic" in kinds
    if most and asked > most and is_limited:
        why = "with RoPE of type dynamic this model" if ropes else "this model has no rotary embedding and"
        raise ModelLoadError(
            f"engine.max_model_len is {asked}, but {why} is computed up to its max_position_embeddings only; "
            f"set it to {most} at most"
        )
    short = [int(rope["original_max_position_embeddings"]) for rope in ropes if rope.get("rope_type") == "longrope"]
    return min([asked or most or 0, *short])


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


def of_text(config: Any, attention: str) -> str | dict[str, str]:
    """Return the argument by which transformers gives an attention to the text part of a model only."""
    text = config.get_text_config(decoder=True)
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {names[0]: attention} if names else attention
