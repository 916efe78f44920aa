"""Opens the KV cache of a vLLM engine for the KV transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.model.kv_cache import KVCache
from engine.vllm.gpu_cache import Gpu, GpuCache, gpu_with
from engine.vllm.messages import Ready
from engine.vllm.shared_cache import SharedCache, spec_of

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An opened cache, and the host's description of the engine. Its `memory` is None if the cache is not shared."""

    ready: Ready
    cache: KVCache | SharedCache | GpuCache
    """A `KVCache` without layers if vLLM's cache is not shared."""

    def close(self) -> None:
        """Close the memory of a GPU. All copies from and to it must have ended."""
        if isinstance(self.cache, GpuCache):
            self.cache.close()


def opened(ready: Ready, memory: int, descriptors: Sequence[int], gpu_with: Callable[[str], Gpu] = gpu_with) -> Opened:
    """Open the cache that the host shares. If this process cannot, the engine serves without KV transfer.

    Args:
        memory: descriptor of the main memory.
        descriptors: descriptors of the GPU's memory.
        gpu_with: finds a GPU of this process by its UUID.

    Raises:
        ModelLoadError: the layout of the cache is not the one that the host declares.
    """
    shared = ready.memory
    if shared is None:
        if ready.why_not_shared:
            logger.warning("this worker exchanges no KV, because vLLM's cache is not shared: %s", ready.why_not_shared)
        return Opened(ready, KVCache(spec_of(ready), ready.num_blocks, 1))
    if shared.gpu is None:
        return Opened(ready, SharedCache(memory, shared, spec_of(ready)))
    try:
        return Opened(ready, GpuCache(shared, descriptors, spec_of(ready), gpu_with(shared.gpu.uuid)))
    except RuntimeError as error:  # of the driver
        reason = f"this process cannot open it: {error}"
        return opened(ready._replace(memory=None, why_not_shared=reason), memory, descriptors)
