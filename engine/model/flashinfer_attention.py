"""Decodes by FlashInfer (Ye et al., 2025), where `engine.attention` names it; prompts, chunks and drafts stay with the
project's kernels. Imports Triton; FlashInfer itself when something is made.

Its layout HND is how our pages lie: `[block, kv_head, token, dim]`, K and V as views into one row. Its kernels follow a
plan of how a batch is divided among the GPU's processors, which wrappers make on the host, from the sequences' lengths:

    a step     its first layer of a kind plans; the layers behind it run by the same plan
    a graph    has wrappers of its own, with buffers that stay; each replay is planned before

Layers are of one kind where heads, scale and window are alike. With a window only the blocks that it reaches are given:
what lay before it may be anybody's by now.
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
"""What FlashInfer's documentation recommends. All wrappers of a process share it: they run one after the other."""
TENSOR_CORES_FROM = 4
"""Query heads for each KV head from which on its kernel for tensor cores is taken: its documentation calls that one the
faster where many share."""


class LayerKind(NamedTuple):
    """What layers have in common that run by one plan."""

    group: int
    scaling: float
    window: int | None


class DecodedRows(NamedTuple):
    """Tokens that are decoded by one plan, one of each sequence."""

    rows: Sequence[int]
    """The row of the block tables that each one's sequence has."""
    lengths: Sequence[int]
    """Tokens that each sees, with itself."""

    @classmethod
    def of(cls, parts: Sequence[StepPart], rows: Sequence[int], size: int = 0) -> DecodedRows:
        """Returns those of some parts, filled up to a graph's size with tokens of nobody, which see what is first in a
        block that there is.

        Args:
            rows: of the block tables, of each part.
            size: of the graph; 0: there is none.
        """
        padding = max(0, size - len(parts))
        return cls([*rows, *[0] * padding], [*[part.end for part in parts], *[1] * padding])


class FlashInferAttention(KernelAttention):
    """A `KernelAttention` whose decodes of one token are FlashInfer's.

    Args:
        cache: this rank's, with pages of the type in which the model computes, K and V of the same size.
        num_sharing: query heads for each KV head.
        dtype: the type in which the model computes.
        room: for the block tables of its steps.
    """

    name = "flashinfer"

    def __init__(self, cache: KVCache, num_sharing: int, dtype: torch.dtype, room: TableRoom) -> None:
        super().__init__(cache, num_sharing, dtype, room)
        self.dtype = dtype
        self.workspace = _workspace(cache.device)
        self._as_in_graphs = False
        """Whether steps are computed as a graph of their size would."""
        self._plans: dict[LayerKind, DecodePlan] = {}

    def ways(self) -> Sequence[FlashInferAttention]:
        """See `KernelAttention.ways`: graphs have other plans."""
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
        """Returns a layer's K and V, `[blocks, kv_heads, tokens, dim]` each; they share the cache's memory."""
        group = self.cache.spec.groups[self.cache.group_of(layer)]
        both = self.cache.layer(layer).view(-1, group.num_kv_heads, 2, group.block_size, group.k_dim)
        return both[:, :, 0], both[:, :, 1]


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class PlannedDecodes:
    """The `DecodedTokens` of a step, or of a graph.

    Args:
        attention: the rank's.
        decodes: its tokens.
        plans: by kind of layer, which are used again.
        size: of the graph; 0: there is none.
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
        if kind not in self._planned:  # in a graph: when it is warmed up, not while it is captured
            if kind not in self._plans:
                self._plans[kind] = DecodePlan(self._attention, kind, self._size)
            self._plans[kind].make(self._decodes)
            self._planned.add(kind)
        self._plans[kind].wrapper.run(query.contiguous(), self._attention.pages(layer), out=out)


class DecodePlan:
    """How layers of a kind are computed, planned anew for each step.

    Args:
        attention: the rank's.
        kind: of the layers.
        size: of the graph that runs by it; 0: there is none.

    Attributes:
        wrapper: FlashInfer's, which runs.
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
            backend="fa2",  # else a batch may be of one that was never tried
            **buffers,
        )
        self._copied = torch.cuda.Event() if self._table.is_cuda else None  # type: ignore[no-untyped-call]

    def make(self, decodes: DecodedRows) -> None:
        """Plans a step, in what the current stream is asked from here on."""
        if self._copied is not None:
            # The wrapper copies each plan from one place in the host's memory. The last copies were behind the step
            # before, which has ended when another one is launched.
            self._copied.synchronize()
        block_size, window = self._shape.block_size, self._kind.window
        firsts = [0 if window is None else max(0, length - window) // block_size for length in decodes.lengths]
        seen = [length - first * block_size for length, first in zip(decodes.lengths, firsts, strict=True)]
        counts = [num_blocks_for(length, block_size) for length in seen]
        begins = [0, *accumulate(counts)]
        # Where they are not pinned, the host may wait for all that the stream was asked before.
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
        """Returns the blocks of all sequences, one sequence after the other, `[total]`, where the tables are.

        Args:
            given: `[4, sequences]`: the row, the first of its blocks, where those begin here, and how many there are.
        """
        given = uploaded(given, self._table.device)
        row, first, begin = given[:3].repeat_interleave(given[3], dim=1, output_size=total)
        places = torch.arange(total, device=self._table.device) - begin + first
        return self._table[row, places].to(torch.int32)
