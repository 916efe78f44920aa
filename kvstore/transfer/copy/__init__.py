"""Copies between the scattered blocks of a cache and the contiguous payload of a chunk.

`blocks` gathers and scatters, in the cache's dtype or quantized (`int8`), by an index of runs (`run_index`). `checksum`
computes and verifies a payload's checksum. On a GPU, `kernels` do both in one pass if `kernel_choice` finds that they
run, and `moves` are copies in progress.
"""

__all__ = ["blocks", "checksum", "int8", "kernel_choice", "kernels", "moves", "run_index"]
