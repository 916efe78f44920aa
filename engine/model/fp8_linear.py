"""8-bit float weights: `model.weights` fp8. `Fp8Linear` replaces the linear modules of a loaded model.

    y[t, o] = x_scale[t] * w_scale[o] * sum over i of (x[t, i] / x_scale[t]) (w[o, i] / w_scale[o])     in (): e4m3

Each output of a module and each input token has its own scale, which maps its largest magnitude to 448, the largest
such float. Products use torch's `_scaled_mm`. Embeddings, the head, norms, routers and all modules that are not linear
modules of a layer stay as they are.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from baton.errors import ConfigError
from engine.core.runner import FP8
from engine.model.kv_cache import rounded, torch_dtype

if TYPE_CHECKING:
    from baton.config import EngineConfig

logger = logging.getLogger(__name__)
OLDEST = (8, 9)
"""Minimum compute capability for products of 8-bit floats."""
MULTIPLE = 16
"""Factor of which inputs and outputs of such modules must be multiples."""
ROUTERS = ("gate", "router")
"""Names of modules that choose experts; quantized ones would choose differently."""
LARGEST = 448.0
ROWS_AT_A_TIME = 1024
"""Rows of a matrix that are quantized together; bounds the extra device memory."""


class Fp8Linear(nn.Module):
    """Linear module whose weights, and whose inputs row by row, are 8-bit floats.

    Args:
        weight: `[out_features, in_features]`, 8-bit floats.
        scale: `[1, out_features]`, float32.
        bias: `[out_features]`, if it has any.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        for name, value in (("weight", weight), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, value)

    def quantized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `quantized_rows`; on a GPU by one kernel, if Triton is installed."""
        if rows.device.type != "cuda" or not _has_triton():
            return quantized_rows(rows)
        from engine.model.fp8_kernels import quantized

        return quantized(rows)

    @classmethod
    def of(cls, linear: nn.Linear) -> Fp8Linear:
        """Return the replacement of a module, in the host's memory."""
        parts = torch.split(linear.weight.detach(), ROWS_AT_A_TIME)
        pieces = [[each.cpu() for each in quantized_rows(rows)] for rows in parts]
        weight, scale = (torch.cat(each) for each in zip(*pieces, strict=True))
        bias = None if linear.bias is None else linear.bias.detach().cpu()
        return cls(weight, scale.view(1, -1), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]` in the inputs' data type, which on a GPU is bfloat16."""
        rows, scale = self.quantized(inputs.flatten(0, -2))
        found: torch.Tensor = torch._scaled_mm(
            rows, self.weight.t(), scale_a=scale, scale_b=self.scale, bias=self.bias, out_dtype=inputs.dtype
        )
        return found.view(*inputs.shape[:-1], -1)


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, `[rows, columns]`, as 8-bit floats, and the scale of each, `[rows, 1]` in float32."""
    scale = rows.abs().amax(1, keepdim=True).float()
    scale /= torch.full_like(scale, LARGEST)  # dividing by a Python number differs between GPU and CPU
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    return rounded(rows / scale, torch_dtype(FP8)), scale


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def refuse_fp8(device: torch.device, dtype: str, engine: EngineConfig) -> None:
    """Refuse 8-bit float weights if the device cannot multiply them.

    Args:
        device: the model's device.
        dtype: data type of the model's computation.

    Raises:
        ConfigError: they are not supported; the message gives the reason.
    """
    if device.type != "cuda":
        raise ConfigError(
            "model.weights fp8 needs an NVIDIA GPU with compute capability 8.9 or more, and this model is on a CPU; "
            "set it to exact"
        )
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        raise ConfigError(
            "model.weights fp8 needs an NVIDIA GPU with compute capability 8.9 or more, and this one has "
            f"{capability[0]}.{capability[1]}; set it to exact"
        )
    if engine.tensor_parallel > 1:
        raise ConfigError("model.weights fp8 needs engine.tensor_parallel 1; set one of them to its default")
    if dtype != "bfloat16":
        raise ConfigError(f"model.weights fp8 needs model.dtype bfloat16, and this model computes in {dtype}")


@torch.no_grad()
def quantize(model: nn.Module) -> None:
    """Replace the linear modules of a loaded model's layers one by one, so that no weight is in memory twice.

    The rest of the model is moved off the device for a moment too. Otherwise the freed memory would be fragmented into
    holes that are too small for a KV pool.

    Args:
        model: transformers' model, complete and on its device.
    """
    layers: nn.Module = model.base_model  # type: ignore[assignment]
    device, num_bytes, num_kept = next(layers.parameters()).device, 0, 0
    names = [name for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        parent, _, child = name.rpartition(".")
        linear = layers.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if child in ROUTERS or linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            num_kept += 1
            continue
        setattr(layers.get_submodule(parent), child, Fp8Linear.of(linear).eval())
        num_bytes += linear.weight.numel()
        del linear
    model.cpu()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model.to(device)
    logger.info(
        "%d linear modules have 8-bit float weights, %.2f GiB; %d are unchanged",
        len(names) - num_kept, num_bytes / 2**30, num_kept,
    )  # fmt: skip
