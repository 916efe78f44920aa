"""Block pools of all layer groups of a cache, used together.

A sequence takes blocks in every group or in none. A prefix counts as cached if a sequence can continue after it. Groups
without a window must then hold all of its blocks, groups with a window those of the window, and the states' pool a row.
There is one key per `key_tokens` tokens, the greatest length that divides every group's block size:

    key_tokens   |   0   |   1   |   2   |   3   |
    group of 16  |   0   |   1   |   2   |   3   |      a block has the key of its last tokens
    group of 32  |       0       |       1       |
    states       |       -       |       1       |      a snapshot: the row after these tokens
    the index    |       -       |       1       |      what all of them hold, at multiples of KVSpec.block_size

The prefix index receives an event when the last pool has stored a key, and another when the first one has evicted it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.blocks import num_blocks_for
from baton.cluster import BlockCounts
from engine.core.block_pool import BlockChange, BlockPool, Stored
from engine.core.kv_spec import EMPTY_PLACE, BlockTables, KVSpec
from engine.core.pool_sizes import ROWS_PER_SEQUENCE
from engine.core.runner import BlockCopy


class Prefix(NamedTuple):
    """Cached content from which a sequence can continue. Its blocks are not acquired yet."""

    num_tokens: int
    """Leading tokens that need not be computed. To receive KV: those in the blocks of groups without a window."""
    tables: tuple[list[int], ...]
    """The first blocks of each block table. The states' table has the snapshot, or an empty place for no token."""
    begins: tuple[int, ...]
    """Number of leading tokens that the blocks hold or that the window no longer reaches, by layer group."""


class GroupPool:
    """One `BlockPool` per block table of a spec.

    Args:
        num_blocks: blocks of each table; see `Runner.num_blocks`.
    """

    def __init__(self, spec: KVSpec, num_blocks: Sequence[int]) -> None:
        if len(num_blocks) != spec.num_tables:
            raise ValueError(f"a spec with {spec.num_tables} block tables got block counts for {len(num_blocks)}")
        self.pools = tuple(BlockPool(number) for number in num_blocks)
        self.groups = spec.groups
        self.block_sizes = tuple(group.block_size for group in spec.groups)
        self.key_tokens = math.gcd(*self.block_sizes)
        self.prefix_tokens = spec.block_size
        """A cached prefix is a multiple of this length."""
        self.caches_prefixes = spec.supports_prefix_reuse
        self.needs_whole_prompts = spec.whole_prompts
        self.has_windows = any(group.window for group in spec.groups)
        self.capacity = min(pool.num_blocks * size for pool, size in zip(self.pools, self.block_sizes, strict=False))
        """Tokens of the longest sequence that the blocks of every group hold."""
        self._group_pools = self.pools[: len(self.block_sizes)]
        self.rows: BlockPool | None = self.pools[-1] if spec.states else None
        """Pool of the states' rows; None: the model has no states."""
        self._is_dense = len(self.pools) == 1 and not self.has_windows
        self._num_holders: Counter[bytes] = Counter()
        """Number of pools that hold a key, if there are several pools."""
        self._events: list[BlockChange] = []

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def num_matching_tokens(self, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of a chain of keys after which a sequence can continue."""
        if not self.caches_prefixes:
            return 0
        num_tokens = self.num_attended_tokens(keys)
        if self._is_dense:
            return num_tokens
        while num_tokens:
            found = min(self._last_row(keys, num_tokens), self._last_window(keys, num_tokens))
            if found == num_tokens:
                break
            num_tokens = found // self.prefix_tokens * self.prefix_tokens
        return num_tokens

    def num_attended_tokens(self, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix in all groups without a window, whatever windows and states need."""
        num_tokens = len(keys) * self.key_tokens
        for index, (pool, size) in enumerate(zip(self._group_pools, self.block_sizes, strict=True)):
            if not self.groups[index].window:
                num_tokens = min(num_tokens, pool.num_matching(self.keys_of(keys, index)) * size)
        return num_tokens // self.prefix_tokens * self.prefix_tokens

    def _last_row(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """Return the length, up to `num_tokens`, of the longest prefix with a snapshot of the states."""
        if self.rows is None:
            return num_tokens
        step = self.prefix_tokens
        ends = range(num_tokens, 0, -step)
        return next((end for end in ends if self.rows.holds(keys[end // self.key_tokens - 1])), 0)

    def _last_window(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """Return an upper bound of the longest prefix, up to `num_tokens`, after which all windows are cached.

        It is `num_tokens` only if they are cached there.
        """
        for index, group in enumerate(self.groups):
            if group.window:
                own, pool = self.keys_of(keys, index), self.pools[index]
                needed = range(num_tokens // group.block_size - 1, group.first_block(num_tokens) - 1, -1)
                missing = next((block for block in needed if not pool.holds(own[block])), None)
                if missing is not None:
                    num_tokens = missing * group.block_size
        return num_tokens

    def match(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest prefix of a chain of keys after which a sequence can continue."""
        num_tokens = self.num_matching_tokens(keys)
        tables = []
        for index, (group, pool) in enumerate(zip(self.groups, self._group_pools, strict=True)):
            first, own = group.first_block(num_tokens), self.keys_of(keys, index)[: num_tokens // group.block_size]
            tables.append([EMPTY_PLACE] * first + pool.match(own[first:]))
        if self.rows is not None:
            key = keys[num_tokens // self.key_tokens - 1 :][:1] if num_tokens else ()
            tables.append(self.rows.match(key) or [EMPTY_PLACE])
        return Prefix(num_tokens, tuple(tables), (num_tokens,) * len(self.groups))

    def match_to_receive(self, keys: Sequence[bytes], num_tokens: int) -> Prefix:
        """Return the blocks that need not be transferred to a sequence of `num_tokens` tokens.

        The state comes with the transfer, so no snapshot is needed. Groups with a window need only the window at the
        end.
        """
        num_held = self.num_attended_tokens(keys) if self.caches_prefixes else 0
        tables, begins = list[list[int]](), list[int]()
        for index, (group, pool) in enumerate(zip(self.groups, self._group_pools, strict=True)):
            first, own = group.first_block(num_tokens), self.keys_of(keys, index)
            held = own[first:] if group.window else own[: num_held // group.block_size]
            found = pool.match(held if self.caches_prefixes else ())
            tables.append([EMPTY_PLACE] * first + found)
            begins.append((first + len(found)) * group.block_size)
        if self.rows is not None:
            tables.append([])
        return Prefix(num_held, tuple(tables), tuple(begins))

    def register(self, table: tuple[int, ...], group: int, first: int, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Register the blocks of a group's table from index `first` on, which have become full.

        Args:
            keys: keys of all full blocks of the table.

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

    def register_row(self, table: tuple[int, ...], key: bytes) -> tuple[int, ...]:
        """Register a sequence's current row as the snapshot after the tokens of a key, if there is room for it.

        Args:
            table: the sequence's states' table.

        Returns:
            The table to use from now on, with one row more.
        """
        assert self.rows is not None
        row, *spare = table
        if not self.rows.has_key(row):
            fresh = self.rows.allocate(1)
            if fresh is None:
                return table
            row, spare = self.rows.register(row, key), spare + fresh
        return (row, *spare)

    def keys(self) -> list[bytes]:
        """Return every key that all pools hold. Windows before it may have been evicted, so it is a hint."""
        if len(self.pools) == 1:
            return self.pools[0].keys()
        self._count()
        return [key for key, number in self._num_holders.items() if number == len(self.pools)]

    def take_events(self) -> list[BlockChange]:
        """Return the changes for the prefix index since the last call, in order."""
        if len(self.pools) == 1:
            return self.pools[0].take_events()
        self._count()
        events, self._events = self._events, []
        return events

    # -- blocks --------------------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many blocks a sequence of `num_tokens` tokens needs in each table."""
        counts = [num_blocks_for(num_tokens, size) for size in self.block_sizes]
        return (*counts, ROWS_PER_SEQUENCE) if self.rows is not None else tuple(counts)

    def num_tokens_in(self, tables: Sequence[Sequence[int]]) -> int:
        """Return how many tokens the blocks of every group hold; 0 if there is no row for the next state."""
        if self.rows is not None and len(tables[-1]) < ROWS_PER_SEQUENCE:
            return 0
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
            num_blocks: length of each table, but for the states' table the number of fresh rows: a step writes
                another row than the one that was found.

        Returns:
            None if there are too few; the found blocks then count as used.
        """
        wanted = [
            (pool, blocks, number if pool is self.rows else max(0, number - len(blocks)))
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

        Full blocks and the row of the state are shared. A partly filled last block is copied: see `BlockPool.fork`.

        Args:
            num_blocks: minimum length of each of its tables; empty: as the shared tokens need.

        Returns:
            The tables, and the copies to perform, whose sources are held until `release_sources`. None if there are too
            few blocks, or the first sequence has given back blocks that the second one needs.
        """
        parts = list[tuple[tuple[int, ...], tuple[int, ...]]]()
        for layers, table in zip(self.groups, tables, strict=False):
            num_full, num_used = num_tokens // layers.block_size, num_blocks_for(num_tokens, layers.block_size)
            if EMPTY_PLACE in table[layers.first_block(num_tokens) : num_used]:
                return None
            parts.append((table[:num_full], table[num_full:num_used]))
        if self.rows is not None:
            parts.append((tables[-1][:1], ()))
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

    def advance(self, table: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a states' table after a step has written its second row, and the row to release, if any.

        A later step writes the row that this one has read, unless that row is a snapshot or another sequence has it.
        """
        assert self.rows is not None
        read, written, *spare = table
        if self._is_written_again(read):
            return (written, *spare, read), ()
        return (written, *spare), () if read == EMPTY_PLACE else (read,)

    def num_missing_after_step(self, table: tuple[int, ...]) -> int:
        """Return how many rows a sequence will lack after its next step, given its states' table."""
        num_left = len(table) - (not self._is_written_again(table[0]))
        return max(0, ROWS_PER_SEQUENCE - num_left)

    def _is_written_again(self, read: int) -> bool:
        """Return whether a later step of the same sequence may write the row that a step reads."""
        assert self.rows is not None
        return read != EMPTY_PLACE and self.rows.is_exclusive(read)

    def without_passed(self, tables: BlockTables, num_tokens: int) -> BlockTables:
        """Release the blocks that have left the windows of a sequence with `num_tokens` computed tokens.

        Returns:
            The tables to use from now on, with empty places; the same object if nothing is released.
        """
        changed = dict[int, tuple[int, ...]]()
        for index, group in enumerate(self.groups):
            table, first = tables[index], min(group.first_block(num_tokens), len(tables[index]))
            if first and table[first - 1] != EMPTY_PLACE:
                self.pools[index].release(table[:first])
                changed[index] = (EMPTY_PLACE,) * first + table[first:]
        return tuple(changed.get(index, table) for index, table in enumerate(tables)) if changed else tables

    # -- accounting ----------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that could be taken now, in the group that has the fewest."""
        return min(pool.num_available for pool in self._group_pools)

    def counts(self) -> BlockCounts:
        """Return the counts of the pool that is used most, in blocks of the largest group."""
        counts = [pool.counts() for pool in self.pools]
        if len(counts) == 1:
            return counts[0]
        total = max(group.total for group in counts[: len(self.block_sizes)])
        most = max(counts, key=lambda pool: pool.in_use / pool.total)
        in_use, free = (-(-number * total // most.total) for number in (most.in_use, most.free))
        free = min(free, total - in_use)
        return BlockCounts(total, free=free, cached=total - in_use - free, in_use=in_use)

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
        """Collect the events of all pools, and update which keys all pools hold."""
        whole = len(self.pools)
        for event in (event for pool in self.pools for event in pool.take_events()):
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
