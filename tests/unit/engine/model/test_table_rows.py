"""Block tables that stay on a device, against tables that are built whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.blocks import num_blocks_for
from baton.sampling import SamplingParams
from engine import uploads
from engine.core.engine import Engine
from engine.core.runner import (
    EMPTY_PLACE,
    BlockTables,
    KVSpec,
    LayerGroup,
    OnLayerDone,
    StepInput,
    StepOutput,
    StepPart,
    ignore_layer,
)
from engine.core.scheduler import SchedulerLimits
from engine.model.table_rows import TableRoom, TableRows
from engine.testing import ArithmeticRunner
from engine.uploads import StepNumbers
from tests.support.builders import sequence_spec
from tests.support.device_waits import DEVICE, Waits
from tests.support.guessing import run

CPU = torch.device("cpu")
SIZES = (16, 48)
SPEC = KVSpec(
    tuple(
        LayerGroup(name=str(size), layers=(number,), block_size=size, num_kv_heads=1, k_dim=8, v_dim=8, dtype="float32")
        for number, size in enumerate(SIZES)
    )
)
ROOM = TableRoom(num_sequences=4, num_tokens=16 * 12)


def part_of(key: int, tables: BlockTables) -> StepPart:
    return StepPart(
        sequence_key=key,
        token_ids=(1,),
        num_computed_tokens=0,
        block_ids=tables,
        num_kv_tokens=(1,) * len(tables),
        sample=True,
        is_decoding=True,
        sampling=SamplingParams(temperature=0.0),
        choice_index=0,
        num_prompt_tokens=1,
    )


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> StepNumbers:
    """Numbers for a CPU that passes for none: what is sent arrives when it is sent, and can be looked at."""
    monkeypatch.setattr(uploads, "_pinned", lambda size, dtype: torch.full((size,), -1, dtype=dtype))
    numbers = StepNumbers(CPU)
    monkeypatch.setattr(uploads, "_is_host", lambda device: False)
    return numbers


@pytest.fixture
def put(numbers: StepNumbers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers were put, each time."""
    counts: list[int] = []
    wanted = numbers.put

    def noted(values: torch.Tensor) -> torch.Tensor:
        counts.append(values.numel())
        return wanted(values)

    monkeypatch.setattr(numbers, "put", noted)
    return counts


def require_there(rows: TableRows, found: Sequence[int], parts: Sequence[StepPart]) -> None:
    assert len(set(found)) == len(found), "two sequences have one row"
    assert all((there >= 0).all() for there in rows.tables), "no block, which a kernel must not look for"
    for row, part in zip(found, parts, strict=True):
        for there, table in zip(rows.tables, part.block_ids, strict=True):
            stands = there[row, : len(table)].tolist()
            assert [s for s, b in zip(stands, table, strict=False) if b != EMPTY_PLACE] == [
                b for b in table[: len(stands)] if b != EMPTY_PLACE
            ]


class Sequences:
    """Sequences to which everything happens that changes a table, with no regard to where blocks come from."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tables: dict[int, BlockTables] = {}
        self.ended: list[int] = []

    def _blocks(self, number: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(1, 1000) for _ in range(number))

    def _fresh(self) -> BlockTables:
        num_tokens = self.draw.randrange(1, ROOM.num_tokens + 30)  # room for drafts may be longer than any sequence
        return tuple(self._blocks(num_blocks_for(num_tokens, size)) for size in SIZES)

    def add(self) -> None:
        again = self.ended and self.draw.random() < 0.4
        key = self.draw.choice(self.ended) if again else self.draw.randrange(-50, 50)
        self.tables.setdefault(key, self._fresh())

    def grow(self, key: int) -> None:
        self.tables[key] = tuple(table + self._blocks(self.draw.randrange(3)) for table in self.tables[key])

    def crop(self, key: int) -> None:
        self.tables[key] = tuple(table[: self.draw.randrange(len(table) + 1)] for table in self.tables[key])

    def preempt(self, key: int) -> None:
        self.tables[key] = self._fresh()

    def share(self, key: int) -> None:
        """A block that became full is found to be there already, and that one is taken."""
        self._replace(key, self.draw.randrange(1, 1000))

    def leave_window(self, key: int) -> None:
        self._replace(key, EMPTY_PLACE)

    def _replace(self, key: int, block: int) -> None:
        tables = [list(table) for table in self.tables[key]]
        table = self.draw.choice(tables)
        if table:
            table[self.draw.randrange(len(table))] = block
        self.tables[key] = tuple(tuple(table) for table in tables)

    def fork(self, key: int) -> None:
        number = self.draw.randrange(6)
        self.tables.setdefault(
            self.draw.randrange(100), tuple(table[:number] + self._blocks(1) for table in self.tables[key])
        )

    def copy(self, key: int) -> None:
        """The same blocks, in another tuple."""
        self.tables[key] = tuple((*table,) for table in self.tables[key])

    def end(self, key: int) -> None:
        del self.tables[key]
        self.ended.append(key)

    def happen(self) -> None:
        ways = (self.grow, self.grow, self.crop, self.preempt, self.share, self.leave_window, self.fork, self.copy)
        self.add()
        for key in list(self.tables):
            if self.draw.random() < 0.5:
                self.draw.choice(ways)(key)
            elif self.draw.random() < 0.3:
                self.end(key)

    def step(self) -> list[StepPart]:
        """Some of them, in any order."""
        chosen = self.draw.sample(list(self.tables), min(len(self.tables), self.draw.randrange(ROOM.num_sequences + 1)))
        return [part_of(key, self.tables[key]) for key in chosen]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_sequences_their_tables_stand_in_their_rows(seed: int, numbers: StepNumbers) -> None:
    """Two steps are under way at a time: the first one reads what it was given until the second one's is sent."""
    rows, sequences = TableRows(SPEC, CPU, ROOM), Sequences(seed)
    places = [table.data_ptr() for table in rows.tables]
    before: tuple[list[int], list[StepPart]] = ([], [])
    for _ in range(60):
        sequences.happen()
        parts = sequences.step()
        found = rows.of(parts, numbers)
        require_there(rows, *before)
        numbers.send()
        require_there(rows, found, parts)
        before = found, parts
    assert [table.data_ptr() for table in rows.tables] == places


class Watched(ArithmeticRunner):
    """Sees before each step that its rows hold the blocks which the step needs."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, max_num_seqs=8)
        self.rows = TableRows(self.spec, CPU, TableRoom(8, self.max_model_len))
        self.num_copies = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        (table,) = self.rows.tables
        for row, part in zip(self.rows.of(step.parts, StepNumbers(CPU)), step.parts, strict=True):
            number = num_blocks_for(part.num_kv_tokens[0], self.spec.block_size)
            assert table[row, :number].tolist() == list(part.block_ids[0][:number])
        self.num_copies += len(step.copies)
        return super().execute(step, on_layer_done)


@pytest.mark.parametrize("seed", range(2))
def test_the_tables_of_an_engines_steps_stand_there(seed: int) -> None:
    """In a pool that is too small: with prefixes that are shared, choices that fork, preemptions, and steps planned
    ahead; in one of the cases with beams.
    """
    draw = random.Random(seed)
    prompt = [draw.randrange(1, 49152) for _ in range(90)]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 50}]
    ways += [{"use_beam_search": True, "beam_width": 3}] * (seed % 2)
    specs = []
    for request in range(9):
        prompt_ids = prompt[: draw.randrange(1, 90)] + [request] * draw.randrange(1, 20)
        way, num_choices = ways[request % len(ways)], 3 if request % 4 == 1 else 1
        for choice in range(num_choices):
            asked = way | {"choice_index": choice, "max_tokens": draw.randrange(40, 90)}
            specs.append(sequence_spec(prompt_ids, str(request), **asked))
    runner = Watched(16)
    engine = Engine(runner, SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=8))
    run(engine, specs, ahead=random.Random(seed))
    assert runner.num_copies > 0
    assert engine.load().preemptions > 0


def test_what_stands_there_is_not_sent_again(numbers: StepNumbers, put: list[int]) -> None:
    rows = TableRows(SPEC, CPU, ROOM)
    first, second = ((1, 2, 3), (4,)), ((5, 6), (7,))
    more, other = ((1, 2, 3, 8), (4,)), ((5, 9), (7,))
    for tables, num_sent in (
        ({0: first, 1: second}, 7),
        ({0: first, 1: second}, 0),
        ({1: second}, 0),
        ({1: tuple((*each,) for each in second)}, 0),
        ({0: more, 1: second}, 1),
        ({1: other, 0: more}, 1),
        ({2: more}, 5),
    ):
        put.clear()
        parts = [part_of(key, each) for key, each in tables.items()]
        found = rows.of(parts, numbers)
        numbers.send()
        require_there(rows, found, parts)
        assert put == [2 * num_sent] * bool(num_sent), tables


def test_who_was_in_a_step_last_keeps_its_row(numbers: StepNumbers) -> None:
    """Also beside new ones that come before it in a step."""
    rows = TableRows(SPEC, CPU, ROOM)
    tables = {key: ((key,), (key,)) for key in range(9)}
    first = dict(zip(range(4), rows.of([part_of(key, tables[key]) for key in range(4)], numbers), strict=True))
    rows.of([part_of(key, tables[key]) for key in (0, 2, 3)], numbers)
    found = rows.of([part_of(key, tables[key]) for key in (5, 0, 2, 3)], numbers)
    assert found == [first[key] for key in (1, 0, 2, 3)]


def test_a_step_that_has_no_rows_is_refused(numbers: StepNumbers) -> None:
    rows, one = TableRows(SPEC, CPU, ROOM), ((1,), (2,))
    with pytest.raises(AssertionError, match="two parts of a sequence"):
        rows.of([part_of(0, one), part_of(0, one)], numbers)
    with pytest.raises(AssertionError, match="more than there are rows"):
        rows.of([part_of(key, one) for key in range(5)], numbers)


def test_what_could_not_be_put_is_put_by_the_next_step(numbers: StepNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, parts = TableRows(SPEC, CPU, ROOM), [part_of(0, ((1, 2), (3,)))]
    with monkeypatch.context() as patch:
        patch.setattr(numbers, "put", None)
        with pytest.raises(TypeError):
            rows.of(parts, numbers)
    found = rows.of(parts, numbers)
    numbers.send()
    require_there(rows, found, parts)


def test_what_a_failed_step_has_put_stands_there_with_the_next(numbers: StepNumbers) -> None:
    rows, parts = TableRows(SPEC, CPU, ROOM), [part_of(key, ((1, 2 + key), (3 + key,))) for key in range(2)]
    found = rows.of(parts[:1], numbers)  # it fails before its numbers are sent
    found += rows.of(parts[1:], numbers)
    numbers.send()
    require_there(rows, found, parts)


def test_on_a_cpu_tables_stand_there_at_once() -> None:
    rows, parts = TableRows(SPEC, CPU, ROOM), [part_of(0, ((1, 2), (3,)))]
    require_there(rows, rows.of(parts, StepNumbers(CPU)), parts)


def test_nobody_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, numbers = TableRows(SPEC, DEVICE, ROOM), StepNumbers(DEVICE)
    with Waits(monkeypatch) as waits:
        for length in (1, 2, 3):
            rows.of([part_of(0, (tuple(range(length)), (1,)))], numbers)
            numbers.send()
    assert not waits.found
    assert waits.num_copies == 3
