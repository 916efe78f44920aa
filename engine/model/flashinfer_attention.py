"""FlashInfer attention (Ye et al., 2025) for decodes, if `engine.attention` is flashinfer.

Prompts, chunks and drafts use the project's kernels. Imports Triton; FlashInfer itself is imported on first use.

FlashInfer's layout HND is the layout of our pages: `[block, kv_head, token, dim]`, with K and V as views into one row.
Its kernels follow a plan that divides a batch among the GPU's multiprocessors. Wrappers create the plan on the host,
from the sequences' lengths:

    a step     its first layer of a kind plans; the following layers use the same plan
    a graph    has its own wrappers, with permanent buffers; each replay is planned before

Layers with equal heads, scale and window are of one kind. With a window only the blocks within it are passed: earlier
blocks may already belong to other sequences.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from baton.blocks import num_blocks_for
from engine.core.runner import StepPart
from engine.model.kernel_attention import DecodedTokens, KernelAttention
from engine.model.kv_cache import KVCache
from engine.model.table_rows import TableRoom
from engine.uploads import uploaded

WORKSPACE_BYTES = 128 * 2**20
"""Size that FlashInfer's documentation recommends. All wrappers of a process share it, since they run one at a time."""
TENSOR_CORES_FROM = 4
"""Query heads per KV head from which on its tensor core kernel is used: its documentation calls it faster for large
groups."""


class LayerKind(NamedTuple):
    """Key of layers that share a plan."""

    group: int
    scaling: float
    window: int | None


class DecodedRows(NamedTuple):
    """Tokens that are decoded by one plan, one of each sequence."""

    rows: Sequence[int]
    """Row of the block tables for each sequence."""
    lengths: Sequence[int]
    """Tokens that each one sees, including itself."""

    @classmethod
    def of(cls, parts: Sequence[StepPart], rows: Sequence[int], size: int = 0) -> DecodedRows:
        """Return the rows of some parts, padded to a graph's size. Padding tokens see one token of an existing block.

        Args:
            rows: row of the block tables for each part.
            size: size of the graph; 0: no graph.
        """
        padding = max(0, size - len(parts))
        return cls([*rows, *[0] * padding], [*[part.end for part in parts], *[1] * padding])


class FlashInferAttention(KernelAttention):
    """`KernelAttention` whose decodes of one token use FlashInfer.

    Args:
        cache: this rank's cache, with pages of the model's data type, K and V of the same size.
        sharing: query heads per KV head, of each layer group.
        dtype: data type of the model's computation.
        room: maximum size of the block tables.
    """

    name = "flashinfer"

    def __init__(self, cache: KVCache, sharing: Sequence[int], dtype: torch.dtype, room: TableRoom) -> None:
        super().__init__(cache, sharing, dtype, room)
        self.dtype = dtype
        self.workspace = _workspace(cache.device)
        self._as_in_graphs = False
        """True if steps are computed in the way of a graph of their size."""
        self._plans: dict[LayerKind, DecodePlan] = {}

    def ways(self) -> Sequence[FlashInferAttention]:
        """See `KernelAttention.ways`: graphs use other plans."""
        in_graphs = copy.copy(self)
        in_graphs._as_in_graphs = True
        return [self, in_graphs]

    def decoded(self, parts: Sequence[StepPart], rows: Sequence[int]) -> DecodedTokens | None:
        """See `KernelAttention.decoded`."""
        if not parts or max(len(part.token_ids) for part in parts) > 1:
            return None
        if self._as_in_graphs:
            return PlannedDecodes(self, DecodedRows.of(parts, rows), {}, len(parts))
        return PlannedDecodes(self, DecodedRows.of(parts, rows), self._plans)

    def decoded_in_graph(self, size: int) -> DecodedTokens:
        """See `KernelAttention.decoded_in_graph`."""
        return PlannedDecodes(self, DecodedRows.of((), (), size), {}, size)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's K and V, `[blocks, kv_heads, tokens, dim]` each; they share the cache's memory."""
        group = self.cache.spec.groups[self.cache.group_of(layer)]
        both = self.cache.layer(layer).view(-1, group.num_kv_heads, 2, group.block_size, group.k_dim)
        return both[:, :, 0], both[:, :, 1]


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class PlannedDecodes:
    """`DecodedTokens` of a step, or of a graph.

    Args:
        attention: the rank's attention.
        decodes: the tokens.
        plans: plans by kind of layer; they are reused.
        size: size of the graph; 0: no graph.
    """

    def __init__(
        self, attention: FlashInferAttention, decodes: DecodedRows, plans: dict[LayerKind, DecodePlan], size: int = 0
    ) -> None:
        self._attention, self._decodes, self._plans, self._size = attention, decodes, plans, size
        self._planned = set[LayerKind]()

    @property
    def num_tokens(self) -> int:
        """See `DecodedTokens.num_tokens`."""
        return len(self._decodes.rows)

    def prepare(self, parts: Sequence[StepPart], rows: Sequence[int]) -> None:
        """See `DecodedTokens.prepare`."""
        decodes = DecodedRows.of(parts, rows, self._size)
        for plan in self._plans.values():
            plan.make(decodes)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scaling: float, window: int | None) -> None:
        """See `DecodedTokens.attend`."""
        kind = LayerKind(self._attention.cache.group_of(layer), scaling, window)
        if kind not in self._planned:  # in a graph: during the warm-up, not during the capture
            if kind not in self._plans:
                self._plans[kind] = DecodePlan(self._attention, kind, self._size)
            self._plans[kind].make(self._decodes)
            self._planned.add(kind)
        self._plans[kind].wrapper.run(query.contiguous(), self._attention.pages(layer), out=out)


class DecodePlan:
    """Plan for the layers of a kind, updated for each step.

    Args:
        attention: the rank's attention.
        kind: kind of the layers.
        size: size of the graph that uses it; 0: no graph.

    Attributes:
        wrapper: FlashInfer's wrapper, which runs the attention.
    """

    def __init__(self, attention: FlashInferAttention, kind: LayerKind, size: int) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._attention, self._kind = attention, kind
        self._shape, self._table = attention.shapes[kind.group], attention.rows.tables[kind.group]
        buffers: dict[str, Any] = {}
        if size:
            lengths = {"indptr": size + 1, "indices": size * self._table.shape[1], "last_page_len": size}
            for name, length in lengths.items():
                buffers[f"paged_kv_{name}_buffer"] = torch.zeros(length, dtype=torch.int32, device=self._table.device)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            attention.workspace,
            "HND",
            use_cuda_graph=bool(size),
            use_tensor_cores=self._shape.num_sharing >= TENSOR_CORES_FROM,
            backend="fa2",  # other backends might be chosen for a batch without having been tested
            **buffers,
        )
        self._copied = torch.cuda.Event() if self._table.is_cuda else None  # type: ignore[no-untyped-call]

    def make(self, decodes: DecodedRows) -> None:
        """Plan a step, in order with the work of the current stream."""
        if self._copied is not None:
            # The wrapper copies each plan from the same host memory. The last copies came after the step before that
            # one, which has ended when another one is launched.
            self._copied.synchronize()
        block_size, window = self._shape.block_size, self._kind.window
        firsts = [0 if window is None else max(0, length - window) // block_size for length in decodes.lengths]
        seen = [length - first * block_size for length, first in zip(decodes.lengths, firsts, strict=True)]
        counts = [num_blocks_for(length, block_size) for length in seen]
        begins = [0, *accumulate(counts)]
        # If they are not pinned, the host may wait for all earlier work of the stream.
        numbers: dict[str, Any] = {"dtype": torch.int32, "pin_memory": self._copied is not None}
        self.wrapper.plan(
            torch.tensor(begins, **numbers),
            self._blocks(torch.tensor([decodes.rows, firsts, begins[:-1], counts]), begins[-1]),
            torch.tensor([(length - 1) % block_size + 1 for length in seen], **numbers),
            self._shape.num_kv_heads * self._shape.num_sharing,
            self._shape.num_kv_heads,
            self._shape.k_dim,
            block_size,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._attention.dtype,
            kv_data_type=self._attention.dtype,
            sm_scale=self._kind.scaling,
        )
        if self._copied is not None:
            self._copied.record()

    def _blocks(self, given: torch.Tensor, total: int) -> torch.Tensor:
        """Return the blocks of all sequences, one sequence after the other, `[total]`, on the device of the tables.

        Args:
            given: `[4, sequences]`: table row, first block in it, offset in the result, and number of blocks of each
                sequence.
        """
        given = uploaded(given, self._table.device)
        row, first, begin = given[:3].repeat_interleave(given[3], dim=1, output_size=total)
        places = torch.arange(total, device=self._table.device) - begin + first
        return self._table[row, places].to(torch.int32)
