"""A loaded transformers model, packed for `step.c`."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baton.errors import NotNative
from engine.model.kv_cache import KVCache
from engine.native.layout import KV_FORMS, PANEL, ExpertsStruct, LayerStruct, MatrixStruct, ModelStruct
from engine.native.spec import (
    EMBEDDING,
    HEAD,
    NORM,
    Experts,
    LayerNames,
    ModelDescription,
    NormKind,
    layer_names,
    require_all_known,
)
from engine.native.weights import PackedLayer, PackedWeights, embedding_rows, pack


def pack_model(description: ModelDescription, loaded: Any, num_positions: int) -> PackedWeights:
    """Pack a model's weights, norms and rotary table.

    The loaded model gives up its weights layer by layer, so that they are never in memory twice; it cannot compute
    afterwards.

    Args:
        loaded: transformers' model, in float32 on a CPU.
        num_positions: length of the longest sequence, in tokens.

    Raises:
        NotNative: the model has a weight that the native step does not use, or another kind of rotation.
    """
    weights = dict(loaded.named_parameters(remove_duplicate=False))
    require_all_known(description, weights)
    names = [layer_names(description, layer, weights) for layer in range(description.num_layers)]
    in_layers = [name for name in weights if name.startswith("model.layers.")]
    if beyond := [name for name in in_layers if int(name.split(".")[2]) >= description.num_layers]:
        raise NotNative(f"the model has {beyond[0]}, which the native step does not support")
    cos, sin = _rotary_table(loaded, num_positions, description.family.rotates_neighbours)
    return PackedWeights(
        cos=cos,
        sin=sin,
        embedding=embedding_rows(weights[EMBEDDING]),
        norm=_norm(description, weights, NORM),
        head=pack([weights[f"{HEAD}.weight"]], [weights.get(f"{HEAD}.bias")]),
        layers=[_pack_layer(description, one, weights) for one in names],
    )


def _pack_layer(
    description: ModelDescription, names: LayerNames, weights: Mapping[str, torch.nn.Parameter]
) -> PackedLayer:
    packed = {}
    for place, parts in names.matrices.items():
        given: list[torch.Tensor] = [weights[f"{part}.weight"] for part in parts]
        biases: list[torch.Tensor | None] = [weights.get(f"{part}.bias") for part in parts]
        if place == "gate_up" and description.family.is_gated and len(parts) == 1:  # one below the other
            given = list(given[0].chunk(2))
            biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
        packed[place] = pack(given, biases, apart=place == "gate_up")
        for part in parts:
            weights[f"{part}.weight"].data = torch.empty(0)
    for place, name in names.experts.items():
        for index, weight in enumerate(weights[name]):
            parts_of_one = list(weight.chunk(2)) if place == "gate_up" else [weight]
            packed[f"{place} {index}"] = pack(parts_of_one, [None] * len(parts_of_one), apart=True)
        weights[name].data = torch.empty(0)
    return PackedLayer({place: _norm(description, weights, name) for place, name in names.norms.items()}, packed)


def _norm(description: ModelDescription, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a norm's weights, followed by its bias if it is a norm by variance."""
    family, width = description.family, description.hidden
    weight = weights.get(f"{name}.weight", torch.ones(width)).detach().float() + family.norm_offset
    if family.norm_kind is NormKind.BY_VARIANCE:
        weight = torch.cat([weight, weights.get(f"{name}.bias", torch.zeros(width)).detach().float()])
    return weight.contiguous()


class PackedModel:
    """A model in the form that `step.c` computes.

    Args:
        cache: KV cache of its steps.
        max_len: length of the longest sequence, in tokens.
    """

    def __init__(self, description: ModelDescription, weights: PackedWeights, cache: KVCache, max_len: int) -> None:
        self.description = description
        self._weights, self._cache, self._max_len = weights, cache, max_len

    @property
    def num_logits(self) -> int:
        """Logits per row in memory: those of the vocabulary, padded to a full panel."""
        return -(-self._weights.head.num_outputs // PANEL) * PANEL

    def describe_memory(self) -> str:
        """Return a text with the memory use of each weight format."""
        sizes = Counter[str]()
        for matrix in self._weights.matrices:
            sizes[matrix.form.name] += matrix.num_bytes
        return ", ".join(f"{form} ({size / 2**20:.0f} MiB)" for form, size in sorted(sizes.items()))

    def struct(self, max_tokens: int, num_threads: int) -> ModelStruct:
        """Return the structure for `step.c`. It is valid while this model and its cache live.

        Args:
            max_tokens: maximum number of tokens in a step.
        """
        what, pages = self.description, self._cache.groups[0]
        self._experts: list[ctypes.Array[Any]] = []
        self._layer_structs = (LayerStruct * what.num_layers)(*map(self._layer, range(what.num_layers)))
        self._head_struct = (MatrixStruct * 1)(self._weights.head.struct())
        return ModelStruct(
            layers=what.num_layers,
            hidden=what.hidden,
            heads=what.num_heads,
            kv_heads=what.num_kv_heads,
            head_dim=what.head_dim,
            rotary_dim=2 * self._weights.cos.shape[1],
            intermediate=what.intermediate,
            vocab=what.vocab_size,
            activation=what.activation,
            qk_norm=what.family.qk_norm,
            norm_kind=what.family.norm_kind,
            rotates_neighbours=what.family.rotates_neighbours,
            gated=what.family.is_gated,
            parallel=what.family.is_parallel,
            kv_form=KV_FORMS[self._cache.spec.groups[0].dtype],
            block_size=self._cache.spec.groups[0].block_size,
            blocks=self._cache.num_blocks,
            max_len=self._max_len,
            max_tokens=max_tokens,
            threads=num_threads,
            embedding_form=self._weights.embedding.form,
            eps=what.eps,
            embedding_scale=what.embedding_scale,
            attention_scale=what.attention_scale,
            residual_scale=what.residual_scale,
            logits_divisor=what.logits_divisor,
            clip=what.clip,
            embedding=self._weights.embedding.rows.data_ptr(),
            embedding_codes_scale=0
            if self._weights.embedding.scale is None
            else self._weights.embedding.scale.data_ptr(),
            cos=self._weights.cos.data_ptr(),
            sin=self._weights.sin.data_ptr(),
            norm=self._weights.norm.data_ptr(),
            layer=self._layer_structs,
            head=self._head_struct,
            kv=pages.data_ptr(),
            layer_stride=pages.stride(0) * pages.itemsize,
        )

    def _layer(self, index: int) -> LayerStruct:
        norms = {place: norm.data_ptr() for place, norm in self._weights.layers[index].norms.items()}
        matrices = {place: matrix.struct() for place, matrix in self._weights.layers[index].matrices.items()}
        what = self.description
        layer = LayerStruct(window=what.windows[index], rotates=what.rotates[index], **norms)
        for place in ("qkv", "out", "gate_up", "down"):
            if place in matrices:
                setattr(layer, place, matrices[place])
        if what.experts is not None and "router" in matrices:
            layer.experts = self._layer_experts(what.experts, matrices)
        return layer

    def _layer_experts(self, experts: Experts, matrices: Mapping[str, MatrixStruct]) -> ctypes.Array[Any]:
        of_each = [
            (MatrixStruct * experts.count)(*(matrices[f"{place} {index}"] for index in range(experts.count)))
            for place in ("gate_up", "down")
        ]
        found = ExpertsStruct(
            experts.count, experts.chosen, experts.inner, experts.normalized, matrices["router"], *of_each
        )
        self._experts.append((ExpertsStruct * 1)(found))
        return self._experts[-1]


@torch.inference_mode()
def _rotary_table(loaded: Any, num_positions: int, rotates_neighbours: bool) -> Sequence[torch.Tensor]:
    """Return cosines and sines, `[num_positions, half of the rotated dimensions]`, as transformers computes them.

    Raises:
        NotNative: two dimensions that are rotated together have different values.
    """
    tables = loaded.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(num_positions)[None])
    halves = []
    for table in tables:
        rows = table[0].float()
        first, second = rows.chunk(2, -1)
        if rotates_neighbours and not torch.equal(first, second):  # no computation shows which of the two is used
            first, second = rows[:, ::2], rows[:, 1::2]
        if not torch.equal(first, second):
            raise NotNative("the model rotates other pairs of dimensions than the native step")
        halves.append(first.contiguous())
    return halves
