"""Description of a model for `step.c`, made from a transformers configuration and the names of its weights.

If a configuration key, a value or a weight is not known here, the model runs on transformers. A further type whose
steps need no new code is one more entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from baton.errors import NotNative
from engine.model.shapes import AttentionLayer, ModelShape

WITHOUT_MEANING = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "embedding_dropout", "eos_token_id", "hidden_dropout",
    "id2label", "initializer_range", "is_encoder_decoder", "is_llama_config", "label2id", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys that do not affect a step."""
SEEN_BY_WEIGHTS = frozenset({
    "attention_bias", "attention_out_bias", "mlp_bias", "quantization_config", "tie_word_embeddings", "use_bias",
    "use_qkv_bias",
})  # fmt: skip
"""Keys whose meaning is visible in the loaded weights."""
SEEN_BY_TRANSFORMERS = frozenset({"max_position_embeddings", "original_max_position_embeddings", "rope_parameters"})
"""Keys from which transformers' own functions compute the rotary table."""
SIZES = frozenset({
    "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "vocab_size",
})  # fmt: skip
READ_OF_ALL_TYPES = frozenset({
    "attention_chunk_size", "fusion_config", "is_causal", "kv_sharing_modes", "mtp_layer_types",
    "partial_rotary_factor", "rope_scaling", "rope_theta", "use_bidirectional_attention",
})  # fmt: skip
"""Keys that transformers' shared functions read, even if a type does not declare them (masking_utils.py, 5.23)."""
KNOWN = WITHOUT_MEANING | SEEN_BY_WEIGHTS | SEEN_BY_TRANSFORMERS | SIZES | {"hidden_act"}
"""Keys that all types may have."""
WINDOWS = frozenset({"layer_types", "sliding_window", "use_sliding_window"})
EXPERTS = frozenset({"num_experts", "num_experts_per_tok", "num_local_experts"})
MULTIPLE = 16
"""Factor of which widths of heads must be multiples; that of the residual must be a multiple of twice as much."""


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    RELU_SQUARED = 2


ACTIVATIONS = {
    "silu": Activation.SILU, "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH, "relu2": Activation.RELU_SQUARED,
}  # fmt: skip


class NormKind(IntEnum):
    """Divisor of a norm; the norm by variance subtracts the mean first."""

    BY_SQUARES = 0
    BY_VARIANCE = 1


class QKNorm(IntEnum):
    """Normalization of queries and keys before their rotation."""

    PLAIN = 0
    BY_HEAD = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Differences of a model type from Llama."""

    keys: frozenset[str] = frozenset()
    """Configuration keys of this type, in addition to those that all types have."""
    fixed: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """Further keys, with the values for which this description is valid."""
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
    )
    """Norms of a layer by their place; each has a field of that name in `step.c`."""
    norm_kind: NormKind = NormKind.BY_SQUARES
    norm_parts: Collection[str] = ("weight",)
    """Names of a norm's weights."""
    norm_offset: float = 0.0
    """Value that is added to the weights of norms."""
    eps: str | float = "rms_norm_eps"
    """Value that norms add before they divide, or the configuration key that contains it."""
    qk_norm: QKNorm = QKNorm.PLAIN
    scales_embedding: bool = False
    """True if embeddings are multiplied by the square root of their width."""
    rotates_neighbours: bool = False
    """True if dimension 2 j is rotated with 2 j + 1, in place of j with j + half."""
    rotates_in_windows: bool = False
    """Whether, in a model with a window, only the layers with a window are rotated."""
    is_parallel: bool = False
    """True if the MLP has the same input as attention."""
    perceptron: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of the MLP's matrices, with the projection back to the residual last; without a gate there are two."""
    has_experts: bool = False

    @property
    def is_gated(self) -> bool:
        return len(self.perceptron) == 3


POST_NORMS = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
FOUR_NORMS = {
    "before_attention": "input_layernorm", "after_attention": "post_self_attn_layernorm",
    "before_mlp": "post_attention_layernorm", "after_mlp": "post_mlp_layernorm",
}  # fmt: skip
MULTIPLIERS = frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"})
BY_VARIANCE, BOTH = NormKind.BY_VARIANCE, ("weight", "bias")
FAMILIES = {
    "arcee": ModelFamily(perceptron=("up_proj", "down_proj")),
    "cohere": ModelFamily(
        keys=frozenset({"logit_scale"}), fixed={"use_qk_norm": (False,)}, norms={"before_attention": "input_layernorm"},
        norm_kind=BY_VARIANCE, eps="layer_norm_eps", rotates_neighbours=True, is_parallel=True,
    ),
    "cohere2": ModelFamily(
        keys=WINDOWS | {"logit_scale"}, norms={"before_attention": "input_layernorm"}, norm_kind=BY_VARIANCE,
        eps="layer_norm_eps", rotates_neighbours=True, rotates_in_windows=True, is_parallel=True,
    ),
    "cwm": ModelFamily(keys=WINDOWS),
    "ernie4_5": ModelFamily(rotates_neighbours=True),
    "exaone4": ModelFamily(
        keys=WINDOWS | {"sliding_window_pattern"}, norms=POST_NORMS, qk_norm=QKNorm.BY_HEAD, rotates_in_windows=True,
    ),
    "flex_olmo": ModelFamily(
        keys=EXPERTS | {"norm_topk_prob"}, norms=POST_NORMS, qk_norm=QKNorm.WHOLE, has_experts=True,
    ),
    "gemma": ModelFamily(
        fixed={"use_bidirectional_attention": (None, False)}, norm_offset=1.0, scales_embedding=True,
    ),
    "glm": ModelFamily(rotates_neighbours=True),
    "glm4": ModelFamily(norms=FOUR_NORMS, rotates_neighbours=True),
    "granite": ModelFamily(keys=MULTIPLIERS),
    "helium": ModelFamily(rotates_neighbours=True),
    "jais2": ModelFamily(
        norm_kind=BY_VARIANCE, norm_parts=BOTH, eps="layer_norm_eps", perceptron=("up_proj", "down_proj"),
    ),
    "llama": ModelFamily(fixed={"rope_interleaved": (False,)}),
    "ministral": ModelFamily(keys=WINDOWS),
    "mistral": ModelFamily(keys=WINDOWS),
    "mixtral": ModelFamily(keys=WINDOWS | EXPERTS, has_experts=True),
    "nemotron": ModelFamily(
        norm_kind=BY_VARIANCE, norm_parts=BOTH, norm_offset=1.0, eps="norm_eps", perceptron=("up_proj", "down_proj"),
    ),
    "olmo": ModelFamily(keys=frozenset({"clip_qkv"}), norm_kind=BY_VARIANCE, norm_parts=(), eps=1e-5),
    "olmo2": ModelFamily(norms=POST_NORMS, qk_norm=QKNorm.WHOLE),
    "olmoe": ModelFamily(keys=EXPERTS | {"clip_qkv", "norm_topk_prob"}, qk_norm=QKNorm.WHOLE, has_experts=True),
    "phi3": ModelFamily(keys=WINDOWS),
    "qwen2": ModelFamily(keys=WINDOWS),
    "qwen3": ModelFamily(keys=WINDOWS, qk_norm=QKNorm.BY_HEAD),
    "qwen3_moe": ModelFamily(
        keys=WINDOWS | EXPERTS | {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"},
        qk_norm=QKNorm.BY_HEAD, has_experts=True,
    ),
    "seed_oss": ModelFamily(),
    "smollm3": ModelFamily(
        keys=WINDOWS | {"no_rope_layer_interval", "no_rope_layers"},
    ),
    "stablelm": ModelFamily(
        fixed={"qk_layernorm": (False,), "use_parallel_residual": (False,)},
        norm_kind=BY_VARIANCE, norm_parts=BOTH, eps="layer_norm_eps",
    ),
    "starcoder2": ModelFamily(
        keys=WINDOWS, norm_kind=BY_VARIANCE, norm_parts=BOTH, eps="norm_epsilon", perceptron=("c_fc", "c_proj"),
    ),
}  # fmt: skip
"""Model types that are computed natively; each is compared with `generate` by a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """MLPs of which a router chooses some for each token."""

    count: int
    chosen: int
    inner: int
    """Width between an expert's two matrices."""
    normalized: bool
    """True if the weights of the chosen experts are normalized to sum to 1."""
    layers: frozenset[int]
    """Layers with experts; the others have an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model as `step.c` sees it."""

    family: ModelFamily
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    activation: Activation
    eps: float
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logits_divisor: float
    windows: tuple[int, ...]
    """Tokens that a token sees, including itself, in each layer; 0: all."""
    rotates: tuple[bool, ...]
    """True if queries and keys are rotated, in each layer."""
    clip: float
    """Largest magnitude of queries, keys and values; 0: no limit."""
    experts: Experts | None

    def shape(self, config: Any) -> ModelShape:
        """Return the attention of its layers; `config` is the one that it describes."""
        layer = AttentionLayer(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, k_dim=self.head_dim, v_dim=self.head_dim
        )
        return ModelShape(config=config, layers=dict.fromkeys(range(self.num_layers), layer))


def describe(config: Any) -> ModelDescription:
    """Return the description of a transformers configuration.

    Raises:
        NotNative: the model type, or a property of the model, is not supported; the message names it.
    """
    kind = config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise NotNative(f"models of type {kind!r} are not among {', '.join(FAMILIES)}")
    _require_known(config, family)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    windows = _windows(config)
    description = ModelDescription(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab_size=config.vocab_size,
        activation=ACTIVATIONS[config.hidden_act],
        eps=getattr(config, family.eps) if isinstance(family.eps, str) else family.eps,
        embedding_scale=config.hidden_size**0.5
        if family.scales_embedding
        else getattr(config, "embedding_multiplier", 1.0),
        attention_scale=getattr(config, "attention_multiplier", head_dim**-0.5),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logits_divisor=getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0),
        windows=windows,
        rotates=_rotates(config, family, windows),
        clip=getattr(config, "clip_qkv", None) or 0.0,
        experts=_experts(config) if family.has_experts else None,
    )
    if head_dim % MULTIPLE or description.hidden % (2 * MULTIPLE):
        raise NotNative(f"heads of {head_dim} or a residual of {description.hidden} are no multiples of {MULTIPLE}")
    return description


def read_keys(config: Any) -> set[str]:
    """Return the keys of a configuration that transformers may read.

    Other keys, such as those left by a training program, have no effect.
    """
    keys = set(config.to_dict())
    if not hasattr(config, "from_dict"):  # it comes from the cache, which has only these keys
        return keys
    named = (each.keys | set(each.fixed) | {str(each.eps)} for each in FAMILIES.values())
    return keys & KNOWN.union(READ_OF_ALL_TYPES, type(config)().to_dict(), *named)


def _require_known(config: Any, family: ModelFamily) -> None:
    """Raise NotNative unless every key that transformers may read is known and fixed keys have a supported value."""
    values = config.to_dict()
    if unknown := sorted(map(str, read_keys(config) - KNOWN - family.keys - {family.eps} - set(family.fixed))):
        raise NotNative(f"config.json has {', '.join(unknown[:3])}, which the native step does not support")
    for key, allowed in family.fixed.items():
        if key in values and values[key] not in allowed:
            raise NotNative(f"config.json has {key} {values[key]!r}, which the native step does not support")
    if config.hidden_act not in ACTIVATIONS:
        raise NotNative(f"the activation {config.hidden_act!r} is not among {', '.join(ACTIVATIONS)}")


def _windows(config: Any) -> tuple[int, ...]:
    window: int = getattr(config, "sliding_window", None) or 0
    if (types := getattr(config, "layer_types", None)) is None:
        return tuple([window] * config.num_hidden_layers)
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise NotNative(f"layers of type {unknown[0]!r} are not supported by the native step")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rotates(config: Any, family: ModelFamily, windows: Collection[int]) -> tuple[bool, ...]:
    if family.rotates_in_windows and config.sliding_window is not None:
        return tuple(window > 0 for window in windows)
    return tuple(bool(one) for one in getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers)


def _experts(config: Any) -> Experts:
    count: int = getattr(config, "num_local_experts", None) or config.num_experts
    chosen: int = config.num_experts_per_tok
    every: int = getattr(config, "decoder_sparse_step", 1)
    if not 1 <= chosen <= count or every < 1:
        raise NotNative(f"the native step cannot choose {chosen} of {count} experts in each layer of {every}")
    without = getattr(config, "mlp_only_layers", None) or ()
    layers = (layer for layer in range(config.num_hidden_layers) if layer not in without and (layer + 1) % every == 0)
    return Experts(
        count=count,
        chosen=chosen,
        inner=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        normalized=getattr(config, "norm_topk_prob", True),
        layers=frozenset(layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Names of one layer's weights, by the field of `step.c`."""

    norms: Mapping[str, str]
    matrices: Mapping[str, tuple[str, ...]]
    """Names of the parts of each matrix, which are stacked along the outputs."""
    experts: Mapping[str, str]
    """Matrices of all experts, `[experts, outputs, inputs]`."""


def layer_names(description: ModelDescription, layer: int, names: Collection[str]) -> LayerNames:
    """Return the names of a layer's weights.

    Args:
        names: names of all weights of the model.

    Raises:
        NotNative: the layer has a weight that the native step does not use.
    """
    begin = f"model.layers.{layer}."
    family = description.family
    norms = {place: f"{begin}{name}" for place, name in family.norms.items()}
    if family.qk_norm is not QKNorm.PLAIN:
        norms |= {which: f"{begin}self_attn.{which[0]}_norm" for which in ("query", "key")}
    attention, perceptron = f"{begin}self_attn.", f"{begin}mlp."
    is_split = f"{attention}q_proj.weight" in names
    matrices = {
        "qkv": tuple(f"{attention}{which}_proj" for which in (("q", "k", "v") if is_split else ("qkv",))),
        "out": (f"{attention}o_proj",),
    }
    experts = {}
    if description.experts is not None and layer in description.experts.layers:
        matrices |= {"router": (f"{perceptron}gate",)}
        experts = {place: f"{perceptron}experts.{place}_proj" for place in ("gate_up", "down")}
    else:
        *inner, outer = family.perceptron
        is_fused = f"{perceptron}gate_up_proj.weight" in names
        matrices |= {
            "gate_up": tuple(f"{perceptron}{name}" for name in (["gate_up_proj"] if is_fused else inner)),
            "down": (f"{perceptron}{outer}",),
        }
    found = LayerNames(norms=norms, matrices=matrices, experts=experts)
    parts = [part for several in matrices.values() for part in several]
    needed = {*experts.values(), *(f"{part}.weight" for part in parts)}
    needed |= {f"{norm}.{part}" for norm in norms.values() for part in family.norm_parts}
    if missing := sorted(needed.difference(names)):
        raise NotNative(f"the model has no {missing[0]}")
    known = needed | {f"{part}.bias" for part in parts}
    if unknown := sorted({name for name in names if name.startswith(begin)} - known):
        raise NotNative(f"the model has {unknown[0]}, which the native step does not support")
    return found


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm", "lm_head"


def require_all_known(description: ModelDescription, names: Collection[str]) -> None:
    """Check the names of the weights outside the layers.

    Raises:
        NotNative: the native step does not use one, or one is missing.
    """
    outside = {name for name in names if not name.startswith("model.layers.")}
    known = {EMBEDDING, f"{HEAD}.weight", *(f"{NORM}.{part}" for part in description.family.norm_parts)}
    if unknown := sorted(outside - known - {f"{HEAD}.bias"}):
        raise NotNative(f"the model has {unknown[0]}, which the native step does not support")
    if missing := sorted(known - outside):
        raise NotNative(f"the model has no {missing[0]}")
