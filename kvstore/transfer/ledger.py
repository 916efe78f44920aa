"""Who owns the reserved blocks of a decode worker at each moment: a pure state machine.

    RESERVED --offer--> RECEIVING --commit and every chunk in--> COMMITTED
        |                   |
        |                   +--fail, while a scatter runs--> DRAINING --scatter ends--> FAILED
        +--fail-------------+--fail, idle--------------------------------------------->

COMMITTED and FAILED are sticky. A reservation carries two references: the request's, dropped by `release`, and the
transfer's, dropped when a terminal state is reached. When both are gone its blocks come out of the ledger, once, as
`Free`, and the reservation is forgotten. DRAINING lasts only while a scatter of this process runs into the blocks,
never on a promise of the other side.

Events about an unknown id or a past generation are counted in `num_fenced` and change nothing. Time is an argument.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import TransferError, TransferTimeout


class State(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    DRAINING = "draining"
    COMMITTED = "committed"
    FAILED = "failed"


TERMINAL = frozenset({State.COMMITTED, State.FAILED})
LEGAL: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.RECEIVING, State.FAILED}),
    State.RECEIVING: frozenset({State.COMMITTED, State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.FAILED}),
    State.COMMITTED: frozenset(),
    State.FAILED: frozenset(),
}


# -- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Committed:
    """The blocks are readable, and the sequence goes on after `first_token`."""

    generation: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Failed:
    generation: int
    error: TransferError


@dataclass(frozen=True, slots=True)
class Free:
    """The ledger holds these blocks no longer, and nothing here writes to them. Comes once a reservation."""

    generation: int
    block_ids: tuple[int, ...]


Instruction = Committed | Failed | Free


@dataclass(slots=True)
class Reservation:
    transfer_id: str
    generation: int
    block_ids: tuple[int, ...]
    expires_at: float
    state: State = State.RESERVED
    num_chunks: int = 0
    chunks_in: set[int] = field(default_factory=set)
    first_token: int | None = None
    scattering: bool = False
    """A chunk is being written into the blocks right now."""
    released: bool = False
    """The request's reference is gone."""

    @property
    def holds_transfer(self) -> bool:
        return self.state not in TERMINAL


class Ledger:
    def __init__(self) -> None:
        self.num_fenced = 0
        self.num_expired = 0
        self._last_generation = 0
        self._by_generation: dict[int, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_generation)

    def reserve(self, transfer_id: str, block_ids: tuple[int, ...], expires_at: float) -> int:
        """The new reservation's generation, unique in this ledger's life. The ledger now holds `block_ids`."""
        self._last_generation += 1
        generation = self._last_generation
        self._by_generation[generation] = Reservation(transfer_id, generation, block_ids, expires_at)
        return generation

    def state(self, generation: int) -> State | None:
        entry = self._by_generation.get(generation)
        return entry.state if entry else None

    def offer(self, transfer_id: str, generation: int, num_chunks: int) -> bool:
        """The sender has the blocks ready. False: fenced, or not waiting for an offer."""
        entry = self._find(transfer_id, generation)
        if entry is None:
            return False
        if entry.state is not State.RESERVED:
            self.num_fenced += 1
            return False
        entry.num_chunks = num_chunks
        self._move(entry, State.RECEIVING)
        return True

    def scatter_begins(self, generation: int) -> bool:
        """Asks to write one chunk into the blocks. False: they are not the transfer's any more."""
        entry = self._by_generation.get(generation)
        if entry is None or entry.state is not State.RECEIVING:
            return False
        assert not entry.scattering, "one thread scatters a transfer"
        entry.scattering = True
        return True

    def scatter_ends(self, generation: int, seq: int) -> list[Instruction]:
        """Chunk `seq` is verified and in place."""
        entry = self._by_generation[generation]
        entry.scattering = False
        if entry.state is State.DRAINING:
            self._move(entry, State.FAILED)
            return self._settle(entry)
        entry.chunks_in.add(seq)
        return self._try_commit(entry)

    def commit(self, transfer_id: str, generation: int, first_token: int) -> list[Instruction]:
        """The sender has sent everything. Takes effect once every chunk is in."""
        entry = self._find(transfer_id, generation)
        if entry is None:
            return []
        if entry.state is not State.RECEIVING or entry.first_token is not None:
            self.num_fenced += 1
            return []
        entry.first_token = first_token
        return self._try_commit(entry)

    def fail(self, transfer_id: str, generation: int, error: TransferError) -> list[Instruction]:
        """Abort, corruption or loss of the session. No effect on a transfer that has ended."""
        entry = self._find(transfer_id, generation)
        return self._fail(entry, error) if entry else []

    def expire(self, now: float) -> list[Instruction]:
        """Fails the transfers whose lease has ended."""
        instructions: list[Instruction] = []
        for entry in list(self._by_generation.values()):
            if entry.state in (State.RESERVED, State.RECEIVING) and entry.expires_at <= now:
                self.num_expired += 1
                instructions += self._fail(entry, TransferTimeout("the KV did not arrive within the lease"))
        return instructions

    def release(self, generation: int) -> list[Instruction]:
        """The request needs the reservation no more: it was cancelled, or it owns the committed blocks from now on."""
        entry = self._by_generation.get(generation)
        if entry is None or entry.released:
            return []
        entry.released = True
        failed = self._fail(entry, TransferError("the request gave up its reservation"))
        return failed or self._settle(entry)

    def check(self) -> None:
        """Raises AssertionError where the books do not hold."""
        for generation, entry in self._by_generation.items():
            assert entry.generation == generation <= self._last_generation
            assert entry.holds_transfer or not entry.released, f"{generation} is over and not forgotten"
            assert not entry.scattering or entry.state in (State.RECEIVING, State.DRAINING), entry
            assert entry.state is not State.DRAINING or entry.scattering, f"{generation} drains and nothing runs"
            complete = len(entry.chunks_in) == entry.num_chunks and entry.first_token is not None
            assert entry.state is not State.COMMITTED or complete, f"{generation} committed without its chunks"

    def _find(self, transfer_id: str, generation: int) -> Reservation | None:
        entry = self._by_generation.get(generation)
        if entry is None or entry.transfer_id != transfer_id:
            self.num_fenced += 1
            return None
        return entry

    def _fail(self, entry: Reservation, error: TransferError) -> list[Instruction]:
        if entry.state not in (State.RESERVED, State.RECEIVING):
            return []
        self._move(entry, State.DRAINING if entry.scattering else State.FAILED)
        return [Failed(entry.generation, error), *self._settle(entry)]

    def _try_commit(self, entry: Reservation) -> list[Instruction]:
        if entry.first_token is None or entry.scattering or len(entry.chunks_in) < entry.num_chunks:
            return []
        self._move(entry, State.COMMITTED)
        return [Committed(entry.generation, entry.first_token), *self._settle(entry)]

    def _settle(self, entry: Reservation) -> list[Instruction]:
        if entry.holds_transfer or not entry.released:
            return []
        del self._by_generation[entry.generation]
        return [Free(entry.generation, entry.block_ids)]

    def _move(self, entry: Reservation, state: State) -> None:
        assert state in LEGAL[entry.state], f"{entry.state} -> {state}"
        entry.state = state
