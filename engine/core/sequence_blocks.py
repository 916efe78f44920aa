"""Blocks of sequences in the pools, and their keys in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from engine.core.block_pool import BlockPool
from engine.core.group_pool import GroupPool
from engine.core.kv_spec import BlockTables
from engine.core.sequence import Purpose, Sequence, Status


class SequenceBlocks:
    """Accounting of the blocks that sequences hold.

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
