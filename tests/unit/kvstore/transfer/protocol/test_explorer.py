"""The KV transfer's two state machines against everything that can go wrong once; and broken ones, which must be found.

What can go wrong twice, and two transfers at a time, is `test_explorer_of_two_faults.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import BatonError, TransferError
from baton.messages import AbortAck, Grant
from kvstore.transfer.protocol import receive_state as receiving
from kvstore.transfer.protocol import send_state as sending
from kvstore.transfer.protocol.machine import Send, TransferFailed
from kvstore.transfer.protocol.receive_state import Free, ReceiveState, Reservation
from kvstore.transfer.protocol.send_state import OfferedTransfer, SendState, Unpin
from tests.unit.kvstore.transfer.protocol.explorer import Scenario, Violation, explore, with_budget

ONE = Scenario(name="one transfer of two chunks", num_chunks=((2,),), num_blocks=2)
SAME_BLOCK = Scenario(name="two transfers, one after the other in one block", num_chunks=((1,), (1,)), num_blocks=1)
STATEFUL = Scenario(
    name="a block of a window, and a state", num_chunks=((2,),), num_blocks=3, num_held=1, states_from=(0,)
)
TWO_SOURCES = Scenario(name="one transfer from two sources", num_chunks=((1, 1),), num_blocks=2)


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        (with_budget(ONE, 1, 1), 5000),
        (with_budget(SAME_BLOCK, 1, 0), 1900),
        (with_budget(TWO_SOURCES, 0, 1), 4000),
        (with_budget(STATEFUL, 1, 1), 2500),
        (with_budget(replace(TWO_SOURCES, name="two sources, a state from one", states_from=(1,)), 0, 1), 1000),
    ],
    ids=str,
)
def test_whatever_happens_once_no_block_is_lost_or_misread_and_every_run_ends(
    scenario: Scenario, at_least: int
) -> None:
    explored = explore(scenario)
    print(f"\n{scenario}: {explored}")
    assert explored.num_worlds > at_least


# -- broken machines: their own checks are off, so that it is the worlds that must show it ----------------------------


class BrokenLedger(ReceiveState):
    def check(self) -> None: ...


class BrokenOffers(SendState):
    def check(self) -> None: ...


class FreesUnderAScatter(BrokenLedger):
    def _settle(self, entry: Reservation) -> list[receiving.ReceiveInstruction]:
        if entry.state is receiving.ReceivePhase.DRAINING and entry.released:
            return [Free(entry.generation, entry.block_ids)]
        return super()._settle(entry)


class FreesTwice(BrokenLedger):
    def release(self, generation: int) -> list[receiving.ReceiveInstruction]:
        entry = self._by_generation.get(generation)
        freed = super().release(generation)
        self._by_generation.update({} if entry is None else {generation: entry})
        return freed or ([] if entry is None else [Free(generation, entry.block_ids)])


class CountsAChunkTwice(BrokenLedger):
    def scatter_ends(self, session: int, generation: int) -> list[receiving.ReceiveInstruction]:
        source = self._by_generation[generation].sources[session]
        source.scattering = (1000 + len(source.chunks_in),)
        return super().scatter_ends(session, generation)


class CommitsWithoutAllChunks(BrokenLedger):
    def _try_commit(self, entry: Reservation) -> list[receiving.ReceiveInstruction]:
        for source in entry.sources.values():
            if source.committed:
                source.chunks_in.update(range(source.num_chunks))
        return super()._try_commit(entry)


class CommitsWithOneSource(BrokenLedger):
    def offer(
        self, session: int, transfer_id: str, generation: int, num_chunks: int, num_sources: int
    ) -> list[receiving.ReceiveInstruction]:
        return super().offer(session, transfer_id, generation, num_chunks, 1)


class WritesAfterAFailure(BrokenLedger):
    def scatter_begins(self, session: int, generation: int, seq: int) -> bool:
        return super().scatter_begins(session, generation, seq) or generation not in self._by_generation


class IsRevivedByALateOffer(BrokenLedger):
    def offer(
        self, session: int, transfer_id: str, generation: int, num_chunks: int, num_sources: int
    ) -> list[receiving.ReceiveInstruction]:
        entry = self._by_generation.get(generation)
        if entry is not None and entry.state is receiving.ReceivePhase.FAILED:
            entry.state, entry.error = receiving.ReceivePhase.RESERVED, None
            entry.sources.clear()
        return super().offer(session, transfer_id, generation, num_chunks, num_sources)


class GrantsOnce(BrokenLedger):
    def offer(
        self, session: int, transfer_id: str, generation: int, num_chunks: int, num_sources: int
    ) -> list[receiving.ReceiveInstruction]:
        entry = self._by_generation.get(generation)
        again = entry is not None and session in entry.sources
        told = super().offer(session, transfer_id, generation, num_chunks, num_sources)
        return [t for t in told if not (again and isinstance(t, Send) and isinstance(t.message, Grant))]


class CommitsWhenAskedAgain(BrokenLedger):
    def scatter_ends(self, session: int, generation: int) -> list[receiving.ReceiveInstruction]:
        source = self._by_generation[generation].sources[session]
        if self.state(generation) is not receiving.ReceivePhase.RECEIVING or not source.scattering:
            return super().scatter_ends(session, generation)
        source.chunks_in.update(source.scattering)
        source.scattering = ()
        return []


class AnswersOnce(BrokenLedger):
    def _answer_again(
        self, session: int, transfer_id: str, generation: int, entry: Reservation | None
    ) -> list[receiving.ReceiveInstruction]:
        return []


class NeverExpires(BrokenLedger):
    def expire(self, now: float) -> list[receiving.ReceiveInstruction]:
        return []


class AcknowledgesAnAbortOnly(BrokenLedger):
    def abort(
        self, session: int, transfer_id: str, generation: int, error: TransferError
    ) -> list[receiving.ReceiveInstruction]:
        return [Send(AbortAck(transfer_id, generation), session)]


class UnpinsUnderAGather(BrokenOffers):
    def _try_unpin(self, transfer: OfferedTransfer) -> list[sending.SendInstruction]:
        if transfer.gathering and not transfer.unpinned:
            transfer.unpinned = True
            return [Unpin(transfer.generation)]
        return super()._try_unpin(transfer)


class UnpinsTwice(BrokenOffers):
    def on_abort_ack(self, transfer_id: str, generation: int) -> list[sending.SendInstruction]:
        transfer = self._by_generation.get(generation)
        if transfer is not None:
            transfer.unpinned = False
        return super().on_abort_ack(transfer_id, generation)


class ReadsAfterAnAbort(BrokenOffers):
    def gather_begins(self, generation: int) -> bool:
        transfer = self._by_generation.get(generation)
        if transfer is not None and transfer.state is sending.SendPhase.ABORTING:
            transfer.gathering += 1
            return True
        return super().gather_begins(generation)


class ForgetsToUnpin(BrokenOffers):
    def gather_ends(self, generation: int, now: float) -> list[sending.SendInstruction]:
        return [i for i in super().gather_ends(generation, now) if not isinstance(i, Unpin)]


class NeverSaysAgain(BrokenOffers):
    def tick(self, now: float) -> list[sending.SendInstruction]:
        for transfer in self._by_generation.values():
            transfer.sent_at = now
        return super().tick(now)


class NeverGivesUp(BrokenOffers):
    def tick(self, now: float) -> list[sending.SendInstruction]:
        for transfer in self._by_generation.values():
            transfer.asked_at = now
        return super().tick(now)


class BelievesItsCommit(BrokenOffers):
    def _try_commit(self, transfer: OfferedTransfer, now: float) -> list[sending.SendInstruction]:
        told = super()._try_commit(transfer, now)
        return [*told, *super().on_commit_ack(transfer.offer.transfer_id, transfer.generation)] if told else []


class CommitsBeforeTheLastChunk(BrokenOffers):
    def finish(self, generation: int, first_token: int | None, now: float) -> list[sending.SendInstruction]:
        transfer = self._by_generation.get(generation)
        if transfer is not None:
            transfer.num_sent = transfer.offer.num_chunks
        return super().finish(generation, first_token, now)


class TellsAFailureTwice(BrokenOffers):
    def lost(self, error: BatonError) -> list[sending.SendInstruction]:
        aborting = [g for g, t in self._by_generation.items() if t.state is sending.SendPhase.ABORTING]
        return [*super().lost(error), *(TransferFailed(generation, error) for generation in aborting)]


@pytest.mark.parametrize(
    ("broken", "scenario", "what"),
    [
        (FreesUnderAScatter, with_budget(ONE, 0, 1), "freed under a scatter"),
        (FreesTwice, with_budget(ONE, 0, 0), "freed again"),
        (CountsAChunkTwice, with_budget(ONE, 1, 0), "not what was sent"),
        (CommitsWithoutAllChunks, with_budget(ONE, 0, 0), "not what was sent"),
        (CommitsWithoutAllChunks, with_budget(STATEFUL, 0, 0), "not what was sent"),
        (CommitsBeforeTheLastChunk, with_budget(STATEFUL, 0, 0), "waits for a timeout"),
        (CommitsWithOneSource, with_budget(TWO_SOURCES, 0, 0), "not what was sent"),
        (WritesAfterAFailure, with_budget(SAME_BLOCK, 0, 1), "somebody else's"),
        (IsRevivedByALateOffer, with_budget(ONE, 2, 0), "a second outcome"),
        (GrantsOnce, with_budget(ONE, 1, 0), "failed with no reason"),
        (CommitsWhenAskedAgain, with_budget(ONE, 0, 0), "waits for a timeout"),
        (AnswersOnce, with_budget(ONE, 1, 0), "failed with no reason"),
        (NeverExpires, with_budget(ONE, 1, 0), "blocks are lost"),
        (AcknowledgesAnAbortOnly, with_budget(ONE, 0, 1), "blocks are lost"),
        (UnpinsUnderAGather, with_budget(ONE, 0, 1), "unpinned under a gather"),
        (UnpinsTwice, with_budget(ONE, 0, 1), "unpinned again"),
        (ReadsAfterAnAbort, with_budget(ONE, 0, 1), "not pinned"),
        (ForgetsToUnpin, with_budget(ONE, 0, 1), "pins are left"),
        (NeverSaysAgain, with_budget(ONE, 1, 0), "failed with no reason"),
        (NeverGivesUp, with_budget(ONE, 1, 0), "round in circles"),
        (BelievesItsCommit, with_budget(ONE, 0, 0), "only the sender believes"),
        (CommitsBeforeTheLastChunk, with_budget(ONE, 0, 0), "waits for a timeout"),
        (TellsAFailureTwice, with_budget(ONE, 1, 1), "a second outcome"),
    ],
)
def test_a_broken_machine_is_found(broken: type[BrokenLedger | BrokenOffers], scenario: Scenario, what: str) -> None:
    machines: tuple[type[ReceiveState], type[SendState]] = (
        (broken, SendState) if issubclass(broken, BrokenLedger) else (ReceiveState, broken)
    )
    with pytest.raises(Violation, match=what):
        explore(scenario, *machines)
