"""Chunks copied by the kernels against torch, in a process whose Triton interprets kernels or compiles them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from engine.core.runner import EMPTY_PLACE
from engine.model.kv_cache import KVCache
from kvstore.transfer.copy import blocks, kernel_choice
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.copy.checksum import digest_of, word_sum
from kvstore.transfer.protocol.plan import WireOptions, plan, rank_spec
from tests.fakes.gpu import fake_gpus

NUM_BLOCKS = 24


class CopyCase(NamedTuple):
    """A transfer between two layouts of the same model."""

    num_tokens: int = 150
    skip_tokens: int = 0
    tp: tuple[int, int] = (1, 1)
    block_sizes: tuple[int, int] = (16, 16)
    dtype: str = "bfloat16"
    wire: str = "auto"
    dim: int = 8
    num_empty: int = 0
    """Blocks at the source that have left a window."""
    chunk_bytes: int = 16384
    by_kernels: bool = True
    """Whether the kernels can move some of it."""


def model_of(case: CopyCase, side: int) -> KvLayout:
    dim, dtype = case.dim, case.dtype
    groups = (
        GroupLayout(name="full", layers=(0, 2, 3), num_kv_heads=6, k_dim=dim, v_dim=dim, dtype=dtype),
        GroupLayout(name="latent", layers=(1,), num_kv_heads=1, k_dim=3 * dim, v_dim=dim, dtype=dtype),
        GroupLayout(name="keys", layers=(4, 5), num_kv_heads=6, k_dim=dim, v_dim=0, dtype=dtype),
    )
    made = KvLayout(case.block_sizes[side], case.tp[side], groups)
    return replace(made, states=(StateLayout("conv", (3, 701), "float32"),)) if case.tp[0] == case.tp[1] else made


def same_moves(case: CopyCase) -> tuple[int, bool]:
    """Moves a sequence chunk by chunk, by kernels and by torch.

    Returns:
        The number of launches of kernels, and whether payloads, checksums and both caches are the same bits.
    """
    from kvstore.transfer.copy import kernels

    launches: list[str] = []

    class Counted:
        """The module with its launches counted."""

        ChunkRuns, gather, scatter = kernels.ChunkRuns, "gather", "scatter"

        @staticmethod
        def launch(kernel: str, *args: Any) -> int:
            launches.append(kernel)
            return kernels.launch(getattr(kernels, kernel), *args)

    with fake_gpus(1) as (gpu,):
        found = []
        for chosen in (Counted, None):
            kernel_choice.CHOSEN[gpu.device] = chosen  # type: ignore[assignment]
            found.append(_moved(case, gpu.device, torch.device("cpu")))
    return len(launches), all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def same_on(device: torch.device, case: CopyCase) -> bool:
    """The same on a GPU that is one, with what was chosen for it and by torch."""
    kernel_choice.choose_kernels(device, 1)
    chosen = kernel_choice.kernels_of(device)
    found = [_moved(case, device, device)]
    try:
        kernel_choice.CHOSEN[device] = None
        found.append(_moved(case, device, device))
    finally:
        kernel_choice.CHOSEN[device] = chosen
    return all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def _moved(case: CopyCase, device: torch.device, memory: torch.device) -> list[torch.Tensor]:
    draw, generator = random.Random(5), torch.Generator().manual_seed(5)
    layouts = [model_of(case, side) for side in (0, 1)]
    ranks = (case.tp[0] - 1, case.tp[1] - 1)
    caches, tables = [], []
    for layout, rank in zip(layouts, ranks, strict=True):
        cache = KVCache(rank_spec(layout, rank), NUM_BLOCKS, 3, memory)
        cache.device = device
        for tensor in (*cache.groups, *cache.states.values()):
            there = tensor.view(torch.uint8)
            there.copy_(torch.empty(there.shape, dtype=torch.uint8).random_(generator=generator))
        used = draw.sample(range(NUM_BLOCKS), -(-case.num_tokens // layout.block_size))
        states = ((draw.randrange(3),),) if layout.states else ()
        caches.append(cache)
        tables.append((tuple(used),) * 3 + states)
    emptied = (EMPTY_PLACE,) * case.num_empty + tables[0][0][case.num_empty :]
    tables[0] = (emptied, *tables[0][1:])
    options = WireOptions(case.chunk_bytes, 64, case.wire)
    planned = plan(layouts[0], ranks[0], layouts[1], ranks[1], case.num_tokens, (case.skip_tokens,) * 3, options)
    ours, theirs = (
        BlockCopier(cache, planned, layout, rank, table)
        for cache, layout, rank, table in zip(caches, layouts, ranks, tables, strict=True)
    )
    payload, moved = torch.zeros(case.chunk_bytes, dtype=torch.uint8, device=memory), []
    for chunk in planned.chunks:
        there = payload[: chunk.num_bytes]
        sums = [
            ours.begin_gather(chunk, there, None, checked=True).end(),
            theirs.begin_scatter(chunk, there, checked=True).end(),
        ]
        assert sums == [digest_of(word_sum(there)[None].cpu().numpy())] * 2
        moved.append(there.clone())
    moved += [tensor.view(torch.uint8) for tensor in (*caches[1].groups, *caches[1].states.values())]
    return moved


def are_right() -> bool:
    """Whether the check before first use passes, and finds a kernel that moves or adds up something else."""
    from kvstore.transfer.copy import kernels

    def broken(what: str) -> Any:
        class Broken:
            ChunkRuns, TILE, NUM_SUMS = kernels.ChunkRuns, kernels.TILE, kernels.NUM_SUMS
            gather, scatter = "gather", "scatter"

            @staticmethod
            def launch(kernel: str, span: Any, payload: torch.Tensor, sums: torch.Tensor) -> int:
                num = kernels.launch(getattr(kernels, kernel), span, payload, sums)
                if what == kernel:
                    (payload if kernel == "gather" else span.pages[2, 4])[0] ^= 1
                if what == f"{kernel}-sum":
                    sums[0] += 1
                return num

        return Broken

    cpu = torch.device("cpu")
    wrong = ("gather", "scatter", "gather-sum", "scatter-sum")
    return kernel_choice.are_right(kernels, cpu, kernels.TILE) and not any(
        kernel_choice.are_right(broken(what), cpu, kernels.TILE) for what in wrong
    )


def constants_of(case: CopyCase) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Returns each kernel with the constants for which it is compiled: in the choice of the copies, and in a transfer.

    The choice knows the layout of the sender alone.
    """
    from kvstore.transfer.copy import kernels

    seen: set[tuple[str, int]] = set()

    class Seen:
        """A kernel whose constants are noted."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **constants: int) -> None:
                seen.add((self._name, constants["SEGMENT"]))
                getattr(kernels, self._name)[grid](*args, **constants)

            return run

    class Spied:
        ChunkRuns, TILE, NUM_SUMS = kernels.ChunkRuns, kernels.TILE, kernels.NUM_SUMS
        gather, scatter, launch = Seen("gather"), Seen("scatter"), staticmethod(kernels.launch)

    cpu = torch.device("cpu")

    def tried(device: torch.device, least_run_words: int) -> None:
        assert kernel_choice.are_right(Spied, cpu, least_run_words)

    with patch.object(blocks, "choose_kernels", tried):
        blocks.choose_copies([KVCache(rank_spec(model_of(case, 0), case.tp[0] - 1), NUM_BLOCKS, 3, cpu)])
    chosen = set(seen)
    seen.clear()
    with fake_gpus(1) as (gpu,):
        kernel_choice.CHOSEN[gpu.device] = Spied  # type: ignore[assignment]
        _moved(case, gpu.device, cpu)
    return chosen, seen
