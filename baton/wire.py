"""The one file where protobuf meets domain values."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

from google.protobuf import json_format, message_factory
from google.protobuf.message import Message

from baton import api
from baton import messages as m
from baton.cluster import ClusterStatus, Worker
from baton.errors import InvalidRequest, Unsupported
from baton.sampling import FinishReason
from baton.v1 import admin_pb2, inference_pb2, kv_pb2, worker_pb2

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


def prefill_request(
    spec: m.SequenceSpec, ticket: m.Ticket | None, source: m.PrefixSource | None = None
) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        sequence=sequence_to_pb(spec),
        ticket=ticket_to_pb(ticket) if ticket else None,
        source=_source_to_pb(source),
    )


def prefill_request_from_pb(
    message: worker_pb2.PrefillRequest,
) -> tuple[m.SequenceSpec, m.Ticket | None, m.PrefixSource | None]:
    ticket = ticket_from_pb(message.ticket) if message.HasField("ticket") else None
    return sequence_from_pb(message.sequence), ticket, _source_from_pb(message)


def decode_request(
    spec: m.SequenceSpec, await_kv: bool, source: m.PrefixSource | None = None
) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(sequence=sequence_to_pb(spec), await_kv=await_kv, source=_source_to_pb(source))


def decode_request_from_pb(
    message: worker_pb2.DecodeRequest,
) -> tuple[m.SequenceSpec, bool, m.PrefixSource | None]:
    return sequence_from_pb(message.sequence), message.await_kv, _source_from_pb(message)


def _source_to_pb(source: m.PrefixSource | None) -> worker_pb2.PrefixSource | None:
    return _to_pb(source, worker_pb2.PrefixSource) if source else None


def _source_from_pb(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> m.PrefixSource | None:
    return _from_pb(message.source, m.PrefixSource) if message.HasField("source") else None


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


# -- worker <-> worker ------------------------------------------------------------------------------------------------

_FROM_SENDER: dict[type[Any], tuple[str, type[Any]]] = {
    m.Hello: ("hello", kv_pb2.Hello),
    m.Rendezvous: ("rendezvous", kv_pb2.Rendezvous),
    m.Offer: ("offer", kv_pb2.Offer),
    m.Commit: ("commit", kv_pb2.Commit),
    m.Abort: ("abort", kv_pb2.Abort),
    m.Ping: ("ping", kv_pb2.Ping),
}
_FROM_RECEIVER: dict[type[Any], tuple[str, type[Any]]] = {
    m.Welcome: ("welcome", kv_pb2.Welcome),
    m.Rendezvous: ("rendezvous", kv_pb2.Rendezvous),
    m.Grant: ("grant", kv_pb2.Grant),
    m.CommitAck: ("commit_ack", kv_pb2.CommitAck),
    m.Nack: ("nack", kv_pb2.Nack),
    m.AbortAck: ("abort_ack", kv_pb2.AbortAck),
    m.LinkReady: ("link_ready", kv_pb2.LinkReady),
    m.Ping: ("ping", kv_pb2.Ping),
    m.SessionFailed: ("session_failed", kv_pb2.SessionFailed),
}
_SENDER_KIND = {field: cls for cls, (field, _) in _FROM_SENDER.items()}
_RECEIVER_KIND = {field: cls for cls, (field, _) in _FROM_RECEIVER.items()}


def session_request(message: m.FromSender) -> kv_pb2.SessionRequest:
    field, pb_class = _FROM_SENDER[type(message)]
    return kv_pb2.SessionRequest(**{field: _to_pb(message, pb_class)})


def session_request_from_pb(message: kv_pb2.SessionRequest) -> m.FromSender | None:
    """None: a message kind this version does not know."""
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _SENDER_KIND[field]) if field else None


def session_response(message: m.FromReceiver) -> kv_pb2.SessionResponse:
    field, pb_class = _FROM_RECEIVER[type(message)]
    return kv_pb2.SessionResponse(**{field: _to_pb(message, pb_class)})


def session_response_from_pb(message: kv_pb2.SessionResponse) -> m.FromReceiver | None:
    """None: a message kind this version does not know."""
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _RECEIVER_KIND[field]) if field else None


def pull_to_pb(pull: m.Pull) -> kv_pb2.PullRequest:
    return _to_pb(pull, kv_pb2.PullRequest)


def pull_from_pb(message: kv_pb2.PullRequest) -> m.Pull:
    return _from_pb(message, m.Pull)


# -- public API ------------------------------------------------------------------------------------------------------

_PLAIN_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "ignore_eos")
_LATER_SAMPLING = ("logprobs", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")


def generate_request_from_pb(message: inference_pb2.GenerateRequest) -> api.GenerateRequest:
    """A client's request.

    Raises:
        InvalidRequest: it has no input.
        Unsupported: it sets a field that is not built yet; the message names it.
    """
    for field in ("slo", "priority", "resume_from"):
        if _is_set(message, field):
            raise Unsupported(f"{field} is not supported yet; leave it unset", field)
    sampling: dict[str, Any] = {}
    params = message.sampling
    for name in _LATER_SAMPLING:
        if params.HasField(name):  # type: ignore[arg-type]
            raise Unsupported(f"sampling.{name} is not supported yet; leave it unset", name)
    if params.logit_bias:
        raise Unsupported("sampling.logit_bias is not supported yet; leave it unset", "logit_bias")
    for name in _PLAIN_SAMPLING:
        if params.HasField(name):  # type: ignore[arg-type]
            sampling[name] = getattr(params, name)
    for name in ("stop", "stop_token_ids"):
        if values := tuple(getattr(params, name)):
            sampling[name] = values
    return api.GenerateRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        sampling=sampling,
        skip_text=message.stream_options.skip_text,
    )


def tokenize_request_from_pb(message: inference_pb2.TokenizeRequest) -> tuple[str, api.Prompt]:
    return message.model, _prompt(message)


def tokenize_response(token_ids: tuple[int, ...], max_model_len: int) -> inference_pb2.TokenizeResponse:
    return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)


def generate_response(chunk: api.GenerateChunk) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=chunk.request_id,
        choice_index=chunk.choice_index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=chunk.finish_reason or "",
        usage=_to_pb(chunk.usage, inference_pb2.Usage) if chunk.usage else None,
        timing=_to_pb(chunk.timing, inference_pb2.Timing) if chunk.timing else None,
    )


def generate_request(request: api.GenerateRequest) -> inference_pb2.GenerateRequest:
    """The client's side of `generate_request_from_pb`."""
    message = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=inference_pb2.SamplingParams(**request.sampling),
        stream_options=inference_pb2.StreamOptions(skip_text=request.skip_text),
    )
    match request.prompt:
        case api.Text(text):
            message.text = text
        case api.TokenIds(ids):
            message.token_ids.ids.extend(ids)
        case api.Chat(messages):
            for entry in messages:
                message.chat.messages.add(role=entry.role, content=entry.content, name=entry.name)
    return message


def generate_chunk(message: inference_pb2.GenerateResponse) -> api.GenerateChunk:
    return api.GenerateChunk(
        message.request_id,
        message.choice_index,
        message.text,
        tuple(message.token_ids),
        FinishReason(message.finish_reason) if message.finish_reason else None,
        _from_pb(message.usage, api.Usage) if message.HasField("usage") else None,
        _from_pb(message.timing, api.Timing) if message.HasField("timing") else None,
    )


def list_models_response(cards: list[api.ModelCard]) -> inference_pb2.ListModelsResponse:
    return inference_pb2.ListModelsResponse(models=[_to_pb(card, inference_pb2.Model) for card in cards])


def _prompt(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> api.Prompt:
    match message.WhichOneof("input"):
        case "text":
            return api.Text(message.text)
        case "chat":
            if message.chat.tools or any(m.tool_calls or m.tool_call_id for m in message.chat.messages):
                raise Unsupported("tools and tool calls in a chat are not supported yet; leave them out", "tools")
            return api.Chat(tuple(api.ChatMessage(m.role, m.content, m.name) for m in message.chat.messages))
        case "token_ids" if isinstance(message, inference_pb2.GenerateRequest):
            return api.TokenIds(tuple(message.token_ids.ids))
    raise InvalidRequest("the request has no input; set one of text, chat or token_ids", "input")


def _is_set(message: inference_pb2.GenerateRequest, field: str) -> bool:
    return any(descriptor.name == field for descriptor, _ in message.ListFields())


# -- operators ---------------------------------------------------------------------------------------------------------


def status_response(status: ClusterStatus) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        pools=_pools(status),
        workers=[_worker(worker) for worker in status.workers],
        routers=[_to_pb(router, admin_pb2.Router) for router in status.routers],
        redis=admin_pb2.Redis(address=status.redis_address, ok=status.redis_ok),
        models=[_to_pb(model, admin_pb2.ServedModel) for model in status.models],
    )


def pools_response(status: ClusterStatus) -> admin_pb2.ListPoolsResponse:
    return admin_pb2.ListPoolsResponse(pools=_pools(status))


def workers_response(status: ClusterStatus) -> admin_pb2.ListWorkersResponse:
    return admin_pb2.ListWorkersResponse(workers=[_worker(worker) for worker in status.workers])


def status_as_json(message: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """`baton status --json`: the message's fields, with zeros and empty values shown."""
    result = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for worker in result["workers"]:
        worker["epoch"] = int(worker["epoch"])  # protobuf's JSON writes 64-bit numbers as strings
        worker["transfers"] = {name: int(number) for name, number in worker["transfers"].items()}
    return result


def _pools(status: ClusterStatus) -> dict[str, admin_pb2.Pool]:
    return {name: _to_pb(pool, admin_pb2.Pool) for name, pool in status.pools.items()}


def _worker(worker: Worker) -> admin_pb2.Worker:
    info, load = worker.info, worker.load
    return admin_pb2.Worker(
        id=info.id,
        role=info.role,
        state=load.state,
        pid=info.pid,
        node=info.node,
        address=info.address,
        epoch=info.epoch,
        running=load.running,
        waiting=load.waiting,
        blocks=_to_pb(load.blocks, admin_pb2.Blocks),
        self_check=load.self_check,
        transfers=admin_pb2.Transfers(
            **{field.name: getattr(load.transfers, field.name) for field in admin_pb2.Transfers.DESCRIPTOR.fields}
        ),
    )


# -- field by field ---------------------------------------------------------------------------------------------------
# Messages and dataclasses here have the same field names, so one loop serves all of them.


def _to_pb(value: Any, pb_class: type[T]) -> T:
    fields: dict[str, Any] = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if "finish_reason" in fields:
        fields["finish_reason"] = fields["finish_reason"] or ""
    for name, (_, pb) in _kind(type(value), pb_class).nested.items():
        inner = fields[name]
        fields[name] = [_to_pb(item, pb) for item in inner] if isinstance(inner, tuple) else _to_pb(inner, pb)
    return pb_class(**fields)


def _from_pb(message: Any, cls: type[T]) -> T:
    values: dict[str, Any] = {}
    kind = _kind(cls, type(message))
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if name == "finish_reason":
            value = FinishReason(value) if value else None
        elif name in kind.nested:
            inner = kind.nested[name][0]
            is_one = isinstance(value, Message)
            value = _from_pb(value, inner) if is_one else tuple(_from_pb(item, inner) for item in value)
        elif not isinstance(value, (str, bytes, int, float)):
            value = tuple(value)
        elif name in kind.optional and not message.HasField(name):
            value = None
        values[name] = value
    return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    nested: dict[str, tuple[Any, Any]]
    """Fields that are messages themselves, or tuples of them: their dataclass and their protobuf class."""
    optional: frozenset[str]
    """Plain fields that may be absent."""


_KINDS: dict[tuple[Any, Any], _Kind] = {}


def _kind(cls: Any, pb_class: Any) -> _Kind:
    if (known := _KINDS.get((cls, pb_class))) is not None:
        return known
    nested: dict[str, tuple[Any, Any]] = {}
    optional: set[str] = set()
    for name, hint in typing.get_type_hints(cls).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        descriptor = pb_class.DESCRIPTOR.fields_by_name[name]
        if dataclasses.is_dataclass(inner):
            nested[name] = (inner, message_factory.GetMessageClass(descriptor.message_type))
        elif descriptor.has_presence:
            optional.add(name)
    return _KINDS.setdefault((cls, pb_class), _Kind(nested, frozenset(optional)))
