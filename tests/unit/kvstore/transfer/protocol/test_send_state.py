"""The offers, event by event. What any order of events can lead to is `test_explorer.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferCorrupted, TransferError, TransferTimeout, WorkerFailed, text_of
from baton.messages import Abort, Commit, Offer
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.send_state import Granted, SendInstruction, SendPhase, SendState, Unpin

ERROR = TransferCorrupted("test")
OFFER = Offer(
    transfer_id="t",
    generation=1,
    plan_digest=b"digest",
    num_chunks=2,
    wire_dtype="auto",
    num_tokens=16,
    chunk_bytes=1024,
)
COMMIT = Commit("t", 1, 9)
ABORT = Abort("t", 1, text_of(ERROR))
RESEND_S, ANSWER_S = 1.0, 10.0


def offered() -> SendState:
    offers = SendState(RESEND_S, ANSWER_S)
    assert offers.offer(OFFER, 0.0) == [Send(OFFER)]
    return offers


def granted() -> SendState:
    offers = offered()
    assert offers.on_grant("t", 1, 0.0) == [Granted(1)]
    return offers


def committing(now: float = 0.0) -> SendState:
    offers = granted()
    gather(offers, now)
    gather(offers, now)
    assert offers.finish(1, 9, now) == [Send(COMMIT)]
    return offers


def gather(offers: SendState, now: float = 0.0) -> list[SendInstruction]:
    assert offers.gather_begins(1)
    offers.check()
    return offers.gather_ends(1, now)


def test_a_transfer_is_committed_when_the_receiver_says_so() -> None:
    offers = committing()
    assert offers.on_commit_ack("t", 1) == [TransferCommitted(1), Unpin(1)]
    assert offers.on_commit_ack("t", 1) == []
    assert len(offers) == 0


@given(st.integers(0, 3), st.integers(0, 3))
def test_the_commit_follows_the_grant_the_last_chunk_and_the_end_of_computing(num_chunks: int, finish_at: int) -> None:
    offers = SendState(RESEND_S, ANSWER_S)
    offers.offer(
        Offer(
            transfer_id="t",
            generation=1,
            plan_digest=b"",
            num_chunks=num_chunks,
            wire_dtype="",
            num_tokens=16,
            chunk_bytes=1024,
        ),
        0.0,
    )
    finish_at = min(finish_at, num_chunks)
    told = offers.finish(1, 9, 0.0) if finish_at == 0 else []
    assert told == []
    told += offers.on_grant("t", 1, 0.0)
    assert (Send(COMMIT) in told) == (num_chunks == 0)
    for num_sent in range(1, num_chunks + 1):
        told += gather(offers)
        if finish_at == num_sent:
            told += offers.finish(1, 9, 0.0)
        assert (Send(COMMIT) in told) == (num_sent == num_chunks)
        offers.check()
    assert told == [Granted(1), Send(COMMIT)]


def test_nothing_is_read_before_the_grant_and_after_the_end() -> None:
    offers = offered()
    assert not offers.gather_begins(1)
    assert not offers.gather_begins(2)
    offers.on_grant("t", 1, 0.0)
    assert offers.gather_begins(1)
    offers.gather_ends(1, 0.0)
    offers.abort(1, ERROR, 0.0)
    assert not offers.gather_begins(1)


def test_giving_up_unpins_at_once_and_is_remembered_until_it_is_heard() -> None:
    offers = granted()
    assert offers.abort(1, ERROR, 0.0) == [TransferFailed(1, ERROR), Send(ABORT), Unpin(1)]
    assert offers.abort(1, ERROR, 0.0) == offers.finish(1, 9, 0.0) == []
    assert offers.state(1) is SendPhase.ABORTING
    assert offers.on_grant("t", 1, 0.0) == offers.on_commit_ack("t", 1) == offers.on_nack("t", 1, "") == []
    assert offers.tick(RESEND_S) == [Send(ABORT)]
    assert offers.on_abort_ack("t", 1) == []
    assert len(offers) == 0


def test_blocks_are_unpinned_when_the_last_of_several_gathers_ends() -> None:
    offers = granted()
    assert offers.gather_begins(1)
    assert offers.gather_begins(1)
    offers.abort(1, ERROR, 0.0)
    assert offers.gather_ends(1, 0.0) == []
    offers.check()
    assert offers.gather_ends(1, 0.0) == [Unpin(1)]
    offers.check()


@pytest.mark.parametrize("acknowledged", [False, True])
def test_giving_up_while_a_gather_runs_unpins_when_it_ends(acknowledged: bool) -> None:
    offers = granted()
    assert offers.gather_begins(1)
    assert offers.abort(1, ERROR, 0.0) == [TransferFailed(1, ERROR), Send(ABORT)]
    if acknowledged:
        assert offers.on_abort_ack("t", 1) == []
    offers.check()
    assert offers.gather_ends(1, 0.0) == [Unpin(1)]
    offers.check()
    assert len(offers) == (not acknowledged)


def test_a_cancel_of_the_sender_is_told_as_a_transfer_error() -> None:
    offers = granted()
    _, told, _ = offers.abort(1, WorkerFailed("private"), 0.0)
    assert told == Send(Abort("t", 1, text_of(TransferError("the sender cancelled"))))


@pytest.mark.parametrize("make", [offered, granted, committing])
def test_a_refusal_fails_with_the_receivers_reason(make: Callable[[], SendState]) -> None:
    offers = make()
    failed, unpin = offers.on_nack("t", 1, text_of(ERROR))
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, TransferCorrupted)
    assert unpin == Unpin(1)
    assert len(offers) == 0
    assert offers.on_nack("t", 1, text_of(ERROR)) == []


def test_a_refusal_while_a_gather_runs_unpins_when_it_ends() -> None:
    offers = granted()
    assert offers.gather_begins(1)
    assert [type(i) for i in offers.on_nack("t", 1, text_of(ERROR))] == [TransferFailed]
    offers.check()
    assert offers.gather_ends(1, 0.0) == [Unpin(1)]
    assert len(offers) == 0


def test_a_lost_session_ends_everything_on_it() -> None:
    offers = granted()
    for generation in (2, 3):
        offers.offer(
            Offer(
                transfer_id="u",
                generation=generation,
                plan_digest=b"",
                num_chunks=1,
                wire_dtype="",
                num_tokens=16,
                chunk_bytes=1024,
            ),
            0.0,
        )
    offers.abort(3, ERROR, 0.0)
    assert offers.gather_begins(1)
    assert offers.lost(ERROR) == [TransferFailed(1, ERROR), TransferFailed(2, ERROR), Unpin(2)], (
        "3 had failed, and was unpinned"
    )
    assert offers.lost(ERROR) == []
    assert offers.gather_ends(1, 0.0) == [Unpin(1)]
    assert len(offers) == 0


@pytest.mark.parametrize(("make", "pending"), [(offered, OFFER), (committing, COMMIT)])
def test_what_is_not_answered_is_said_again_and_given_up_in_the_end(
    make: Callable[[], SendState], pending: Offer | Commit
) -> None:
    offers = make()
    assert offers.tick(0.9) == []
    assert offers.tick(1.0) == [Send(pending)]
    assert offers.tick(1.9) == []
    assert offers.tick(2.0) == [Send(pending)]
    assert offers.num_resent == 2
    failed, told, unpin = offers.tick(10.0)
    assert isinstance(failed, TransferFailed)
    assert isinstance(failed.error, TransferTimeout)
    assert isinstance(told, Send)
    assert isinstance(told.message, Abort)
    assert unpin == Unpin(1)
    assert offers.tick(11.0) == [told]
    assert offers.tick(20.0) == []
    assert len(offers) == 0


def test_sending_has_no_time_limit_and_a_commit_has_its_own() -> None:
    offers = granted()
    assert offers.tick(1e6) == []
    gather(offers, 1e6)
    gather(offers, 1e6)
    offers.finish(1, 9, 1e6)
    assert offers.tick(1e6 + 0.9) == []
    assert offers.tick(1e6 + 9.9) == [Send(COMMIT)]
    assert [type(i) for i in offers.tick(1e6 + 10.0)] == [TransferFailed, Send, Unpin]


def test_a_grant_after_the_commit_is_an_answer() -> None:
    """Another source is not complete yet: the receiver is alive, and the wait begins anew."""
    offers = committing()
    assert offers.on_grant("t", 1, 5.0) == []
    assert offers.tick(14.9) == [Send(COMMIT)]
    assert [type(i) for i in offers.tick(15.0)] == [TransferFailed, Send, Unpin]


def test_answers_about_others_are_counted_and_change_nothing() -> None:
    offers = committing()
    assert offers.on_grant("t", 2, 0.0) == offers.on_commit_ack("u", 1) == []
    assert offers.on_nack("u", 1, "") == offers.on_abort_ack("t", 7) == []
    assert offers.num_fenced == 4
    assert offers.on_grant("t", 1, 0.0) == offers.on_abort_ack("t", 1) == []
    assert offers.state(1) is SendPhase.COMMITTING


def test_an_acknowledgement_of_what_was_not_committed_is_nothing() -> None:
    assert offered().on_commit_ack("t", 1) == granted().on_commit_ack("t", 1) == []


def test_a_ticket_is_used_once() -> None:
    with pytest.raises(AssertionError, match="used once"):
        offered().offer(OFFER, 0.0)


def test_check_finds_pins_dropped_too_early() -> None:
    offers = granted()
    offers._by_generation[1].unpinned = True
    with pytest.raises(AssertionError, match="has let go"):
        offers.check()
