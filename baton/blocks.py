"""Block keys: names of cached KV blocks, identical in the router and in every worker.

A key names everything a block's content depends on: the tokens up to its end, the model, the tenant's cache scope, the
adapter and the images. `SequenceSpec.block_keys` makes the keys of a sequence.

    key_0 = H(seed,    tokens[ 0:16])
    key_i = H(key_i-1, tokens[16i:16(i+1)])       seed = H(content id, HMAC(secret, tenant)),
                                                     with an adapter H(seed, adapter digest)

If a hash block contains tokens of images, their digests, grids and places are hashed with its tokens.

Keys are chained over hash blocks of 16 tokens whatever the block size, so pools with different block sizes share keys:
the key of a block of 32 tokens is the key of its second hash block. `H` is BLAKE2b with a 16-byte digest. A fast
non-cryptographic hash is not sufficient, because a tenant that finds a collision could read another tenant's cache.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Mapping, Sequence

HASH_BLOCK = 16
"""Tokens per element of the key chain. Block sizes are multiples of it."""
KEY_BYTES = 16

HASH_BLOCK_BYTES = HASH_BLOCK * 4
NOTHING_ELSE: Mapping[int, bytes] = {}

assert array("I").itemsize == 4


def content_id(model_identity: str) -> str:
    """Return an id of the model in block keys and Redis; 32 hexadecimal digits."""
    return hashlib.blake2b(f"{model_identity}\0".encode(), digest_size=KEY_BYTES).hexdigest()


def cache_seed(content: str, secret: bytes, cache_scope: str) -> bytes:
    """Return the seed of a tenant's key chains. Clients cannot forge another tenant's: only routers know `secret`."""
    scope = hmac.digest(secret, cache_scope.encode(), "sha256")
    return hashlib.blake2b(content.encode() + scope, digest_size=KEY_BYTES).digest()


def seed_with_adapter(seed: bytes, adapter_digest: str) -> bytes:
    """Return the seed of the key chains of an adapter's sequences in the cache scope of `seed`."""
    return hashlib.blake2b(seed + adapter_digest.encode(), digest_size=KEY_BYTES).digest()


def block_keys(
    seed: bytes,
    token_ids: Sequence[int],
    block_size: int = HASH_BLOCK,
    others: Mapping[int, bytes] = NOTHING_ELSE,
) -> list[bytes]:
    """Return the keys of the full blocks of `token_ids`, in order. A trailing partial block has none.

    Args:
        seed: the seed of the chain; for tokens that follow full blocks, the key of the last one.
        others: what else the content of a hash block depends on, by its index among those of `token_ids`.
    """
    if block_size % HASH_BLOCK:
        raise ValueError(f"block_size must be a multiple of {HASH_BLOCK}, got {block_size}")
    packed = array("I", token_ids[: len(token_ids) // block_size * block_size]).tobytes()
    key = seed
    chain: list[bytes] = []
    for offset in range(0, len(packed), HASH_BLOCK_BYTES):
        hashed = key + packed[offset : offset + HASH_BLOCK_BYTES]
        if others:
            hashed += others.get(offset // HASH_BLOCK_BYTES, b"")
        key = hashlib.blake2b(hashed, digest_size=KEY_BYTES).digest()
        chain.append(key)
    num_hash_blocks = block_size // HASH_BLOCK
    return chain[num_hash_blocks - 1 :: num_hash_blocks]


def num_pullable(num_tokens: int, num_cached: int) -> int:
    """Return how many leading tokens can be pulled from a worker that has `num_cached` of the sequence's `num_tokens`.

    The last token is never pulled: its computation yields the next token.
    """
    return max(0, min(num_cached, num_tokens - 1))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
