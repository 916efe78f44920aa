"""Copies between the scattered blocks of a cache and the contiguous payload of a chunk.

`blocks` gathers and scatters, in the cache's dtype or quantized to int8, by an index of runs. `checksum` computes and
verifies a payload's checksum. On a GPU, `kernels` do both in one pass if `kernel_choice` finds that they run.
"""

__all__ = ["blocks", "checksum", "kernel_choice", "kernels"]
