"""Probes of modules with random numbers on the present device: a replacement must compute the same as the original.

Weights that could hide a difference, such as those of a norm that are far from 1, are replaced temporarily, and so are
submodules that could hide one.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.model.attention import set_step
from engine.model.attention_step import AttentionTerms

SIZES = ((1, 1.0), (6, 8.0), (6, 0.01))
"""Number of tokens and magnitude of each probe: beyond a single clipped range, and some as small as an eps."""


class Heard(NamedTuple):
    """Arguments of an attention module's call to the step, and its result."""

    found: torch.Tensor
    """`[1, T, hidden]`."""
    layer: int
    terms: AttentionTerms
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Queries, `[heads, T, dim]`, keys and values."""


class _Listening:
    """`AttentionStep` that records its arguments and returns the queries."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        self.asked.append((layer, terms, (query.clone(), key.clone(), value.clone())))
        return query.transpose(0, 1).contiguous()


class _Answering(nn.Module):
    """Module that always returns the same value and records its input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.given: list[torch.Tensor] = []

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Return the fixed value."""
        self.given.append(hidden_states)
        return self.answer


class Draw:
    """Random numbers, the same for each model.

    Args:
        device: device of the numbers.
        dtype: data type of the model's computation.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normally distributed numbers with mean 0 and the given scale."""
        numbers = torch.randn(*size, generator=self._generator, device=self.device)
        return (numbers * scale).to(dtype or self.dtype)


def largest_ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors as a share of the second's largest magnitude.

    Infinity: some results are not numbers.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    difference = (one.float() - other.float()).abs().amax() / other.float().abs().amax().clamp(min=1e-30)
    return float(difference.nan_to_num(math.inf))


def heard(module: nn.Module, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> Heard:
    """Return the arguments that an attention module passes to the step, and its result."""
    step = _Listening()

    def run() -> torch.Tensor:
        set_step(step)
        found: torch.Tensor = module(
            hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, past_key_values=None
        )[0]  # fmt: skip
        return found

    found = contextvars.copy_context().run(run)
    ((layer, terms, given),) = step.asked
    return Heard(found, layer, terms, given)


def through(
    layer: nn.Module, hidden: torch.Tensor, attended: torch.Tensor, deeper: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a layer's attention and MLP, which return fixed values, and the layer's result."""
    attention, perceptron = _Answering((attended, None)), _Answering(deeper)
    with _in_place(layer, self_attn=attention, mlp=perceptron):
        found: torch.Tensor = layer(
            hidden, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=None,
        )  # fmt: skip
    return (*attention.given, *perceptron.given, found)


@contextmanager
def other_weight(module: nn.Module, weight: torch.Tensor) -> Iterator[None]:
    """Context manager: replaces a module's weight."""
    parameter = module.get_parameter("weight")
    kept = parameter.data
    parameter.data = weight
    try:
        yield
    finally:
        parameter.data = kept


@contextmanager
def _in_place(module: nn.Module, **others: nn.Module) -> Iterator[None]:
    kept = {name: module.get_submodule(name) for name in others}
    for name, other in others.items():
        setattr(module, name, other)
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(module, name, own)
