"""Block keys of the blocks in vLLM's prefix cache. Pure.

vLLM identifies a block by a hash of its own. Its events contain the tokens of each block and the hash of the previous
block, or the salt of a first block. The salt is the seed of Baton's key chain. So each block's key follows from the
previous block's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.blocks import block_keys
from engine.core.block_pool import BlockChange, Removed, Stored
from engine.vllm.messages import StoredBlock


class BlockNames:
    """Baton's keys of vLLM's cached blocks.

    A block has a key only if all blocks before it are known. If vLLM has evicted one of those, no prompt can reuse the
    block.

    Args:
        keeps_tokens: True if `tokens_of` is used, which needs the tokens of all blocks.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self._blocks: dict[str, StoredBlock] | None = {} if keeps_tokens else None
        self._keys: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}

    def keys(self) -> list[bytes]:
        """Return the keys of all cached blocks."""
        return list(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def name_of(self, key: bytes) -> str | None:
        """Return vLLM's hash of a cached block; None: it is not cached."""
        return self._names.get(key)

    def tokens_of(self, names: Sequence[str]) -> tuple[list[int], str]:
        """Return the tokens of a chain of blocks from its first one on, and its salt."""
        if self._blocks is None or not names:
            return [], ""
        blocks = [self._blocks[name] for name in names]
        return [token for block in blocks for token in block.token_ids], blocks[0].salt

    def update(self, stored: Iterable[StoredBlock], removed: Iterable[str]) -> list[BlockChange]:
        """Record a step's changes. Return them with Baton's keys, in order."""
        changes: list[BlockChange] = []
        for block in stored:
            if block.name in self._keys:
                continue
            seed = self._keys.get(block.before) if block.before else bytes.fromhex(block.salt)
            if seed is None:
                continue
            self._keys[block.name] = key = block_keys(seed, block.token_ids, len(block.token_ids))[0]
            self._names[key] = block.name
            if self._blocks is not None:
                self._blocks[block.name] = block
            changes.append(Stored(key))
        gone = [self._keys.pop(name) for name in removed if name in self._keys]
        for key in gone:
            name = self._names.pop(key)
            if self._blocks is not None:
                del self._blocks[name]
        return changes + [Removed(key) for key in gone]
