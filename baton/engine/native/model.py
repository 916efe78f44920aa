"""A loaded transformers model, packed for `step.c`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from baton.engine.model.kv_cache import KVCache
from baton.engine.native.layout import PANEL, LayerStruct, MatrixStruct, ModelStruct
from baton.engine.native.spec import EMBEDDING, HEAD, NORM, ModelDescription, layer_names, require_all_known
from baton.engine.native.weights import PackedMatrix, embedding_rows, pack
from baton.errors import NotNative


class PackedModel:
    """The weights, norms and rotary table of a model.

    The loaded model gives up its weights layer by layer, so that they are never there twice; it computes nothing more.

    Args:
        loaded: transformers' model, in float32 on a CPU.
        cache: the KV cache of its steps.
        max_len: tokens of the longest sequence.

    Raises:
        NotNative: the model has a weight that has no place in a step, or rotates in another way.
    """

    def __init__(self, description: ModelDescription, loaded: Any, cache: KVCache, max_len: int) -> None:
        self.description = description
        self._cache, self._max_len = cache, max_len
        weights = dict(loaded.named_parameters(remove_duplicate=False))
        require_all_known(weights)
        names = [layer_names(description, layer, weights) for layer in range(description.num_layers)]
        in_layers = [name for name in weights if name.startswith("model.layers.")]
        if beyond := [name for name in in_layers if int(name.split(".")[2]) >= description.num_layers]:
            raise NotNative(f"the model has {beyond[0]}, which the native step does not know")
        self._cos, self._sin = _rotary_table(loaded, max_len)
        self._head = pack([weights[f"{HEAD}.weight"]], [weights.get(f"{HEAD}.bias")])
        self._embedding = embedding_rows(weights[EMBEDDING])
        self._norms = {"": self._norm(weights[NORM])}
        self._matrices: list[dict[str, PackedMatrix]] = []
        self._layer_norms: list[dict[str, torch.Tensor]] = []
        for one in names:
            packed = {}
            for place, parts in (
                ("qkv", one.qkv),
                ("out", (one.out,)),
                ("gate_up", one.gate_up),
                ("down", (one.down,)),
            ):
                given = [weights[f"{part}.weight"] for part in parts]
                biases = [weights.get(f"{part}.bias") for part in parts]
                if place == "gate_up" and len(parts) == 1:  # one below the other
                    given = list(given[0].chunk(2))
                    biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
                packed[place] = pack(given, biases, apart=place == "gate_up")
                for part in parts:
                    weights[f"{part}.weight"].data = torch.empty(0)
            self._matrices.append(packed)
            self._layer_norms.append({place: self._norm(weights[name]) for place, name in one.norms.items()})

    @property
    def num_logits(self) -> int:
        """Logits of a row in memory: those of the vocabulary, and what fills the last panel."""
        return -(-self._head.num_outputs // PANEL) * PANEL

    def describe_memory(self) -> str:
        """Returns how much memory which form of weights takes, in words."""
        sizes = Counter[str]()
        for matrix in (self._head, *(one for layer in self._matrices for one in layer.values())):
            sizes[matrix.form.name] += matrix.num_bytes
        return ", ".join(f"{form} ({size / 2**20:.0f} MiB)" for form, size in sorted(sizes.items()))

    def struct(self, max_tokens: int, num_threads: int) -> ModelStruct:
        """Returns the structure of `step.c`. It is good while this model and its cache live.

        Args:
            max_tokens: most tokens of a step.
        """
        what, pages = self.description, self._cache.groups[0]
        self._layer_structs = (LayerStruct * what.num_layers)(*map(self._layer, range(what.num_layers)))
        self._head_struct = (MatrixStruct * 1)(self._head.struct())
        return ModelStruct(
            layers=what.num_layers,
            hidden=what.hidden,
            heads=what.num_heads,
            kv_heads=what.num_kv_heads,
            head_dim=what.head_dim,
            rotary_dim=2 * self._cos.shape[1],
            intermediate=what.intermediate,
            vocab=what.vocab_size,
            activation=what.activation,
            qk_norm=what.family.qk_norm,
            block_size=self._cache.spec.groups[0].block_size,
            blocks=self._cache.num_blocks,
            max_len=self._max_len,
            max_tokens=max_tokens,
            threads=num_threads,
            embedding_form=self._embedding.form,
            eps=what.eps,
            embedding_scale=what.embedding_scale,
            attention_scale=what.attention_scale,
            residual_scale=what.residual_scale,
            logits_divisor=what.logits_divisor,
            embedding=self._embedding.rows.data_ptr(),
            embedding_codes_scale=0 if self._embedding.scale is None else self._embedding.scale.data_ptr(),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            norm=self._norms[""].data_ptr(),
            layer=self._layer_structs,
            head=self._head_struct,
            kv=pages.data_ptr(),
            layer_stride=pages.stride(0),
        )

    def _layer(self, index: int) -> LayerStruct:
        norms = {place: norm.data_ptr() for place, norm in self._layer_norms[index].items()}
        matrices = {place: matrix.struct() for place, matrix in self._matrices[index].items()}
        what = self.description
        return LayerStruct(window=what.windows[index], rotates=what.rotates[index], **norms, **matrices)

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.detach().float() + self.description.family.norm_offset).contiguous()


@torch.inference_mode()
def _rotary_table(loaded: Any, max_len: int) -> Sequence[torch.Tensor]:
    """Returns cosines and sines, `[max_len, half of the rotated dimensions]`, as transformers computes them.

    Raises:
        NotNative: dimension j is not rotated with dimension j + half.
    """
    tables = loaded.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(max_len)[None])
    halves = []
    for table in tables:
        first, second = table[0].float().chunk(2, -1)
        if not torch.equal(first, second):
            raise NotNative("the model rotates other pairs of dimensions than the native step")
        halves.append(first.contiguous())
    return halves
