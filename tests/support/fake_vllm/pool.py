"""KV blocks and prefix cache of a fake vLLM, with the rules of vLLM's own.

Free blocks keep their content until they are taken, those that were used longest ago first. Several blocks may have
one hash; it is gone when none has it. Block 0 stands for no block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.vllm.messages import StoredBlock


class OutOfBlocks(Exception):
    """There are too few free blocks."""


class Pool:
    """Blocks 1 to `num_blocks`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._references = Counter[int]()
        self._name_of: dict[int, str] = {}
        self._blocks_of: dict[str, OrderedDict[int, None]] = {}
        self._stored: list[StoredBlock] = []
        self._removed: dict[str, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that are in use by nothing, cached or not."""
        return len(self._free)

    @property
    def num_named(self) -> int:
        return len(self._blocks_of)

    def take(self, number: int) -> list[int]:
        """Raises OutOfBlocks; then nothing is taken."""
        if number > len(self._free):
            raise OutOfBlocks
        taken = []
        for _ in range(number):
            block, _ = self._free.popitem(last=False)
            self._references[block] = 1
            self._forget(block)
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Uses blocks that are cached."""
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Frees blocks. The last block is evicted first, because the fewest prompts share it."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was given back twice"
            if not self._references[block]:
                self._free[block] = None

    def is_free(self, block: int) -> bool:
        return block in self._free

    def find(self, name: str) -> int | None:
        """A block with this hash."""
        return next(iter(self._blocks_of.get(name, ())), None)

    def store(self, block: int, stored: StoredBlock) -> None:
        """A block is full. vLLM reports it also if another one has its hash."""
        assert block not in self._free, f"block {block} is cached while it is free"
        if block not in self._name_of:
            self._name_of[block] = stored.name
            self._blocks_of.setdefault(stored.name, OrderedDict())[block] = None
        self._stored.append(stored)

    def clear(self) -> None:
        """Forgets all prefixes."""
        for block in list(self._name_of):
            self._forget(block)

    def taken(self) -> tuple[list[StoredBlock], list[str]]:
        """Returns the changes since the last call, as `hooks.Events.taken` does."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, {}
        return stored, [name for name in removed if name not in self._blocks_of]

    def _forget(self, block: int) -> None:
        if (name := self._name_of.pop(block, None)) is None:
            return
        del self._blocks_of[name][block]
        if not self._blocks_of[name]:
            del self._blocks_of[name]
        self._removed[name] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is free, or has as many references as tables contain it."""
        used = Counter(block for table in tables for block in table)
        assert used == +self._references, f"{used} and {self._references} differ"
        assert not used.keys() & self._free.keys(), "a block in use is free"
        assert len(used) + len(self._free) == self.num_blocks, "a block is lost"
