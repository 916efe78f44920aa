"""Copies between the scattered blocks of a cache and the contiguous payload of a chunk, and their checksums."""
