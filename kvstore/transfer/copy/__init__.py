"""Copies between the scattered blocks of a cache and the contiguous payload of a chunk.

`blocks` gathers and scatters, in the cache's dtype or quantized (`int8`); `checksum` seals a payload and verifies it.
"""

__all__ = ["blocks", "checksum", "int8"]
