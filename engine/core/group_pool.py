"""Block pools of all layer groups of a cache, used together.

A sequence takes blocks in every group or in none. A prefix counts as cached if every group holds it whole. The prefix
index receives an event when the last group has stored it, and another when the first group has evicted it. There is one
key per `key_tokens` tokens, the greatest length that divides every group's block size:

    key_tokens   |   0   |   1   |   2   |   3   |
    group of 16  |   0   |   1   |   2   |   3   |      a block has the key of its last tokens
    group of 32  |       0       |       1       |
    the index    |       0       |       1       |      what all groups can hold: multiples of KVSpec.block_size

The states' table comes last. Its blocks are never cached: a state cannot be cropped to a prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from baton.blocks import num_blocks_for
from baton.cluster import BlockCounts
from engine.core.block_pool import BlockChange, BlockPool, Stored
from engine.core.kv_spec import EMPTY_PLACE, BlockTables, KVSpec
from engine.core.runner import BlockCopy


class GroupPool:
    """One `BlockPool` per block table of a spec.

    Args:
        num_blocks: blocks of each table; see `Runner.num_blocks`.
    """

    def __init__(self, spec: KVSpec, num_blocks: Sequence[int]) -> None:
        if len(num_blocks) != spec.num_tables:
            raise ValueError(f"a spec with {spec.num_tables} block tables got block counts for {len(num_blocks)}")
        self.pools = tuple(BlockPool(number) for number in num_blocks)
        self.block_sizes = tuple(group.block_size for group in spec.groups)
        self.key_tokens = math.gcd(*self.block_sizes)
        self.prefix_tokens = spec.block_size
        """A cached prefix is a multiple of this length."""
        self.caches_prefixes = spec.supports_prefix_reuse
        self.capacity = min(pool.num_blocks * size for pool, size in zip(self.pools, self.block_sizes, strict=False))
        """Tokens of the longest sequence that the blocks of every group hold."""
        self._groups = self.pools[: len(self.block_sizes)]
        self._state_pools = self.pools[len(self.block_sizes) :]
        self.has_states = bool(self._state_pools)
        self._num_holders: Counter[bytes] = Counter()
        """Number of groups that hold a key, if there are several groups."""
        self._events: list[BlockChange] = []

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def num_matching_tokens(self, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of a chain of keys that every group holds."""
        if not self.caches_prefixes:
            return 0
        num_tokens = min(
            pool.num_matching(self.keys_of(keys, group)) * self.block_sizes[group]
            for group, pool in enumerate(self._groups)
        )
        return num_tokens // self.prefix_tokens * self.prefix_tokens

    def match(self, keys: Sequence[bytes]) -> tuple[list[int], ...]:
        """Return the blocks of that prefix in each table. They are not acquired yet."""
        num_tokens = self.num_matching_tokens(keys)
        found = [
            pool.match(self.keys_of(keys, group)[: num_tokens // self.block_sizes[group]])
            for group, pool in enumerate(self._groups)
        ]
        return (*found, *([] for _ in self._state_pools))

    def register(self, table: tuple[int, ...], group: int, first: int, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Register the blocks of a group's table from index `first` on, now full, under the keys of all its blocks.

        Returns:
            The table to use from now on: the same tuple, unless a block was replaced; see `BlockPool.register`.
        """
        pool, full = self.pools[group], table[first : len(keys)]
        found = tuple(
            [
                block if block == EMPTY_PLACE else pool.register(block, key)
                for block, key in zip(full, keys[first:], strict=True)
            ]
        )
        return table if found == full else (*table[:first], *found, *table[len(keys) :])

    def keys_of(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        """Return the keys of a chain that belong to full blocks of a group."""
        step = self.block_sizes[group] // self.key_tokens
        return keys if step == 1 else keys[step - 1 :: step]

    def keys(self) -> list[bytes]:
        """Return every key whose prefix is cached whole."""
        if len(self._groups) == 1:
            return self.pools[0].keys()
        self._count()
        return [key for key, number in self._num_holders.items() if number == len(self._groups)]

    def take_events(self) -> list[BlockChange]:
        """Return the changes for the prefix index since the last call, in order."""
        if len(self._groups) == 1:
            return self.pools[0].take_events()
        self._count()
        events, self._events = self._events, []
        return events

    # -- blocks --------------------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many blocks a sequence of `num_tokens` tokens needs in each table."""
        counts = [num_blocks_for(num_tokens, size) for size in self.block_sizes]
        return (*counts, *(1 for _ in self._state_pools))

    def num_tokens_in(self, tables: Sequence[Sequence[int]]) -> int:
        """Return how many tokens the blocks of every group hold."""
        return min(len(table) * size for table, size in zip(tables, self.block_sizes, strict=False))

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether these numbers of blocks, one per table, are available."""
        return all(number <= pool.num_available for pool, number in zip(self.pools, num_blocks, strict=True))

    def allocate(self, num_blocks: Sequence[int]) -> BlockTables | None:
        """Take fresh blocks in every table, all or nothing. Return None if there are too few."""
        if not self.has_room(num_blocks):
            return None
        fresh = [pool.allocate(number) for pool, number in zip(self.pools, num_blocks, strict=True)]
        return tuple(tuple(blocks) for blocks in fresh if blocks is not None)

    def reuse(self, found: Sequence[Sequence[int]], num_blocks: Sequence[int]) -> BlockTables | None:
        """Take the blocks that `match` has found and fresh ones after them, all or nothing.

        Args:
            num_blocks: length of each table.

        Returns:
            None if there are too few; the found blocks then count as used.
        """
        wanted = [
            (pool, blocks, max(0, number - len(blocks)))
            for pool, blocks, number in zip(self.pools, found, num_blocks, strict=True)
        ]
        if not all(pool.fits(blocks, num_fresh) for pool, blocks, num_fresh in wanted):
            for pool, blocks, _ in wanted:
                pool.touch(blocks)
            return None
        taken = [pool.reuse(blocks, num_fresh) for pool, blocks, num_fresh in wanted]
        return tuple(tuple(blocks) for blocks in taken if blocks is not None)

    def fork(
        self, tables: BlockTables, num_tokens: int, num_blocks: Sequence[int] = ()
    ) -> tuple[BlockTables, tuple[BlockCopy, ...]] | None:
        """Take the blocks of a second sequence that shares the first `num_tokens` computed tokens of a first one.

        Full blocks are shared. A partly filled last block and the state are copied: see `BlockPool.fork`.

        Args:
            num_blocks: minimum length of each of its tables; empty: as the shared tokens need.

        Returns:
            The tables, and the copies to perform, whose sources are held until `release_sources`. None if there are too
            few blocks.
        """
        parts = []
        for table, size in zip(tables, self.block_sizes, strict=False):
            num_full, num_used = num_tokens // size, num_blocks_for(num_tokens, size)
            parts.append((table[:num_full], table[num_full:num_used]))
        parts += [((), table) for table in tables[len(self.block_sizes) :]]
        lengths = num_blocks or [0] * len(parts)
        more = [max(0, n - len(shared) - len(copied)) for n, (shared, copied) in zip(lengths, parts, strict=True)]
        wanted = list(zip(self.pools, parts, more, strict=True))
        if any(len(copied) + num_more > pool.num_available for pool, (_, copied), num_more in wanted):
            return None
        forked, copies = [], []
        for group, (pool, (shared, copied), num_more) in enumerate(wanted):
            fresh = pool.fork(shared, copied, num_more)
            assert fresh is not None
            forked.append((*shared, *fresh))
            copies += [BlockCopy(group, source, target) for source, target in zip(copied, fresh, strict=False)]
        return tuple(forked), tuple(copies)

    def acquire(self, tables: Iterable[Sequence[int]]) -> None:
        """Take one reference on each block of each table, all of them cached or in use."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.acquire(table)

    def release(self, tables: Iterable[Sequence[int]]) -> None:
        """Drop one reference on each block of one sequence's tables."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.release(table)

    def release_sources(self, copies: Iterable[BlockCopy]) -> None:
        """Drop the references that `fork` has taken for copies."""
        for copy in copies:
            self.pools[copy.group].release((copy.source,))

    # -- accounting ----------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that could be taken now, in the group that has the fewest."""
        return min(pool.num_available for pool in self._groups)

    def counts(self) -> BlockCounts:
        """Return the counts of the layer group that is used most."""
        counts = [pool.counts() for pool in self._groups]
        return max(counts, key=lambda group: group.in_use / group.total) if len(counts) > 1 else counts[0]

    def check(self, holders: Iterable[BlockTables], copies: Iterable[BlockCopy]) -> None:
        """Assert that every used block has as many references as holders, including copies that read it."""
        held = [Counter[int]() for _ in self.pools]
        for tables in holders:
            for counter, table in zip(held, tables, strict=False):
                counter.update(block for block in table if block != EMPTY_PLACE)
        for copy in copies:
            held[copy.group][copy.source] += 1
        for pool, counter in zip(self.pools, held, strict=True):
            pool.check()
            in_use = pool.counts().in_use
            assert len(counter) == in_use, f"{in_use} blocks in use, {len(counter)} held"
            assert counter == pool.references(), "a block has more or fewer references than holders"

    def _count(self) -> None:
        """Collect the events of all groups, and update which prefixes are whole."""
        whole = len(self._groups)
        for event in (event for pool in self._groups for event in pool.take_events()):
            if isinstance(event, Stored):
                self._num_holders[event.key] += 1
                if self._num_holders[event.key] == whole:
                    self._events.append(event)
            else:
                if self._num_holders[event.key] == whole:
                    self._events.append(event)
                self._num_holders[event.key] -= 1
                if not self._num_holders[event.key]:
                    del self._num_holders[event.key]
