"""Offers of a sending worker on one connection, and the blocks that it may still read: a pure state machine.

    OFFERED --grant--> SENDING --every chunk sent, finished--> COMMITTING --ack--> COMMITTED
        |                 |                                        |
        +-----------------+----------------- nack, lost -----------+--------------------------> FAILED
        +-----------------+----------------- abort ----------------+--> ABORTING --ack, lost--> FAILED

The source's blocks are pinned until `Unpin`, which is given once per transfer: when the transfer has ended here and no
gather of it runs. An ABORTING transfer reads no blocks; it is kept only until the receiver has acknowledged the Abort.
An unanswered message is sent again every `resend_s`, and abandoned after `answer_s`. The receiver's answers are sticky.

Events are method calls; the machine returns instructions, in order. Time is an argument.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.errors import BatonError, TransferError, TransferTimeout, text_of, transfer_error_of
from baton.messages import Abort, Commit, Offer
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed, checked_move


class SendPhase(enum.Enum):
    """State of an offered transfer: the event for which it waits."""

    OFFERED = "offered"
    SENDING = "sending"
    COMMITTING = "committing"
    ABORTING = "aborting"
    COMMITTED = "committed"
    FAILED = "failed"


LIVE = frozenset({SendPhase.OFFERED, SendPhase.SENDING, SendPhase.COMMITTING})
UNANSWERED = frozenset({SendPhase.OFFERED, SendPhase.COMMITTING, SendPhase.ABORTING})
LEGAL: dict[SendPhase, frozenset[SendPhase]] = {
    SendPhase.OFFERED: frozenset({SendPhase.SENDING, SendPhase.ABORTING, SendPhase.FAILED}),
    SendPhase.SENDING: frozenset({SendPhase.COMMITTING, SendPhase.ABORTING, SendPhase.FAILED}),
    SendPhase.COMMITTING: frozenset({SendPhase.COMMITTED, SendPhase.ABORTING, SendPhase.FAILED}),
    SendPhase.ABORTING: frozenset({SendPhase.FAILED}),
    SendPhase.COMMITTED: frozenset(),
    SendPhase.FAILED: frozenset(),
}


# -- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """The transfer's chunks may be sent as they become ready."""

    generation: int


@dataclass(frozen=True, slots=True)
class Unpin:
    """The source's blocks are no longer read. Given once per transfer, with its end or after it."""

    generation: int


SendInstruction = Send[Offer | Commit | Abort] | Granted | TransferCommitted | TransferFailed | Unpin


@dataclass(slots=True, kw_only=True)
class OfferedTransfer:
    """One transfer on the connection."""

    offer: Offer
    state: SendPhase
    sent_at: float
    """Time at which the unanswered message was last sent."""
    asked_at: float
    """Time at which it was first sent, or last answered with a Grant."""
    num_sent: int = 0
    finished: bool = False
    """True once everything is computed, and `first_token` is known if one was drawn."""
    first_token: int | None = None
    """Token from which the receiver continues."""
    gathering: int = 0
    """Number of gathers that read its blocks at this moment."""
    unpinned: bool = False
    error: BatonError | None = None

    @property
    def generation(self) -> int:
        """Generation of the receiver's reservation."""
        return self.offer.generation

    def pending(self) -> Offer | Commit | Abort:
        """Return the message that is unanswered."""
        ids = (self.offer.transfer_id, self.generation)
        match self.state:
            case SendPhase.OFFERED:
                return self.offer
            case SendPhase.COMMITTING:
                return Commit(*ids, self.first_token)
            case _:
                error = self.error if isinstance(self.error, TransferError) else TransferError("the sender cancelled")
                return Abort(*ids, text_of(error))


class SendState:
    """Transfers of one connection, by the generation of the receiver's reservation."""

    def __init__(self, resend_s: float, answer_s: float) -> None:
        self.num_fenced = 0
        self.num_resent = 0
        self._resend_s = resend_s
        self._answer_s = answer_s
        self._by_generation: dict[int, OfferedTransfer] = {}

    def __len__(self) -> int:
        return len(self._by_generation)

    def state(self, generation: int) -> SendPhase | None:
        """Return the phase of a transfer, or None for one that is unknown or forgotten."""
        transfer = self._by_generation.get(generation)
        return transfer.state if transfer else None

    # -- this worker's side ------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> list[SendInstruction]:
        """Start a transfer."""
        assert offer.generation not in self._by_generation, "a ticket is used once"
        self._by_generation[offer.generation] = OfferedTransfer(
            offer=offer, state=SendPhase.OFFERED, sent_at=now, asked_at=now
        )
        return [Send(offer)]

    def finish(self, generation: int, first_token: int | None, now: float) -> list[SendInstruction]:
        """Record that everything is computed. The Commit follows once every chunk has been sent."""
        transfer = self._by_generation.get(generation)
        if transfer is None or transfer.state not in LIVE:
            return []
        transfer.finished = True
        transfer.first_token = first_token
        return self._try_commit(transfer, now)

    def abort(self, generation: int, error: BatonError, now: float) -> list[SendInstruction]:
        """Abort a transfer. A transfer that has ended is not affected."""
        transfer = self._by_generation.get(generation)
        if transfer is None or transfer.state not in LIVE:
            return []
        transfer.error = error
        self._move(transfer, SendPhase.ABORTING)
        transfer.sent_at = transfer.asked_at = now
        return [TransferFailed(generation, error), Send(transfer.pending()), *self._try_unpin(transfer)]

    def lost(self, error: BatonError) -> list[SendInstruction]:
        """End every transfer, because the connection has ended."""
        instructions: list[SendInstruction] = []
        for transfer in [t for t in self._by_generation.values() if t.state in LIVE | UNANSWERED]:
            instructions += self._end(transfer, error)
        return instructions

    def tick(self, now: float) -> list[SendInstruction]:
        """Send unanswered messages again, and abandon those that stay unanswered for too long."""
        instructions: list[SendInstruction] = []
        for transfer in [t for t in self._by_generation.values() if t.state in UNANSWERED]:
            if now - transfer.asked_at >= self._answer_s:
                unheard = TransferTimeout(f"no answer to an offer or a commit within {self._answer_s:g} s")
                if transfer.state is SendPhase.ABORTING:
                    instructions += self._end(transfer, unheard)
                else:
                    instructions += self.abort(transfer.generation, unheard, now)
            elif now - transfer.sent_at >= self._resend_s:
                transfer.sent_at = now
                self.num_resent += 1
                instructions.append(Send(transfer.pending()))
        return instructions

    # -- the chunks --------------------------------------------------------------------------------------------------

    def gather_begins(self, generation: int) -> bool:
        """Claim the blocks for reading one chunk. If it returns False, they may belong to another sequence by now."""
        transfer = self._by_generation.get(generation)
        if transfer is None or transfer.state is not SendPhase.SENDING:
            return False
        transfer.gathering += 1
        return True

    def gather_ends(self, generation: int, now: float) -> list[SendInstruction]:
        """Record that the chunk is in staging and its sending has started: the transport is first in, first out."""
        transfer = self._by_generation[generation]
        transfer.gathering -= 1
        transfer.num_sent += 1
        if transfer.state is SendPhase.SENDING:
            return self._try_commit(transfer, now)
        return self._try_unpin(transfer)

    # -- the receiver's answers --------------------------------------------------------------------------------------

    def on_grant(self, transfer_id: str, generation: int, now: float) -> list[SendInstruction]:
        """Handle a Grant: chunks may be sent, or, after a Commit, not every chunk of every source has arrived yet."""
        transfer = self._find(transfer_id, generation)
        if transfer is not None and transfer.state is SendPhase.COMMITTING:
            transfer.asked_at = now  # an answer: not everything has arrived yet
        if transfer is None or transfer.state is not SendPhase.OFFERED:
            return []
        self._move(transfer, SendPhase.SENDING)
        return [Granted(generation), *self._try_commit(transfer, now)]

    def on_commit_ack(self, transfer_id: str, generation: int) -> list[SendInstruction]:
        """Handle a CommitAck: the receiver has everything."""
        transfer = self._find(transfer_id, generation)
        if transfer is None or transfer.state is not SendPhase.COMMITTING:
            return []
        self._move(transfer, SendPhase.COMMITTED)
        return [TransferCommitted(generation), *self._try_unpin(transfer)]

    def on_nack(self, transfer_id: str, generation: int, reason: str) -> list[SendInstruction]:
        """Handle a Nack: the transfer has failed at the receiver, for a reason in the form of `text_of`."""
        transfer = self._find(transfer_id, generation)
        if transfer is None or transfer.state not in LIVE:
            return []
        return self._end(transfer, transfer_error_of(reason))

    def on_abort_ack(self, transfer_id: str, generation: int) -> list[SendInstruction]:
        """Handle an AbortAck: the receiver has ended the transfer, with any outcome."""
        transfer = self._find(transfer_id, generation)
        if transfer is None or transfer.state is not SendPhase.ABORTING:
            return []
        self._move(transfer, SendPhase.FAILED)
        return self._try_unpin(transfer)

    def check(self) -> None:
        """Raise AssertionError if the machine contradicts itself."""
        for generation, transfer in self._by_generation.items():
            assert transfer.generation == generation
            assert transfer.num_sent <= transfer.offer.num_chunks
            assert not transfer.gathering or not transfer.unpinned, f"{generation} reads blocks that it has let go"
            assert not transfer.unpinned or transfer.state is SendPhase.ABORTING, (
                f"{generation} has let go of its blocks"
            )
            over = transfer.state in (SendPhase.COMMITTED, SendPhase.FAILED)
            assert not over or transfer.gathering, f"{generation} is over and not forgotten"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _find(self, transfer_id: str, generation: int) -> OfferedTransfer | None:
        transfer = self._by_generation.get(generation)
        if transfer is None or transfer.offer.transfer_id != transfer_id:
            self.num_fenced += 1
            return None
        return transfer

    def _try_commit(self, transfer: OfferedTransfer, now: float) -> list[SendInstruction]:
        everything_sent = transfer.finished and transfer.num_sent == transfer.offer.num_chunks
        if transfer.state is not SendPhase.SENDING or not everything_sent:
            return []
        self._move(transfer, SendPhase.COMMITTING)
        transfer.sent_at = transfer.asked_at = now
        return [Send(transfer.pending())]

    def _end(self, transfer: OfferedTransfer, error: BatonError) -> list[SendInstruction]:
        was_live = transfer.state in LIVE
        transfer.error = transfer.error or error
        self._move(transfer, SendPhase.FAILED)
        failed = [TransferFailed(transfer.generation, error)] if was_live else []
        return [*failed, *self._try_unpin(transfer)]

    def _try_unpin(self, transfer: OfferedTransfer) -> list[SendInstruction]:
        if transfer.gathering:
            return []
        if transfer.state in (SendPhase.COMMITTED, SendPhase.FAILED):
            del self._by_generation[transfer.generation]
        if transfer.unpinned:
            return []
        transfer.unpinned = True
        return [Unpin(transfer.generation)]

    def _move(self, transfer: OfferedTransfer, state: SendPhase) -> None:
        transfer.state = checked_move(LEGAL, transfer.state, state)
