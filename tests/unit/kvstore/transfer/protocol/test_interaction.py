"""Both state machines of a KV transfer, with the messages between them: scenarios as text.

A line is an event, and after the arrow what the machine did then: its state and its instructions. `hears` takes the
oldest message that is on its way to that side; `loses` drops it. What any order of events can lead to is
`test_explorer.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from baton.errors import TransferCorrupted, WorkerFailed, text_of
from baton.messages import Abort, AbortAck, Commit, CommitAck, Grant, Nack, Offer
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.receive_state import Free, ReceiveState
from kvstore.transfer.protocol.send_state import Granted, SendState, Unpin

RESEND_S, ANSWER_S, LEASE_S, NUM_CHUNKS = 1.0, 10.0, 30.0, 2


class Wire:
    """One sender, one receiver, and what is on its way between them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sends, self.receives = SendState(RESEND_S, ANSWER_S), ReceiveState()
        self.generation = self.receives.reserve("t", ("block",), LEASE_S)
        self.to_sender: deque[Any] = deque()
        self.to_receiver: deque[Any] = deque()

    def happens(self, line: str) -> str:
        """Have an event happen, and return what was done."""
        words = line.split()
        side = words[0]
        done = (self._sender if side == "sender" else self._receiver)(*words[1:])
        machine, queue = (
            (self.sends, self.to_receiver) if side == "sender" else (self.receives, self.to_sender)
        )  # a message goes to the other side
        queue += [each.message for each in done if isinstance(each, Send)]
        self.sends.check()
        self.receives.check()
        state = machine.state(self.generation)
        said = ", ".join(map(in_words, done))
        return f"{state.value if state else 'gone'}{': ' if said else ''}{said}"

    def _sender(self, what: str, *words: str) -> list[Any]:
        match what:
            case "offers":
                offer = Offer(
                    transfer_id="t",
                    generation=self.generation,
                    plan_digest=b"",
                    num_chunks=NUM_CHUNKS,
                    wire_dtype="auto",
                    num_tokens=16,
                    chunk_bytes=1024,
                )
                return list(self.sends.offer(offer, self.now_s))
            case "sends":
                assert self.sends.gather_begins(self.generation) == (words != ("nothing",))
                return [] if words else list(self.sends.gather_ends(self.generation, self.now_s))
            case "finishes":
                return list(self.sends.finish(self.generation, 9, self.now_s))
            case "aborts":
                return list(self.sends.abort(self.generation, TransferCorrupted("bad"), self.now_s))
            case "loses":
                self.to_sender.popleft()
                return []
            case "waits":
                self.now_s += float(words[0])
                return list(self.sends.tick(self.now_s))
            case "disconnects":
                return list(self.sends.lost(WorkerFailed("gone")))
        match self.to_sender.popleft():
            case Grant(transfer_id, generation):
                return list(self.sends.on_grant(transfer_id, generation, self.now_s))
            case CommitAck(transfer_id, generation):
                return list(self.sends.on_commit_ack(transfer_id, generation))
            case Nack(transfer_id, generation, reason):
                return list(self.sends.on_nack(transfer_id, generation, reason))
            case AbortAck(transfer_id, generation):
                return list(self.sends.on_abort_ack(transfer_id, generation))
        raise AssertionError("a message that no receiver sends")

    def _receiver(self, what: str, *words: str) -> list[Any]:
        match what:
            case "writes":
                assert self.receives.scatter_begins(0, self.generation, int(words[0]))
                return list(self.receives.scatter_ends(0, self.generation))
            case "begins":
                assert self.receives.scatter_begins(0, self.generation, int(words[0]))
                return []
            case "drops":
                assert not self.receives.scatter_begins(0, self.generation, int(words[0]))
                return []
            case "ends":
                return list(self.receives.scatter_ends(0, self.generation))
            case "releases":
                return list(self.receives.release(self.generation))
            case "loses":
                self.to_receiver.popleft()
                return []
            case "waits":
                self.now_s += float(words[0])
                return list(self.receives.expire(self.now_s))
        match self.to_receiver.popleft():
            case Offer() as offer:
                return list(self.receives.offer(0, offer.transfer_id, offer.generation, offer.num_chunks, 1))
            case Commit(transfer_id, generation, first_token):
                return list(self.receives.commit(0, transfer_id, generation, first_token))
            case Abort(transfer_id, generation, reason):
                assert reason == text_of(TransferCorrupted("bad"))
                return list(self.receives.abort(0, transfer_id, generation, TransferCorrupted("bad")))
        raise AssertionError("a message that no sender sends")


def in_words(instruction: Any) -> str:
    match instruction:
        case Send(message):
            return f"send {type(message).__name__}"
        case TransferCommitted():
            return "committed"
        case TransferFailed(_, error):
            return f"failed by {type(error).__name__}"
        case Granted():
            return "chunks may go"
        case Free():
            return "free the blocks"
        case Unpin():
            return "unpin the blocks"
    raise AssertionError(instruction)


SCENARIOS = {
    "a transfer": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        receiver writes 0    -> receiving
        sender sends         -> sending
        sender finishes      -> committing: send Commit
        receiver writes 1    -> receiving
        receiver hears       -> committed: committed, send CommitAck
        sender hears         -> gone: committed, unpin the blocks
        receiver releases    -> gone: free the blocks
    """,
    "the commit comes before the last chunks are written": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        sender sends         -> sending
        sender finishes      -> committing: send Commit
        receiver hears       -> receiving
        receiver writes 0    -> receiving
        receiver writes 1    -> committed: committed, send CommitAck
        sender hears         -> gone: committed, unpin the blocks
        receiver releases    -> gone: free the blocks
    """,
    "a grant is lost, and asked for again": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender loses         -> offered
        sender waits 1.5     -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
    """,
    "an acknowledgement is lost, and the reservation is gone when it is asked for again": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        receiver writes 0    -> receiving
        sender sends         -> sending
        receiver writes 1    -> receiving
        sender finishes      -> committing: send Commit
        receiver hears       -> committed: committed, send CommitAck
        receiver releases    -> gone: free the blocks
        sender loses         -> committing
        sender waits 1.5     -> committing: send Commit
        receiver hears       -> gone: send CommitAck
        sender hears         -> gone: committed, unpin the blocks
    """,
    "the sender gives up while a chunk is written": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        receiver begins 0    -> receiving
        sender aborts        -> aborting: failed by TransferCorrupted, send Abort, unpin the blocks
        receiver hears       -> draining: failed by TransferCorrupted, send AbortAck
        receiver drops 1     -> draining
        receiver ends        -> failed
        receiver releases    -> gone: free the blocks
        sender hears         -> gone
    """,
    "the receiving request is cancelled": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        receiver releases    -> gone: failed by TransferCancelled, send Nack, free the blocks
        sender hears         -> gone: failed by TransferCancelled, unpin the blocks
    """,
    "the sender is silent until the lease expires": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender sends         -> sending
        receiver waits 31    -> failed: failed by TransferExpired, send Nack
        sender hears         -> gone: failed by TransferExpired, unpin the blocks
        receiver releases    -> gone: free the blocks
    """,
    "the connection ends": """
        sender offers        -> offered: send Offer
        receiver hears       -> receiving: send Grant
        sender hears         -> sending: chunks may go
        sender disconnects   -> gone: failed by WorkerFailed, unpin the blocks
    """,
    "the receiver answers nothing": """
        sender offers        -> offered: send Offer
        receiver loses       -> reserved
        sender waits 11      -> aborting: failed by TransferTimeout, send Abort, unpin the blocks
        sender waits 11      -> gone
        sender waits 11      -> gone
    """,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens_to_a_transfer(name: str) -> None:
    wire = Wire()
    for line in SCENARIOS[name].strip().splitlines():
        event, expected = (part.strip() for part in line.split("->", 1))
        assert wire.happens(event) == expected, event
