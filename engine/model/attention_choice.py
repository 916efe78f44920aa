"""Which attention a rank computes with: the kernels where they run and prove right, torch's own everywhere else, and
FlashInfer's for decodes where it is asked for, or none.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from baton.errors import ModelLoadError, in_one_line
from engine.core.kv_spec import FP8, KVSpec
from engine.core.runner import OnLayerDone, StepPart
from engine.model.attention import step_context
from engine.model.attention_probe import PROBE_ROOM, is_batch_invariant, largest_difference, probe_cache
from engine.model.attention_step import Attention, AttentionStep
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers

if TYPE_CHECKING:
    from baton.config import EngineConfig
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.kernel_attention import KernelAttention

logger = logging.getLogger(__name__)
MAX_DIM = 256
MAX_SHARING = 16
FLOATS = frozenset({"float32", "bfloat16", "float16"})
FLASHINFER_TYPES = frozenset({"bfloat16", "float16"})
OLDEST = (8, 0)
"""Compute capability from which on the kernels compile without spilled registers, as a test shows."""
OLDEST_FP8 = (8, 9)
"""Compute capability from which on Triton reads and writes floats of 8 bits."""
OWN = "the project's own kernels"
SEVERAL_RANKS = "the model is divided among several ranks"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Difference between two attentions that may come of adding up in another order, of values of about 1."""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """An `Attention` by `torch.nn.functional.scaled_dot_product_attention`."""

    cache: KVCache
    num_sharing: int
    reason: str = ""
    """Why it is not the kernels'."""
    name = "torch"
    needs_numbers = True

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        """See `Attention.step`."""
        return step_context(self.cache, parts, self.num_sharing, on_layer_done, numbers)


class AttentionWish(NamedTuple):
    """What a worker's settings want of its attention."""

    is_invariant: bool = False
    """Tokens must come out the same to the bit beside any others: `engine.batch_invariant`."""
    by_flashinfer: bool = False
    """FlashInfer decodes: `engine.attention`."""


def attention_of(
    cache: KVCache, num_sharing: int, dtype: torch.dtype, room: TableRoom, wish: AttentionWish
) -> Attention:
    """Returns the attention of a rank, and logs which and why.

    Args:
        cache: the rank's.
        num_sharing: query heads for each KV head.
        dtype: the type in which the model computes.
        room: for the block tables of steps, where they stay on the device.
        wish: of the settings.

    Raises:
        ModelLoadError: it cannot be had.
    """
    reason, level = why_not_kernels(cache.spec, num_sharing, dtype, cache.device), logging.INFO
    if wish.by_flashinfer:
        reason = reason or why_not_flashinfer(cache.spec, dtype)
    if reason is None:
        try:
            by_kernels = _by_kernels(cache, num_sharing, dtype, room, wish)
            probed = probe_cache(cache.spec, cache.device)
            torchs = TorchAttention(probed, num_sharing)
            proven = _by_kernels(probed, num_sharing, dtype, PROBE_ROOM, wish)
            difference = max(largest_difference(probed, num_sharing, dtype, (torchs, way)) for way in proven.ways())
            is_kept = not wish.is_invariant or is_batch_invariant(probed, num_sharing, dtype, proven)
        except Exception as error:  # a compiler's, a driver's
            reason, level = f"the kernels do not run here: {in_one_line(error)}", logging.WARNING
        else:
            if is_kept and difference <= TOLERANCE[dtype]:
                whose = f"FlashInfer for decodes and {OWN}" if wish.by_flashinfer else OWN
                logger.info("attention is by %s, which differ from torch's by %.2g at most", whose, difference)
                return by_kernels
            differs = f"differs from it by {difference:.2g}" if is_kept else "depends on what is beside a token"
            reason, level = f"the kernels' {differs}", logging.WARNING
    if wish.is_invariant:
        raise ModelLoadError(f"engine.batch_invariant cannot be kept by torch's attention: {reason}")
    if wish.by_flashinfer:
        raise ModelLoadError(f"engine.attention flashinfer cannot be had: {reason}; set it to auto")
    logger.log(level, "attention is torch's own: %s", reason)
    return TorchAttention(cache, num_sharing, reason)


def _by_kernels(
    cache: KVCache, num_sharing: int, dtype: torch.dtype, room: TableRoom, wish: AttentionWish
) -> KernelAttention:
    if wish.by_flashinfer:
        from engine.model.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(cache, num_sharing, dtype, room)
    from engine.model.kernel_attention import KernelAttention

    return KernelAttention(cache, num_sharing, dtype, room, is_invariant=wish.is_invariant)


def decode_graphs(model: Any, attention: Attention, engine: EngineConfig) -> DecodeGraphs | str:
    """Returns the graphs of a rank's decode steps, or why it launches each by itself.

    Args:
        model: transformers' model.
        attention: the rank's.
        engine: the settings. Ranks of one model launch each step: what they add up over is no part of a graph.
    """
    if isinstance(attention, TorchAttention):
        return "attention is torch's own"
    if engine.tensor_parallel > 1:
        return SEVERAL_RANKS
    from engine.model.decode_graphs import graphs_of

    return graphs_of(model, attention)


def why_not_kernels(spec: KVSpec, num_sharing: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why the kernels cannot be used; None: they can, if they run."""
    computed, pages = str(dtype).removeprefix("torch."), {group.dtype for group in spec.groups}
    dims = {dim for group in spec.groups for dim in (group.k_dim, group.v_dim)}
    reasons = {
        "the device is no NVIDIA GPU": device.type != "cuda",
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        f"heads have {max(dims)} dimensions, more than {MAX_DIM}": max(dims) > MAX_DIM,
        f"{num_sharing} query heads share a KV head, more than {MAX_SHARING}": num_sharing > MAX_SHARING,
        f"the model computes in {computed}, its pages are of {', '.join(sorted(pages))}": not pages <= {computed, FP8},
        f"the kernels do not know {computed}": computed not in FLOATS,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    oldest = OLDEST_FP8 if FP8 in pages else OLDEST
    if (capability := torch.cuda.get_device_capability(device)) < oldest:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, less than {oldest[0]}.{oldest[1]}"
    return None


def why_not_flashinfer(spec: KVSpec, dtype: torch.dtype) -> str | None:
    """Returns why FlashInfer cannot decode where the kernels can be used; None: it can, if it runs."""
    computed = str(dtype).removeprefix("torch.")
    reasons = {
        "it is not installed (pip install flashinfer-python)": importlib.util.find_spec("flashinfer") is None,
        f"it does not compute in {computed}": computed not in FLASHINFER_TYPES,
        "the heads of keys and of values differ in size": any(group.k_dim != group.v_dim for group in spec.groups),
        f"pages are not of the model's {computed}": any(group.dtype != computed for group in spec.groups),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
