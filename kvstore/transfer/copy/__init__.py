"""Copies between the scattered blocks of a cache and the contiguous payload of a chunk.

`blocks` gathers and scatters, in the cache's dtype or quantized (`int8`), by an index of runs (`run_index`). `checksum`
seals a payload and verifies it. On a GPU `kernels` do both in one pass, where `kernel_choice` finds that they run, and
`moves` are copies under way.
"""

__all__ = ["blocks", "checksum", "int8", "kernel_choice", "kernels", "moves", "run_index"]
