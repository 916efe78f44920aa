"""Selection of a rank's attention.

The project's kernels are used if they run and are correct on this device, FlashInfer for decodes if configured, and
torch's own attention otherwise.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from baton.errors import ModelLoadError, in_one_line
from engine.core.runner import FP8, KVSpec, OnLayerDone, StepPart
from engine.model.attention import step_context
from engine.model.attention_probe import PROBE_ROOM, ProbedHeads, is_batch_invariant, largest_difference, probe_cache
from engine.model.attention_step import Attention, AttentionStep
from engine.model.kv_cache import KVCache
from engine.model.shapes import ModelShape
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
"""Minimum compute capability for kernels without spilled registers; a test checks it."""
OLDEST_FP8 = (8, 9)
"""Minimum compute capability for 8-bit floats in Triton."""
OWN = "the project's own kernels"
SEVERAL_RANKS = "the model is divided among several ranks"
RECURRENT = "the model has recurrent layers"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Difference between two attentions that a different order of summation may cause, for values of about 1."""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """`Attention` by `torch.nn.functional.scaled_dot_product_attention`."""

    cache: KVCache
    reason: str = ""
    """Reason why the kernels are not used."""
    name = "torch"
    needs_numbers = True

    def step(self, parts: Sequence[StepPart], on_layer_done: OnLayerDone, numbers: StepNumbers) -> AttentionStep:
        """See `Attention.step`."""
        return step_context(self.cache, parts, on_layer_done, numbers)


class AttentionWish(NamedTuple):
    """Attention that a worker's settings require."""

    is_invariant: bool = False
    """Tokens must be bit-identical in any batch: `engine.batch_invariant`."""
    by_flashinfer: bool = False
    """FlashInfer decodes: `engine.attention`."""


def attention_of(
    cache: KVCache, shape: ModelShape, dtype: torch.dtype, room: TableRoom, wish: AttentionWish
) -> Attention:
    """Return the attention of a rank, and log the choice with its reason.

    Args:
        cache: the rank's cache.
        shape: attention of the model's layers.
        dtype: data type of the model's computation.
        room: maximum size of the block tables that stay on the device.
        wish: requirements of the settings.

    Raises:
        ModelLoadError: the required attention is not available.
    """
    reason, level = why_not_kernels(cache.spec, shape, dtype, cache.device), logging.INFO
    sharing = shape.sharing(cache.spec)
    heads = ProbedHeads(sharing, shape.honours)
    if wish.by_flashinfer:
        reason = reason or why_not_flashinfer(cache.spec, shape, dtype)
    if reason is None:
        try:
            by_kernels = _by_kernels(cache, sharing, dtype, room, wish)
            probed = probe_cache(cache.spec, cache.device)
            torchs = TorchAttention(probed)
            proven = _by_kernels(probed, sharing, dtype, PROBE_ROOM, wish)
            difference = max(largest_difference(probed, heads, dtype, (torchs, way)) for way in proven.ways())
            is_kept = not wish.is_invariant or is_batch_invariant(probed, heads, dtype, proven)
        except Exception as error:  # from a compiler or a driver
            reason, level = f"the kernels do not run here: {in_one_line(error)}", logging.WARNING
        else:
            if is_kept and difference <= TOLERANCE[dtype]:
                whose = f"FlashInfer for decodes and {OWN}" if wish.by_flashinfer else OWN
                logger.info("attention is by %s, which differ from torch's by %.2g at most", whose, difference)
                return by_kernels
            differs = f"differs from it by {difference:.2g}" if is_kept else "depends on what is beside a token"
            reason, level = f"the kernels' {differs}", logging.WARNING
    if wish.is_invariant:
        raise ModelLoadError(f"engine.batch_invariant is not supported by torch's attention: {reason}")
    if wish.by_flashinfer:
        raise ModelLoadError(f"engine.attention flashinfer is not available: {reason}; set it to auto")
    logger.log(level, "attention is torch's own: %s", reason)
    return TorchAttention(cache, reason)


def _by_kernels(
    cache: KVCache, sharing: tuple[int, ...], dtype: torch.dtype, room: TableRoom, wish: AttentionWish
) -> KernelAttention:
    if wish.by_flashinfer:
        from engine.model.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(cache, sharing, dtype, room)
    from engine.model.kernel_attention import KernelAttention

    return KernelAttention(cache, sharing, dtype, room, is_invariant=wish.is_invariant)


def decode_graphs(model: Any, attention: Attention, engine: EngineConfig, *, has_states: bool) -> DecodeGraphs | str:
    """Return the CUDA graphs of a rank's decode steps, or the reason why there are none.

    Args:
        model: transformers' model.
        attention: the rank's attention.
        engine: the settings. With several ranks there are no graphs: collective operations are not captured.
        has_states: whether the model has recurrent layers. Their rows differ from step to step, so there are no graphs.
    """
    if has_states:
        return RECURRENT
    if isinstance(attention, TorchAttention):
        return "attention is torch's own"
    if engine.tensor_parallel > 1:
        return SEVERAL_RANKS
    from engine.model.decode_graphs import graphs_of

    return graphs_of(model, attention)


def why_not_kernels(spec: KVSpec, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot be used; None: they can, if they run."""
    computed, pages = str(dtype).removeprefix("torch."), {group.dtype for group in spec.groups}
    if not shape.layers:
        return "the model has no attention"
    dims = {dim for group in spec.groups for dim in (group.k_dim, group.v_dim)}
    num_sharing = max(shape.sharing(spec))
    reasons = {
        "the device is no NVIDIA GPU": device.type != "cuda",
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        "layers keep latents (MLA)": shape.is_latent,
        f"heads have {max(dims)} dimensions, more than {MAX_DIM}": max(dims) > MAX_DIM,
        f"{num_sharing} query heads share a KV head, more than {MAX_SHARING}": num_sharing > MAX_SHARING,
        f"the model computes in {computed}, its pages are of {', '.join(sorted(pages))}": not pages <= {computed, FP8},
        f"the kernels do not support {computed}": computed not in FLOATS,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    oldest = OLDEST_FP8 if FP8 in pages else OLDEST
    if (capability := torch.cuda.get_device_capability(device)) < oldest:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, less than {oldest[0]}.{oldest[1]}"
    return None


def why_not_flashinfer(spec: KVSpec, shape: ModelShape, dtype: torch.dtype) -> str | None:
    """Return why FlashInfer cannot decode although the kernels can be used; None: it can, if it runs."""
    computed = str(dtype).removeprefix("torch.")
    reasons = {
        "it is not installed (pip install flashinfer-python)": importlib.util.find_spec("flashinfer") is None,
        f"it does not compute in {computed}": computed not in FLASHINFER_TYPES,
        f"layers ask for {' and '.join(sorted(shape.honours))}": bool(shape.honours),
        "the heads of keys and of values differ in size": any(group.k_dim != group.v_dim for group in spec.groups),
        f"pages are not of the model's {computed}": any(group.dtype != computed for group in spec.groups),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
