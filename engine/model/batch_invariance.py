"""Batch invariance: makes a model's output bit-identical in any batch (`engine.batch_invariant`).

In transformers' models three operations depend on the number of rows: matrix products, means over a row, and attention.
The first two are replaced here by `invariant_kernels`, in the modules of a loaded model; attention uses `kernels` with
one tiling for prompts and decodes. All other operations process single numbers, or one row at a time. The replacements
are then tested, and modules with weights that are no linear map, norm or embedding are refused. In the sampler, sums
over the vocabulary depend on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from baton.errors import ConfigError, ModelLoadError

PROBED_ROWS = 300
PROBES = (slice(0, 1), slice(7, 8), slice(64, 66), slice(1, 65), slice(100, 230))
"""Slices of rows that are computed separately and compared with the full batch: one, few, and many rows."""
NORMS = ("Norm", "LayerNorm1P")
"""Suffixes of the names of norms."""


class InvariantLinear(nn.Linear):
    """Linear map whose rows are computed independently of other rows. Loaded modules are converted to this class."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features]` for `[..., in_features]`."""
        from engine.model.invariant_kernels import product

        return product(rows, self.weight, self.bias)


class RowByRow(TorchFunctionMode):
    """Context in which reductions over the last dimension are computed row by row: means, sums, running sums and
    softmax.

    Sums of integers are left alone, because they are exact in any order.

    Raises:
        NotImplementedError: a reduction over other dimensions, or with arguments that are not supported.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or its replacement."""
        kwargs = kwargs or {}
        replaced = _BY_NAME.get(getattr(func, "__name__", ""))
        if replaced is None or not args[0].is_floating_point():
            return func(*args, **kwargs)
        if args[1:] not in ((-1,), ((-1,),)):
            raise NotImplementedError(f"torch's {func.__name__} with {args[1:]} has no kernel that goes row by row")
        return replaced(args[0], **kwargs)


def _mean(numbers: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
    from engine.model.invariant_kernels import row_sums

    found = row_sums(numbers, torch.float32, numbers.shape[-1]).to(numbers.dtype)
    return found if keepdim else found[..., 0]


def _sum(numbers: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    from engine.model.invariant_kernels import row_sums

    return row_sums(numbers, dtype)[..., 0]


def _cumsum(numbers: torch.Tensor) -> torch.Tensor:
    from engine.model.invariant_kernels import running_sums

    return running_sums(numbers)


def _shares(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the differences from each row's maximum, their exponentials, and the sums of those in float64."""
    from engine.model.invariant_kernels import row_sums

    distances = numbers - numbers.amax(-1, keepdim=True)
    shares = distances.exp()
    return distances, shares, row_sums(shares, torch.float64)


def _softmax(numbers: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    _, shares, sums = _shares(numbers)
    return torch.div(shares, sums.to(shares.dtype), out=out)


def _log_softmax(numbers: torch.Tensor) -> torch.Tensor:
    distances, _, sums = _shares(numbers)
    return distances - sums.log().to(distances.dtype)


def _logsumexp(numbers: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
    _, _, sums = _shares(numbers)
    found = numbers.amax(-1, keepdim=True) + sums.log().to(numbers.dtype)
    return found if keepdim else found[..., 0]


_BY_NAME: dict[str, Callable[..., torch.Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "cumsum": _cumsum,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
}


def refuse_unkept(device: torch.device, weights: str) -> None:
    """Raise ConfigError if batch invariance is not supported on a model's device or with its weight format."""
    if device.type == "cpu":
        raise ConfigError(
            "engine.batch_invariant on a CPU needs the native step, since torch's matrix products depend on "
            "the number of rows; unset it, or set engine.runner to native"
        )
    if weights != "exact":
        raise ConfigError(
            f"engine.batch_invariant is not supported with model.weights {weights} on transformers, whose products "
            "depend on the number of rows; unset one of them"
        )


def make_invariant(model: nn.Module) -> None:
    """Replace a model's operations that depend on the number of rows, and test the modules with weights.

    Raises:
        ModelLoadError: the model has modules for which invariance is unknown, or a module's result depends on other
            rows on this device.
    """
    if unknown := sorted({type(module).__name__ for module in model.modules() if not _is_known(module)}):
        raise ModelLoadError(
            f"engine.batch_invariant is not supported with {', '.join(unknown)} of a {type(model).__name__}: "
            "their results may depend on other rows; unset it"
        )
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = InvariantLinear
        elif _is_norm(module):
            module.forward = functools.partial(_in_rows, module.forward)
    for module in _of_each_kind(model):
        if not _is_invariant(module):
            raise ModelLoadError(
                f"engine.batch_invariant is not supported on this device: rows of a {type(module).__name__} change "
                "with the other rows; unset it"
            )


def _in_rows(forward: Callable[..., Any], *args: Any) -> Any:
    with RowByRow():
        return forward(*args)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(NORMS)


def _is_known(module: nn.Module) -> bool:
    has_weights = any(True for _ in module.parameters(recurse=False)) or hasattr(module, "weight")
    return not has_weights or type(module) is nn.Linear or isinstance(module, nn.Embedding) or _is_norm(module)


def _of_each_kind(model: nn.Module) -> Iterator[nn.Module]:
    """Yield linear maps and norms, one of each class and shape."""
    seen = set()
    for module in model.modules():
        weights = getattr(module, "weight", None)
        if isinstance(weights, torch.Tensor) and (isinstance(module, nn.Linear) or _is_norm(module)):
            kind = (type(module), tuple(weights.shape))
            if kind not in seen:
                seen.add(kind)
                yield module


@torch.inference_mode()
def _is_invariant(module: nn.Module) -> bool:
    """Return whether rows of random numbers have the same results alone and among others."""
    weights: torch.Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator(weights.device).manual_seed(0)
    shape = (PROBED_ROWS, weights.shape[-1])
    rows = torch.randn(shape, generator=generator, dtype=weights.dtype, device=weights.device)
    found = module(rows)
    return all(module(rows[probe]).equal(found[probe]) for probe in PROBES)
