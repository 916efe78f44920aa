"""The one file where protobuf meets domain values."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton import api
from baton import messages as m
from baton.cluster import ClusterStatus, PoolStatus, Worker
from baton.costs import StepCosts
from baton.errors import BatonError, InvalidRequest, TransferRefused, Unsupported
from baton.sampling import FinishReason, SamplingParams
from baton.v1 import admin_pb2, inference_pb2, kv_pb2, worker_pb2

T = TypeVar("T")
MAX_CONTROL_BYTES = 64 * 1024
"""Of a ticket, of a message between workers, and of a call's start but for its tokens: many times what is ever sent.
Reading a message costs a hundred times its bytes, so longer ones are refused unread."""
MAX_COMMANDS = 1024
"""In one frame; a router writes a few (`baton.rpc.outbox`)."""
MAX_TOKEN_BYTES = 5

# -- router <-> workers --------------------------------------------------------------------------------------------
# What travels with each request and each token is written out by hand: it is 5 times cheaper than a loop over fields.


def write_sequence(spec: m.SequenceSpec, message: worker_pb2.SequenceSpec) -> None:
    """Into an empty message, in its place: one that goes to another's constructor is copied with all its tokens."""
    message.request_id = spec.request_id
    message.choice_index = spec.choice_index
    message.token_ids.extend(spec.token_ids)
    message.num_prompt_tokens = spec.num_prompt_tokens
    _write_sampling(spec.sampling, message.sampling)
    message.cache_seed = spec.cache_seed
    message.attempt = spec.attempt
    message.priority = spec.priority
    message.ttft_s = spec.ttft_s
    message.itl_s = spec.itl_s
    message.num_expected_tokens = spec.num_expected_tokens


def sequence_from_pb(message: worker_pb2.SequenceSpec) -> m.SequenceSpec:
    return m.SequenceSpec(
        request_id=message.request_id,
        choice_index=message.choice_index,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=_sampling_from_pb(message.sampling),
        cache_seed=message.cache_seed,
        attempt=message.attempt,
        priority=message.priority,
        ttft_s=message.ttft_s,
        itl_s=message.itl_s,
        num_expected_tokens=message.num_expected_tokens,
    )


def _write_sampling(params: SamplingParams, message: inference_pb2.SamplingParams) -> None:
    """What is not at its default, into an empty message: most requests set two or three of the fields."""
    message.SetInParent()
    for name, default in _SAMPLING_DEFAULTS:
        value = getattr(params, name)
        if value != default:
            if isinstance(value, tuple):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)


def _sampling_from_pb(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest and Unsupported, as `_sampling_set_in` and `SamplingParams` do."""
    return SamplingParams(**_sampling_set_in(message))


def _sampling_set_in(message: inference_pb2.SamplingParams) -> dict[str, Any]:
    """Raises Unsupported for a field that the contract has and this release has not."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name not in _SAMPLING_NAMES:
            raise Unsupported(f"sampling.{field.name} is not supported yet; leave it unset", field.name)
        found[field.name] = tuple(value) if field.is_repeated else value
    return found


_SAMPLING_DEFAULTS = tuple((field.name, field.default) for field in dataclasses.fields(SamplingParams))
_SAMPLING_NAMES = frozenset(name for name, _ in _SAMPLING_DEFAULTS)


def ticket_to_pb(ticket: m.Ticket) -> worker_pb2.Ticket:
    return _to_pb(ticket, worker_pb2.Ticket)


def ticket_from_pb(message: worker_pb2.Ticket) -> m.Ticket:
    """Raises TransferRefused for one that is too long to be read."""
    _require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    return _from_pb(message, m.Ticket)


def start(start: m.Start) -> worker_pb2.Command:
    command = worker_pb2.Command(call_id=start.call_id, trace=start.trace)
    request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest | worker_pb2.FetchRequest
    match start.request:
        case m.PrefillRequest(sequence, ticket, source):
            request = command.prefill
            if ticket is not None:
                request.ticket.CopyFrom(ticket_to_pb(ticket))
        case m.DecodeRequest(sequence, await_kv, source):
            request = command.decode
            request.await_kv = await_kv
        case m.FetchRequest(sequence, source):
            request = command.fetch
        case None | BatonError():
            raise AssertionError("a router knows what it asks for")
    write_sequence(sequence, request.sequence)
    if source is not None:
        request.source.CopyFrom(_to_pb(source, worker_pb2.PrefixSource))
    return command


def cancel(cancel: m.Cancel) -> worker_pb2.Command:
    return worker_pb2.Command(call_id=cancel.call_id, cancel=worker_pb2.Cancel())


def serve_request(commands: Iterable[worker_pb2.Command]) -> worker_pb2.ServeRequest:
    return worker_pb2.ServeRequest(commands=commands)


def commands(message: worker_pb2.ServeRequest, max_model_len: float = math.inf) -> list[m.Start | m.Cancel]:
    """What a router orders. A start that is not read, being too long or of a newer release, holds its refusal.

    Args:
        max_model_len: the most tokens that a sequence may have here.

    Raises:
        InvalidRequest: these are more than a router writes at a time.
    """
    if len(message.commands) > MAX_COMMANDS:
        raise InvalidRequest(f"a frame has {len(message.commands)} commands; a worker takes {MAX_COMMANDS} at a time")
    return [_command(command, max_model_len) for command in message.commands]


def max_start_bytes(max_model_len: float) -> float:
    """Of a call's start; a longer one is not read."""
    return MAX_CONTROL_BYTES + MAX_TOKEN_BYTES * max_model_len


def _command(message: worker_pb2.Command, max_model_len: float) -> m.Start | m.Cancel:
    if message.WhichOneof("command") == "cancel":
        return m.Cancel(message.call_id)
    try:
        _require_short(message, max_start_bytes(max_model_len), InvalidRequest)
        if path := unknown_field(message):
            raise Unsupported(f"this worker does not know the field {path} of a router's command")
        return m.Start(message.call_id, _call_request(message), dict(message.trace))
    except (InvalidRequest, TransferRefused, Unsupported) as refusal:
        return m.Start(message.call_id, refusal, {})


def _call_request(message: worker_pb2.Command) -> m.PrefillRequest | m.DecodeRequest | m.FetchRequest | None:
    match message.WhichOneof("command"):
        case "prefill":
            prefill = message.prefill
            ticket = ticket_from_pb(prefill.ticket) if prefill.HasField("ticket") else None
            return m.PrefillRequest(sequence_from_pb(prefill.sequence), ticket, _source_from_pb(prefill))
        case "decode":
            decode = message.decode
            return m.DecodeRequest(sequence_from_pb(decode.sequence), decode.await_kv, _source_from_pb(decode))
        case "fetch":
            fetch = message.fetch
            return m.FetchRequest(sequence_from_pb(fetch.sequence), _from_pb(fetch.source, m.PrefixSource))
    return None


def _source_from_pb(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> m.PrefixSource | None:
    return _from_pb(message.source, m.PrefixSource) if message.HasField("source") else None


_EVENTS: dict[type[Any], tuple[str, type[Any]]] = {
    m.FirstToken: ("first_token", worker_pb2.FirstToken),
    m.HandedOver: ("handed_over", worker_pb2.HandedOver),
    m.Ticket: ("ticket", worker_pb2.Ticket),
    m.Fetched: ("fetched", worker_pb2.Fetched),
    m.Migrate: ("migrate", worker_pb2.Migrate),
    m.Failed: ("failed", worker_pb2.Failed),
    m.Ended: ("ended", worker_pb2.Ended),
}
_EVENT_KIND = {field: cls for cls, (field, _) in _EVENTS.items()}


def serve_response(events: Iterable[tuple[int, m.Event]]) -> worker_pb2.ServeResponse:
    """Events, each with the id of its call."""
    response = worker_pb2.ServeResponse()
    for call_id, event in events:
        if isinstance(event, m.NewTokens):
            tokens = response.events.add(call_id=call_id).new_tokens
            tokens.token_ids.extend(event.token_ids)
            tokens.finish_reason = event.finish_reason or ""
            if event.report is not None:
                tokens.report.CopyFrom(_to_pb(event.report, worker_pb2.PrefillReport))
        else:
            field, pb_class = _EVENTS[type(event)]
            response.events.add(call_id=call_id, **{field: _to_pb(event, pb_class)})
    return response


def events(message: worker_pb2.ServeResponse) -> list[tuple[int, m.Event | None]]:
    """Events, each with the id of its call; None: a kind that this version does not know."""
    return [(event.call_id, _event(event)) for event in message.events]


def _event(message: worker_pb2.Event) -> m.Event | None:
    field = message.WhichOneof("event")
    if field == "new_tokens":
        tokens = message.new_tokens
        finish_reason = tokens.finish_reason
        return m.NewTokens(
            token_ids=tuple(tokens.token_ids),
            finish_reason=FinishReason(finish_reason) if finish_reason else None,
            report=_from_pb(tokens.report, m.PrefillReport) if tokens.HasField("report") else None,
        )
    event: m.Event | None = _from_pb(getattr(message, field), _EVENT_KIND[field]) if field else None
    return event


# -- fields of other releases ------------------------------------------------------------------------------------------
# Protobuf keeps what it does not know and says nothing. Here a client's field that is not known is refused by its
# number, and a router's does not go to a worker that does not know it: each worker lists in its lease what it knows of
# a router's messages. A field is written "SequenceSpec.9".

_Fields = tuple[tuple[str, bool, "_Fields"], ...]
"""The fields of a message that hold messages: name, whether they hold many, and those that these have in turn."""


def check_known(message: Message) -> None:
    """Raises Unsupported if a client has set a field, at any depth, that this release does not know."""
    if path := unknown_field(message):
        raise Unsupported(
            f"{message.DESCRIPTOR.name} has a field {path} that this release does not know, or not in this form; "
            "leave it unset, or ask a release that knows it",
            path,
        )


def unknown_field(message: Message) -> str:
    """The path of a field, at any depth, that this release does not know, as "sampling.99"; empty: there is none."""
    return _unknown_field(message, _message_fields(message.DESCRIPTOR))


def _unknown_field(message: Message, fields: _Fields) -> str:
    if unknown := UnknownFieldSet(message):
        return str(unknown[0].field_number)
    for name, is_repeated, inner in fields:
        if is_repeated:
            items = getattr(message, name)
            for index in range(len(items)):  # where there is nothing, its iterator costs more than all the rest
                if path := _unknown_field(items[index], inner):
                    return f"{name}[{index}].{path}"
        elif message.HasField(name) and (path := _unknown_field(getattr(message, name), inner)):
            return f"{name}.{path}"
    return ""


@functools.cache
def _message_fields(descriptor: Descriptor) -> _Fields:
    """No map holds messages here, and an entry of a map that has something unknown is an unknown field of the map's
    owner.
    """
    return tuple(
        (field.name, field.is_repeated, _message_fields(field.message_type))
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )


def fields_of(spec: m.SequenceSpec) -> set[str]:
    """What is set in a sequence that goes to a worker."""
    message = worker_pb2.SequenceSpec()
    write_sequence(spec, message)
    return fields_in(message)


def fields_in(message: Message) -> set[str]:
    """What is set in a message and in those that it holds."""
    found = {f"{message.DESCRIPTOR.name}.{field.number}" for field, _ in message.ListFields()}
    for name, is_repeated, _ in _message_fields(message.DESCRIPTOR):
        if is_repeated or message.HasField(name):
            inner = getattr(message, name)
            found.update(*(fields_in(item) for item in (inner if is_repeated else (inner,))))
    return found


@functools.lru_cache(maxsize=64)
def fields_unknown_to(known_fields: str) -> frozenset[str]:
    """What this release knows of a router's messages and a worker does not.

    Args:
        known_fields: `WorkerInfo.known_fields`; an empty list, or what cannot be read of one, names no field.
    """
    return frozenset(_numbered(KNOWN_FIELDS) - _numbered(known_fields))


def named(fields: Iterable[str]) -> str:
    """Fields of a router's messages for people: "SamplingParams.min_p (5)"."""
    descriptors = _reachable(worker_pb2.Command.DESCRIPTOR)
    words = []
    for message, _, number in (field.partition(".") for field in sorted(fields)):
        words.append(f"{message}.{descriptors[message].fields_by_number[int(number)].name} ({number})")
    return ", ".join(words)


def _numbered(known_fields: str) -> set[str]:
    parts = (part.partition(":") for part in known_fields.split())
    return {f"{message}.{number}" for message, _, numbers in parts for number in numbers.split(",") if number}


def _reachable(descriptor: Descriptor) -> dict[str, Descriptor]:
    found = {descriptor.name: descriptor}
    for name, _, _ in _message_fields(descriptor):
        inner = descriptor.fields_by_name[name].message_type
        assert inner is not None
        found |= _reachable(inner)
    return found


def _known_numbers(descriptor: Descriptor) -> str:
    """The numbers of the fields that a worker heeds: the contract has sampling fields that this release refuses."""
    is_sampling = descriptor.name == inference_pb2.SamplingParams.DESCRIPTOR.name
    heeded = _SAMPLING_NAMES - m.ROUTERS_SAMPLING
    return ",".join(str(f.number) for f in descriptor.fields if not is_sampling or f.name in heeded)


KNOWN_FIELDS = " ".join(
    f"{name}:{_known_numbers(descriptor)}"
    for name, descriptor in sorted(_reachable(worker_pb2.Command.DESCRIPTOR).items())
)
"""Of a router's messages, as a worker tells it in its lease: "Command:1,2 SequenceSpec:1,2,3"."""


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
    """None: a message kind this version does not know. Raises TransferRefused for one that is too long to be read."""
    _require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _SENDER_KIND[field]) if field else None


def session_response(message: m.FromReceiver) -> kv_pb2.SessionResponse:
    field, pb_class = _FROM_RECEIVER[type(message)]
    return kv_pb2.SessionResponse(**{field: _to_pb(message, pb_class)})


def session_response_from_pb(message: kv_pb2.SessionResponse) -> m.FromReceiver | None:
    """As `session_request_from_pb`."""
    _require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    field = message.WhichOneof("message")
    return _from_pb(getattr(message, field), _RECEIVER_KIND[field]) if field else None


def pull_to_pb(pull: m.Pull) -> kv_pb2.PullRequest:
    return _to_pb(pull, kv_pb2.PullRequest)


def pull_from_pb(message: kv_pb2.PullRequest, max_keys: float = math.inf) -> m.Pull:
    """Raises TransferRefused for more than `max_keys` keys, or a ticket that is too long to be read."""
    if len(message.block_keys) > max_keys:
        raise TransferRefused(f"{len(message.block_keys)} block keys are asked for; this worker has at most {max_keys}")
    return m.Pull(ticket_from_pb(message.ticket), tuple(message.block_keys))


def _require_short(message: Message, most: float, error: type[BatonError]) -> None:
    if (num_bytes := message.ByteSize()) > most:
        raise error(f"a {message.DESCRIPTOR.name} of {num_bytes} bytes is not read here; {most} are the most")


# -- public API ------------------------------------------------------------------------------------------------------


def generate_request_from_pb(message: inference_pb2.GenerateRequest) -> api.GenerateRequest:
    """A client's request.

    Raises:
        InvalidRequest: it has no input.
        Unsupported: it sets a field that is not built yet; the message names it.
    """
    return api.GenerateRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling_set_in(message.sampling),
        skip_text=message.stream_options.skip_text,
        priority=message.priority,
        ttft_ms=message.slo.ttft_ms if message.slo.HasField("ttft_ms") else None,
        itl_ms=message.slo.itl_ms if message.slo.HasField("itl_ms") else None,
        e2e_ms=message.slo.e2e_ms if message.slo.HasField("e2e_ms") else None,
        resume_from=dict(message.resume_from),
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
        priority=request.priority,
        resume_from=request.resume_from,
    )
    objectives = {"ttft_ms": request.ttft_ms, "itl_ms": request.itl_ms, "e2e_ms": request.e2e_ms}
    if any(value is not None for value in objectives.values()):
        message.slo.MergeFrom(inference_pb2.ServiceLevelObjective(**objectives))
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
        request_id=message.request_id,
        choice_index=message.choice_index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        usage=_from_pb(message.usage, api.Usage) if message.HasField("usage") else None,
        timing=_from_pb(message.timing, api.Timing) if message.HasField("timing") else None,
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


# -- operators ---------------------------------------------------------------------------------------------------------


def status_response(status: ClusterStatus) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        pools=_pools(status),
        workers=[_worker(worker) for worker in status.workers],
        routers=[_to_pb(router, admin_pb2.Router) for router in status.routers],
        redis=admin_pb2.Redis(
            address=status.redis_address,
            ok=status.redis_ok,
            garbage=[_to_pb(each, admin_pb2.StoreGarbage) for each in status.store_garbage],
        ),
        models=[_to_pb(model, admin_pb2.ServedModel) for model in status.models],
        controller=_to_pb(status.controller, admin_pb2.Controller) if status.controller else None,
    )


def pools_response(status: ClusterStatus) -> admin_pb2.ListPoolsResponse:
    return admin_pb2.ListPoolsResponse(pools=_pools(status))


def workers_response(status: ClusterStatus) -> admin_pb2.ListWorkersResponse:
    return admin_pb2.ListWorkersResponse(workers=[_worker(worker) for worker in status.workers])


def scale_response(pool: PoolStatus) -> admin_pb2.ScalePoolResponse:
    return admin_pb2.ScalePoolResponse(pool=_to_pb(pool, admin_pb2.Pool))


def drain_response(worker: Worker) -> admin_pb2.DrainWorkerResponse:
    return admin_pb2.DrainWorkerResponse(worker=_worker(worker))


def role_response(worker: Worker) -> admin_pb2.SetWorkerRoleResponse:
    return admin_pb2.SetWorkerRoleResponse(worker=_worker(worker))


def step_costs(message: admin_pb2.StepCosts) -> StepCosts:
    """Of a worker in a status."""
    return _from_pb(message, StepCosts)


def explain_response(explanations: list[api.Explanation]) -> admin_pb2.ExplainResponse:
    return admin_pb2.ExplainResponse(decisions=[_to_pb(each, admin_pb2.Decision) for each in explanations])


def explanations(message: admin_pb2.ExplainResponse) -> list[api.Explanation]:
    return [_from_pb(decision, api.Explanation) for decision in message.decisions]


def status_as_json(message: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """`baton status --json`: the message's fields, with zeros and empty values shown."""
    result = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for worker in result["workers"]:
        for name in ("epoch", "preemptions", "computed_tokens", "queued_tokens"):
            worker[name] = int(worker[name])  # protobuf's JSON writes 64-bit numbers as strings
        worker["transfers"] = {name: int(number) for name, number in worker["transfers"].items()}
    for garbage in result["redis"]["garbage"]:
        garbage["times"] = int(garbage["times"])
    for router in result["routers"]:
        for name in ("met", "missed", "rejected"):
            router[name] = int(router[name])
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
        costs=_to_pb(load.costs, admin_pb2.StepCosts),
        block_size=info.block_size,
        chunk_tokens=info.chunk_tokens,
        preemptions=load.preemptions,
        busy_s=load.busy_s,
        computed_tokens=load.computed_tokens,
        queued_tokens=load.queued_tokens,
        version=info.version,
        content_id=info.content_id,
        wire_compat=info.wire_compat,
        max_model_len=info.max_model_len,
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
