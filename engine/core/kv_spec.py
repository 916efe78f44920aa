"""Shape of a KV cache in plain values, as the scheduler, the KV transfer and the simulator need it.

The layers of a model form groups whose KV has the same shape and window. Each sequence has a block table and a token
count for every group. A dense model is one group; a model without attention has one group without layers, whose blocks
take no memory and only name prefixes.

Recurrent layers also keep a state of fixed size. All states of a sequence together are a row of the states' pool. A
step reads a sequence's row and writes another one, and never changes the row that it reads. So a step can be computed
again, and a row can be shared and cached like a full block.

    block_ids       ( table of group 0, table of group 1, ..., table of the states )   the last only if there are states
    states' table   ( row after the computed tokens, row that the next step writes )   first EMPTY_PLACE: no state yet
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from baton.blocks import HASH_BLOCK

BlockTables = tuple[tuple[int, ...], ...]
"""Block ids in sequence order, one table per layer group, then the states' table if the model has states."""

EMPTY_PLACE = -1
"""Entry of a block table without a block: its tokens have left the layers' window, or no token is computed yet, so
there is no state. It is never read."""

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of the data type without `torch.`."""


INT8 = "int8"
"""Data type of quantized pages: value = scale times code, with one scale per token and head of K and of V."""
FP8 = "float8_e4m3fn"
"""Data type of pages of 8-bit floats, whose maximum is 448. They have no scale, like vLLM's by default."""
INT8_SCALE_BYTES = 4
"""Bytes of a float32 scale. It is stored after a token's codes and counts among the dimensions of K and of V."""


class PageOrder(StrEnum):
    """The order of values within one KV head of a block."""

    K_THEN_V = "k_then_v"
    """The K of all tokens, then the V of all tokens."""
    BY_TOKEN = "by_token"
    """The K and V of one token side by side, token after token."""
    OPAQUE = "opaque"
    """Layout known only to the engine, identified by a tag. Blocks are copied whole, between equal groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV has the same shape, and the blocks that hold it.

    Raises:
        ValueError: the block size is not a multiple of 16, or the data type is unknown.
    """

    name: str
    layers: tuple[int, ...]
    """The model's layer indices, ascending."""
    block_size: int
    """Tokens per block, a multiple of 16. Groups of one model may differ."""
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    page_order: PageOrder = PageOrder.K_THEN_V
    tag: str = ""
    """Name of an opaque page order; empty for the others."""
    strides: tuple[int, int] = (0, 0)
    """Elements from one layer to the next and from one block to the next; 0: contiguous."""
    window: int = 0
    """Number of tokens that a token attends to, itself included; 0: all tokens before it."""
    is_replicated: bool = False
    """True if each of several ranks holds all KV heads of the model."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % HASH_BLOCK:
            raise ValueError(f"block_size must be a multiple of {HASH_BLOCK}, got {self.block_size}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if (self.page_order is PageOrder.OPAQUE) != bool(self.tag):
            raise ValueError(f"an opaque page order needs a tag, and only that: {self.page_order}, {self.tag!r}")

    @property
    def page_dims(self) -> tuple[int, ...]:
        """Elements per token of each page of a head: of K and of V, or of both if they are interleaved."""
        is_apart = self.page_order is PageOrder.K_THEN_V
        return (self.k_dim, self.v_dim) if is_apart else (self.k_dim + self.v_dim,)

    @property
    def page_numel(self) -> int:
        """Elements of one head's K and V in a block."""
        return self.block_size * (self.k_dim + self.v_dim)

    @property
    def row_numel(self) -> int:
        """Elements of one block of one layer."""
        return self.num_kv_heads * self.page_numel

    @property
    def row_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.row_numel * DTYPE_BYTES[self.dtype]

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that is needed after `num_tokens` tokens.

        The last of these tokens may be computed again, and attends to the window that ends with it.
        """
        return max(0, num_tokens - self.window) // self.block_size if self.window else 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Named tensor of fixed size that every sequence of a model with recurrent layers has."""

    name: str
    shape: tuple[int, ...]
    """`(layers, ...)` of a real model: the states of one kind of all layers are one tensor."""
    dtype: str
    """A key of `DTYPE_BYTES`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV cache: the same on every worker of a model with equal settings."""

    groups: tuple[LayerGroup, ...]
    states: tuple[StateSpec, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    """Layers without KV of their own, each with the layer whose KV it reads."""
    whole_prompts: bool = False
    """True if a prompt must be computed in one step: the model cannot continue a state by several tokens, or an encoder
    reads the prompt in both directions."""

    @property
    def block_size(self) -> int:
        """Tokens of the shortest prefix that whole blocks of every group hold: the unit of prefix reuse."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def num_layers(self) -> int:
        """The model's layers up to and including the last one with KV."""
        return 1 + max((layer for group in self.groups for layer in group.layers), default=-1)

    @property
    def num_tables(self) -> int:
        """Block tables of a sequence."""
        return len(self.groups) + bool(self.states)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every group, over all layers."""
        return sum(len(group.layers) * group.row_bytes for group in self.groups)

    @property
    def supports_prefix_reuse(self) -> bool:
        """True if a prompt can be continued from a cached prefix."""
        return not self.whole_prompts

    @property
    def state_bytes(self) -> int:
        """Bytes of one row of the states' pool."""
        return sum(state.num_bytes for state in self.states)

    @property
    def resumes_anywhere(self) -> bool:
        """True if a sequence can continue after each of its cached blocks: there are neither states nor windows."""
        return not self.states and not any(group.window for group in self.groups)

    def describe(self) -> str:
        """Return a one-line description of everything that two workers must agree on."""
        sizes = "/".join(str(size) for size in sorted({group.block_size for group in self.groups}))
        groups = "; ".join(
            f"{g.name}: {len(g.layers)} layers x {g.num_kv_heads} heads x ({g.k_dim}+{g.v_dim}) {g.dtype}"
            f"{f' window {g.window}' if g.window else ''}"
            f"{'' if g.page_order is PageOrder.K_THEN_V else f' {g.page_order} {g.tag}'.rstrip()}"
            for g in self.groups
        )
        states = "".join(f"; state {s.name}{list(s.shape)}" for s in self.states)
        return f"block size {sizes}; {groups}{states}"
