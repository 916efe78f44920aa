"""The one file where protobuf meets domain values."""

from __future__ import annotations

from typing import Any, TypeVar

from baton import messages as m
from baton.sampling import FinishReason
from baton.v1 import kv_pb2, worker_pb2

T = TypeVar("T")

# -- router <-> workers --------------------------------------------------------------------------------------------


def sequence_to_pb(spec: m.SequenceSpec) -> worker_pb2.SequenceSpec:
    return _to_pb(spec, worker_pb2.SequenceSpec)


def sequence_from_pb(message: worker_pb2.SequenceSpec) -> m.SequenceSpec:
    return _from_pb(message, m.SequenceSpec)


def ticket_to_pb(ticket: m.Ticket) -> worker_pb2.Ticket:
    return _to_pb(ticket, worker_pb2.Ticket)


def ticket_from_pb(message: worker_pb2.Ticket) -> m.Ticket:
    return _from_pb(message, m.Ticket)


def prefill_request(spec: m.SequenceSpec, ticket: m.Ticket | None) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(sequence=sequence_to_pb(spec), ticket=ticket_to_pb(ticket) if ticket else None)


def prefill_request_from_pb(message: worker_pb2.PrefillRequest) -> tuple[m.SequenceSpec, m.Ticket | None]:
    return sequence_from_pb(message.sequence), ticket_from_pb(message.ticket) if message.HasField("ticket") else None


def decode_request(spec: m.SequenceSpec, await_kv: bool) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(sequence=sequence_to_pb(spec), await_kv=await_kv)


def decode_request_from_pb(message: worker_pb2.DecodeRequest) -> tuple[m.SequenceSpec, bool]:
    return sequence_from_pb(message.sequence), message.await_kv


def prefill_response(event: m.FirstToken | m.HandedOver) -> worker_pb2.PrefillResponse:
    if isinstance(event, m.FirstToken):
        return worker_pb2.PrefillResponse(first_token=_to_pb(event, worker_pb2.FirstToken))
    return worker_pb2.PrefillResponse(handed_over=_to_pb(event, worker_pb2.HandedOver))


def prefill_event(message: worker_pb2.PrefillResponse) -> m.FirstToken | m.HandedOver:
    if message.WhichOneof("event") == "first_token":
        return _from_pb(message.first_token, m.FirstToken)
    return _from_pb(message.handed_over, m.HandedOver)


def decode_response(event: m.Ticket | m.NewTokens) -> worker_pb2.DecodeResponse:
    if isinstance(event, m.Ticket):
        return worker_pb2.DecodeResponse(ticket=ticket_to_pb(event))
    return worker_pb2.DecodeResponse(new_tokens=_to_pb(event, worker_pb2.NewTokens))


def decode_event(message: worker_pb2.DecodeResponse) -> m.Ticket | m.NewTokens:
    if message.WhichOneof("event") == "ticket":
        return ticket_from_pb(message.ticket)
    return _from_pb(message.new_tokens, m.NewTokens)


# -- prefill <-> decode ----------------------------------------------------------------------------------------------

_FROM_PREFILL: dict[type[Any], tuple[str, type[Any]]] = {
    m.Hello: ("hello", kv_pb2.Hello),
    m.Rendezvous: ("rendezvous", kv_pb2.Rendezvous),
    m.Offer: ("offer", kv_pb2.Offer),
    m.Commit: ("commit", kv_pb2.Commit),
    m.Abort: ("abort", kv_pb2.Abort),
}
_FROM_DECODE: dict[type[Any], tuple[str, type[Any]]] = {
    m.Welcome: ("welcome", kv_pb2.Welcome),
    m.Rendezvous: ("rendezvous", kv_pb2.Rendezvous),
    m.Grant: ("grant", kv_pb2.Grant),
    m.CommitAck: ("commit_ack", kv_pb2.CommitAck),
    m.Nack: ("nack", kv_pb2.Nack),
    m.AbortAck: ("abort_ack", kv_pb2.AbortAck),
}
_PREFILL_KIND = {field: cls for cls, (field, _) in _FROM_PREFILL.items()}
_DECODE_KIND = {field: cls for cls, (field, _) in _FROM_DECODE.items()}


def session_request(message: m.FromPrefill) -> kv_pb2.SessionRequest:
    field, pb_class = _FROM_PREFILL[type(message)]
    return kv_pb2.SessionRequest(**{field: _to_pb(message, pb_class)})


def session_request_from_pb(message: kv_pb2.SessionRequest) -> m.FromPrefill | None:
    """None: a message kind this version does not know."""
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _PREFILL_KIND[field]) if field else None


def session_response(message: m.FromDecode) -> kv_pb2.SessionResponse:
    field, pb_class = _FROM_DECODE[type(message)]
    return kv_pb2.SessionResponse(**{field: _to_pb(message, pb_class)})


def session_response_from_pb(message: kv_pb2.SessionResponse) -> m.FromDecode | None:
    """None: a message kind this version does not know."""
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _DECODE_KIND[field]) if field else None


# -- field by field ---------------------------------------------------------------------------------------------------
# Messages and dataclasses here have the same field names, so one loop serves all of them.


def _to_pb(value: Any, pb_class: type[T]) -> T:
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return pb_class(**{name: v or "" if name == "finish_reason" else v for name, v in fields.items()})


def _from_pb(message: Any, cls: type[T]) -> T:
    values: dict[str, Any] = {}
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if name == "finish_reason":
            value = FinishReason(value) if value else None
        elif not isinstance(value, (str, bytes, int, float)):
            value = tuple(value)
        values[name] = value
    return cls(**values)
