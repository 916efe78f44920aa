"""Who owns the reserved blocks of a receiving worker at each moment: a pure state machine.

    RESERVED --offer--> RECEIVING --every source committed, every chunk in--> COMMITTED
        |                   |
        |                   +--fail, while a scatter runs--> DRAINING --the last scatter ends--> FAILED
        +--fail-------------+--fail, idle------------------------------------------------------>

A transfer has one source for each pair of ranks that exchange bytes; each talks over a session of its own. Success is
counted over sets: every source has committed, and every chunk of every source is in.

COMMITTED and FAILED are sticky: whatever is asked again later gets the same answer, even after the reservation is gone.
A reservation carries two references: the request's, dropped by `release`, and the transfer's, dropped when a terminal
state is reached. When both are gone its blocks come out of the ledger, once, as `Free`. DRAINING lasts only while
scatters of this process run into the blocks, never on a promise of the other side.

Events come in as calls; what must apply comes out as instructions, in order. Events about an unknown id or a past
generation are counted in `num_fenced` and change nothing. Time is an argument.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.errors import TransferCancelled, TransferError, TransferExpired, TransferRefused
from baton.messages import AbortAck, CommitAck, Grant, Nack
from kvstore.transfer.protocol.reasons import to_reason

MAX_REMEMBERED = 4096
"""Outcomes kept for senders that ask again after a reservation is gone."""


class ReceivePhase(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    DRAINING = "draining"
    COMMITTED = "committed"
    FAILED = "failed"


TERMINAL = frozenset({ReceivePhase.COMMITTED, ReceivePhase.FAILED})
LEGAL: dict[ReceivePhase, frozenset[ReceivePhase]] = {
    ReceivePhase.RESERVED: frozenset({ReceivePhase.RECEIVING, ReceivePhase.FAILED}),
    ReceivePhase.RECEIVING: frozenset({ReceivePhase.COMMITTED, ReceivePhase.DRAINING, ReceivePhase.FAILED}),
    ReceivePhase.DRAINING: frozenset({ReceivePhase.FAILED}),
    ReceivePhase.COMMITTED: frozenset(),
    ReceivePhase.FAILED: frozenset(),
}


# -- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this on a session."""

    session: int
    message: Grant | CommitAck | Nack | AbortAck


@dataclass(frozen=True, slots=True)
class Committed:
    """The blocks are readable; a sequence goes on after `first_token`, a pulled prefix has none."""

    generation: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    generation: int
    error: TransferError


@dataclass(frozen=True, slots=True)
class Free:
    """The ledger holds these blocks no longer, and nothing here writes to them. Comes once a reservation."""

    generation: int
    block_ids: tuple[int, ...]


Instruction = Tell | Committed | Failed | Free


@dataclass(slots=True)
class Source:
    """One session's part of a transfer."""

    num_chunks: int
    chunks_in: set[int] = field(default_factory=set)
    committed: bool = False
    scattering: int | None = None
    """The chunk that is being written into the blocks right now."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    transfer_id: str
    generation: int
    block_ids: tuple[int, ...]
    expires_at: float
    state: ReceivePhase = ReceivePhase.RESERVED
    sources: dict[int, Source] = field(default_factory=dict)
    """By session."""
    num_sources: int = 0
    """That the first offer announced."""
    first_token: int | None = None
    error: TransferError | None = None
    released: bool = False
    """The request's reference is gone."""

    @property
    def is_scattering(self) -> bool:
        return any(source.scattering is not None for source in self.sources.values())

    @property
    def is_complete(self) -> bool:
        return len(self.sources) == self.num_sources > 0 and all(
            source.committed and len(source.chunks_in) == source.num_chunks for source in self.sources.values()
        )


class ReceiveState:
    def __init__(self) -> None:
        self.num_fenced = 0
        self._last_generation = 0
        self._by_generation: dict[int, Reservation] = {}
        self._ended: OrderedDict[int, tuple[str, str]] = OrderedDict()
        """Generations that are gone: the transfer's id, and None where it was committed."""

    def __len__(self) -> int:
        return len(self._by_generation)

    # -- the request's side ------------------------------------------------------------------------------------------

    def reserve(self, transfer_id: str, block_ids: tuple[int, ...], expires_at: float) -> int:
        """The new reservation's generation, unique in this ledger's life. The ledger now holds `block_ids`."""
        self._last_generation += 1
        generation = self._last_generation
        self._by_generation[generation] = Reservation(
            transfer_id=transfer_id, generation=generation, block_ids=block_ids, expires_at=expires_at
        )
        return generation

    def state(self, generation: int) -> ReceivePhase | None:
        entry = self._by_generation.get(generation)
        return entry.state if entry else None

    def release(self, generation: int) -> list[Instruction]:
        """The request needs the reservation no more: it was cancelled, or it owns the committed blocks from now on."""
        entry = self._by_generation.get(generation)
        if entry is None or entry.released:
            return []
        entry.released = True
        failed = self._fail(entry, TransferCancelled("the request gave up its reservation"))
        return failed or self._settle(entry)

    # -- the senders' side -------------------------------------------------------------------------------------------

    def offer(
        self, session: int, transfer_id: str, generation: int, num_chunks: int, num_sources: int
    ) -> list[Instruction]:
        """A source will send `num_chunks`. Idempotent."""
        entry = self._find(transfer_id, generation)
        if entry is None or entry.state not in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING):
            return self._answer_again(session, transfer_id, generation, entry)
        source = entry.sources.get(session)
        if source is None:
            if num_sources != (entry.num_sources or num_sources) or len(entry.sources) == num_sources:
                return self._not_expected(session, transfer_id, generation)
            entry.num_sources = num_sources
            entry.sources[session] = Source(num_chunks)
            if entry.state is ReceivePhase.RESERVED:
                self._move(entry, ReceivePhase.RECEIVING)
        elif source.num_chunks != num_chunks:
            return self._not_expected(session, transfer_id, generation)
        return [Tell(session, Grant(transfer_id, generation))]

    def commit(self, session: int, transfer_id: str, generation: int, first_token: int | None) -> list[Instruction]:
        """A source has sent everything. Takes effect once all have, and every chunk is in. Idempotent."""
        entry = self._find(transfer_id, generation)
        if entry is None or entry.state is not ReceivePhase.RECEIVING:
            return self._answer_again(session, transfer_id, generation, entry)
        source = entry.sources.get(session)
        if source is None:
            return self._not_expected(session, transfer_id, generation)
        is_repeated, source.committed = source.committed, True
        entry.first_token = first_token
        committed = self._try_commit(entry)
        if is_repeated and not committed and len(source.chunks_in) == source.num_chunks:
            return [Tell(session, Grant(transfer_id, generation))]  # it is another source that is not done
        return committed

    def abort(self, session: int, transfer_id: str, generation: int, error: TransferError) -> list[Instruction]:
        """A source gave the transfer up. The acknowledgement says that it has ended here, in whatever way."""
        entry = self._find(transfer_id, generation)
        failed = self._fail(entry, error, but_not=session) if entry else []
        return [*failed, Tell(session, AbortAck(transfer_id, generation))]

    def lost(self, session: int, error: TransferError) -> list[Instruction]:
        """A session has ended, and with it every transfer that it took part in."""
        instructions: list[Instruction] = []
        for entry in [e for e in self._by_generation.values() if session in e.sources]:
            instructions += self._fail(entry, error, but_not=session)
        return instructions

    def renew(self, session: int, expires_at: float) -> None:
        """The sender lives: the leases of all transfers that it offered on this session are extended."""
        for entry in self._by_generation.values():
            if session in entry.sources:
                entry.expires_at = max(entry.expires_at, expires_at)

    # -- the chunks --------------------------------------------------------------------------------------------------

    def scatter_begins(self, session: int, generation: int, seq: int) -> bool:
        """Asks to write chunk `seq` of a source into the blocks. False: it must not be."""
        entry = self._by_generation.get(generation)
        source = entry.sources.get(session) if entry and entry.state is ReceivePhase.RECEIVING else None
        if source is None or seq in source.chunks_in or not 0 <= seq < source.num_chunks:
            self.num_fenced += 1
            return False
        assert source.scattering is None, "one thread scatters a source's chunks"
        source.scattering = seq
        return True

    def scatter_ends(self, session: int, generation: int) -> list[Instruction]:
        """That chunk is verified and in place, unless the transfer has failed meanwhile."""
        entry = self._by_generation[generation]
        source = entry.sources[session]
        assert source.scattering is not None
        source.chunks_in.add(source.scattering)
        source.scattering = None
        if entry.state is ReceivePhase.RECEIVING:
            return self._try_commit(entry)
        if entry.is_scattering:
            return []
        self._move(entry, ReceivePhase.FAILED)
        return self._settle(entry)

    # -- bad news from here ------------------------------------------------------------------------------------------

    def fail(self, transfer_id: str, generation: int, error: TransferError) -> list[Instruction]:
        """Corruption, refusal or shutdown. No effect on a transfer that has ended."""
        entry = self._find(transfer_id, generation)
        return self._fail(entry, error) if entry else []

    def expire(self, now: float) -> list[Instruction]:
        """Fails the transfers whose lease has ended."""
        instructions: list[Instruction] = []
        for entry in list(self._by_generation.values()):
            if entry.state in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING) and entry.expires_at <= now:
                instructions += self._fail(entry, TransferExpired("the KV did not arrive within the lease"))
        return instructions

    def check(self) -> None:
        """Raises AssertionError where the books do not hold."""
        for generation, entry in self._by_generation.items():
            assert entry.generation == generation <= self._last_generation
            assert not (entry.released and entry.state in TERMINAL), f"{generation} is over and not forgotten"
            assert not entry.is_scattering or entry.state in (ReceivePhase.RECEIVING, ReceivePhase.DRAINING), entry
            assert entry.state is not ReceivePhase.DRAINING or entry.is_scattering, (
                f"{generation} drains and nothing runs"
            )
            assert entry.state is not ReceivePhase.COMMITTED or entry.is_complete, (
                f"{generation} committed without its chunks"
            )
            assert (entry.state in (ReceivePhase.DRAINING, ReceivePhase.FAILED)) == (entry.error is not None), entry
        assert len(self._ended) <= MAX_REMEMBERED

    # -- inside ------------------------------------------------------------------------------------------------------

    def _find(self, transfer_id: str, generation: int) -> Reservation | None:
        entry = self._by_generation.get(generation)
        if entry is None or entry.transfer_id != transfer_id:
            self.num_fenced += 1
            return None
        return entry

    def _answer_again(
        self, session: int, transfer_id: str, generation: int, entry: Reservation | None
    ) -> list[Instruction]:
        """What a sender is told that asks about a transfer which does not wait for it."""
        if entry is None:
            ended = self._ended.get(generation)
            if ended is None or ended[0] != transfer_id:
                return self._not_expected(session, transfer_id, generation)
            reason = ended[1]
        elif entry.state is ReceivePhase.RESERVED:
            return self._not_expected(session, transfer_id, generation)
        else:
            reason = to_reason(entry.error) if entry.error else ""
        if not reason:
            return [Tell(session, CommitAck(transfer_id, generation))]
        return [Tell(session, Nack(transfer_id, generation, reason))]

    def _not_expected(self, session: int, transfer_id: str, generation: int) -> list[Instruction]:
        refused = TransferRefused(f"transfer {transfer_id}, generation {generation}, is not expected")
        return [Tell(session, Nack(transfer_id, generation, to_reason(refused)))]

    def _fail(self, entry: Reservation, error: TransferError, but_not: int | None = None) -> list[Instruction]:
        if entry.state not in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING):
            return []
        entry.error = error
        self._move(entry, ReceivePhase.DRAINING if entry.is_scattering else ReceivePhase.FAILED)
        nack = Nack(entry.transfer_id, entry.generation, to_reason(error))
        told = [Tell(session, nack) for session in entry.sources if session != but_not]
        return [Failed(entry.generation, error), *told, *self._settle(entry)]

    def _try_commit(self, entry: Reservation) -> list[Instruction]:
        if not entry.is_complete or entry.is_scattering:
            return []
        self._move(entry, ReceivePhase.COMMITTED)
        told = [Tell(session, CommitAck(entry.transfer_id, entry.generation)) for session in entry.sources]
        return [Committed(entry.generation, entry.first_token), *told, *self._settle(entry)]

    def _settle(self, entry: Reservation) -> list[Instruction]:
        if entry.state not in TERMINAL or not entry.released:
            return []
        del self._by_generation[entry.generation]
        self._ended[entry.generation] = entry.transfer_id, to_reason(entry.error) if entry.error else ""
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return [Free(entry.generation, entry.block_ids)]

    def _move(self, entry: Reservation, state: ReceivePhase) -> None:
        assert state in LEGAL[entry.state], f"{entry.state} -> {state}"
        entry.state = state
