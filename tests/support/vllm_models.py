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


_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.25}


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).eval().save_pretrained(folder)
    texts = resolve(ModelConfig(), cache_dir(load().cluster)).path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(texts / name, folder / name)
    return folder
