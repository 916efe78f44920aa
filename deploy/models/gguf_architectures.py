"""Model architectures whose GGUF files are converted: the names of their tensors, and their config.json.

llama.cpp stores the rows of llama's query and key projections so that the two halves of a rotary pair are adjacent;
Hugging Face's models expect all first halves before all second halves. For a head:

    llama.cpp     0 d/2 1 d/2+1 2 d/2+2 ...      (convert_hf_to_gguf.py, LlamaModel.permute)
    Hugging Face  0 1 2 ... d/2 d/2+1 d/2+2 ...

Gemma multiplies by 1 + weight in its norms; llama.cpp stores the sum (convert_hf_to_gguf.py, Gemma3Model.norm_shift).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import ModelLoadError
from deploy.models.gguf_metadata import Metadata

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
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_PERIOD = 6
"""Every sixth layer attends to all tokens. GGUF does not say so, and llama.cpp assumes it (`set_swa_pattern(6)`)."""
GEMMA3_SLIDING_THETA = 1e4
"""Rotary base of the layers with a window, which GGUF does not say either (`rope_freq_base_train_swa`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    name: str
    """`general.architecture`, which is also the prefix of the architecture's keys."""
    layer_names: Mapping[str, str]
    config: Callable[[Metadata, str, bool], dict[str, Any]]
    """Metadata, prefix and whether input and output share their embedding -> config.json without special tokens."""
    permutes_heads: bool
    norm_shift: float
    """Number that llama.cpp has added to the weights of norms."""

    def hugging_face_name(self, name: str) -> str:
        """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
            if match[2] in self.layer_names:
                return f"model.layers.{match[1]}.{self.layer_names[match[2]]}.weight"
        elif name.removesuffix(".weight") in OUTER_NAMES:
            return f"{OUTER_NAMES[name.removesuffix('.weight')]}.weight"
        raise ModelLoadError(f"The GGUF file holds {name}, which the {self.name} architecture does not have.")


def _llama(metadata: Metadata, prefix: str, tied: bool) -> dict[str, Any]:
    sizes = _sizes(metadata, prefix)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "head_dim": metadata.get(
            f"{prefix}.rope.dimension_count", sizes["hidden_size"] // sizes["num_attention_heads"]
        ),
        **_limits(metadata, prefix),
        "rope_parameters": _rope(metadata.get(f"{prefix}.rope.freq_base", 1e4)),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _gemma3(metadata: Metadata, prefix: str, tied: bool) -> dict[str, Any]:
    width = metadata[f"{prefix}.attention.key_length"]
    sizes = _sizes(metadata, prefix)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **sizes,
        "head_dim": width,
        # Not in the model of 27B, whose rotary embeddings are scaled, so that it is not converted.
        "query_pre_attn_scalar": width,
        **_limits(metadata, prefix),
        "sliding_window": metadata[f"{prefix}.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if layer % GEMMA3_PERIOD else "full_attention"
            for layer in range(1, sizes["num_hidden_layers"] + 1)
        ],
        "rope_parameters": {
            "full_attention": _rope(metadata.get(f"{prefix}.rope.freq_base", 1e6)),
            "sliding_attention": _rope(GEMMA3_SLIDING_THETA),
        },
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "dtype": "float32",
    }


def _sizes(metadata: Metadata, prefix: str) -> dict[str, Any]:
    num_heads = metadata[f"{prefix}.attention.head_count"]
    return {
        "hidden_size": metadata[f"{prefix}.embedding_length"],
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", num_heads),
    }


def _limits(metadata: Metadata, prefix: str) -> dict[str, Any]:
    return {
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "rms_norm_eps": _shortest(metadata[f"{prefix}.attention.layer_norm_rms_epsilon"]),
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": _shortest(theta)}


def _shortest(value: float) -> float:
    """GGUF keeps float32: 9.999999747378752e-06 was written as 1e-05, and is the same float32."""
    return float(str(np.float32(value)))


ARCHITECTURES = {
    "llama": Architecture(name="llama", layer_names=LAYER_NAMES, config=_llama, permutes_heads=True, norm_shift=0.0),
    "gemma3": Architecture(
        name="gemma3", layer_names=GEMMA3_LAYER_NAMES, config=_gemma3, permutes_heads=False, norm_shift=1.0
    ),
}
