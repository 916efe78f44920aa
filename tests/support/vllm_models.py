"""Tiny models with random weights that vLLM's build for CPUs can run, with the vocabulary of the default model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve

VOCAB_SIZE = 49152


def llama(folder: Path) -> Path:
    """Two layers of attention with heads of 32, the least that vLLM computes on CPUs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _saved(LlamaForCausalLM, LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads, **_TOKENS), folder)


def mla(folder: Path) -> Path:
    """Latent attention (MLA) and a mixture of experts, as DeepSeek-V2 has them."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", max_position_embeddings=1024, **_TOKENS,
    )  # fmt: skip
    return _saved(DeepseekV2ForCausalLM, config, folder)


def hybrid(folder: Path) -> Path:
    """Three layers with a recurrent state (gated delta rule) and one of attention, as Qwen3-Next has them."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=1024, **_TOKENS,
    )  # fmt: skip
    return _saved(Qwen3NextForCausalLM, config, folder)


_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.25}


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).eval().save_pretrained(folder)
    texts = resolve(ModelConfig(), cache_dir(load().cluster)).path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(texts / name, folder / name)
    return folder
