"""Shapes of attention that no model has been asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.core.runner import KVSpec
from engine.model.asking import ask
from engine.model.shapes import AttentionLayer, ModelShape


def shape_of(spec: KVSpec, num_sharing: int, **others: Any) -> ModelShape:
    """Returns the shape of a model with these groups, in which so many query heads share a KV head."""
    of_layer = {layer: group for group in spec.groups for layer in group.layers}
    layers = {
        layer: AttentionLayer(
            num_heads=group.num_kv_heads * num_sharing,
            num_kv_heads=group.num_kv_heads,
            k_dim=group.k_dim,
            v_dim=group.v_dim,
        )
        for layer, group in sorted(of_layer.items())
    }
    return ModelShape(config=SimpleNamespace(model_type="made"), layers=layers, **others)


def spec_of_model(config: Any, dtype: str = "float32", block_size: int = 16) -> KVSpec:
    """Returns the layout of the KV of a model on one rank."""
    return ask(config).shape.cache_spec(block_size, dtype, 1)
