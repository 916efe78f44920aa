"""vLLM's KV cache of one GPU, described so that the worker can open it. Tested with fakes, not run on a GPU.

vLLM allocates the cache through torch: with `cudaMalloc` by default, which a legacy handle shares, or as VMM memory
(`engine.gpu_memory`). The driver reports which one it is. If a cache cannot be shared, the host reports the reason,
and the worker serves without KV transfer. Caches that cannot be shared are for example:

    vLLM's own VMM allocator (`enable_cumem_allocator`) in 0.32, whose allocations have no descriptors
    memory of `cudaMallocAsync`, and of other allocators that offer neither a legacy handle nor a descriptor
    layouts in which a layer's blocks are not contiguous, such as those whose names begin with B

The worker reads KV only after the host has reported the end of its step. By then vLLM has copied the
step's tokens to the CPU, and so has waited for all writes of the step (`GPUModelRunner._to_list`, with
`async_scheduling` off). Unlike on CPUs the host does not report single layers. That would need an event that both
processes share, and CUDA graphs of whole steps call no hook between layers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from engine.gpu_memory import BY_DESCRIPTOR, GpuMemoryCalls
from engine.vllm.messages import GpuMemory, KvMemory

MAX_ALLOCATIONS = 250
"""Maximum number of VMM allocations of a cache: one message carries at most 253 descriptors."""


class NotShared(Exception):
    """The KV cache cannot be shared with the worker; the message says why."""


class Rows(NamedTuple):
    """A KV cache in memory, `[layer][block][row]` without gaps."""

    address: int
    num_layers: int
    num_blocks: int
    row_numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.row_numel * self.dtype.itemsize


class Exported(NamedTuple):
    """A shared KV cache. The receiver of the descriptors closes them."""

    memory: KvMemory
    descriptors: list[int]
    """Descriptors of the VMM allocations, in the order of `GpuMemory.sizes`."""


def exported(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, calls: GpuMemoryCalls) -> Exported:
    """Describe a KV cache for another process.

    Args:
        kv_caches: tensors of the layers, as vLLM registers them: `[blocks, heads, tokens, content]` by their shape, in
            memory in the order of the layout.
        num_blocks: blocks of the cache; the tensors may have a multiple of it, of smaller blocks.

    Raises:
        NotShared: the layout or the memory does not allow it.
    """
    rows = rows_of(list(kv_caches.values()), num_blocks)
    try:
        memory, descriptors = _memory_of(rows, calls)
    except RuntimeError as error:  # of the driver
        raise NotShared(f"the GPU's driver does not share it: {error}") from error
    dtype = str(rows.dtype).removeprefix("torch.")
    return Exported(KvMemory(rows.num_layers, rows.num_blocks, rows.row_numel, dtype, [], memory), descriptors)


def rows_of(tensors: Sequence[torch.Tensor], num_blocks: int) -> Rows:
    """Return where the layers' blocks lie. The order of the values in a block may be any.

    It follows from the tensors' strides, not from the layout's name: with one KV head several layouts are the same.

    Raises:
        NotShared: a layer's blocks do not follow each other without gaps, or layers do not.
    """
    if not tensors:
        raise NotShared("it has no layers")
    first = tensors[0]
    if not num_blocks or first.shape[0] % num_blocks:
        raise NotShared(f"a layer has {first.shape[0]} blocks, which are not {num_blocks} equal parts")
    row_numel = first.numel() // num_blocks
    layer_bytes = first.numel() * first.itemsize
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape or tensor.dtype is not first.dtype or tensor.device != first.device:
            raise NotShared("its layers differ in shape, data type or device")
        inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(0, *inner).is_contiguous():
            raise NotShared("the blocks of a layer do not follow each other in memory")
        if tensor.data_ptr() != first.data_ptr() + index * layer_bytes:
            raise NotShared("its layers do not follow each other in memory")
    return Rows(first.data_ptr(), len(tensors), num_blocks, row_numel, first.dtype)


def _memory_of(rows: Rows, calls: GpuMemoryCalls) -> tuple[GpuMemory, list[int]]:
    end = rows.address + rows.num_bytes
    placed = calls.placed(rows.address)
    if placed.has_legacy_handle:
        if end > placed.base + placed.num_bytes:
            raise NotShared("it is longer than its allocation")
        handle = calls.legacy_handle(rows.address)
        return GpuMemory(calls.uuid, rows.address - placed.base, handle.hex(), []), []
    sizes: list[int] = []
    descriptors: list[int] = []
    try:
        at = placed.base
        while at < end:
            part = calls.placed(at)
            if not part.handle_types & BY_DESCRIPTOR:
                raise NotShared("its allocator gave it neither a legacy handle nor a file descriptor")
            if part.base != at or not part.num_bytes:
                raise NotShared("its allocations do not follow each other")
            if len(sizes) == MAX_ALLOCATIONS:
                raise NotShared(f"it has more than {MAX_ALLOCATIONS} allocations")
            descriptors.append(calls.export(at))
            sizes.append(part.num_bytes)
            at += part.num_bytes
        return GpuMemory(calls.uuid, rows.address - placed.base, "", sizes), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, and empty the list."""
    while descriptors:
        os.close(descriptors.pop())
