"""Tilings of the attention kernel: a table of compile-time parameters, to be changed if another entry measures faster.

All entries compile without spilled registers from sm_80 on. On an H100, according to the compiled code (bfloat16, 128
dimensions): a tile of one token leaves room for three programs on a multiprocessor, each with two loads of K and V in
flight, about 190 KiB in all, while 25 to 40 suffice for its bandwidth. A tile of many tokens reads 32 KiB of K and V
for 128 rows and 64 keys, for which the tensor cores need 1,024 cycles; with half the rows the cache would be too slow.
Measured there (Triton 3.6, an 8B Llama, profiled steps): 64 sequences of 512 tokens take 59 us a layer and 8 us to
combine the shares, one sequence 5.9 and 2.5 us.
"""

from __future__ import annotations

from typing import NamedTuple

WGMMA_CAPABILITY = 90
"""Compute capability from which on products of many rows read their operands from shared memory."""


class Tiling(NamedTuple):
    """Compile-time parameters of `kernels.attend` for a kind of tile."""

    rows: int
    """Rows of queries; each token takes as many as there are query heads per KV head."""
    keys: int
    """Keys that are processed together."""
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """Tilings for each kind of tile."""

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
"""Table by the bytes of a number of the model's data type, and by the maximum dimensions of a head."""
MANY_TOKENS_BEFORE = Tiling(64, 64, 4, 2)
"""Replaces tiles of 128 rows on GPUs that read operands from registers, of which these tiles would need too many."""


def tilings_of(itemsize: int, dims: int, capability: int) -> Tilings:
    """Return the tilings for heads of `dims` dimensions and a GPU's compute capability, such as 90."""
    found = next(tilings for (size, most), tilings in TILINGS.items() if itemsize <= size and dims <= most)
    if capability < WGMMA_CAPABILITY and found.many_tokens.rows > MANY_TOKENS_BEFORE.rows:
        return found._replace(many_tokens=MANY_TOKENS_BEFORE)
    return found
