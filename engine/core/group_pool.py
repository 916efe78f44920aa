"""Block pools of all layer groups of a cache, used together, and the blocks that sequences hold in them.

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
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from baton.blocks import num_blocks_for
from baton.cluster import BlockCounts
from engine.core.block_pool import BlockChange, BlockPool, Stored
from engine.core.pool_sizes import ROWS_PER_SEQUENCE
from engine.core.runner import EMPTY_PLACE, BlockCopy, BlockTables, KVSpec
from engine.core.sequence import Purpose, Sequence, Status


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

    def __init__(self, spec: KVSpec, num_blocks: SequenceOf[int]) -> None:
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

    def num_matching_tokens(self, keys: SequenceOf[bytes]) -> int:
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

    def num_attended_tokens(self, keys: SequenceOf[bytes]) -> int:
        """Return the length of the longest prefix in all groups without a window, whatever windows and states need."""
        num_tokens = len(keys) * self.key_tokens
        for index, (pool, size) in enumerate(zip(self._group_pools, self.block_sizes, strict=True)):
            if not self.groups[index].window:
                num_tokens = min(num_tokens, pool.num_matching(self.keys_of(keys, index)) * size)
        return num_tokens // self.prefix_tokens * self.prefix_tokens

    def _last_row(self, keys: SequenceOf[bytes], num_tokens: int) -> int:
        """Return the length, up to `num_tokens`, of the longest prefix with a snapshot of the states."""
        if self.rows is None:
            return num_tokens
        step = self.prefix_tokens
        ends = range(num_tokens, 0, -step)
        return next((end for end in ends if self.rows.holds(keys[end // self.key_tokens - 1])), 0)

    def _last_window(self, keys: SequenceOf[bytes], num_tokens: int) -> int:
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

    def match(self, keys: SequenceOf[bytes]) -> Prefix:
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

    def match_to_receive(self, keys: SequenceOf[bytes], num_tokens: int) -> Prefix:
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

    def register(self, table: tuple[int, ...], group: int, first: int, keys: SequenceOf[bytes]) -> tuple[int, ...]:
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

    def keys_of(self, keys: SequenceOf[bytes], group: int) -> SequenceOf[bytes]:
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

    def num_tokens_in(self, tables: SequenceOf[SequenceOf[int]]) -> int:
        """Return how many tokens the blocks of every group hold; 0 if there is no row for the next state."""
        if self.rows is not None and len(tables[-1]) < ROWS_PER_SEQUENCE:
            return 0
        return min(len(table) * size for table, size in zip(tables, self.block_sizes, strict=False))

    def has_room(self, num_blocks: SequenceOf[int]) -> bool:
        """Return whether these numbers of blocks, one per table, are available."""
        return all(number <= pool.num_available for pool, number in zip(self.pools, num_blocks, strict=True))

    def allocate(self, num_blocks: SequenceOf[int]) -> BlockTables | None:
        """Take fresh blocks in every table, all or nothing. Return None if there are too few."""
        if not self.has_room(num_blocks):
            return None
        fresh = [pool.allocate(number) for pool, number in zip(self.pools, num_blocks, strict=True)]
        return tuple(tuple(blocks) for blocks in fresh if blocks is not None)

    def reuse(self, found: SequenceOf[SequenceOf[int]], num_blocks: SequenceOf[int]) -> BlockTables | None:
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
        self, tables: BlockTables, num_tokens: int, num_blocks: SequenceOf[int] = ()
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

    def acquire(self, tables: Iterable[SequenceOf[int]]) -> None:
        """Take one reference on each block of each table, all of them cached or in use."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.acquire(table)

    def release(self, tables: Iterable[SequenceOf[int]]) -> None:
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


class SequenceBlocks:
    """Accounting of the blocks that sequences hold, and of their keys in the prefix cache.

    Args:
        pool: pool of the blocks.
        output_reservation: output tokens for which blocks are reserved at admission.
        snapshot_tokens: tokens between two snapshots of states.
    """

    def __init__(self, pool: GroupPool, output_reservation: int, snapshot_tokens: int) -> None:
        self.pool = pool
        self._output_reservation = output_reservation
        self._snapshot_tokens = -(-snapshot_tokens // pool.prefix_tokens) * pool.prefix_tokens

    def take(self, sequence: Sequence, tables: BlockTables) -> None:
        """Give a sequence its block tables."""
        sequence.block_ids = tables
        sequence.num_block_tokens = self.pool.num_tokens_in(tables)

    def missing(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return how many more blocks of each table a sequence needs for its first `num_tokens` tokens."""
        wanted = self.pool.num_blocks_for(num_tokens)
        return [max(0, number - len(table)) for number, table in zip(wanted, sequence.block_ids, strict=True)]

    def add(self, sequence: Sequence, num_blocks: Iterable[int]) -> None:
        """Allocate more blocks of each table for a sequence. The pool must have room for them."""
        blocks = self.pool.allocate(tuple(num_blocks))
        assert blocks is not None, "the pool has no room for the blocks"
        self.take(sequence, tuple(table + new for table, new in zip(sequence.block_ids, blocks, strict=True)))

    def give_back(self, sequence: Sequence) -> None:
        """Free a sequence's blocks."""
        self.pool.release(sequence.block_ids)
        self.copied(sequence)
        sequence.block_ids = ()
        sequence.num_block_tokens = 0
        sequence.num_kv_tokens = ()
        sequence.num_registered_keys = 0
        sequence.snapshot_ends = ()
        sequence.passing_key = None

    def copied(self, sequence: Sequence) -> None:
        """Record that a forked sequence's copies are performed, or no longer needed."""
        if sequence.copies:
            self.pool.release_sources(sequence.copies)
            sequence.copies = ()

    def unregistered(self, sequence: Sequence) -> BlockTables:
        """Return the blocks of each table that `register_computed` will register or replace."""
        pool = self.pool
        if not pool.caches_prefixes:
            return ()
        begin, end = sequence.num_registered_keys * pool.key_tokens, sequence.num_computed_tokens
        end -= end % pool.key_tokens
        sizes = zip(sequence.block_ids, pool.block_sizes, strict=False)
        tables = tuple(table[begin // size : end // size] for table, size in sizes)
        return tables if pool.rows is None else (*tables, sequence.block_ids[-1][:1])

    def advance(self, sequence: Sequence) -> BlockTables:
        """Make the row that a step writes the current row of its sequence. Return the tables of what to release."""
        *tables, rows = sequence.block_ids
        rows, left = self.pool.advance(rows)
        self.take(sequence, (*tables, rows))
        return (*(() for _ in tables), left)

    def keep_state(self, sequence: Sequence) -> None:
        """Release all rows but the current one of a sequence that computes no further tokens."""
        if self.pool.rows is not None:
            *tables, rows = sequence.block_ids
            self.pool.rows.release(rows[1:])
            sequence.block_ids = (*tables, rows[:1])

    def register_computed(self, sequence: Sequence) -> None:
        """Register the blocks that have become full, and the state after them, so that other sequences can share them.

        Blocks that have left the sequence's windows are released.
        """
        self._register_blocks(sequence)
        if self.pool.has_windows:
            sequence.block_ids = self.pool.without_passed(sequence.block_ids, sequence.num_computed_tokens)
        if self.pool.rows is not None and self.pool.caches_prefixes:
            self._register_state(sequence, self.pool.rows)

    def _register_state(self, sequence: Sequence, snapshots: BlockPool) -> None:
        """Keep the state after whole blocks as a snapshot.

        Snapshots at multiples of `snapshot_tokens`, and at the ends chosen at admission, stay in the cache. Any other
        one stays until the sequence has a later one, so that few tokens are lost if it ends or is preempted.
        """
        num_tokens = sequence.num_computed_tokens
        if not num_tokens or num_tokens % self.pool.prefix_tokens:
            return
        key = self._keys(sequence, num_tokens // self.pool.key_tokens)[num_tokens // self.pool.key_tokens - 1]
        if sequence.passing_key is not None:
            snapshots.forget(sequence.passing_key)
        is_kept = num_tokens % self._snapshot_tokens == 0 or num_tokens in sequence.snapshot_ends
        is_new = not snapshots.holds(key)
        *tables, rows = sequence.block_ids
        sequence.block_ids = (*tables, self.pool.register_row(rows, key))
        sequence.passing_key = key if is_new and not is_kept else None

    def num_until_snapshot(self, sequence: Sequence) -> float:
        """Return the maximum number of tokens for a step over a prompt, so that no snapshot is passed."""
        if self.pool.rows is None or not self.pool.caches_prefixes:
            return math.inf
        begin = sequence.num_computed_tokens
        on_grid = begin // self._snapshot_tokens * self._snapshot_tokens + self._snapshot_tokens
        return min([on_grid, *(end for end in sequence.snapshot_ends if end > begin)]) - begin

    def snapshot_ends(self, sequence: Sequence, keys: SequenceOf[bytes]) -> tuple[int, ...]:
        """Return the numbers of tokens after which a prompt's state is kept, in addition to the regular snapshots.

        These are the end of the cached blocks that it shares, and the end of its last full block before the last token.

        Args:
            keys: keys of the blocks that it may take from the cache.
        """
        unit = self.pool.prefix_tokens
        return self.pool.num_attended_tokens(keys), (sequence.num_tokens - 1) // unit * unit

    def _register_blocks(self, sequence: Sequence) -> None:
        pool = self.pool
        num_full = sequence.num_computed_tokens // pool.key_tokens
        if num_full <= sequence.num_registered_keys or not pool.caches_prefixes:
            return
        keys = self._keys(sequence, num_full)[:num_full]
        tables, is_same = list(sequence.block_ids), True
        for group, size in enumerate(pool.block_sizes):
            first = sequence.num_registered_keys * pool.key_tokens // size
            group_keys = pool.keys_of(keys, group)
            if first < len(group_keys):
                tables[group] = pool.register(tables[group], group, first, group_keys)
                is_same = is_same and tables[group] is sequence.block_ids[group]
        if not is_same:
            sequence.block_ids = tuple(tables)
        sequence.num_registered_keys = num_full

    def num_present_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a waiting or running sequence need not be computed here any more.

        They are computed, received, or cached while the sequence waits.
        """
        if sequence.status is not Status.WAITING:
            return sequence.num_computed_tokens
        if sequence.awaits_kv:
            return sequence.num_tokens
        return self.pool.num_matching_tokens(self.reusable_keys(sequence))

    def check(self, holders: Collection[Sequence], pinned: Iterable[BlockTables] = ()) -> None:
        """Assert that these sequences and the pins hold every block in use."""
        copies = (copy for sequence in holders for copy in sequence.copies)
        self.pool.check([*(sequence.block_ids for sequence in holders), *pinned], copies)
        for sequence in holders:
            sizes = self.pool.block_sizes
            for table, size, number in zip(sequence.block_ids, sizes, sequence.num_kv_tokens, strict=False):
                assert len(table) * size >= number, f"{number} tokens are in {len(table)} blocks"

    def reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the leading blocks that a sequence may take from the cache."""
        if not self.pool.caches_prefixes or sequence.scores_prompt:
            return []
        # The last known token is computed here, so its block cannot come from the cache, unless its KV is transferred.
        num_keys = (sequence.num_tokens - (not sequence.awaits_kv)) // self.pool.key_tokens
        return self._keys(sequence, num_keys)[:num_keys]

    def num_expected(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the blocks for the known tokens and the expected rest of the output, at most the pool's size.

        A beam reserves nothing: only its known tokens are certain to be its own.
        """
        num_tokens = sequence.num_tokens
        if sequence.purpose is not Purpose.PREFILL and sequence.search is None:
            num_left = sequence.spec.max_tokens - sequence.num_output_tokens
            expected = sequence.spec.num_expected_tokens or self._output_reservation
            num_tokens += min(num_left, max(0, expected - sequence.num_output_tokens))
        return self.pool.num_blocks_for(min(num_tokens, self.pool.capacity))

    def _keys(self, sequence: Sequence, num_keys: int) -> list[bytes]:
        """Compute at least the first `num_keys` block keys of a sequence."""
        keys, unit = sequence.block_keys, self.pool.key_tokens
        if len(keys) < num_keys:
            keys += sequence.spec.block_keys(sequence.token_ids, keys, end=num_keys * unit, block_size=unit)
        return keys
