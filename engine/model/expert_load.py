"""Counts how many tokens a mixture-of-experts model sends to each expert.

Transformers' experts are one module per layer, which is called with the hidden states, `top_k_index` and the weights.
A hook adds the indices up on the device, so a step does not wait for the count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

EXPERTS = "ep_dispatch_experts"
"""Style of the experts' modules in transformers' expert-parallel plans."""


class ExpertLoad:
    """Tokens per expert, over all layers, since the model was loaded.

    Args:
        model: transformers' model. Its experts have been divided among ranks by `plan`.
        plan: expert-parallel plan: names of modules, in which `*` stands for a layer's number, and their styles.
        num_experts: experts per layer, on all ranks together.
    """

    def __init__(self, model: Any, plan: Mapping[str, str], num_experts: int) -> None:
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=next(model.parameters()).device)
        on_gpu = self._counts.is_cuda
        self._on_host = torch.zeros(num_experts, dtype=torch.int64, pin_memory=True) if on_gpu else self._counts
        names = [re.escape(name).replace(r"\*", r"\d+") for name, style in plan.items() if style == EXPERTS]
        pattern = re.compile(rf"(.*\.)?({'|'.join(names)})")
        for name, module in model.named_modules():
            if pattern.fullmatch(name):
                module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        chosen = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]).flatten()
        # Some models have choices after the last expert that compute nothing.
        is_expert = chosen < len(self._counts)
        self._counts.scatter_add_(0, torch.where(is_expert, chosen, 0).long(), is_expert.long())

    def publish(self) -> None:
        """Copy the counts to the host, in the order of the device's current stream."""
        if self._on_host is not self._counts:
            self._on_host.copy_(self._counts, non_blocking=True)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each expert, as published last."""
        return tuple(self._on_host.tolist())
