"""One rank's part of a transformers model: loading it, and computing a step with it.

Weights are split as transformers' own plan of the model type says: projections by head and by hidden unit, so that a
layer's ranks sum twice, after attention and after the perceptron (Shoeybi et al., 2019, Megatron-LM). A rank has the KV
of its heads only. All ranks compute the same steps in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from baton.config import EngineConfig, ModelConfig
from baton.engine.attention import ATTENTION_NAME, begun_blocks, set_step, step_context
from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup
from baton.engine.runner import LayerDone
from baton.engine.scheduler import Part
from baton.errors import ModelLoadError

LLAMA_FAMILY = (
    "cohere", "ernie4_5", "gemma", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
"""Model types whose attention is what `paged_attention` computes; each is tested on a tiny random model."""
KEYS = "layers.*.self_attn.k_proj"
"""In a plan: how the projection to keys is split."""
BY_HEAD = "colwise"


@dataclass(frozen=True, slots=True)
class Step:
    """What every rank computes. `parts` are in packed order; of those in `sampling` the last token's logits."""

    parts: Sequence[Part]
    sampling: Sequence[int]


class ModelRank:
    """Weights and KV cache of one rank, on the cache's device.

    Where there are several ranks, this process's default process group is theirs.

    Raises:
        ModelLoadError: the weights cannot be loaded.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, cache: KVCache) -> None:
        torch.set_num_threads(engine.num_threads)
        transformers_logging.set_verbosity_error()  # it warns of generation settings that are not its business here
        transformers_logging.disable_progress_bar()
        split = {}
        if engine.tensor_parallel > 1:
            split["distributed_config"] = DistributedConfig(tp_size=engine.tensor_parallel, tp_plan="auto")
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                model.path,
                dtype=cache.spec.groups[0].dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                **split,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(f"cannot load the weights in {model.path}: {error}") from error
        self.model.to(cache.device).eval()
        self.cache = cache

    @torch.inference_mode()
    def compute(self, step: Step, layer_done: LayerDone) -> torch.Tensor:
        """Writes the KV of this rank's heads and returns logits, `[len(step.sampling) or 1, vocabulary]`.

        On a GPU both are there when its current stream has come so far.
        """
        device, parts = self.cache.device, step.parts
        token_ids = torch.tensor([[token for part in parts for token in part.token_ids]], device=device)
        positions = torch.cat([torch.arange(p.start, p.end) for p in parts])[None].to(device)
        ends = torch.tensor([p.num_tokens for p in parts]).cumsum(0) - 1
        if begun := begun_blocks(self.cache, parts):
            self.cache.clear_blocks(begun)
        set_step(step_context(self.cache, parts, layer_done))
        # With no row to sample from, one row of logits is computed for nothing: 0 would mean all of them.
        rows = ends[list(step.sampling)].to(device) if step.sampling else 1
        logits: torch.Tensor = self.model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows
        ).logits[0]  # fmt: skip
        return logits


def load_config(path: str) -> Any:
    """Raises ModelLoadError: the folder does not hold a model that runs here."""
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


def rank_spec(config: Any, block_size: int, dtype: torch.dtype, num_ranks: int) -> KVSpec:
    """The KV layout of one rank of a dense model: one group of all layers, no state.

    Raises:
        ModelLoadError: the heads cannot be shared out evenly over so many ranks.
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
    group = LayerGroup("all", layers, num_kv_heads // num_ranks, head_dim, head_dim, dtype)
    return KVSpec(block_size, (group,))


def eos_token_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()
