"""References on blocks that readers hold independently of their sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from engine.core.group_pool import GroupPool
from engine.core.kv_spec import BlockTables
from engine.core.outputs import Pin


class Pins:
    """The pins of one pool, until they are given back."""

    def __init__(self, pool: GroupPool) -> None:
        self._pool = pool
        self._ids = itertools.count()
        self._tables: dict[int, BlockTables] = {}

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def tables(self) -> Iterable[BlockTables]:
        """The pinned block tables, each as often as it is pinned."""
        return self._tables.values()

    def take(self, tables: BlockTables, num_tokens: int = 0) -> Pin:
        """Take a reference on each block of some tables.

        Args:
            num_tokens: length of the cached prefix that the tables hold; 0: they hold none.
        """
        pin = Pin(next(self._ids), tables, num_tokens)
        if any(tables):
            self._pool.acquire(tables)
            self._tables[pin.pin_id] = tables
        return pin

    def give_back(self, *pins: Pin) -> None:
        """Drop the references that one `take` each has taken."""
        for pin in pins:
            if any(pin.block_ids):
                assert pin.pin_id in self._tables, f"pin {pin.pin_id} is unpinned more often than pinned"
                self._pool.release(self._tables.pop(pin.pin_id))
