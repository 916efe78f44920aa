from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.ledger import Committed, Failed, Free, Instruction, Ledger, State

ERROR = TransferError("test")


def reserved(num_chunks: int | None = None) -> Ledger:
    """One reservation, generation 1, of blocks 4 and 5; offered if `num_chunks` is given."""
    ledger = Ledger()
    assert ledger.reserve("t", (4, 5), expires_at=30.0) == 1
    assert num_chunks is None or ledger.offer("t", 1, num_chunks)
    return ledger


def scatter(ledger: Ledger, seq: int) -> list[Instruction]:
    assert ledger.scatter_begins(1)
    return ledger.scatter_ends(1, seq)


def test_a_transfer_commits_and_its_blocks_come_back_once() -> None:
    ledger = reserved(num_chunks=2)
    assert scatter(ledger, 0) == []
    assert ledger.commit("t", 1, 99) == [], "a chunk is missing"
    assert scatter(ledger, 1) == [Committed(1, 99)]
    assert ledger.release(1) == [Free(1, (4, 5))]
    assert ledger.release(1) == []
    assert len(ledger) == 0


def test_a_chunk_counts_once() -> None:
    ledger = reserved(num_chunks=2)
    scatter(ledger, 0)
    scatter(ledger, 0)
    assert ledger.commit("t", 1, 99) == []


def test_a_failure_while_a_scatter_runs_drains_first() -> None:
    ledger = reserved(num_chunks=1)
    assert ledger.scatter_begins(1)
    assert ledger.fail("t", 1, ERROR) == [Failed(1, ERROR)]
    assert ledger.state(1) is State.DRAINING
    assert ledger.release(1) == [], "the scatter still writes to the blocks"
    assert ledger.scatter_ends(1, 0) == [Free(1, (4, 5))]


def test_terminal_states_are_sticky() -> None:
    ledger = reserved(num_chunks=0)
    assert ledger.commit("t", 1, 99) == [Committed(1, 99)]
    assert ledger.fail("t", 1, ERROR) == []
    assert ledger.expire(1e9) == []
    assert ledger.state(1) is State.COMMITTED
    failed = reserved(num_chunks=0)
    failed.fail("t", 1, ERROR)
    assert failed.commit("t", 1, 99) == []
    assert failed.num_fenced == 1


def test_leases_end_by_the_time_given() -> None:
    ledger = reserved()
    assert ledger.expire(29.9) == []
    (failed,) = ledger.expire(30.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferTimeout)
    assert ledger.num_expired == 1


def test_unknown_ids_and_past_generations_are_counted_and_change_nothing() -> None:
    ledger = reserved()
    ledger.release(1)
    assert ledger.reserve("t", (6,), 30.0) == 2, "the id again, another generation"
    assert not ledger.offer("t", 1, 1)
    assert not ledger.offer("other", 2, 1)
    assert ledger.commit("t", 1, 5) == []
    assert ledger.fail("t", 1, ERROR) == []
    assert ledger.num_fenced == 4
    assert ledger.state(2) is State.RESERVED


# -- every reachable state of two transfers ----------------------------------------------------------------------


class World:
    """The ledger and what has come out of it, for two transfers of one chunk each."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.readable: set[int] = set()
        self.freed: set[int] = set()
        self.writing: set[int] = set()
        self.chunk_in: set[int] = set()
        self.commit_seen: set[int] = set()
        for name in ("a", "b"):
            self.ledger.reserve(name, (ord(name),), 30.0)

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            generation = instruction.generation
            match instruction:
                case Committed():
                    assert generation in self.chunk_in & self.commit_seen, "readable before commit"
                    assert generation not in self.freed
                    self.readable.add(generation)
                case Free():
                    assert generation not in self.freed, "freed twice"
                    assert generation not in self.writing, "freed under a scatter"
                    self.freed.add(generation)

    def key(self) -> str:
        entries = {g: str(e) for g, e in self.ledger._by_generation.items()}
        return f"{entries}{self.readable}{self.freed}{self.writing}{self.chunk_in}{self.commit_seen}"


def events(world: World) -> list[tuple[str, Callable[[World], None]]]:
    def begin(w: World, g: int) -> None:
        if w.ledger.scatter_begins(g):
            assert g not in w.freed, "a write into freed blocks"
            assert g not in w.readable, "a write into readable blocks"
            w.writing.add(g)

    def end(w: World, g: int) -> None:
        w.writing.discard(g)
        if w.ledger.state(g) is State.RECEIVING:
            w.chunk_in.add(g)
        w.carry_out(w.ledger.scatter_ends(g, 0))

    def commit(w: World, t: str, g: int) -> None:
        w.commit_seen.add(g)
        w.carry_out(w.ledger.commit(t, g, 5))

    found: list[tuple[str, Callable[[World], None]]] = [("expire", lambda w: w.carry_out(w.ledger.expire(30.0)))]
    for g, t in ((1, "a"), (2, "b")):
        found += [
            (f"offer {t}", lambda w, g=g, t=t: w.ledger.offer(t, g, 1)),  # type: ignore[misc]
            (f"commit {t}", lambda w, g=g, t=t: commit(w, t, g)),  # type: ignore[misc]
            (f"fail {t}", lambda w, g=g, t=t: w.carry_out(w.ledger.fail(t, g, ERROR))),  # type: ignore[misc]
            (f"release {t}", lambda w, g=g: w.carry_out(w.ledger.release(g))),  # type: ignore[misc]
            (f"stale {t}", lambda w, g=g, t=t: w.carry_out(w.ledger.commit(t, g + 7, 5))),  # type: ignore[misc]
        ]
        if g in world.writing:
            found.append((f"end {t}", lambda w, g=g: end(w, g)))  # type: ignore[misc]
        else:
            found.append((f"begin {t}", lambda w, g=g: begin(w, g)))  # type: ignore[misc]
    return found


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """All that any sequence of events leads to; each step keeps the invariants that `World` asserts."""
    frontier, seen = [World()], {}
    while frontier:
        world = frontier.pop()
        for _, event in events(world):
            after = copy.deepcopy(world)
            event(after)
            after.ledger.check()
            if after.key() not in seen:
                seen[after.key()] = after
                frontier.append(after)
    return list(seen.values())


def test_no_sequence_of_events_breaks_an_invariant(worlds: list[World]) -> None:
    assert len(worlds) > 300
    assert any(len(w.readable) == 2 for w in worlds), "commits are reachable"


def test_no_state_leaks_blocks_once_both_references_drop(worlds: list[World]) -> None:
    for world in worlds:
        for generation in (1, 2):
            world.carry_out(world.ledger.release(generation))
            if generation in world.writing:
                world.writing.discard(generation)
                world.carry_out(world.ledger.scatter_ends(generation, 0))
        assert world.freed == {1, 2}
        assert len(world.ledger) == 0
