"""Replaces modules of a loaded model with equivalents that use fewer kernels, if they prove correct.

On a GPU a small kernel takes as long to launch as to compute, and a layer of transformers has about 45. So norms,
rotary embeddings, gates and sums use the project's own kernels (`fused_kernels`), and projections of the same input
become one matrix product. A module is replaced only in this model, and only if it computes the same from random numbers
on this device; transformers is not changed for other models of the process. On a CPU, and with several ranks, all
modules stay transformers' own.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn

from baton.errors import in_one_line
from engine.model.attention_choice import FLOATS, OLDEST, RECURRENT, SEVERAL_RANKS
from engine.model.fused_probe import Draw

logger = logging.getLogger(__name__)
ALIGNMENT = 256
"""Alignment, in bytes, of tensors in the same memory."""


class Fused(NamedTuple):
    """Result of the replacement of a model's modules."""

    num_fused: int
    kept: tuple[str, ...]
    """Modules that were not replaced, with the reasons, as texts."""


def fuse(model: nn.Module, num_ranks: int, *, has_states: bool = False, keeps_layers: bool = False) -> Fused:
    """Replace all modules of a loaded model that can be replaced, and log the result.

    Args:
        model: transformers' model, on the device on which it computes.
        num_ranks: number of ranks of the model.
        has_states: whether it has recurrent layers.
        keeps_layers: whether the model adds something between its layers, so that they must remain a list.
    """
    device, dtype = next((weight.device, weight.dtype) for weight in model.parameters())
    reason = RECURRENT if has_states else why_not_fused(device, dtype, num_ranks)
    if reason is not None:
        logger.info("layers are computed by transformers' own modules: %s", reason)
        return Fused(0, (reason,))
    fusing, kept = None, list[str]()
    try:
        fusing = _Fusing(model, Draw(device, dtype), keeps_layers=keeps_layers)
        fusing.run()
    except Exception as error:  # from a compiler or a driver
        kept.append(in_one_line(error))
        logger.warning("layers are computed by transformers' own modules: %s", kept[0])
    if fusing is None:
        return Fused(0, tuple(kept))
    if fusing.fused:
        logger.info("by fused kernels: %s", ", ".join(f"{count} {name}" for name, count in fusing.fused.items()))
    for name, reasons in fusing.kept.items():
        kept.append(f"{len(reasons)} {name}, since {reasons[0]}")
        logger.info("by transformers' own: %s", kept[-1])
    return Fused(fusing.fused.total(), tuple(kept))


def why_not_fused(device: torch.device, dtype: torch.dtype, num_ranks: int) -> str | None:
    """Return why no module of a model can be replaced; None: modules can, if they prove to compute the same."""
    if device.type != "cuda":
        return "the device is no NVIDIA GPU"
    if num_ranks > 1:
        return SEVERAL_RANKS
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if str(dtype).removeprefix("torch.") not in FLOATS:
        return f"the kernels do not support {dtype}"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "the GPU is older than the kernels support"
    return None


class _Fusing:
    """State of the replacement of a model's modules.

    Args:
        model: transformers' model.
        draw: random numbers for the model.
        keeps_layers: see `fuse`.
    """

    def __init__(self, model: nn.Module, draw: Draw, *, keeps_layers: bool = False) -> None:
        self._model, self._draw, self._keeps_layers = model, draw, keeps_layers
        self._moved = _MovedWeights(draw.device)
        owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        self._tied = {weight for weight, num_owners in owners.items() if num_owners > 1}
        self.fused: Counter[str] = Counter()
        """Numbers of replaced modules, by the name of the replacement."""
        self.kept: dict[str, list[str]] = {}
        """Reasons why modules were not replaced, by their class name."""

    @torch.no_grad()
    def run(self) -> None:
        from engine.model import fused_parts as parts

        for name, module in self._of_kind("Norm"):
            self._put(name, module, parts.norm_of(module, self._draw))
        rotary = next((module for _, module in self._of_kind("RotaryEmbedding")), None)
        if rotary is not None and "layer_type" not in inspect.signature(rotary.forward).parameters:
            for name, module in self._of_kind("Attention"):
                self._put(name, module, parts.attention_of_layer(module, rotary, self._draw))
        for name, module in self._of_kind("MLP"):
            self._put(name, module, parts.perceptron_of(module, self._draw))
        for name, module in self._of_kind("DecoderLayer"):
            self._put(name, module, parts.layer_of(module, self._draw))
        for name, module in () if self._keeps_layers else self._of_kind("ModuleList"):
            if isinstance(module, nn.ModuleList) and (stack := parts.stack_of(module)) is not None:
                self._put(name, module, stack)

    def _of_kind(self, kind: str) -> Iterator[tuple[str, nn.Module]]:
        for name in [name for name, module in self._model.named_modules() if type(module).__name__.endswith(kind)]:
            yield name, self._model.get_submodule(name)

    def _put(self, name: str, module: nn.Module, found: nn.Module | str) -> None:
        if not isinstance(found, str) and not self._moved.merge(found, self._tied):
            found = "its weights are others', too"
        if isinstance(found, str):
            self.kept.setdefault(type(module).__name__, []).append(found)
            return
        parent, _, child = name.rpartition(".")
        in_place = nn.ModuleList([found]) if isinstance(module, nn.ModuleList) else found
        setattr(self._model.get_submodule(parent), child, in_place.eval())
        self.fused[type(found).__name__] += 1


class _MovedWeights:
    """Memory that holds a module's weights while one matrix replaces them: the model is never in memory twice.

    All weights of a module are moved here before any replacement is allocated. As they were loaded side by side, they
    leave one hole, large enough for the larger matrices; merged one by one, they would leave unused smaller holes.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def merge(self, part: nn.Module, tied: Collection[int]) -> bool:
        """Replace each `Beside` of a module by one matrix. Return whether none is left.

        Args:
            part: the new module.
            tied: `id` of each weight that several modules share.
        """
        from engine.model.fused_modules import Beside

        besides = [(name, child) for name, child in part.named_children() if isinstance(child, Beside)]
        if not besides:
            return True
        if any(id(weight) in tied for weight in part.parameters()):
            return False
        self._take(list(part.parameters()))
        for name, child in besides:
            setattr(part, name, child.merged())
        begin, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel()
        for weight in part.parameters():
            if begin <= weight.data_ptr() < end:
                weight.data = weight.data.clone()
        return True

    def _take(self, weights: list[nn.Parameter]) -> None:
        sizes = [-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._memory.device)
        begin = 0
        for weight, size in zip(weights, sizes, strict=True):
            there = self._memory[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
            weight.data = there.copy_(weight.data)
            begin += size
