"""How the attention kernel is compiled: a table to be measured, and to be changed where another entry is faster.

What is taken spills no registers from sm_80 on. On an H100, by the code that the compiler makes (bfloat16, 128
dimensions): a tile of one token leaves room for three programs on a multiprocessor, each with two turns of K and V on
their way, about 190 KiB in all, where 25 to 40 suffice for its bandwidth. A tile of many tokens reads 32 KiB of K and V
for 128 rows and 64 keys, for which the tensor cores need 1,024 cycles: with half the rows the cache would be too slow.
Measured there (Triton 3.6, an 8B Llama, profiled steps): 64 sequences of 512 tokens 59 us a layer and 8 us to combine
the shares, one sequence 5.9 and 2.5 us.
"""

from __future__ import annotations

from typing import NamedTuple

WGMMA_CAPABILITY = 90
"""Compute capability from which on the products of many rows read their factors from shared memory."""


class Tiling(NamedTuple):
    """How `kernels.attend` is compiled for a kind of tile."""

    rows: int
    """Rows of queries, of which each token takes as many as heads share its K and V."""
    keys: int
    """Keys that are looked at together."""
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """How the kinds of tiles are compiled."""

    one_token: Tiling
    drafts: Tiling
    """Few tokens, whose keys are divided into shares."""
    many_tokens: Tiling


TILINGS = {
    (2, 64): Tilings(Tiling(16, 128, 4, 3), Tiling(64, 64, 8, 2), Tiling(128, 64, 8, 2)),
    (2, 128): Tilings(Tiling(16, 64, 4, 3), Tiling(64, 64, 8, 2), Tiling(128, 64, 8, 3)),
    (2, 256): Tilings(Tiling(16, 32, 4, 2), Tiling(32, 32, 8, 2), Tiling(64, 32, 8, 2)),
    (4, 256): Tilings(Tiling(16, 16, 8, 3), Tiling(16, 16, 8, 3), Tiling(16, 16, 8, 3)),
}
"""Keys are the bytes of a number that a model computes in, and the dimensions of a head, each up to so many."""
MANY_TOKENS_BEFORE = Tiling(64, 64, 4, 2)
"""How tiles of 128 rows are compiled where factors are read from registers, of which they would take too many."""


def tilings_of(itemsize: int, dims: int, capability: int) -> Tilings:
    """Returns how tiles are compiled for heads of some dimensions and a GPU of a compute capability, such as 90."""
    found = next(tilings for (size, most), tilings in TILINGS.items() if itemsize <= size and dims <= most)
    if capability < WGMMA_CAPABILITY and found.many_tokens.rows > MANY_TOKENS_BEFORE.rows:
        return found._replace(many_tokens=MANY_TOKENS_BEFORE)
    return found
