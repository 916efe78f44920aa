"""Contract of two workers (`kv.proto`): the control stream of a KV transfer, and the pull of a prefix."""

from __future__ import annotations

import math

from baton import messages as m
from baton.errors import TransferRefused
from baton.v1 import kv_pb2
from baton.wire.convert import MAX_CONTROL_BYTES, Oneof, require_short, to_pb
from baton.wire.worker import ticket_from_pb

_FROM_SENDER = Oneof(
    kv_pb2.SessionRequest,
    "message",
    hello=m.Hello,
    rendezvous=m.Rendezvous,
    offer=m.Offer,
    commit=m.Commit,
    abort=m.Abort,
    ping=m.Ping,
)
_FROM_RECEIVER = Oneof(
    kv_pb2.SessionResponse,
    "message",
    welcome=m.Welcome,
    rendezvous=m.Rendezvous,
    grant=m.Grant,
    commit_ack=m.CommitAck,
    nack=m.Nack,
    abort_ack=m.AbortAck,
    transport_ready=m.TransportReady,
    ping=m.Ping,
    session_failed=m.SessionFailed,
)


def session_request(message: m.FromSender) -> kv_pb2.SessionRequest:
    """Encode a message of the sender."""
    return kv_pb2.SessionRequest(**_FROM_SENDER.to_field(message))


def session_request_from_pb(message: kv_pb2.SessionRequest) -> m.FromSender | None:
    """Decode a message of the sender; None: a kind that this version does not know.

    Raises:
        TransferRefused: the message is too long.
    """
    require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    value: m.FromSender | None = _FROM_SENDER.value_of(message)
    return value


def session_response(message: m.FromReceiver) -> kv_pb2.SessionResponse:
    """Encode a message of the receiver."""
    return kv_pb2.SessionResponse(**_FROM_RECEIVER.to_field(message))


def session_response_from_pb(message: kv_pb2.SessionResponse) -> m.FromReceiver | None:
    """Decode a message of the receiver; None: a kind that this version does not know.

    Raises:
        TransferRefused: the message is too long.
    """
    require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    value: m.FromReceiver | None = _FROM_RECEIVER.value_of(message)
    return value


def pull_to_pb(pull: m.Pull) -> kv_pb2.PullRequest:
    """Encode the request for a prefix."""
    return to_pb(pull, kv_pb2.PullRequest)


def pull_from_pb(message: kv_pb2.PullRequest, max_keys: float = math.inf) -> m.Pull:
    """Decode the request for a prefix.

    Raises:
        TransferRefused: it has more than `max_keys` keys, or its ticket is too long.
    """
    if len(message.block_keys) > max_keys:
        raise TransferRefused(f"{len(message.block_keys)} block keys are requested; this worker has at most {max_keys}")
    return m.Pull(ticket_from_pb(message.ticket), tuple(message.block_keys), message.permit)
