"""Whole tiny models with fused modules against the same without, and kernels against torch: see `interpreted`."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.core.runner import ignore_layer
from engine.model.adapters import AdapterWeights, ModelAdapters, rows_with_adapters
from engine.model.attention import ATTENTION_NAME, set_step
from engine.model.attention_choice import TorchAttention
from engine.model.kv_cache import KVCache, torch_dtype
from engine.uploads import StepNumbers
from tests.support.fusing import fuse_here
from tests.support.graphed import part_of
from tests.support.shapes import spec_of_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def model_of(config: Any, dtype: str = "float32", device: torch.device = CPU) -> Any:
    """A model of random weights, none of which is what another might be."""
    torch.manual_seed(0)
    config._attn_implementation = ATTENTION_NAME
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
    return model.to(device)


class Fused(NamedTuple):
    """What has become of a model."""

    difference: float
    """The greatest difference of its logits, over their largest."""
    modules: dict[str, int]
    """The modules that were replaced, by what they are now."""
    words: list[str]
    """What the log says."""
    num_parameters: tuple[int, int]
    """Before and after."""


def whole(kind: str, values: dict[str, Any], dtype: str = "float32", device: torch.device = CPU) -> Fused:
    """Computes a prompt and decode steps before and after."""
    model = model_of(AutoConfig.for_model(kind, **values), dtype, device)
    expected, before = logits_of(model, dtype), sum(weight.numel() for weight in model.parameters())
    words = fuse_here(model)
    found, after = logits_of(model, dtype), sum(weight.numel() for weight in model.parameters())
    difference = float(((found - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf))
    names = Counter(type(module).__name__ for module in model.modules())
    modules = {name: count for name, count in names.items() if name.startswith("Fused")}
    return Fused(difference, modules, words, (before, after))


def with_adapters(kind: str, values: dict[str, Any]) -> tuple[float, dict[str, int], float]:
    """Computes a prompt with one adapter, a decode with none and one with another, after modules were replaced.

    Returns:
        The greatest difference of logits from those of merged weights, over their largest; the replaced modules; and
        the same difference of a step without adapters afterwards, from one before they were loaded.
    """
    model = model_of(AutoConfig.for_model(kind, **values))
    adapters = ModelAdapters(model, 2, 8)
    with adapters.watched():
        plain = logits_of(model, "float32", adapters)
    maps = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"}
    draw, expected, weights = torch.Generator().manual_seed(3), [plain], list[AdapterWeights]()
    for rank in (5, 8):
        shapes = {name: ((rank, each.in_features), (each.out_features, rank)) for name, each in maps.items()}
        found = {n: tuple(0.3 * torch.randn(s, generator=draw) for s in pair) for n, pair in shapes.items()}
        weights.append(AdapterWeights({name: (a, b) for name, (a, b) in found.items()}))
        for name, (a, b) in found.items():
            maps[name].weight.data += b @ a
        expected.append(logits_of(model, "float32"))
        for name, (a, b) in found.items():
            maps[name].weight.data -= b @ a
    fuse_here(model)
    adapters.make()
    before = logits_of(model, "float32", adapters)
    for slot, each in enumerate(weights, start=1):
        adapters.load(slot, each)
    mixed = logits_of(model, "float32", adapters, (1, 0, 2))
    told = torch.cat([expected[1][:7], expected[0][7:8], expected[2][8:]])
    after = logits_of(model, "float32", adapters)
    names = Counter(type(module).__name__ for module in model.modules())
    modules = {name: count for name, count in names.items() if name.startswith("Fused")}
    return _share(mixed, told), modules, float((after - before).abs().max())


def _share(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf))


@torch.inference_mode()
def logits_of(
    model: Any, dtype: str, adapters: ModelAdapters | None = None, slots: tuple[int, int, int] = (0, 0, 0)
) -> torch.Tensor:
    """Those of a prompt and of two decodes, by torch's attention.

    Args:
        adapters: of the model, if it has any.
        slots: the adapters of the prompt and of the decodes.
    """
    config = model.config
    cache = KVCache(spec_of_model(config, dtype), 24, 8, model.device)
    for group in cache.groups:
        group.copy_(torch.randn(group.shape, generator=torch.Generator().manual_seed(1)))
    attention = TorchAttention(cache)
    prompt = part_of(0, 7, 9)._replace(token_ids=(5, 6, 7, 8, 9, 10, 11), num_kv_tokens=(16,), is_decoding=False)
    found = []
    decodes = [part_of(1, 8, 0, adapter=slots[1]), part_of(2, 9, 15, adapter=slots[2])]
    for parts in ([prompt._replace(adapter=slots[0])], decodes):
        parts = [part._replace(block_ids=part.block_ids * len(cache.groups)) for part in parts]
        parts = [part._replace(num_kv_tokens=part.num_kv_tokens * len(cache.groups)) for part in parts]
        numbers = StepNumbers(model.device)
        set_step(attention.step(parts, ignore_layer, numbers))
        rows = rows_with_adapters(parts, numbers)
        numbers.send()
        if adapters is not None:
            adapters.begin(rows, sum(len(part.token_ids) for part in parts))
        token_ids = torch.tensor([[token for part in parts for token in part.token_ids]])
        positions = torch.cat([torch.arange(part.num_computed_tokens, part.end) for part in parts])[None]
        given = {"input_ids": token_ids.to(model.device), "position_ids": positions.to(model.device)}
        found.append(model(**given, use_cache=False).logits[0].float())
    return torch.cat(found)
