"""The block tables of sequences, on the device for as long as they take part in steps.

    tables   [rows, blocks], one for each layer group        row: the blocks of one sequence, in order
    a step   gives the rows of its sequences, and of their tables what does not stand there yet

A sequence keeps its row from step to step; who has not been in a step for longest gives its own to a new one. It is
known what a row holds, whosever that was, and what differs from it is sent: of most sequences nothing, of one in
sixteen a block. So it does not matter why a table is another one: blocks that were added, replaced or given back, a
preemption, a key that is used again. A table that stays is the same tuple in each step, and is not looked at.

Kernels find a row by its number, and the tables stay where they are: a graph that was captured with them reads what
they hold then. A step that is launched while another one runs changes them behind it.
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
from engine.core.kv_spec import EMPTY_PLACE, BlockTables, KVSpec
from engine.core.runner import StepPart
from engine.uploads import StepNumbers


class TableRoom(NamedTuple):
    """The most that block tables hold."""

    num_sequences: int
    """Sequences of a step."""
    num_tokens: int
    """Tokens of a sequence."""


@dataclass(slots=True)
class _TableRow:
    number: int
    held: BlockTables
    """What stands in it, but for the empty places, and what is longer than any sequence may be."""
    last_step: int = 0
    """The step that read it last."""


class TableRows:
    """The rows of a rank's block tables.

    Args:
        spec: of its cache.
        device: where the tables are.
        room: for how much.

    Attributes:
        num_rows: sequences that have one, at most.
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
        """Where each table begins in all of them, and the length of its rows."""
        self._rows: OrderedDict[int, _TableRow] = OrderedDict()
        """The rows by sequence key; who was in a step last comes last."""
        self._num_steps = 0

    def of(self, parts: Sequence[StepPart], numbers: StepNumbers) -> list[int]:
        """Returns the row of each part of a step. Its table stands there in what is asked after the numbers are sent.

        Args:
            parts: of no more sequences than there is room for, one each.
            numbers: the step's.
        """
        rows, changed, found = self._rows, list[tuple[_TableRow, BlockTables]](), list[int]()
        self._num_steps += 1
        for part in parts:  # before anybody gives its row away
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
        for row, tables in changed:  # not before: what could not be put does not stand there
            row.held = tables


def _differing(held: tuple[int, ...], table: tuple[int, ...], width: int) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the places below `width` in which a table has a block that does not stand there, and those blocks."""
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
