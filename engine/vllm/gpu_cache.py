"""vLLM's KV cache of one GPU in the worker's process. Tested with fakes, not run on a GPU.

The worker has a CUDA context of its own on the GPU, and reads and writes the host's memory in it:

    reads    start after the host has reported the end of the step (`gpu_export`), so they need no fence
    writes   end before `VllmEngine.insert`. The transfer counts a chunk as received after `GpuMove.end` or
             `BlockCopier.scatter` has waited for its copy (`pipeline.receive_loop.ChunkWriter`). It reports the KV as
             arrived after the last chunk. So each later kernel of vLLM finds the KV in the GPU's memory
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from engine.core.runner import KVSpec
from engine.gpu_memory import CudaMemoryCalls, GpuMemoryCalls, cuda_device_with
from engine.model.kv_cache import torch_dtype
from engine.vllm.messages import GpuMemory, KvMemory
from engine.vllm.shared_cache import require_probe


class Gpu(NamedTuple):
    """A GPU of this process, and the calls of its driver."""

    device: torch.device
    calls: GpuMemoryCalls


def gpu_with(uuid: str) -> Gpu:
    """Return the GPU with this UUID.

    Raises:
        RuntimeError: this process has none.
    """
    device = cuda_device_with(uuid)
    return Gpu(device, CudaMemoryCalls(device))


class GpuCache:
    """vLLM's KV cache as the KV transfer reads and writes it (`kvstore.transfer.copy.blocks.RankCache`).

    Args:
        memory: description of the host's memory; `memory.gpu` is set.
        descriptors: descriptors of the VMM allocations; the caller may close them afterwards.
        spec: one group of layers, whose page order is opaque.

    Raises:
        RuntimeError: this process cannot open the memory; nothing of it stays open.
        ModelLoadError: the KV of the host's probe is not where it should be; nothing of the memory stays open.
    """

    def __init__(self, memory: KvMemory, descriptors: Sequence[int], spec: KVSpec, gpu: Gpu) -> None:
        assert memory.gpu is not None, "a cache in main memory"
        self.spec = spec
        self.device = gpu.device
        self.table_sizes = (memory.num_blocks,)
        self.states: Mapping[str, torch.Tensor] = {}
        self.groups: Sequence[torch.Tensor] = ()
        dtype = torch_dtype(memory.dtype)
        shape = memory.num_layers, memory.num_blocks, memory.row_numel
        num_bytes = memory.num_layers * memory.num_blocks * memory.row_numel * dtype.itemsize
        with contextlib.ExitStack() as undo:
            address = _opened(memory.gpu, descriptors, gpu.calls, undo)
            rows = gpu.calls.bytes_at(address, num_bytes).view(dtype).view(shape)
            require_probe(rows, memory.probe)
            gpu.calls.synchronize()
            undo.callback(gpu.calls.synchronize)  # runs first in `close`: no copy may run then
            self._undo = undo.pop_all()
        self.groups = (rows,)

    def close(self) -> None:
        """Close the memory, after all copies of this process have ended. No tensor of it may be used any more."""
        self.groups = ()
        self._undo.close()


def _opened(memory: GpuMemory, descriptors: Sequence[int], calls: GpuMemoryCalls, undo: contextlib.ExitStack) -> int:
    """Open or map the memory. Return the address of the cache's first byte.

    Args:
        undo: gets a callback for each call that `close` must undo.
    """
    if memory.handle:
        base = calls.open_handle(bytes.fromhex(memory.handle))
        undo.callback(calls.close_handle, base)
        return base + memory.offset
    if len(descriptors) != len(memory.sizes):
        raise RuntimeError(f"the host sent {len(descriptors)} descriptors of {len(memory.sizes)} allocations")
    whole = sum(memory.sizes)
    base = at = calls.reserve(whole)
    undo.callback(calls.unreserve, base, whole)
    for num_bytes, descriptor in zip(memory.sizes, descriptors, strict=True):
        calls.map_descriptor(at, num_bytes, descriptor)
        undo.callback(calls.unmap, at, num_bytes)
        at += num_bytes
    calls.allow(base, whole)
    return base + memory.offset
