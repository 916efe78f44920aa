"""Ownership of a receiving worker's reserved blocks: a pure state machine.

    RESERVED --offer--> RECEIVING --every source committed, every chunk in--> COMMITTED
        |                   |
        |                   +--fail, while a scatter runs--> DRAINING --the last scatter ends--> FAILED
        +--fail-------------+--fail, idle------------------------------------------------------>

A transfer has one source for each source and destination rank that exchange bytes. Each source has its own connection.
Success is counted over sets: every source has committed, and every chunk of every source has been received.

COMMITTED and FAILED are sticky: a message that is repeated later gets the same answer, even after the reservation is
gone. A reservation carries two references: the request's, dropped by `release`, and the transfer's, dropped when it
reaches a terminal phase. When both are gone, `Free` returns the blocks exactly once. DRAINING lasts only while this
process's scatters write into the blocks; it never depends on the other side.

Events are method calls; the machine returns instructions, in order. Events about an unknown id or a past generation are
counted in `num_fenced` and have no effect. Time is an argument.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.errors import TransferCancelled, TransferError, TransferExpired, TransferRefused, text_of
from baton.messages import AbortAck, CommitAck, Grant, Nack
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed, checked_move

MAX_REMEMBERED = 4096
"""Number of outcomes kept for senders that ask again after a reservation is gone."""


class ReceivePhase(enum.Enum):
    """Progress of a reservation."""

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
class Free:
    """The machine no longer holds these blocks, and this process no longer writes to them.

    Given once per reservation.
    """

    generation: int
    block_ids: tuple[object, ...]


ReceiveInstruction = Send[Grant | CommitAck | Nack | AbortAck] | TransferCommitted | TransferFailed | Free


@dataclass(slots=True)
class SourceProgress:
    """One connection's part of a transfer."""

    num_chunks: int
    chunks_in: set[int] = field(default_factory=set)
    committed: bool = False
    scattering: tuple[int, ...] = ()
    """Chunks that are being written into the blocks at this moment, in the order in which they started."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks that are held for one transfer."""

    transfer_id: str
    generation: int
    block_ids: tuple[object, ...]
    expires_at: float
    state: ReceivePhase = ReceivePhase.RESERVED
    sources: dict[int, SourceProgress] = field(default_factory=dict)
    """Sources that have made an offer, by connection."""
    num_sources: int = 0
    """Number of sources, as implied by the first offer."""
    first_token: int | None = None
    error: TransferError | None = None
    released: bool = False
    """True after the request has dropped its reference."""

    @property
    def is_scattering(self) -> bool:
        """True while a chunk is being written into the blocks."""
        return any(source.scattering for source in self.sources.values())

    @property
    def is_complete(self) -> bool:
        """True if every source has committed and every chunk has been received."""
        return len(self.sources) == self.num_sources > 0 and all(
            source.committed and len(source.chunks_in) == source.num_chunks for source in self.sources.values()
        )


class ReceiveState:
    """Reservations of one worker, by generation."""

    def __init__(self) -> None:
        self.num_fenced = 0
        self._last_generation = 0
        self._by_generation: dict[int, Reservation] = {}
        self._ended: OrderedDict[int, tuple[str, str]] = OrderedDict()
        """Past generations: the transfer's id, and its failure reason; "" if it was committed."""

    def __len__(self) -> int:
        return len(self._by_generation)

    # -- the request's side ------------------------------------------------------------------------------------------

    def reserve(self, transfer_id: str, block_ids: tuple[object, ...], expires_at: float) -> int:
        """Hold `block_ids` for a transfer.

        Returns:
            The reservation's generation, unique in this machine's life.
        """
        self._last_generation += 1
        generation = self._last_generation
        self._by_generation[generation] = Reservation(
            transfer_id=transfer_id, generation=generation, block_ids=block_ids, expires_at=expires_at
        )
        return generation

    def state(self, generation: int) -> ReceivePhase | None:
        """Return the phase of a reservation, or None for one that is unknown or gone."""
        entry = self._by_generation.get(generation)
        return entry.state if entry else None

    def release(self, generation: int) -> list[ReceiveInstruction]:
        """Drop the request's reference: the request was cancelled, or it owns the committed blocks from now on."""
        entry = self._by_generation.get(generation)
        if entry is None or entry.released:
            return []
        entry.released = True
        failed = self._fail(entry, TransferCancelled("the request gave up its reservation"))
        return failed or self._settle(entry)

    # -- the senders' side -------------------------------------------------------------------------------------------

    def offer(
        self, connection: int, transfer_id: str, generation: int, num_chunks: int, num_sources: int
    ) -> list[ReceiveInstruction]:
        """Handle an Offer: a source will send `num_chunks`. Idempotent."""
        entry = self._find(transfer_id, generation)
        if entry is None or entry.state not in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING):
            return self._answer_again(connection, transfer_id, generation, entry)
        source = entry.sources.get(connection)
        if source is None:
            if num_sources != (entry.num_sources or num_sources) or len(entry.sources) == num_sources:
                return self._not_expected(connection, transfer_id, generation)
            entry.num_sources = num_sources
            entry.sources[connection] = SourceProgress(num_chunks)
            if entry.state is ReceivePhase.RESERVED:
                self._move(entry, ReceivePhase.RECEIVING)
        elif source.num_chunks != num_chunks:
            return self._not_expected(connection, transfer_id, generation)
        return [Send(Grant(transfer_id, generation), connection)]

    def commit(
        self, connection: int, transfer_id: str, generation: int, first_token: int | None
    ) -> list[ReceiveInstruction]:
        """Handle a Commit: a source has sent everything.

        The transfer is committed once all sources have. Idempotent.
        """
        entry = self._find(transfer_id, generation)
        if entry is None or entry.state is not ReceivePhase.RECEIVING:
            return self._answer_again(connection, transfer_id, generation, entry)
        source = entry.sources.get(connection)
        if source is None:
            return self._not_expected(connection, transfer_id, generation)
        is_repeated, source.committed = source.committed, True
        entry.first_token = first_token
        committed = self._try_commit(entry)
        if is_repeated and not committed and len(source.chunks_in) == source.num_chunks:
            return [Send(Grant(transfer_id, generation), connection)]  # another source is not complete yet
        return committed

    def abort(
        self, connection: int, transfer_id: str, generation: int, error: TransferError
    ) -> list[ReceiveInstruction]:
        """Handle an Abort: a source has abandoned the transfer. The acknowledgement means that it has ended here."""
        entry = self._find(transfer_id, generation)
        failed = self._fail(entry, error, but_not=connection) if entry else []
        return [*failed, Send(AbortAck(transfer_id, generation), connection)]

    def lost(self, connection: int, error: TransferError) -> list[ReceiveInstruction]:
        """Fail every transfer in which the connection took part, because the connection has ended."""
        instructions: list[ReceiveInstruction] = []
        for entry in [e for e in self._by_generation.values() if connection in e.sources]:
            instructions += self._fail(entry, error, but_not=connection)
        return instructions

    def renew(self, connection: int, expires_at: float) -> None:
        """Extend the leases of all transfers that were offered on this connection: its sender is alive."""
        for entry in self._by_generation.values():
            if connection in entry.sources:
                entry.expires_at = max(entry.expires_at, expires_at)

    # -- the chunks --------------------------------------------------------------------------------------------------

    def scatter_begins(self, connection: int, generation: int, seq: int) -> bool:
        """Claim chunk `seq` of a source for writing into the blocks. Returns False if the chunk must be dropped."""
        entry = self._by_generation.get(generation)
        source = entry.sources.get(connection) if entry and entry.state is ReceivePhase.RECEIVING else None
        if source is None or seq in (*source.chunks_in, *source.scattering) or not 0 <= seq < source.num_chunks:
            self.num_fenced += 1
            return False
        source.scattering = (*source.scattering, seq)
        return True

    def scatter_ends(self, connection: int, generation: int) -> list[ReceiveInstruction]:
        """Record that the earliest started chunk is verified and in place, unless the transfer has failed."""
        entry = self._by_generation[generation]
        source = entry.sources[connection]
        seq, *later = source.scattering
        source.chunks_in.add(seq)
        source.scattering = tuple(later)
        if entry.state is ReceivePhase.RECEIVING:
            return self._try_commit(entry)
        if entry.is_scattering:
            return []
        self._move(entry, ReceivePhase.FAILED)
        return self._settle(entry)

    # -- local failures ----------------------------------------------------------------------------------------------

    def fail(self, transfer_id: str, generation: int, error: TransferError) -> list[ReceiveInstruction]:
        """Fail a transfer: corruption, refusal or shutdown. A transfer that has ended is not affected."""
        entry = self._find(transfer_id, generation)
        return self._fail(entry, error) if entry else []

    def expire(self, now: float) -> list[ReceiveInstruction]:
        """Fail the transfers whose lease has expired."""
        instructions: list[ReceiveInstruction] = []
        for entry in list(self._by_generation.values()):
            if entry.state in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING) and entry.expires_at <= now:
                instructions += self._fail(entry, TransferExpired("the KV did not arrive within the lease"))
        return instructions

    def check(self) -> None:
        """Raise AssertionError if the machine contradicts itself."""
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
        self, connection: int, transfer_id: str, generation: int, entry: Reservation | None
    ) -> list[ReceiveInstruction]:
        """Answer a sender whose transfer does not expect this message."""
        if entry is None:
            ended = self._ended.get(generation)
            if ended is None or ended[0] != transfer_id:
                return self._not_expected(connection, transfer_id, generation)
            reason = ended[1]
        elif entry.state is ReceivePhase.RESERVED:
            return self._not_expected(connection, transfer_id, generation)
        else:
            reason = text_of(entry.error) if entry.error else ""
        if not reason:
            return [Send(CommitAck(transfer_id, generation), connection)]
        return [Send(Nack(transfer_id, generation, reason), connection)]

    def _not_expected(self, connection: int, transfer_id: str, generation: int) -> list[ReceiveInstruction]:
        refused = TransferRefused(f"transfer {transfer_id}, generation {generation}, is not expected")
        return [Send(Nack(transfer_id, generation, text_of(refused)), connection)]

    def _fail(self, entry: Reservation, error: TransferError, but_not: int | None = None) -> list[ReceiveInstruction]:
        if entry.state not in (ReceivePhase.RESERVED, ReceivePhase.RECEIVING):
            return []
        entry.error = error
        self._move(entry, ReceivePhase.DRAINING if entry.is_scattering else ReceivePhase.FAILED)
        nack = Nack(entry.transfer_id, entry.generation, text_of(error))
        answers = [Send(nack, connection) for connection in entry.sources if connection != but_not]
        return [TransferFailed(entry.generation, error), *answers, *self._settle(entry)]

    def _try_commit(self, entry: Reservation) -> list[ReceiveInstruction]:
        if not entry.is_complete or entry.is_scattering:
            return []
        self._move(entry, ReceivePhase.COMMITTED)
        answers = [Send(CommitAck(entry.transfer_id, entry.generation), connection) for connection in entry.sources]
        return [TransferCommitted(entry.generation, entry.first_token), *answers, *self._settle(entry)]

    def _settle(self, entry: Reservation) -> list[ReceiveInstruction]:
        if entry.state not in TERMINAL or not entry.released:
            return []
        del self._by_generation[entry.generation]
        self._ended[entry.generation] = entry.transfer_id, text_of(entry.error) if entry.error else ""
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return [Free(entry.generation, entry.block_ids)]

    def _move(self, entry: Reservation, state: ReceivePhase) -> None:
        entry.state = checked_move(LEGAL, entry.state, state)
