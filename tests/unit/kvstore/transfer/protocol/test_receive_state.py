"""The ledger, event by event. What any order of events can lead to is `test_explorer.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferCorrupted, TransferError, TransferExpired, TransferRefused, text_of, transfer_error_of
from baton.messages import AbortAck, CommitAck, Grant, Nack
from kvstore.transfer.protocol import receive_state as module
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.receive_state import Free, ReceiveInstruction, ReceivePhase, ReceiveState

ERROR = TransferCorrupted("test")
A, B, C = 5, 6, 7
"""Sessions."""
GRANT = Grant("t", 1)
ACK = CommitAck("t", 1)
NACK = Nack("t", 1, text_of(ERROR))


def reserved() -> ReceiveState:
    """One reservation, generation 1, of blocks 4 and 5."""
    ledger = ReceiveState()
    assert ledger.reserve("t", (4, 5), expires_at=30.0) == 1
    return ledger


def receiving(num_chunks: int, *sessions: int) -> ReceiveState:
    ledger = reserved()
    for session in sessions or (A,):
        assert ledger.offer(session, "t", 1, num_chunks, len(sessions) or 1) == [Send(GRANT, session)]
    return ledger


def scatter(ledger: ReceiveState, seq: int, session: int = A) -> list[ReceiveInstruction]:
    assert ledger.scatter_begins(session, 1, seq)
    return ledger.scatter_ends(session, 1)


def refusal(instructions: list[ReceiveInstruction]) -> TransferError:
    (told,) = instructions
    assert isinstance(told, Send)
    assert isinstance(told.message, Nack)
    return transfer_error_of(told.message.reason)


def test_a_transfer_commits_and_its_blocks_come_back_once() -> None:
    ledger = receiving(2)
    assert scatter(ledger, 0) == []
    assert ledger.commit(A, "t", 1, 99) == [], "a chunk is missing"
    assert scatter(ledger, 1) == [TransferCommitted(1, 99), Send(ACK, A)]
    assert ledger.release(1) == [Free(1, (4, 5))]
    assert ledger.release(1) == []
    assert len(ledger) == 0
    ledger.check()


def test_the_commit_may_come_last_and_without_a_token() -> None:
    ledger = receiving(1)
    assert scatter(ledger, 0) == []
    assert ledger.commit(A, "t", 1, None) == [TransferCommitted(1, None), Send(ACK, A)]


def test_a_transfer_of_nothing_is_committed_by_word_alone() -> None:
    assert receiving(0).commit(A, "t", 1, 7) == [TransferCommitted(1, 7), Send(ACK, A)]


def test_two_sources_must_both_commit_and_have_sent_everything() -> None:
    ledger = receiving(1, A, B)
    assert scatter(ledger, 0, A) == scatter(ledger, 0, B) == []
    assert ledger.commit(A, "t", 1, 9) == []
    assert ledger.commit(A, "t", 1, 9) == [Send(GRANT, A)], "it is the other one that is waited for"
    assert ledger.commit(B, "t", 1, 9) == [TransferCommitted(1, 9), Send(ACK, A), Send(ACK, B)]


def test_one_source_is_not_enough_before_the_other_has_offered() -> None:
    ledger = reserved()
    ledger.offer(A, "t", 1, 0, 2)
    assert ledger.commit(A, "t", 1, 9) == []
    ledger.offer(B, "t", 1, 0, 2)
    assert ledger.commit(B, "t", 1, 9) == [TransferCommitted(1, 9), Send(ACK, A), Send(ACK, B)]


def test_sources_that_were_not_announced_or_announce_otherwise_are_refused() -> None:
    ledger = receiving(1, A, B)
    assert isinstance(refusal(ledger.offer(C, "t", 1, 1, 2)), TransferRefused), "a third of two"
    assert isinstance(refusal(ledger.offer(A, "t", 1, 2, 2)), TransferRefused), "the number of chunks has changed"
    assert isinstance(refusal(ledger.commit(C, "t", 1, 9)), TransferRefused)
    assert isinstance(refusal(reserved().offer(A, "t", 1, 1, 0)), TransferRefused), "no source is expected"
    assert ledger.state(1) is ReceivePhase.RECEIVING, "the others go on"


@pytest.mark.parametrize("num_sources", [1, 3])
def test_the_first_offer_says_how_many_sources_there_are(num_sources: int) -> None:
    ledger = reserved()
    ledger.offer(A, "t", 1, 0, 2)
    assert isinstance(refusal(ledger.offer(B, "t", 1, 0, num_sources)), TransferRefused)
    ledger.commit(A, "t", 1, 9)
    assert ledger.offer(B, "t", 1, 0, 2) == [Send(GRANT, B)]
    assert TransferCommitted(1, 9) in ledger.commit(B, "t", 1, 9)


def test_an_offer_again_is_granted_again() -> None:
    ledger = receiving(1)
    assert ledger.offer(A, "t", 1, 1, 1) == [Send(GRANT, A)]
    ledger.commit(A, "t", 1, 9)
    assert ledger.offer(A, "t", 1, 1, 1) == [Send(GRANT, A)]


@given(st.permutations(range(4)), st.lists(st.integers(-2, 6), max_size=8), st.integers(0, 4))
def test_it_is_the_set_of_chunks_that_counts(order: list[int], strays: list[int], commit_at: int) -> None:
    ledger = receiving(4)
    brought: list[ReceiveInstruction] = []
    for step, seq in enumerate(order):
        if step == commit_at:
            brought += ledger.commit(A, "t", 1, 9)
        brought += scatter(ledger, seq)
        for stray in strays:
            if stray not in order[step + 1 :]:
                assert not ledger.scatter_begins(A, 1, stray), "in already, or none of the plan's"
        ledger.check()
        assert bool(brought) == (step == 3 and commit_at < 4)
    if commit_at == 4:
        brought += ledger.commit(A, "t", 1, 9)
    assert brought == [TransferCommitted(1, 9), Send(ACK, A)]


def test_chunks_are_written_only_while_they_are_received() -> None:
    ledger = reserved()
    assert not ledger.scatter_begins(A, 1, 0), "not offered"
    ledger.offer(A, "t", 1, 1, 1)
    assert not ledger.scatter_begins(B, 1, 0), "not its session"
    assert not ledger.scatter_begins(A, 2, 0), "no such generation"
    ledger.fail("t", 1, ERROR)
    assert not ledger.scatter_begins(A, 1, 0), "failed"
    assert ledger.num_fenced == 4
    committed = receiving(0)
    committed.commit(A, "t", 1, 9)
    assert not committed.scatter_begins(A, 1, 0)


def test_a_failure_while_scatters_run_drains_first() -> None:
    ledger = receiving(1, A, B)
    assert ledger.scatter_begins(A, 1, 0)
    assert ledger.scatter_begins(B, 1, 0)
    assert ledger.fail("t", 1, ERROR) == [TransferFailed(1, ERROR), Send(NACK, A), Send(NACK, B)]
    assert ledger.state(1) is ReceivePhase.DRAINING
    assert ledger.release(1) == [], "the scatters still write to the blocks"
    assert ledger.scatter_ends(B, 1) == []
    ledger.check()
    assert ledger.scatter_ends(A, 1) == [Free(1, (4, 5))]
    ledger.check()


def test_several_chunks_of_a_source_are_written_at_once_and_end_in_the_order_in_which_they_began() -> None:
    ledger = receiving(3)
    assert ledger.scatter_begins(A, 1, 2)
    assert not ledger.scatter_begins(A, 1, 2), "it is being written"
    assert ledger.scatter_begins(A, 1, 0)
    assert ledger.commit(A, "t", 1, 9) == []
    assert ledger.scatter_ends(A, 1) == []
    assert not ledger.scatter_begins(A, 1, 2), "it is in"
    assert ledger.fail("t", 1, ERROR) == [TransferFailed(1, ERROR), Send(NACK, A)]
    assert ledger.release(1) == [], "the other one still writes to the blocks"
    ledger.check()
    assert ledger.scatter_ends(A, 1) == [Free(1, (4, 5))]
    ledger.check()


def test_a_drained_failure_waits_for_its_request() -> None:
    ledger = receiving(1)
    assert ledger.scatter_begins(A, 1, 0)
    ledger.fail("t", 1, ERROR)
    assert ledger.scatter_ends(A, 1) == []
    assert ledger.state(1) is ReceivePhase.FAILED
    assert ledger.release(1) == [Free(1, (4, 5))]


def test_a_request_that_gives_up_ends_the_transfer() -> None:
    failed, told, freed = receiving(1).release(1)
    assert isinstance(failed, TransferFailed)
    assert told == Send(Nack("t", 1, text_of(failed.error)), A)
    assert freed == Free(1, (4, 5))


def test_what_is_asked_again_later_is_answered_the_same() -> None:
    committed, failed = receiving(0), receiving(0)
    committed.commit(A, "t", 1, 9)
    failed.fail("t", 1, ERROR)
    for release in (False, True):
        if release:
            committed.release(1)
            failed.release(1)
        for ledger, answer in ((committed, ACK), (failed, NACK)):
            assert ledger.commit(A, "t", 1, 9) == [Send(answer, A)]
            assert ledger.offer(A, "t", 1, 0, 1) == [Send(answer, A)]
            assert ledger.abort(A, "t", 1, ERROR) == [Send(AbortAck("t", 1), A)]
            assert ledger.fail("t", 1, ERROR) == ledger.expire(1e9) == ledger.lost(A, ERROR) == []


def test_an_abort_fails_the_others_and_is_acknowledged() -> None:
    ledger = receiving(1, A, B)
    assert ledger.abort(A, "t", 1, ERROR) == [TransferFailed(1, ERROR), Send(NACK, B), Send(AbortAck("t", 1), A)]
    assert ledger.abort(A, "t", 1, ERROR) == [Send(AbortAck("t", 1), A)]
    assert ledger.abort(A, "never heard of", 9, ERROR) == [Send(AbortAck("never heard of", 9), A)]


def test_an_abort_that_overtakes_its_offer_ends_the_transfer() -> None:
    ledger = reserved()
    assert ledger.abort(A, "t", 1, ERROR) == [TransferFailed(1, ERROR), Send(AbortAck("t", 1), A)]
    assert ledger.offer(A, "t", 1, 1, 1) == [Send(NACK, A)]


def test_a_lost_session_fails_its_own_transfers_only() -> None:
    ledger = receiving(1, A, B)
    assert ledger.reserve("u", (6,), 30.0) == 2
    ledger.offer(B, "u", 2, 1, 1)
    assert ledger.lost(A, ERROR) == [TransferFailed(1, ERROR), Send(NACK, B)]
    assert ledger.state(2) is ReceivePhase.RECEIVING


def test_leases_end_by_the_time_given_unless_the_sender_lives() -> None:
    ledger = reserved()
    ledger.renew(A, 50.0)
    assert ledger.expire(29.9) == []
    (failed,) = ledger.expire(30.0)
    assert isinstance(failed, TransferFailed)
    assert type(failed.error) is TransferExpired
    assert ledger.expire(31.0) == []
    renewed = receiving(1)
    renewed.renew(A, 50.0)
    renewed.renew(A, 40.0)
    renewed.renew(B, 90.0)
    assert renewed.expire(49.9) == []
    assert [type(i) for i in renewed.expire(50.0)] == [TransferFailed, Send]


def test_unknown_ids_and_past_generations_are_counted_and_change_nothing() -> None:
    ledger = reserved()
    ledger.release(1)
    assert ledger.reserve("t", (6,), 30.0) == 2, "the id again, another generation"
    assert isinstance(refusal(ledger.offer(A, "other", 2, 1, 1)), TransferRefused)
    assert isinstance(refusal(ledger.commit(A, "t", 3, 5)), TransferRefused)
    assert ledger.fail("t", 1, ERROR) == []
    assert ledger.num_fenced == 3
    assert ledger.state(2) is ReceivePhase.RESERVED
    assert isinstance(refusal(ledger.commit(A, "t", 2, 5)), TransferRefused), "nothing was offered"


def test_a_past_generation_answers_for_its_own_transfer_only() -> None:
    ledger = receiving(0)
    ledger.commit(A, "t", 1, 9)
    ledger.release(1)
    assert isinstance(refusal(ledger.commit(A, "other", 1, 9)), TransferRefused)
    assert ledger.commit(A, "t", 1, 9) == [Send(ACK, A)]


def test_old_outcomes_are_forgotten_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    ledger = ReceiveState()
    for generation in (1, 2, 3):
        ledger.reserve("t", (), 30.0)
        ledger.release(generation)
        ledger.check()
    answers = [refusal(ledger.commit(A, "t", generation, 9)) for generation in (1, 2, 3)]
    assert [isinstance(answer, TransferRefused) for answer in answers] == [True, False, False]


def test_check_finds_accounting_that_does_not_hold() -> None:
    ledger = receiving(1)
    ledger._by_generation[1].state = ReceivePhase.COMMITTED
    with pytest.raises(AssertionError, match="without its chunks"):
        ledger.check()
    ledger._by_generation[1].state = ReceivePhase.DRAINING
    with pytest.raises(AssertionError, match="nothing runs"):
        ledger.check()
