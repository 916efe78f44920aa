"""Block tables of sequences, kept on the device while the sequences take part in steps.

    tables   [rows, blocks], one for each layer group        row: the blocks of one sequence, in order
    a step   sends the row numbers of its sequences, and the entries of their tables that have changed

A sequence keeps its row from step to step. A new sequence takes the row of the sequence that was least recently in a
step. The host knows the content of each row, whichever sequence it belonged to, and sends only the differences: nothing
for most sequences, one block for one in sixteen. So the reason of a change does not matter: blocks that were added,
replaced or freed, a preemption, or a reused key. An unchanged table is the same tuple in each step, and is not
compared.

Kernels find a row by its number, and the tables keep their addresses, so a captured graph reads their current content.
A step that is launched while another one runs changes the tables after it, in stream order.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from baton.blocks import num_blocks_for
from engine.core.runner import EMPTY_PLACE, BlockTables, KVSpec, StepPart
from engine.uploads import StepNumbers


class TableRoom(NamedTuple):
    """Maximum content of block tables."""

    num_sequences: int
    """Maximum number of sequences in a step."""
    num_tokens: int
    """Maximum number of tokens in a sequence."""


@dataclass(slots=True)
class _TableRow:
    number: int
    held: BlockTables
    """Content of the row on the device, except empty places and entries beyond the maximum length."""
    last_step: int = 0
    """The last step that read it."""


class TableRows:
    """Rows of a rank's block tables.

    Args:
        spec: spec of the rank's cache.
        device: device of the tables.
        room: maximum content.

    Attributes:
        num_rows: maximum number of sequences with a row.
        tables: one for each layer group, `[rows, blocks]`, in int64.
    """

    def __init__(self, spec: KVSpec, device: torch.device, room: TableRoom) -> None:
        shapes = [(room.num_sequences, num_blocks_for(room.num_tokens, group.block_size)) for group in spec.groups]
        self.num_rows = room.num_sequences
        self._all = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int64, device=device)
        begins = accumulate(map(math.prod, shapes), initial=0)
        self.tables = tuple(
            self._all[begin : begin + math.prod(shape)].view(shape)
            for begin, shape in zip(begins, shapes, strict=False)
        )
        self._places = [(int(table.storage_offset()), table.shape[1]) for table in self.tables]
        """Offset of each table in the common memory, and the length of its rows."""
        self._rows: OrderedDict[int, _TableRow] = OrderedDict()
        """Rows by sequence key, the most recently used last."""
        self._num_steps = 0

    def of(self, parts: Sequence[StepPart], numbers: StepNumbers) -> list[int]:
        """Return the row of each part of a step. The rows are up to date for work submitted after the numbers are sent.

        Args:
            parts: parts of different sequences, at most as many as there are rows.
            numbers: the step's numbers.
        """
        rows, changed, found = self._rows, list[tuple[_TableRow, BlockTables]](), list[int]()
        self._num_steps += 1
        for part in parts:  # before a row is given to a new sequence
            if part.sequence_key in rows:
                rows.move_to_end(part.sequence_key)
        for part in parts:
            row = rows.get(part.sequence_key) or self._new(part.sequence_key)
            assert row.last_step < self._num_steps, "a step has two parts of a sequence, or more than there are rows"
            row.last_step = self._num_steps
            if row.held is not part.block_ids:
                changed.append((row, part.block_ids))
            found.append(row.number)
        self._change(changed, numbers)
        return found

    def _new(self, sequence_key: int) -> _TableRow:
        if len(self._rows) < self.num_rows:
            row = _TableRow(len(self._rows), ((),) * len(self.tables))
        else:
            _, row = self._rows.popitem(last=False)
        self._rows[sequence_key] = row
        return row

    def _change(self, changed: Sequence[tuple[_TableRow, BlockTables]], numbers: StepNumbers) -> None:
        places, blocks = array("q"), array("q")
        for row, tables in changed:
            for group, (begin, width) in enumerate(self._places):
                held, table = row.held[group], tables[group]
                if held is not table:
                    there, new = _differing(held, table, width)
                    first = begin + row.number * width
                    places.extend([first + place for place in there])
                    blocks.extend(new)
        if places:
            numbers.replace(self._all, torch.frombuffer(places + blocks, dtype=torch.int64).view(2, -1))
        for row, tables in changed:  # only now: an entry that could not be sent is not on the device
            row.held = tables


def _differing(held: tuple[int, ...], table: tuple[int, ...], width: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the indices below `width` at which a table differs from the held content, and the table's blocks there."""
    end = min(len(table), width)
    common = min(len(held), end)
    places: Sequence[int] = range(common, end)
    blocks: Sequence[int] = table[common:end]
    if held[:common] != table[:common]:
        places = [place for place in range(end) if place >= common or table[place] != held[place]]
        blocks = [table[place] for place in places]
    if EMPTY_PLACE in blocks:
        places = [place for place in places if table[place] != EMPTY_PLACE]
        blocks = [block for block in blocks if block != EMPTY_PLACE]
    return places, blocks
