"""Runs unmodified transformers models over the paged KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.engine.attention import ATTENTION_NAME, begun_blocks, order_for_packing, set_step, step_context
from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup
from baton.engine.runner import LayerDone, ignore_layer
from baton.engine.sampler import sample
from baton.engine.scheduler import Batch
from baton.errors import ModelLoadError

LLAMA_FAMILY = (
    "cohere", "ernie4_5", "gemma", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
"""Model types whose attention is what `paged_attention` computes; each is tested on a tiny random model."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL_LENGTH_SEQUENCES = 64
"""The pool is not made larger than this many sequences of full length."""


class TransformersRunner:
    """A causal language model and its KV cache on one device.

    Raises:
        ModelLoadError: the folder is not a model this engine runs, or the KV pool is too small; the message says why.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        torch.set_num_threads(engine.num_threads)
        transformers_logging.set_verbosity_error()  # it warns of generation settings that are not its business here
        transformers_logging.disable_progress_bar()
        self.device = torch.device(_device_name(model.device))
        config = _load_config(model.path)
        dtype = _dtype(model.dtype, self.device, config)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                model.path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelLoadError(f"cannot load the weights in {model.path}: {error}") from error
        self.model.to(self.device).eval()
        spec = kv_spec(config, engine.block_size, dtype)
        model_len: int = engine.max_model_len or config.max_position_embeddings
        num_blocks = engine.num_blocks or min(
            int(engine.kv_cache_gib * 2**30 // spec.block_bytes),
            FULL_LENGTH_SEQUENCES * num_blocks_for(model_len, engine.block_size),
        )
        if num_blocks < 2:
            raise ModelLoadError(
                f"a KV pool of {num_blocks} blocks is too small (a block is {spec.block_bytes} bytes); "
                "raise engine.kv_cache_gib or engine.num_blocks"
            )
        self.cache = KVCache(spec, num_blocks, engine.max_num_seqs, self.device)
        self.max_model_len = min(model_len, num_blocks * engine.block_size)
        self.eos_token_ids = eos_token_ids(Path(model.path))

    @torch.inference_mode()
    def execute(self, batch: Batch, layer_done: LayerDone = ignore_layer) -> list[int]:
        order = order_for_packing(batch)
        parts = [batch[index] for index in order]
        token_ids = torch.tensor([[token for part in parts for token in part.token_ids]], device=self.device)
        positions = torch.cat([torch.arange(p.start, p.end) for p in parts])[None].to(self.device)
        ends = torch.tensor([p.num_tokens for p in parts]).cumsum(0) - 1
        sampling = [row for row, part in enumerate(parts) if part.sample]
        if begun := begun_blocks(self.cache, parts):
            self.cache.clear_blocks(begun)
        set_step(step_context(self.cache, parts, layer_done))
        # With no row to sample from, one row of logits is computed for nothing: 0 would mean all of them.
        rows = ends[sampling].to(self.device) if sampling else 1
        logits = self.model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows
        ).logits[0]  # fmt: skip
        if not sampling:
            if self.device.type == "cuda":  # with a row to sample from, reading its token waits for the step
                torch.cuda.current_stream(self.device).synchronize()
            return []
        sequences = [parts[row].sequence for row in sampling]
        sampled = sample(logits, [s.spec for s in sequences], [s.num_tokens for s in sequences])
        by_batch_index = {order[row]: token for row, token in zip(sampling, sampled, strict=True)}
        return [by_batch_index[index] for index in sorted(by_batch_index)]


def kv_spec(config: Any, block_size: int, dtype: torch.dtype) -> KVSpec:
    """The KV layout of a dense model: one group of all layers, no state."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = tuple(range(config.num_hidden_layers))
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVSpec(block_size, (LayerGroup("all", layers, num_kv_heads, head_dim, head_dim, dtype),))


def eos_token_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def _load_config(path: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a model folder that transformers can read: {error}") from error
    if config.model_type not in LLAMA_FAMILY:
        raise ModelLoadError(
            f"{path} holds a model of type {config.model_type!r}, which this version does not run; "
            f"it runs {', '.join(LLAMA_FAMILY)}"
        )
    return config


def _device_name(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    if name not in DTYPES:
        raise ModelLoadError(f"model.dtype must be auto or one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]
