"""Triton kernels over the pages of a KV cache, and their launches. Imports Triton: only `kernel_attention` imports it.

The inputs of a step are two lists of integers, and the sequences' block tables:

    rows, places  [T]           for each new token: the row of its sequence's block table, and its position;
                                a place of -1 is padding: nothing is written there
    tiles         [tiles, 4]    row of the block table | first packed token | tokens | position of the first
    tables        [rows, blocks]

A program of `attend` computes one tile for one KV head. The query heads that share it are packed into rows, token by
token, and K and V are read once for all of them, one block at a time, wherever it is. No page is copied and no mask is
created. If few tokens attend many keys, the keys are divided into shares (Dao et al., 2023, Flash-Decoding). Their size
depends only on the tile, not on the batch; `combine` merges the shares. The number of programs that process the shares
of a tile depends on the number of tiles, and does not change the result.

Offsets into pages have 64 bits: a layer's part of a pool may have more than 2^31 elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.model.attention_step import AttentionTerms
from engine.model.tilings import Tiling, tilings_of

NUM_SHARES = 16
"""Maximum number of shares into which the keys of a tile are divided."""
SHARE_KEYS = 128
"""Minimum number of keys in a share."""
ENOUGH_PROGRAMS = 2048
"""Programs that keep a GPU busy: several times as many as run at once, as tiles differ in length."""
WRITE_TOKENS = 16
"""Tokens that a program writes."""
NO_WINDOW = 1 << 30
LOG2_E = math.log2(math.e)
BASE = tl.constexpr(LOG2_E)
"""Factor of scores for the exponentials of 2, for kernels."""
_VARIED = ("tables", "rows", "places", "tiles")
"""Arguments whose addresses change from step to step. Specialized kernels for their alignment would be compiled while
serving."""


@triton.jit
def _rounded(values, pages):
    """Return values in the type of pages. Values beyond the range of 8-bit floats become their maximum."""
    if pages.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -448.0, 448.0)
    return values.to(pages.dtype.element_ty)


@triton.jit(do_not_specialize=("num_tokens", "table_stride"), do_not_specialize_on_alignment=_VARIED)
def write(
    key, value, pages, tables, rows, places, num_tokens, table_stride,
    key_head, key_token, value_head, value_token,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write K and V of some tokens and one head into their pages, rounded to the pages' type."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(places + token, mask=token < num_tokens, other=-1).to(tl.int32)
    is_real = place >= 0
    row = tl.load(rows + token, mask=is_real, other=0).to(tl.int64)
    block = tl.load(tables + row * table_stride + place // BLOCK, mask=is_real, other=0).to(tl.int64)
    page = (block * KV_HEADS + head) * (BLOCK * (K_DIM + V_DIM))
    token = token.to(tl.int64)
    k_dim = tl.arange(0, K_WIDTH)
    mask = is_real[:, None] & (k_dim < K_DIM)[None, :]
    new = tl.load(key + head * key_head + token[:, None] * key_token + k_dim[None, :], mask=mask)
    there = page + (place % BLOCK) * K_DIM
    tl.store(pages + there[:, None] + k_dim[None, :], _rounded(new, pages), mask=mask)
    v_dim = tl.arange(0, V_WIDTH)
    mask = is_real[:, None] & (v_dim < V_DIM)[None, :]
    new = tl.load(value + head * value_head + token[:, None] * value_token + v_dim[None, :], mask=mask)
    there = page + BLOCK * K_DIM + (place % BLOCK) * V_DIM
    tl.store(pages + there[:, None] + v_dim[None, :], _rounded(new, pages), mask=mask)


@triton.jit
def _shares_of(position, count, window, KEYS: tl.constexpr, SHARES: tl.constexpr, SHARE: tl.constexpr):
    """Return the first key that a tile sees, one past its last, the size of a share, and the number of shares.

    Padding has no shares.
    """
    begin = tl.maximum(position - window + 1, 0) // KEYS * KEYS  # aligned, so that all tiles read the same groups
    num_keys = position + count - begin
    keys_each = tl.maximum(tl.cdiv(num_keys, SHARES * KEYS) * KEYS, SHARE)
    return begin, begin + num_keys, keys_each, tl.cdiv(num_keys, keys_each)


@triton.jit
def _blocks_of(table, start, end, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the block of each of some keys."""
    place = start + tl.arange(0, KEYS)
    return tl.load(table + place // BLOCK, mask=place < end, other=0).to(tl.int64)


@triton.jit
def _weighed(scores, peak, scale):
    """Return the weights of some keys, the factor that rescales each row's earlier sums, and each row's new maximum.

    As in online softmax, a weight is 2 to the power of the scaled score less the new maximum.
    """
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # for a row that has seen no key
    return tl.exp2(scores * scale - level[:, None]), tl.exp2(peak - level), higher


@triton.jit
def _look(
    asked, peak, total, found, pages, block, start, oldest, end, at, window, scale, cap_scale,
    PAGES: tl.constexpr, BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, KEYS: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Update each row's maximum score, sum of weights and weighted values with some keys.

    Unless it `IS_EDGE`, each row sees all of these keys. Places before the oldest key that any row sees may belong to
    another sequence.
    """
    place = start + tl.arange(0, KEYS)
    is_key = (place >= oldest) & (place < end)
    page = block * PAGES
    k_dim = tl.arange(0, K_WIDTH)
    mask = (k_dim < K_DIM)[None, :]
    if IS_EDGE:
        mask = mask & is_key[:, None]
    there = page + (place % BLOCK) * K_DIM
    keys = tl.load(pages + there[:, None] + k_dim[None, :], mask=mask, other=0.0).to(asked.dtype)
    scores = tl.dot(asked, tl.trans(keys), input_precision="ieee")
    if IS_CAPPED:  # the hyperbolic tangent, which not every version of Triton has
        scores = 2 * tl.sigmoid(2 * cap_scale * scores) - 1
    if IS_EDGE:
        is_seen = is_key[None, :] & (place[None, :] <= at[:, None]) & (place[None, :] > at[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, faded, peak = _weighed(scores, peak, scale)
    v_dim = tl.arange(0, V_WIDTH)
    mask = (v_dim < V_DIM)[None, :]
    if IS_EDGE:
        mask = mask & is_key[:, None]
    there = page + (place % BLOCK) * V_DIM
    values = tl.load(pages + there[:, None] + v_dim[None, :] + BLOCK * K_DIM, mask=mask, other=0.0).to(asked.dtype)
    found = tl.dot(weights.to(asked.dtype), values, found * faded[:, None], input_precision="ieee")
    return peak, total * faded + tl.sum(weights, 1), found


@triton.jit
def _look_over(
    asked, pages, table, first, end, position, at, window, scale, cap_scale,
    PAGES: tl.constexpr, BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, KEYS: tl.constexpr, IS_CAPPED: tl.constexpr, IS_WHOLE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Process the keys from `first` to `end`, which are all keys of a tile if it `IS_WHOLE`.

    Then most keys are seen by all rows, and they come first. The address of a page depends on its block number, so
    block numbers are loaded one iteration ahead.
    """
    peak = tl.full((asked.shape[0],), float("-inf"), tl.float32)
    total = tl.full((asked.shape[0],), 0.0, tl.float32)
    found = tl.full((asked.shape[0], V_WIDTH), 0.0, tl.float32)
    oldest = position - window + 1
    inner = end
    num_inner = 0
    if IS_WHOLE:
        inner = first + tl.cdiv(tl.maximum(end - window - first, 0), KEYS) * KEYS
        num_inner = tl.maximum(position + 1 - inner, 0) // KEYS * KEYS
        if IN_ORDER:  # in a window the keys that come first would depend on the tile
            num_inner = tl.where(inner > first, 0, num_inner)
        block = _blocks_of(table, inner, end, KEYS, BLOCK)
        for start in range(inner, inner + num_inner, KEYS):
            next_block = _blocks_of(table, start + KEYS, end, KEYS, BLOCK)
            peak, total, found = _look(
                asked, peak, total, found, pages, block, start, oldest, end, at, window, scale, cap_scale,
                PAGES, BLOCK, K_DIM, V_DIM, K_WIDTH, V_WIDTH, KEYS, IS_CAPPED, False,
            )  # fmt: skip
            block = next_block
    block = _blocks_of(table, first, end, KEYS, BLOCK)
    for step in range(first, end - num_inner, KEYS):
        start = step
        if IS_WHOLE:  # few iterations: loading ahead would only cost registers
            start = tl.where(step < inner, step, step + num_inner)
            block = _blocks_of(table, start, end, KEYS, BLOCK)
            next_block = block
        else:
            next_block = _blocks_of(table, start + KEYS, end, KEYS, BLOCK)
        peak, total, found = _look(
            asked, peak, total, found, pages, block, start, oldest, end, at, window, scale, cap_scale,
            PAGES, BLOCK, K_DIM, V_DIM, K_WIDTH, V_WIDTH, KEYS, IS_CAPPED, True,
        )  # fmt: skip
        block = next_block
    return peak, total, found


@triton.jit(do_not_specialize=("table_stride", "window", "num_shares"), do_not_specialize_on_alignment=_VARIED)
def attend(
    query, pages, out, peaks, sums, sinks, tables, tiles,
    table_stride, query_head, query_token, scale, cap_scale, window, num_shares,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SHARES: tl.constexpr, SHARE: tl.constexpr, IS_CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Attend the rows of a tile over its keys.

    Scores are multiplied by `scale`, which includes the base of the exponentials; with a cap first by `cap_scale`, then
    limited to 1. `sinks` is `[heads]`.

    `out` is `[T, heads, V_DIM]`, or with several shares `[T, heads, num_shares, V_DIM]`, not yet divided by `sums`;
    `peaks` and `sums` are `[T, heads, num_shares]`. Programs take the shares of a tile in turn. The last tiles go
    first: those of a prompt have the most keys.
    """
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    head = tl.program_id(1).to(tl.int64)
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    count = tl.load(tile + 2).to(tl.int32)
    position = tl.load(tile + 3).to(tl.int32)
    begin, end, keys_each, num_filled = _shares_of(position, count, window, KEYS, SHARES, SHARE)
    first_share, num_programs = tl.program_id(2), tl.num_programs(2)
    if SHARES == 1:
        first_share, num_programs, keys_each, num_filled = 0, 1, end - begin, 1
    line = tl.arange(0, ROWS)
    token = line // SHARING
    is_line = token < count
    at = position + tl.minimum(token, count - 1)
    token += tl.load(tile + 1).to(tl.int64)
    shared = head * SHARING + line % SHARING
    k_dim = tl.arange(0, K_WIDTH)
    v_dim = tl.arange(0, V_WIDTH)
    places = (token * query_token + shared * query_head)[:, None] + k_dim[None, :]
    asked = tl.load(query + places, mask=is_line[:, None] & (k_dim < K_DIM)[None, :], other=0.0)
    line = token * (KV_HEADS * SHARING) + shared
    mask = is_line[:, None] & (v_dim < V_DIM)[None, :]
    pages += head * (BLOCK * (K_DIM + V_DIM))
    for share in range(first_share, num_filled, num_programs):
        first = begin + share * keys_each
        peak, total, found = _look_over(
            asked, pages, table, first, tl.minimum(end, first + keys_each), position, at, window, scale, cap_scale,
            KV_HEADS * BLOCK * (K_DIM + V_DIM), BLOCK, K_DIM, V_DIM, K_WIDTH, V_WIDTH, KEYS, IS_CAPPED, SHARES == 1,
            IN_ORDER,
        )  # fmt: skip
        there = line
        if SHARES == 1:
            if HAS_SINKS:
                sink = tl.load(sinks + shared).to(tl.float32) * BASE
                level = tl.maximum(peak, sink)
                faded = tl.exp2(peak - level)
                found = found * faded[:, None]
                total = total * faded + tl.exp2(sink - level)
            found = found / tl.where(total > 0.0, total, 1.0)[:, None]
        else:
            there = line * num_shares + share
            tl.store(peaks + there, peak, mask=is_line)
            tl.store(sums + there, total, mask=is_line)
        tl.store(out + there[:, None] * V_DIM + v_dim[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("window", "num_shares"), do_not_specialize_on_alignment=_VARIED)
def combine(
    shares, peaks, sums, out, sinks, tiles, window, num_shares,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, KEYS: tl.constexpr,
    SHARES: tl.constexpr, SHARE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the shares of the tokens of a tile and one head.

    A token that has seen no key, such as padding, becomes zeros.
    """
    tile = tiles + tl.program_id(0) * 4
    first = tl.load(tile + 1).to(tl.int64)
    count = tl.load(tile + 2).to(tl.int32)
    _, _, _, num_filled = _shares_of(tl.load(tile + 3).to(tl.int32), count, window, KEYS, SHARES, SHARE)
    share = tl.arange(0, SHARES)
    is_share = share < num_filled
    v_dim = tl.arange(0, V_WIDTH)
    mask = is_share[:, None] & (v_dim < V_DIM)[None, :]
    for token in range(count):
        line = (first + token) * HEADS + tl.program_id(1)
        at = line * num_shares + share
        found = tl.load(shares + at[:, None] * V_DIM + v_dim[None, :], mask=mask, other=0.0)
        peak = tl.load(peaks + at, mask=is_share, other=float("-inf"))
        total = tl.load(sums + at, mask=is_share, other=0.0)
        highest = tl.max(peak, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * BASE
            highest = tl.maximum(highest, sink)
        faded = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
        total = tl.sum(total * faded, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - highest)
        found = tl.sum(found * faded[:, None], 0) / tl.where(total > 0.0, total, 1.0)
        tl.store(out + line * V_DIM + v_dim, found.to(out.dtype.element_ty), mask=v_dim < V_DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Constants for which the kernels are compiled: the heads of a layer group, and the model's data type."""

    num_kv_heads: int
    num_sharing: int
    """Query heads per KV head."""
    block_size: int
    k_dim: int
    v_dim: int
    itemsize: int
    """Bytes of a query's element."""
    capability: int
    """The GPU's compute capability, such as 90."""
    is_invariant: bool = False
    """True if a token's result is bit-identical in any tile: all tiles are of one kind, and keys are not divided."""

    @property
    def pages(self) -> dict[str, int]:
        """Constants that describe the layout of pages."""
        return {
            "KV_HEADS": self.num_kv_heads,
            "BLOCK": self.block_size,
            "K_DIM": self.k_dim,
            "V_DIM": self.v_dim,
            "K_WIDTH": _width(self.k_dim),
            "V_WIDTH": _width(self.v_dim),
        }

    def tiling(self, *, of_one_token: bool, is_shared: bool) -> Tiling:
        """Return the tiling for tiles of one or of many tokens, with keys divided into shares or not."""
        tilings = tilings_of(self.itemsize, max(self.k_dim, self.v_dim), 0 if self.is_invariant else self.capability)
        if self.is_invariant or not (of_one_token or is_shared):
            return tilings.many_tokens
        return tilings.one_token if of_one_token else tilings.drafts


class WrittenTokens(NamedTuple):
    """Tokens that a step computes, and the locations of their sequences' blocks. See the module's docstring."""

    tables: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


class Tiles(NamedTuple):
    """Queries that are attended by one launch."""

    tiles: torch.Tensor
    """`[tiles, 4]`: see the module's docstring."""
    of_one_token: bool
    """True if every tile has one token."""
    num_shares: int
    """Maximum number of shares of any of them, at most `NUM_SHARES`; 0: keys are not divided."""


def write_pages(
    shape: HeadShape, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, new: WrittenTokens
) -> None:
    """Write K and V, `[kv_heads, T, dim]`, into one layer's pages."""
    key, value = _with_close_dims(key), _with_close_dims(value)
    num_tokens = key.shape[1]
    _launch(
        write,
        (triton.cdiv(num_tokens, WRITE_TOKENS), shape.num_kv_heads),
        (key, value, pages, *new, num_tokens, new.tables.stride(0), *key.stride()[:2], *value.stride()[:2]),
        {**shape.pages, "TOKENS": WRITE_TOKENS},
    )


def attend_tiles(
    shape: HeadShape, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor, *,
    tables: torch.Tensor, tiles: Tiles, terms: AttentionTerms,
) -> None:  # fmt: skip
    """Attend queries, `[heads, T, k_dim]`, over one layer's pages, and write into `out`, `[T, heads, v_dim]`."""
    scaling = 1 / math.sqrt(shape.k_dim) if terms.scaling is None else terms.scaling
    window, cap = terms.sliding_window or NO_WINDOW, terms.softcap
    sinks, of_sinks = query if terms.sinks is None else terms.sinks, {"HAS_SINKS": terms.sinks is not None}
    scale, cap_scale = (scaling * LOG2_E, 0.0) if cap is None else (cap * LOG2_E, scaling / cap)
    query = _with_close_dims(query)
    tiling = shape.tiling(of_one_token=tiles.of_one_token, is_shared=tiles.num_shares > 0)
    size = (len(out), query.shape[0], tiles.num_shares)
    found, peaks, sums = out, out, out
    if tiles.num_shares:
        found, peaks, sums = (out.new_empty(one, dtype=torch.float32) for one in ((*size, shape.v_dim), size, size))
    division = {"KEYS": tiling.keys, "SHARES": NUM_SHARES if tiles.num_shares else 1, "SHARE": SHARE_KEYS}
    numbers = (tables.stride(0), *query.stride()[:2], scale, cap_scale, window, tiles.num_shares)
    kind = {"SHARING": shape.num_sharing, "ROWS": tiling.rows, "IS_CAPPED": cap is not None, **of_sinks}
    _launch(
        attend,
        (len(tiles.tiles), shape.num_kv_heads, _num_programs(len(tiles.tiles) * shape.num_kv_heads, tiles.num_shares)),
        (query, pages, found, peaks, sums, sinks, tables, tiles.tiles, *numbers),
        {**shape.pages, **division, **kind, "IN_ORDER": shape.is_invariant},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if tiles.num_shares:
        _launch(
            combine,
            (len(tiles.tiles), query.shape[0]),
            (found, peaks, sums, out, sinks, tiles.tiles, window, tiles.num_shares),
            {"HEADS": query.shape[0], "V_DIM": shape.v_dim, "V_WIDTH": _width(shape.v_dim), **division, **of_sinks},
        )


def num_shares_of(num_keys: int, shape: HeadShape) -> int:
    """Return the maximum number of shares for `num_keys` keys of a tile, as `attend` computes it."""
    return 0 if shape.is_invariant else max(1, min(NUM_SHARES, -(-num_keys // SHARE_KEYS)))


def _num_programs(num_tiles: int, num_shares: int) -> int:
    """Return the number of programs for the shares of a tile and a KV head."""
    return max(1, min(num_shares, -(-ENOUGH_PROGRAMS // num_tiles)))


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], **options: int
) -> None:
    kernel[grid](*args, **constants, **options)


def _width(dim: int) -> int:
    """Return the padded number of dimensions of a head in registers; the padding is masked."""
    return max(16, 1 << (dim - 1).bit_length())


def _with_close_dims(heads: torch.Tensor) -> torch.Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()
