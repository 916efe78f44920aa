"""Asks a model what its layers keep and what its attention needs, in place of a list of types.

The model is made without weights, on torch's meta device, and computes three tokens through transformers' own cache and
an attention function that only takes notes. So a model of any size answers within seconds:

    the cache      heads and widths of the KV that each layer keeps, its window, recurrent states
    the function   heads of queries, and every further argument that attention must honour
    both together  latents that a layer expands behind its cache, layers that read another layer's KV

A model cannot be computed on meta if its code branches on values, such as the chosen experts. It is then computed on
the CPU, with weights that are zeros and take no memory. Products with them are zeros without being computed.

Whatever Baton does not compute is refused by a sentence that names it. This is the first of the checks that prevent
wrong tokens; `self_check` is the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import CAUSAL
from engine.model.attention import unknown_terms
from engine.model.latent import EXPAND
from engine.model.recurrent import cache_argument
from engine.model.shapes import FIXED_LENGTH, AttentionLayer, Division, KeptStates, ModelShape, ropes_of

NUM_TOKENS = 3
ASKED_IN = torch.bfloat16
"""Data type in which the model computes. A state that has another type here has it whatever the model computes in."""
NOTES = "baton_asking"
"""Name of the attention function that takes notes."""
KEYS, EXPANDING, BY_HEAD = "layers.*.self_attn.k_proj", ".kv_b_proj", "colwise"
"""Name in a tensor-parallel plan that determines the split of the key projection, and the split by head."""
ROPE_KINDS = frozenset({"default", *ROPE_INIT_FUNCTIONS})
"""Rotary embeddings that transformers computes from a configuration; `longest_sequence` limits their length."""
AUTO_CLASSES = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
)
"""Transformers' classes of models that continue text, in the order in which a type is looked for."""
INDEXER = "indexer_keys"
"""Attribute of cache layers whose attention chooses the tokens that it sees (DeepSeek V3.2)."""
LONG = "original_max_position_embeddings"
DENOISES, ENCODER = "DiffusionGemmaForBlockDiffusion", "model.encoder.language_model"
"""Transformers' class of models that denoise a canvas, and the name of its encoder."""
CANVAS = "canvas_length"
"""Field of the configuration of models that denoise a canvas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Notes on one layer's call of attention."""

    num_heads: int
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None
    honours: frozenset[str]


@dataclass(slots=True)
class _Notes:
    calls: dict[int, _Call] = field(default_factory=dict)
    modules: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model's answers.

    Attributes:
        model_class: transformers' class of the model.
        shape: attention of its layers.
        num_parameters: numbers in its weights, tied ones counted once per use.
        unused: names of submodules that a text does not pass through, such as those for images.
    """

    model_class: type[Any]
    shape: ModelShape
    num_parameters: int
    unused: tuple[str, ...] = ()


_NOTES: ContextVar[_Notes] = ContextVar("notes")


def ask(config: Any, *, sees: bool = False) -> AskedModel:
    """Ask the model that a transformers configuration describes.

    Args:
        sees: whether the class must be the one with the encoder for images, if there is a choice.

    Raises:
        ModelLoadError: it is not a model that continues text, or its attention is not supported; the message says what
            is missing.
    """
    if config.is_encoder_decoder is True:
        return _ask_decoder(config)
    if hasattr(config, CANVAS):
        return _ask_diffusion(config)
    text = config.get_text_config(decoder=True)
    require_known_rope(text)
    auto_class = _auto_class(config, sees=sees)
    try:
        with torch.device("meta"):
            model = auto_class.from_config(
                _without_positions(config), attn_implementation=NOTES, dtype=ASKED_IN, trust_remote_code=False
            ).eval()
    except KeyError as error:
        if error.args != (NOTES,):
            raise ModelLoadError(f"transformers cannot make the model of config.json: {in_one_line(error)}") from error
        raise ModelLoadError(
            f"models of type {config.model_type!r} have attention of their own, past transformers' attention functions"
        ) from error
    except Exception as error:  # the model's own code
        raise ModelLoadError(f"transformers cannot make the model of config.json: {in_one_line(error)}") from error
    notes, cache, called = _asked(model, config)
    layers = _layers(text, notes, cache)
    is_latent = any(layer.is_latent for layer in layers.values())
    shape = ModelShape(
        config=text,
        layers=layers,
        division=_division(text.base_model_tp_plan or {}, is_latent=is_latent),
        has_rank_plan=bool(text.base_model_tp_plan),
        has_expert_plan=bool(getattr(text, "base_model_ep_plan", None)),
        honours=frozenset(name for call in notes.calls.values() for name in call.honours),
        states=tuple(_states(cache)),
    )
    if not (layers or shape.states):
        raise ModelLoadError("no layer of the model keeps anything in transformers' cache, which is not supported")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return AskedModel(type(model), shape, num_parameters, tuple(_unused(model, called)))


def _ask_decoder(config: Any) -> AskedModel:
    """Ask a model with an encoder for the prompt and a decoder for the answer; see `ask`."""
    kind = config.model_type
    if kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise ModelLoadError(f"models of type {kind!r} have an encoder, whose input is not text alone")
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForSeq2SeqLM.from_config(
                config, attn_implementation="eager", dtype=ASKED_IN, trust_remote_code=False
            ).eval()
            model(input_ids=tokens, decoder_input_ids=tokens, past_key_values=cache, use_cache=True)
    except Exception as error:  # the model's own code
        raise ModelLoadError(f"transformers cannot run the model of config.json: {in_one_line(error)}") from error
    both = (*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers)
    shapes = {(*layer.keys.shape[1::2], *layer.values.shape[3:]) for layer in both}
    if len(shapes) != 1 or any(layer.keys.shape[2] != NUM_TOKENS for layer in both):
        raise ModelLoadError(
            f"models of type {kind!r} are not supported: their decoder's layers keep K and V of different shapes"
        )
    ((num_heads, k_dim, v_dim),) = shapes
    layer = AttentionLayer(num_heads=num_heads, num_kv_heads=num_heads, k_dim=k_dim, v_dim=v_dim)
    layers = dict.fromkeys(range(len(cache.self_attention_cache.layers)), layer)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return AskedModel(
        type(model), ModelShape(config=config.get_text_config(decoder=True), layers=layers), num_parameters
    )


def _ask_diffusion(config: Any) -> AskedModel:
    """Ask a model whose encoder reads the text and whose decoder denoises a canvas; see `ask`.

    The encoder's layers are asked. The decoder has the same ones and keeps nothing.
    """
    kind, length = config.model_type, getattr(config, CANVAS)
    if type(length) is not int or length < 1:
        raise ModelLoadError(f"config.json says {length!r:.40} as {CANVAS}; it must be a number of tokens")
    if config.architectures not in (None, [], [DENOISES]) or kind not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        raise ModelLoadError(f"models of type {kind!r} denoise a canvas, and only a {DENOISES} is supported")
    text = config.get_text_config(decoder=True)
    require_known_rope(text)
    try:
        with torch.device("meta"):
            model = AutoModelForMultimodalLM.from_config(
                config, attn_implementation=NOTES, dtype=ASKED_IN, trust_remote_code=False
            ).eval()
        encoder = model.get_submodule(ENCODER)
    except Exception as error:  # the model's own code
        raise ModelLoadError(f"transformers cannot make the model of config.json: {in_one_line(error)}") from error
    notes, cache, _ = _asked(encoder, text)
    layers = _layers(text, notes, cache)
    if any(layer.is_latent or layer.source is not None for layer in layers.values()) or any(
        call.honours for call in notes.calls.values()
    ):
        raise ModelLoadError(f"models of type {kind!r} are not supported: their attention has terms not known here")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    above, _, own = ENCODER.rpartition(".")
    unused = tuple(f"{above}.{name}" for name, _ in model.get_submodule(above).named_children() if name != own)
    return AskedModel(type(model), ModelShape(config=text, layers=layers), num_parameters, unused)


def divides_heads(plan: Mapping[str, str] | None) -> bool:
    """Return whether a tensor-parallel plan of transformers divides the heads of attention that keeps no latents."""
    return (plan or {}).get(KEYS) == BY_HEAD


def _division(plan: Mapping[str, str], *, is_latent: bool) -> Division:
    """Return what a tensor-parallel plan of transformers divides of the attention."""
    if not is_latent:
        return Division.HEADS if divides_heads(plan) else Division.NONE
    of_latents = (style for name, style in plan.items() if name.endswith(EXPANDING))
    return Division.QUERIES if next(of_latents, None) == BY_HEAD else Division.NONE


def _auto_class(config: Any, *, sees: bool = False) -> Any:
    """Return transformers' class for models of this type that continue text."""
    kind, architectures = config.model_type, list(config.architectures or [])
    found = [(auto_class, names[kind]) for auto_class, names in AUTO_CLASSES if kind in names]
    if not found:
        raise ModelLoadError(f"transformers has no model of type {kind!r} that continues a text token by token")
    known = {name for _, names in found for name in ([names] if isinstance(names, str) else names)}
    if architectures and not any(name in known or name.endswith(CAUSAL) for name in architectures):
        raise ModelLoadError(
            f"config.json describes a {architectures[0]}; the models of type {kind!r} that continue a text token by "
            f"token are {', '.join(sorted(known))}"
        )
    return found[1 if sees and len(found) > 1 and found[0][0] is AutoModelForCausalLM else 0][0]


def _asked(model: Any, config: Any) -> tuple[_Notes, DynamicCache, set[str]]:
    """Compute three tokens. Return the notes, the cache, and the names of all submodules that took part."""
    called = set[str]()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
    try:
        return *_computed(model, config, "meta"), called
    except ModelLoadError:
        raise
    except Exception:  # its code branches on values
        model._apply(_zeros)
    try:
        with _ZeroProducts():
            return *_computed(model, config, "cpu"), called
    except ModelLoadError:
        raise
    except Exception as error:  # the model's own code
        raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error


def _computed(model: Any, config: Any, device: str) -> tuple[_Notes, DynamicCache]:
    """Compute three tokens on the device of the weights. Return the notes and the cache."""
    notes, cache = _Notes(), _cache_of(config)
    _NOTES.set(notes)
    token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=device)
    with torch.inference_mode():
        model(input_ids=token_ids, use_cache=True, **{cache_argument(model): cache})
    return notes, cache


def _zeros(weight: torch.Tensor) -> torch.Tensor:
    """Return zeros on the CPU in the shape and data type of a tensor. All of them share one element of memory."""
    return torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)


class _ZeroProducts(TorchFunctionMode):
    """Replaces products with a matrix by zeros, without reading the matrix."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        if func in (torch.matmul, torch.Tensor.matmul) and args[1].dim() == 2:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[1])
        return func(*args, **(kwargs or {}))


def _without_positions(config: Any) -> Any:
    """Return a copy of a configuration whose rotary embeddings do not look at the positions: on meta there are none."""
    config = copy.deepcopy(config)
    for rope in ropes_of(config.get_text_config(decoder=True)):
        if rope.get("rope_type") in FIXED_LENGTH:
            rope["rope_type"] = "default"
    return config


def _cache_of(config: Any) -> DynamicCache:
    try:
        cache = DynamicCache(config=config)
    except Exception as error:  # of a type of layer that transformers does not know
        raise ModelLoadError(
            f"transformers has no cache for the layers of config.json: {in_one_line(error)}"
        ) from error
    if any(hasattr(layer, INDEXER) for layer in cache.layers):
        raise ModelLoadError("the model keeps keys of an indexer (sparse attention), which this version does not run")
    return cache


def _take_notes(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that notes its arguments and returns numbers without meaning."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelLoadError(f"a {type(module).__name__} attends without saying of which layer it is")
    if unknown := unknown_terms(kwargs):
        raise ModelLoadError(f"layer {layer} asks attention for {', '.join(unknown)}, which is not computed here")
    if attention_mask is not None:
        raise ModelLoadError(f"layer {layer} has a mask of its own, which is not computed here")
    is_causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise ModelLoadError(f"layer {layer} attends to later tokens, too: this model does not continue a text")
    notes, honours = _NOTES.get(), {"softcap": softcap, "s_aux": s_aux}
    if layer in notes.calls:
        raise ModelLoadError(f"layer {layer} attends twice, and its KV has one place")
    notes.modules[layer] = module
    notes.calls[layer] = _Call(
        num_heads=query.shape[1],
        keys=key,
        values=value,
        window=sliding_window,
        honours=frozenset(name for name, given in honours.items() if given is not None),
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(NOTES, _take_notes)


def _layers(text: Any, notes: _Notes, cache: DynamicCache) -> dict[int, AttentionLayer]:
    """Return the attention of each layer that has one, by the layer's index."""
    longest = getattr(text, "max_position_embeddings", None)
    found = ((index, _layer(index, notes, cache, longest)) for index in range(text.num_hidden_layers))
    return {index: layer for index, layer in found if layer is not None}


def _layer(index: int, notes: _Notes, cache: DynamicCache, longest: int | None) -> AttentionLayer | None:
    """Return the attention of one layer, if it is supported; None: it has none.

    Args:
        longest: the model's longest sequence; a window of as many tokens is none.
    """
    call = notes.calls.get(index)
    kept = cache.layers[index] if index < len(cache.layers) else None
    keys: torch.Tensor | None = getattr(kept, "keys", None)
    if call is None:
        if keys is None:
            return None
        raise ModelLoadError(
            f"layer {index} attends by itself, past the attention function, which this version does not run"
        )
    if keys is None or kept is None:
        return _reader(index, call, notes)
    values: torch.Tensor = kept.values
    window = getattr(kept, "sliding_window", None)
    if window != call.window and not (call.window is None and window and longest and window >= longest):
        raise ModelLoadError(
            f"layer {index} keeps {window or 'all'} tokens, but its attention is given a window of {call.window}: it "
            "has a mask that is not computed here"
        )
    of_cache = (keys.shape[1], keys.shape[3], values.shape[3])
    of_call = (call.keys.shape[1], call.keys.shape[3], call.values.shape[3])
    # Some layers repeat heads after transformers' cache. Baton's cache keeps the repeated heads.
    if of_cache[1:] == of_call[1:] and of_call[0] % of_cache[0] == 0:
        of_cache = of_call
    is_latent = of_cache != of_call
    if is_latent and (keys.shape[1] != 1 or not hasattr(notes.modules[index], EXPAND) or call.honours):
        raise ModelLoadError(f"layer {index} keeps other keys and values than it attends to, in a form not known here")
    num_kv_heads, k_dim, v_dim = of_cache
    width = call.window or 0
    return AttentionLayer(
        num_heads=call.num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        is_latent=is_latent,
        window=0 if longest and width >= longest else width,
    )


def _reader(index: int, call: _Call, notes: _Notes) -> AttentionLayer:
    """Return the attention of a layer that keeps no KV: it must attend to that of an earlier layer."""
    for source, other in notes.calls.items():
        if source < index and other.keys is call.keys and other.values is call.values:
            if other.window != call.window:
                raise ModelLoadError(f"layer {index} has another window than layer {source}, whose KV it reads")
            return AttentionLayer(
                num_heads=call.num_heads,
                num_kv_heads=call.keys.shape[1],
                k_dim=call.keys.shape[3],
                v_dim=call.values.shape[3],
                source=source,
            )
    raise ModelLoadError(f"layer {index} keeps no KV and does not attend to that of an earlier layer")


def _states(cache: DynamicCache) -> Iterator[KeptStates]:
    """Yield the states that recurrent layers keep, those of one kind and shape together."""
    places: dict[tuple[str, tuple[int, ...], torch.dtype], list[tuple[int, int]]] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for kind, kept in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for number, state in kept.items():
                if state is not None:
                    places.setdefault((kind, tuple(state.shape[1:]), state.dtype), []).append((index, number))
    kinds = [kind for kind, _, _ in places]
    for number, ((kind, shape, dtype), found) in enumerate(places.items()):
        yield KeptStates(
            name=kind if kinds.count(kind) == 1 else f"{kind}.{kinds[:number].count(kind)}",
            kind=kind,
            places=tuple(found),
            shape=shape,
            dtype="" if dtype is ASKED_IN else str(dtype).removeprefix("torch."),
        )


def _unused(model: Any, called: set[str]) -> Iterator[str]:
    """Yield the topmost submodules with weights that the text does not pass through.

    Only the two upper levels count: deeper down, a module without a call may be an expert that no token has chosen.
    """
    for name, module in model.named_modules():
        is_upper = name and name.count(".") < 2
        if not is_upper or any(other == name or other.startswith(f"{name}.") for other in called):
            continue
        above = name.rpartition(".")[0]
        is_covered = above and not any(other == above or other.startswith(f"{above}.") for other in called)
        if not is_covered and any(True for _ in module.parameters()):
            yield name


def require_known_rope(config: Any) -> None:
    """Raise ModelLoadError for RoPE of a kind unknown to transformers."""
    for rope in ropes_of(config):
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            raise ModelLoadError(
                f"RoPE of type {kind!r} is not supported; supported are {', '.join(sorted(ROPE_KINDS))}"
            )
        if kind == "longrope" and not (type(rope.get(LONG)) is int and rope[LONG] > 0):
            raise ModelLoadError(f"config.json has RoPE of type longrope with {rope.get(LONG)!r:.40} as {LONG}")
