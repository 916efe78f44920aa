"""vLLM's KV cache on CPUs, as the worker maps it.

The host has put it into shared memory. On a GPU the cache is a `gpu_cache.GpuCache`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import torch

from baton.errors import ModelLoadError
from engine.core.runner import KVSpec, LayerGroup, PageOrder
from engine.model.kv_cache import torch_dtype
from engine.vllm.messages import KvMemory, Ready


class SharedCache:
    """vLLM's KV cache as the KV transfer reads and writes it (`kvstore.transfer.copy.blocks.RankCache`).

    Args:
        descriptor: descriptor of the memory; the caller may close it afterwards.
        memory: description of the cache in the memory.
        spec: one group of layers, whose page order is opaque.

    Raises:
        ModelLoadError: the KV of the host's probe is not where it should be.
    """

    def __init__(self, descriptor: int, memory: KvMemory, spec: KVSpec) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self.table_sizes = (memory.num_blocks,)
        self.states: Mapping[str, torch.Tensor] = {}
        mapped = mmap.mmap(descriptor, 0)
        shape = memory.num_layers, memory.num_blocks, memory.row_numel
        rows = torch.frombuffer(mapped, dtype=torch.uint8).view(torch_dtype(memory.dtype)).view(shape)
        self.groups: Sequence[torch.Tensor] = (rows,)
        require_probe(rows, memory.probe)


def spec_of(ready: Ready) -> KVSpec:
    """Return the shape of vLLM's cache.

    Routers let workers exchange KV if their groups are equal (`worker.member.wire_compat`). Without shared memory the
    group gets a unique name, so that this worker exchanges none.
    """
    block_size = ready.groups[0].block_size if ready.groups else 16
    memory = ready.memory
    if memory is None:
        name = f"vllm {os.urandom(8).hex()}"
        group = LayerGroup(
            name=name, layers=(), block_size=block_size, num_kv_heads=1, k_dim=1, v_dim=1, dtype="float32"
        )
    else:
        group = LayerGroup(
            name="vllm",
            layers=tuple(range(memory.num_layers)),
            block_size=block_size,
            num_kv_heads=1,
            k_dim=memory.row_numel // block_size,
            v_dim=0,
            dtype=memory.dtype,
            page_order=PageOrder.OPAQUE,
            tag=ready.tag,
        )
    return KVSpec((group,), whole_prompts=not ready.caches_prefixes)


def require_probe(rows: torch.Tensor, probe: Sequence[int]) -> None:
    """Require that the probe's blocks have content in all layers, and their neighbours none.

    With a wrong layout workers would transfer wrong values, which no checksum detects.
    """
    others = {near for block in probe for near in (block - 1, block + 1)} - {*probe, 0, rows.shape[1]}
    content = rows.view(torch.uint8)  # 8-bit floats cannot be indexed on every device
    filled = bool(content[:, list(probe)].any(-1).all())
    if not filled or bool(content[:, sorted(others)].any()):
        raise ModelLoadError(
            "vLLM's KV cache is not laid out as vLLM declares; set router.mode to aggregated, and report this with the "
            "log"
        )
