"""Every message survives the way through bytes, and no field of the public API is silently ignored."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import api, kv_layout, timelines, wire
from baton import messages as m
from baton.chat import ChatMessage, tool_call
from baton.cluster import (
    BlockCounts,
    ClusterStatus,
    Computes,
    ControllerInfo,
    OpenConnections,
    PoolScaling,
    PoolStatus,
    Role,
    RouterInfo,
    ServedModel,
    StoreGarbage,
    TransferCounts,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.costs import StepCosts
from baton.errors import InvalidRequest, Unsupported
from baton.hypotheses import Beam, Hypotheses
from baton.sampling import UNDRAWN, EarlyStopping, FinishReason, SamplingParams
from baton.scores import TokenScores
from baton.structure import MAX_GRAMMAR_BYTES, MAX_STRUCTURE_CHOICES, StructuredOutputs
from baton.timelines import RequestList, RequestTimeline
from baton.tools import Tool, ToolCallDelta, ToolChoice, ToolUse
from baton.v1 import admin_pb2, inference_pb2, kv_pb2, worker_pb2
from baton.wire.worker import MAX_HYPOTHESES_BYTES
from tests.support import builders

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_FLOAT: st.floats(allow_nan=False, width=32),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_STRING: TEXT,
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


IDS = st.integers(0, 2**32 - 1)
SAMPLING_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.none() | st.integers(1, 2**31 - 1),
    "temperature": st.floats(0, 2, width=32),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True, width=32),
    "min_p": st.floats(0, 1, width=32),
    "seed": st.none() | st.integers(1 - 2**63, 2**63 - 1),
    "stop": st.lists(SOME_TEXT, max_size=4).map(tuple),
    "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    "n": st.integers(1, 16),
    "ignore_eos": st.booleans(),
    "logprob_token_ids": st.lists(IDS, max_size=4).map(tuple),
    "logprobs": st.none() | st.integers(0, 20),
    "min_tokens": st.integers(0, 1),
    "repetition_penalty": st.floats(0.015625, 2, width=32),
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=4).map(
        lambda d: tuple(sorted(d.items()))
    ),
    "bad_words": st.lists(SOME_TEXT, max_size=4).map(tuple),
    "bad_word_ids": st.lists(st.lists(IDS, min_size=2, max_size=4).map(tuple), max_size=4).map(tuple),
    "allowed_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    "typical_p": st.floats(0, 1, exclude_min=True, width=32),
    "dry_multiplier": st.floats(0, 100, width=32),
    "dry_base": st.floats(1, 4, width=32),
    "dry_allowed_length": st.integers(1, 50),
    "dry_range": st.integers(0, 2**31 - 1),
    "dry_sequence_breakers": st.lists(SOME_TEXT, min_size=1, max_size=4).map(tuple),
    "dry_breaker_ids": st.lists(IDS, max_size=4).map(tuple),
    "xtc_probability": st.floats(0, 1, width=32),
    "xtc_threshold": st.floats(0, 1, width=32),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "xtc_exempt_token_ids": st.lists(IDS, max_size=4).map(tuple),
    "structured_outputs": st.none()
    | st.builds(StructuredOutputs, json=SOME_TEXT)
    | st.builds(StructuredOutputs, regex=SOME_TEXT)
    | st.builds(StructuredOutputs, grammar=SOME_TEXT)
    | st.builds(StructuredOutputs, choice=st.lists(SOME_TEXT, min_size=1, max_size=4).map(tuple))
    | st.just(StructuredOutputs(json_object=True)),
    "reasoning_end_ids": st.lists(IDS, min_size=1, max_size=4).map(tuple),
    "reasoning_begin_id": st.none() | IDS,
    "best_of": st.none(),  # it depends on n
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "thinking_budget": st.none() | st.integers(0, 2**31 - 1),
    "use_beam_search": st.booleans(),
    "beam_width": st.none() | st.just(16),
    "length_penalty": st.floats(-10, 10, width=32),
    "early_stopping": st.sampled_from(EarlyStopping),
}
UNSEARCHED: dict[str, Any] = {"beam_width": None, "length_penalty": 1.0, "early_stopping": "false"}
SEARCHED: dict[str, Any] = {name: neutral[0] for name, neutral in UNDRAWN.items()} | {"temperature": 1.0, "stop": ()}


def _together(values: dict[str, Any]) -> SamplingParams:
    """Returns parameters of those values, right one by one, that are right together."""
    values |= {"ignore_eos": False} if values["structured_outputs"] else {}
    return SamplingParams(**values | (SEARCHED if values["use_beam_search"] else UNSEARCHED))


SAMPLING_PARAMS = st.fixed_dictionaries(SAMPLING_VALUES).map(_together)


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "finish_reason":
        return st.none() | st.sampled_from(FinishReason)
    if field.message_type is not None:  # the dataclass has the message's name, but for one
        name = {"Decision": "Explanation"}.get(field.message_type.name, field.message_type.name)
        if name == "SamplingParams":
            return SAMPLING_PARAMS
        if name == "TokenScores":
            return st.integers(0, 3).flatmap(scores)
        owner = next(module for module in (m, api, kv_layout, timelines) if hasattr(module, name))
        values = messages_of(getattr(owner, name), field.message_type)
    else:
        values = SCALARS[field.type]
    if field.is_repeated:
        return st.lists(values, max_size=6).map(tuple)
    return values


def messages_of(cls: type[Any], descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Any value that the fields of the contract can hold. The field names must be the same on both sides."""
    assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in descriptor.fields], cls
    strategies = {field.name: values_of(field) for field in descriptor.fields}
    for field in descriptor.fields:
        if field.has_presence and field.message_type is None:
            strategies[field.name] = st.none() | strategies[field.name]
    return st.builds(cls, **strategies)


@st.composite
def scores(draw: st.DrawFn, num_tokens: int) -> TokenScores:
    """Draws the scores of so many tokens, or none."""
    num_top = draw(st.integers(0, 3))
    if not num_tokens or draw(st.booleans()):
        return TokenScores()
    floats = st.floats(max_value=0, width=32, allow_nan=False)
    return TokenScores(
        tuple(draw(st.lists(floats, min_size=num_tokens, max_size=num_tokens))),
        tuple(draw(st.lists(IDS, min_size=num_tokens * num_top, max_size=num_tokens * num_top))),
        tuple(draw(st.lists(floats, min_size=num_tokens * num_top, max_size=num_tokens * num_top))),
    )


SPECS = messages_of(m.SequenceSpec, worker_pb2.SequenceSpec.DESCRIPTOR)
TICKETS = messages_of(m.Ticket, worker_pb2.Ticket.DESCRIPTOR)
SOURCES = messages_of(m.PrefixSource, worker_pb2.PrefixSource.DESCRIPTOR)
FROM_SENDER = {cls: getattr(kv_pb2, cls.__name__) for cls in typing.get_args(m.FromSender)}
FROM_RECEIVER = {cls: getattr(kv_pb2, cls.__name__) for cls in typing.get_args(m.FromReceiver)}


def through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def written(spec: m.SequenceSpec) -> worker_pb2.SequenceSpec:
    message = worker_pb2.SequenceSpec()
    wire.write_sequence(spec, message)
    return message


@given(SPECS)
def test_sequence_spec(spec: m.SequenceSpec) -> None:
    assert wire.sequence_from_pb(through_bytes(written(spec))) == spec


@given(TICKETS)
def test_ticket(ticket: m.Ticket) -> None:
    assert wire.ticket_from_pb(through_bytes(wire.ticket_to_pb(ticket))) == ticket


PREFILLS = st.builds(m.PrefillRequest, SPECS, st.none() | TICKETS, st.none() | SOURCES)
DECODES = st.builds(m.DecodeRequest, SPECS, st.booleans(), st.none() | SOURCES)
FETCHES = st.builds(m.FetchRequest, SPECS, SOURCES)
CALL_IDS = st.integers(0, 2**64 - 1)
STARTS = st.builds(m.StartCall, CALL_IDS, PREFILLS | DECODES | FETCHES, st.dictionaries(TEXT, TEXT, max_size=3))


@given(st.lists(STARTS | st.builds(m.CancelCall, CALL_IDS), max_size=4))
def test_commands_to_workers(commands: list[m.StartCall | m.CancelCall]) -> None:
    written = [wire.start_command(c) if isinstance(c, m.StartCall) else wire.cancel_command(c) for c in commands]
    assert wire.commands(through_bytes(wire.serve_request(written))) == commands


@given(messages_of(m.Pull, kv_pb2.PullRequest.DESCRIPTOR))
def test_pull(pull: m.Pull) -> None:
    assert wire.pull_from_pb(through_bytes(wire.pull_to_pb(pull))) == pull


EVENT_NAMES = {cls: {m.CallEnded: "Ended"}.get(cls, cls.__name__) for cls in typing.get_args(m.Event)}
"""Names of the contract's messages, by the class that stands for them here."""
EVENTS = st.one_of([messages_of(cls, getattr(worker_pb2, name).DESCRIPTOR) for cls, name in EVENT_NAMES.items()])


@given(st.lists(st.tuples(CALL_IDS, EVENTS), max_size=6))
def test_events_of_workers(events: list[tuple[int, m.Event]]) -> None:
    assert wire.events(through_bytes(wire.serve_response(events))) == events


def test_every_kind_of_event_and_command_is_covered() -> None:
    kinds = {field.message_type.name for field in worker_pb2.Event.DESCRIPTOR.oneofs[0].fields if field.message_type}
    assert kinds == set(EVENT_NAMES.values())
    kinds = {field.message_type.name for field in worker_pb2.Command.DESCRIPTOR.oneofs[0].fields if field.message_type}
    assert kinds == {"PrefillRequest", "DecodeRequest", "FetchRequest", "Cancel"}


def test_kinds_of_a_newer_version_are_told_from_the_others() -> None:
    """So that a call fails, where it would wait for ever."""
    command = worker_pb2.ServeRequest(commands=[worker_pb2.Command(call_id=3)])
    assert wire.commands(command) == [m.StartCall(3, None, {})]
    assert wire.events(worker_pb2.ServeResponse(events=[worker_pb2.Event(call_id=3)])) == [(3, None)]


@pytest.mark.parametrize("cls", FROM_SENDER)
@settings(max_examples=30)
@given(data=st.data())
def test_messages_of_a_sender(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages_of(cls, FROM_SENDER[cls].DESCRIPTOR))
    assert wire.session_request_from_pb(through_bytes(wire.session_request(message))) == message


@pytest.mark.parametrize("cls", FROM_RECEIVER)
@settings(max_examples=30)
@given(data=st.data())
def test_messages_of_a_receiver(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages_of(cls, FROM_RECEIVER[cls].DESCRIPTOR))
    assert wire.session_response_from_pb(through_bytes(wire.session_response(message))) == message


def test_every_kind_of_session_message_is_covered() -> None:
    for message, classes in ((kv_pb2.SessionRequest, FROM_SENDER), (kv_pb2.SessionResponse, FROM_RECEIVER)):
        kinds = {field.message_type.name for field in message.DESCRIPTOR.fields if field.message_type}
        assert kinds == {cls.__name__ for cls in classes}


def test_a_session_message_of_a_later_version_is_none() -> None:
    unknown = b"\xfa\x06\x00"  # field 111, empty
    assert wire.session_request_from_pb(kv_pb2.SessionRequest.FromString(unknown)) is None
    assert wire.session_response_from_pb(kv_pb2.SessionResponse.FromString(unknown)) is None


@pytest.mark.parametrize("kind", ["prefill", "decode", "fetch"])
@pytest.mark.parametrize(
    "structure",
    [
        StructuredOutputs(json="x" * MAX_GRAMMAR_BYTES),
        StructuredOutputs(choice=("x" * (MAX_GRAMMAR_BYTES // MAX_STRUCTURE_CHOICES),) * MAX_STRUCTURE_CHOICES),
    ],
    ids=["json", "choice"],
)
def test_the_largest_structures_are_read_and_nothing_else_as_long(kind: str, structure: StructuredOutputs) -> None:
    plain = builders.sequence_spec((1, 2, 3), "r")
    sampling = dataclasses.replace(plain.sampling, structured_outputs=structure, ignore_eos=False)
    spec = dataclasses.replace(plain, sampling=sampling)

    def request(spec: m.SequenceSpec) -> m.PrefillRequest | m.DecodeRequest | m.FetchRequest:
        if kind == "fetch":
            return m.FetchRequest(spec, m.PrefixSource(worker_id="w", address="h:1", num_tokens=2))
        return m.PrefillRequest(spec, None) if kind == "prefill" else m.DecodeRequest(spec, await_kv=True)

    def read(spec: m.SequenceSpec) -> Any:
        frame = wire.serve_request([wire.start_command(m.StartCall(1, request(spec), {}))])
        (start,) = wire.commands(through_bytes(frame), 64)
        assert isinstance(start, m.StartCall)
        return start.request

    assert read(spec) == request(spec)
    assert isinstance(read(dataclasses.replace(spec, request_id="x" * 2 * wire.MAX_CONTROL_BYTES)), InvalidRequest)
    assert isinstance(read(dataclasses.replace(plain, request_id="x" * MAX_GRAMMAR_BYTES)), InvalidRequest)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_state_of_a_search_is_read_unless_it_is_too_large(kind: str) -> None:
    def read(num_tokens: int) -> Any:
        beam = Beam(token_ids=(300,) * num_tokens)
        spec = dataclasses.replace(builders.sequence_spec((1, 2, 3), "r"), hypotheses=Hypotheses(running=(beam,)))
        request = m.PrefillRequest(spec, None) if kind == "prefill" else m.DecodeRequest(spec, await_kv=True)
        frame = wire.serve_request([wire.start_command(m.StartCall(1, request, {}))])
        (start,) = wire.commands(through_bytes(frame), 64)
        assert isinstance(start, m.StartCall)
        assert isinstance(start.request, InvalidRequest) or start.request == request
        return start.request

    most = MAX_HYPOTHESES_BYTES // 2
    assert not isinstance(read(most - 16), InvalidRequest)
    assert isinstance(read(most + wire.MAX_CONTROL_BYTES), InvalidRequest)


def test_an_order_to_move_what_is_no_search_adds_nothing_to_its_sequence() -> None:
    """Else no worker of an older release could take it."""
    ((_, order),) = wire.events(through_bytes(wire.serve_response([(1, m.Migrate())])))
    assert isinstance(order, m.Migrate)
    spec = builders.sequence_spec((1, 2, 3), "r")
    moved = dataclasses.replace(spec, hypotheses=order.hypotheses)
    assert wire.fields_of(moved) == wire.fields_of(spec)


# -- the public API ----------------------------------------------------------------------------------------------------

SAMPLING_FIELDS = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
SUPPORTED = [name for name in SAMPLING_FIELDS if name in {f.name for f in dataclasses.fields(SamplingParams)}]
SET_VALUES = {
    name: values.filter(lambda value: value not in ((), None))  # an empty list is no list
    for name, values in SAMPLING_VALUES.items()
}
SAMPLINGS = st.sets(st.sampled_from(sorted(SET_VALUES)), max_size=8).flatmap(  # of all at once most would be too long
    lambda names: st.fixed_dictionaries({name: SET_VALUES[name] for name in sorted(names)})
)
JSON_OBJECTS = st.dictionaries(TEXT, st.one_of(st.none(), st.booleans(), st.integers(), TEXT), max_size=3)
CALLS = st.builds(tool_call, call_id=TEXT, name=TEXT, arguments=TEXT)
MESSAGES = st.one_of(
    st.builds(ChatMessage, role=st.sampled_from(("system", "developer", "user")), content=TEXT, name=TEXT),
    st.builds(ChatMessage, role=st.just("tool"), content=TEXT, tool_call_id=TEXT),
    st.builds(
        ChatMessage,
        role=st.just("assistant"),
        content=TEXT,
        reasoning=st.none() | TEXT,
        tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    ),
)
PROMPTS = st.one_of(
    st.builds(api.Text, TEXT, st.booleans(), st.booleans()),
    st.builds(api.TokenIds, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20).map(tuple)),
    st.builds(
        api.Chat,
        messages=st.lists(MESSAGES, min_size=1, max_size=4).map(tuple),
        documents=st.lists(JSON_OBJECTS, max_size=2).map(tuple),
        template_kwargs=JSON_OBJECTS,
        add_generation_prompt=st.booleans(),
        parse_special=st.booleans(),
    ),
    st.builds(
        api.Chat,
        messages=st.lists(MESSAGES, min_size=1, max_size=4).map(tuple),
        add_generation_prompt=st.just(False),
        continue_final_message=st.just(True),
    ),
)


OBJECTIVES = st.none() | st.floats(allow_nan=False)
GENERATE_REQUESTS = st.builds(
    api.GenerateRequest,
    prompt=PROMPTS,
    request_id=TEXT,
    model=TEXT,
    sampling=SAMPLINGS,
    skip_text=st.booleans(),
    priority=SCALARS[FieldDescriptor.TYPE_INT32],
    ttft_ms=OBJECTIVES,
    itl_ms=OBJECTIVES,
    e2e_ms=OBJECTIVES,
)


@given(GENERATE_REQUESTS)
def test_generate_request(request: api.GenerateRequest) -> None:
    assert wire.generate_request_from_pb(through_bytes(wire.generate_request(request))) == request


@given(
    st.builds(
        api.GenerateChunk,
        request_id=TEXT,
        choice_index=st.integers(0, 2**32 - 1),
        text=TEXT,
        token_ids=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        stop_reason=st.none() | TEXT | IDS,
        usage=st.none() | messages_of(api.Usage, inference_pb2.Usage.DESCRIPTOR),
        timing=st.none() | messages_of(api.Timing, inference_pb2.Timing.DESCRIPTOR),
    ),
    st.data(),
)
def test_generate_chunk(chunk: api.GenerateChunk, data: st.DataObject) -> None:
    chunk = dataclasses.replace(chunk, scores=data.draw(scores(len(chunk.token_ids))))
    assert wire.generate_chunk(through_bytes(wire.generate_response(chunk))) == chunk


def test_what_is_set_to_zero_is_set() -> None:
    message = inference_pb2.GenerateRequest(
        text="x", sampling=inference_pb2.SamplingParams(temperature=0, top_k=0, seed=0, ignore_eos=False)
    )
    sampling = wire.generate_request_from_pb(through_bytes(message)).sampling
    assert sampling == {"temperature": 0.0, "top_k": 0, "seed": 0, "ignore_eos": False}
    assert wire.generate_request_from_pb(inference_pb2.GenerateRequest(text="x")).sampling == {}


def test_an_objective_of_zero_is_one_and_none_is_the_classs() -> None:
    message = inference_pb2.GenerateRequest(text="x", slo=inference_pb2.ServiceLevelObjective(itl_ms=0), priority=-3)
    request = wire.generate_request_from_pb(through_bytes(message))
    assert (request.ttft_ms, request.itl_ms, request.priority) == (None, 0.0, -3)
    without = wire.generate_request_from_pb(inference_pb2.GenerateRequest(text="x"))
    assert (without.ttft_ms, without.itl_ms, without.priority) == (None, None, 0)


def test_a_workers_sequence_has_no_objective_unless_it_is_told_one() -> None:
    spec = m.SequenceSpec(
        request_id="r",
        choice_index=0,
        token_ids=(1,),
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
        cache_seed=b"seed",
    )
    received = wire.sequence_from_pb(through_bytes(written(spec)))
    assert (received.ttft_s, received.itl_s) == (float("inf"), float("inf"))


EXAMPLES: dict[int, Any] = {
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_STRING: "x",
    FieldDescriptor.TYPE_MESSAGE: None,
}


def set_field(message: Any, field: FieldDescriptor) -> None:
    """Gives a field some value other than its default."""
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        target[1] = 1
    elif field.is_repeated and field.message_type is not None:
        target.add()
    elif field.is_repeated:
        target.append(EXAMPLES.get(field.type, 1))
    elif field.name == "structured_outputs":
        target.json_object = True
    elif field.message_type is not None:
        target.SetInParent()
    else:
        setattr(message, field.name, EXAMPLES.get(field.type, 1))


@pytest.mark.parametrize("name", list(SAMPLING_FIELDS))
def test_every_sampling_field_is_taken_or_refused_by_name(name: str) -> None:
    message = inference_pb2.GenerateRequest(text="x")
    set_field(message.sampling, SAMPLING_FIELDS[name])
    if name in SUPPORTED:
        assert set(wire.generate_request_from_pb(message).sampling) == {name}
        return
    with pytest.raises(Unsupported, match=rf"sampling\.{name} is not supported yet; leave it unset") as refusal:
        wire.generate_request_from_pb(message)
    assert refusal.value.param == name


def test_sampling_fields_refused_today() -> None:
    assert set(SUPPORTED) == set(SAMPLING_VALUES)
    assert set(SAMPLING_FIELDS) - set(SUPPORTED) == set()


@pytest.mark.parametrize("name", list(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name))
def test_every_request_field_is_taken(name: str) -> None:
    message = inference_pb2.GenerateRequest(text="y")
    without = wire.generate_request_from_pb(message)
    field = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[name]
    if name == "truncation_side":
        message.truncate_prompt_tokens, message.truncation_side = 1, "left"
        without = wire.generate_request_from_pb(message)
        message.truncation_side = "right"
    elif name == "add_special_tokens":
        message.add_special_tokens = False
    else:
        set_field(message, field)
    if name in ("sampling", "slo", "stream_options"):  # empty, they say nothing
        part = getattr(message, name)
        set_field(part, part.DESCRIPTOR.fields[0])
    assert wire.generate_request_from_pb(message) != without


def test_what_a_client_has_already_is_kept() -> None:
    request = api.GenerateRequest(prompt=api.Text("x"), request_id="r", resume_from={0: 3, 2: 0})
    assert wire.generate_request_from_pb(through_bytes(wire.generate_request(request))) == request


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"role": "user", "tool_call_id": "x"}, r"messages\[0\].tool_call_id belongs to a tool's message"),
        ({"role": "user", "reasoning": ""}, r"messages\[0\].reasoning belongs to an assistant's message"),
        ({"role": "user", "tool_calls": [inference_pb2.ToolCall(name="f")]}, "tool_calls belongs to an assistant's"),
        ({"role": "wizard"}, r"messages\[0\].role must be one of"),
        ({"role": "user", "name": "n" * 257}, "longer than 256 characters"),
    ],
)
def test_a_message_has_what_its_role_can_have(fields: dict[str, Any], sentence: str) -> None:
    message = inference_pb2.GenerateRequest()
    message.chat.messages.add(**fields)
    with pytest.raises(InvalidRequest, match=sentence):
        wire.generate_request_from_pb(message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template_kwargs_json": "{"}, "template_kwargs_json"),
        ({"template_kwargs_json": "[]"}, "template_kwargs_json"),
        ({"template_kwargs_json": "[" * 100_000}, "template_kwargs_json"),
        ({"documents_json": ["{}", "5"]}, "documents_json"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_chat_s_fields_are_checked(fields: dict[str, Any], param: str) -> None:
    message = inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput(**fields))
    with pytest.raises(InvalidRequest) as raised:
        wire.generate_request_from_pb(message)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "fields", [{"truncation_side": "up", "truncate_prompt_tokens": 1}, {"truncation_side": "left"}]
)
def test_a_truncation_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="truncation_side"):
        wire.generate_request_from_pb(inference_pb2.GenerateRequest(text="x", **fields))


def test_names_in_a_chat_are_kept() -> None:
    message = inference_pb2.GenerateRequest()
    message.chat.messages.add(role="user", content="x", name="ada")
    assert wire.generate_request_from_pb(message).prompt == api.Chat(
        messages=(ChatMessage(role="user", content="x", name="ada"),)
    )


@pytest.mark.parametrize(
    ("choice", "name", "tools"),
    [
        ("maybe", "", '{"type": "object"}'),
        ("auto", "f", '{"type": "object"}'),
        ("none", "f", ""),
        ("", "", "[]"),
        ("", "", "{"),
    ],
)
def test_tools_that_cannot_be_are_refused(choice: str, name: str, tools: str) -> None:
    message = inference_pb2.GenerateRequest()
    message.chat.tools.add(name="f", parameters_json=tools)
    message.chat.tool_choice, message.chat.tool_choice_name = choice, name
    with pytest.raises(InvalidRequest, match="tool"):
        wire.generate_request_from_pb(message)


TOOLS = st.builds(
    Tool,
    name=st.text(),
    description=st.none() | st.text(min_size=1),
    parameters=st.none() | st.dictionaries(st.text(), st.integers() | st.text(), min_size=1),
    strict=st.booleans(),
)
CHOICES = st.builds(ToolChoice, use=st.sampled_from(ToolUse), is_parallel=st.booleans()) | st.builds(
    ToolChoice, use=st.just(ToolUse.REQUIRED), name=st.text(min_size=1), is_parallel=st.booleans()
)


@given(st.lists(TOOLS, max_size=3).map(tuple), CHOICES)
def test_tools_come_as_they_were_sent(tools: tuple[Tool, ...], choice: ToolChoice) -> None:
    chat = api.Chat(messages=(ChatMessage(role="user", content="x"),), tools=tools, tool_choice=choice)
    sent = wire.generate_request(api.GenerateRequest(prompt=chat))
    assert wire.generate_request_from_pb(sent).prompt == chat
    calls = (
        ToolCallDelta(index=3, arguments="{", call_id="id", name="name", content_offset=7),
        ToolCallDelta(index=3, arguments="}"),
    )
    chunk = api.GenerateChunk(request_id="r", choice_index=0, tool_calls=calls, reasoning="so")
    assert wire.generate_chunk(wire.generate_response(chunk)) == chunk


def test_a_request_without_input_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no input; set one of text, chat or token_ids"):
        wire.generate_request_from_pb(inference_pb2.GenerateRequest(request_id="r"))
    with pytest.raises(InvalidRequest, match="no input"):
        wire.tokenize_request_from_pb(inference_pb2.TokenizeRequest())


@pytest.mark.parametrize(
    ("objectives", "has_slo"), [({}, False), ({"ttft_ms": 5.0}, True), ({"itl_ms": 7.0}, True), ({"e2e_ms": 9.0}, True)]
)
def test_a_request_without_objectives_has_no_slo(objectives: dict[str, Any], has_slo: bool) -> None:
    message = wire.generate_request(api.GenerateRequest(prompt=api.Text("x"), **objectives))
    assert message.HasField("slo") is has_slo
    back = wire.generate_request_from_pb(through_bytes(message))
    got = {"ttft_ms": back.ttft_ms, "itl_ms": back.itl_ms, "e2e_ms": back.e2e_ms}
    assert {name: value for name, value in got.items() if value is not None} == objectives


def test_tokenize() -> None:
    request = inference_pb2.TokenizeRequest(model="m", text="hello")
    assert wire.tokenize_request_from_pb(request) == api.Text("hello")
    response = through_bytes(wire.tokenize_response((1, 2, 3), 100))
    assert (list(response.token_ids), response.max_model_len) == ([1, 2, 3], 100)


def test_list_models() -> None:
    card = api.ModelCard(id="m", path="/m", max_model_len=8192, created=1_700_000_000, weights="int8g", kv_dtype="int8")
    (model,) = through_bytes(wire.list_models_response([card])).models
    assert (model.id, model.path, model.max_model_len, model.created) == ("m", "/m", 8192, 1_700_000_000)
    assert (model.weights, model.kv_dtype) == ("int8g", "int8")


# -- operators ---------------------------------------------------------------------------------------------------------


def status(num_workers: int) -> ClusterStatus:
    info = WorkerInfo(
        id="decode-0",
        role=Role.DECODE,
        address="127.0.0.1:5",
        pid=77,
        node="node",
        epoch=2**40,
        content_id="content",
        wire_compat="wire",
        block_size=16,
        max_model_len=8192,
        chunk_tokens=128,
        version="1.4",
        engine="transformers",
        sampler="inverse-transform-blake2b/1",
        computes=Computes(gpu="NVIDIA H200", dtype="bfloat16", attention="torch", fallbacks=("slow: since",)),
    )
    transfers = TransferCounts(
        sent_committed=2, received_committed=3, received_failed=1, pulled_tokens=2**40, open_connections=4,
        slots_in_use=5, unsent_bytes=2**33,
    )  # fmt: skip
    costs = StepCosts(
        s_overhead=0.5, s_per_token=0.25, s_per_pair=0.0, s_weights=2.0, s_per_sequence=3.0, s_per_kv_token=4.0
    )
    load = WorkerLoad(
        state=WorkerState.READY,
        running=0,
        waiting=3,
        queued_tokens=100,
        blocks=BlockCounts(10, 4, 5, 1),
        self_check="ok",
        transfers=transfers,
        preemptions=0,
        costs=costs,
        busy_s=0.5,
        computed_tokens=2**33,
        connections=(OpenConnections("nccl", "P2P", 2),),
    )
    return ClusterStatus(
        pools={"decode": PoolStatus(2, 1), "prefill": PoolStatus(0, 0)},
        workers=(Worker(info, load),) * num_workers,
        routers=(
            RouterInfo(
                id="router-0",
                pid=5,
                grpc="h:1",
                http="h:2",
                mirror_lag_s=0.0,
                met=7,
                missed=0,
                rejected=1,
                version="1.3",
                ready_workers=2,
            ),
        ),
        redis_address="redis://x",
        redis_ok=False,
        models=(ServedModel(id="m", path="/m"),),
        controller=ControllerInfo(
            pid=3, address="h:3", scaling=(PoolScaling("decode", 0.5, 3),), version="1.2", incarnation="c3"
        ),
        store_garbage=(StoreGarbage("lease", 2**40, "k: no number"),),
    )


def test_status_as_json_has_rows_of_states_if_there_are_any() -> None:
    before = status(1)
    (worker,) = before.workers
    load = dataclasses.replace(worker.load, state_rows=BlockCounts(9, 4, 3, 2))
    after = dataclasses.replace(before, workers=(dataclasses.replace(worker, load=load), worker))
    first, second = wire.status_as_json(through_bytes(wire.status_response(after)))["workers"]
    assert first == {**second, "state_rows": {"total": 9, "free": 4, "cached": 3, "in_use": 2}}
    assert "state_rows" not in second


def test_status_as_json_has_every_field_even_when_zero() -> None:
    assert wire.status_as_json(through_bytes(wire.status_response(status(1)))) == {
        "pools": {
            "decode": {"desired": 2, "ready": 1, "engine": []},
            "prefill": {"desired": 0, "ready": 0, "engine": []},
        },
        "workers": [
            {
                "id": "decode-0",
                "role": "decode",
                "state": "ready",
                "pid": 77,
                "node": "node",
                "address": "127.0.0.1:5",
                "epoch": 2**40,
                "running": 0,
                "waiting": 3,
                "blocks": {"total": 10, "free": 4, "cached": 5, "in_use": 1},
                "self_check": "ok",
                "transfers": {
                    "open_connections": 4,
                    "slots_in_use": 5,
                    "unsent_bytes": 2**33,
                    "committed": 5,
                    "failed": 1,
                    "pulled_tokens": 2**40,
                },
                "costs": {
                    "s_overhead": 0.5,
                    "s_per_token": 0.25,
                    "s_per_pair": 0.0,
                    "s_weights": 2.0,
                    "s_per_sequence": 3.0,
                    "s_per_kv_token": 4.0,
                },
                "block_size": 16,
                "chunk_tokens": 128,
                "preemptions": 0,
                "busy_s": 0.5,
                "computed_tokens": 2**33,
                "queued_tokens": 100,
                "version": "1.4",
                "content_id": "content",
                "wire_compat": "wire",
                "max_model_len": 8192,
                "engine": "transformers",
                "sampler": "inverse-transform-blake2b/1",
                "computes": {
                    "gpu": "NVIDIA H200",
                    "num_ranks": 1,
                    "dtype": "bfloat16",
                    "weights": "",
                    "kv_dtype": "",
                    "attention": "torch",
                    "num_graphs": 0,
                    "num_fused": 0,
                    "plans_ahead": False,
                    "kv_copies": "",
                    "fallbacks": ["slow: since"],
                },
                "connections": [{"transport": "nccl", "carrier": "P2P", "open_connections": 2}],
                "max_adapters": 0,
                "adapters": [],
                "adapter_load_s": 0.0,
                "release": "",
            }
        ],
        "routers": [
            {
                "id": "router-0",
                "pid": 5,
                "grpc": "h:1",
                "http": "h:2",
                "mirror_lag_s": 0.0,
                "met": 7,
                "missed": 0,
                "rejected": 1,
                "version": "1.3",
                "ready_workers": 2,
                "models": [],
            }
        ],
        "redis": {
            "address": "redis://x",
            "ok": False,
            "garbage": [{"what": "lease", "times": 2**40, "latest": "k: no number"}],
        },
        "models": [
            {
                "id": "m",
                "path": "/m",
                "content_id": "",
                "release": "",
                "share": 1.0,
                "state": "ready",
                "pools": {},
                "held": 0,
                "wake_s": 0.0,
                "problem": "",
            }
        ],
        "controller": {
            "pid": 3,
            "address": "h:3",
            "scaling": [{"pool": "decode", "utilisation": 0.5, "wanted": 3}],
            "version": "1.2",
        },
    }


def test_status_of_an_empty_cluster() -> None:
    assert wire.status_as_json(wire.status_response(status(0)))["workers"] == []


TIMELINES = messages_of(RequestTimeline, admin_pb2.RequestTimeline.DESCRIPTOR)


@settings(max_examples=20)
@given(st.lists(TIMELINES, max_size=3))
def test_timelines(found: list[RequestTimeline]) -> None:
    """Infinite objectives too: a class may have none. The placements are those of each tenant's latest call."""
    message = through_bytes(wire.explain_response(found))
    assert wire.timelines(message) == found
    latest = {each.summary.tenant: each.placements for each in reversed(found)}
    assert wire.explanations(message) == [each for placements in latest.values() for each in placements]


@settings(max_examples=20)
@given(messages_of(RequestList, admin_pb2.ListRequestsResponse.DESCRIPTOR))
def test_request_lists(found: RequestList) -> None:
    assert wire.request_list(through_bytes(wire.requests_response(found))) == found


def test_pools_and_workers_are_those_of_the_status() -> None:
    whole = wire.status_response(status(2))
    assert wire.pools_response(status(2)).pools == whole.pools
    assert list(wire.workers_response(status(2)).workers) == list(whole.workers)


def test_the_status_names_the_adapters_that_workers_hold() -> None:
    poet = builders.registered_adapter("poet")
    load = dataclasses.replace(builders.READY, adapters=(poet.adapter.digest, "cd" * 32), adapter_load_s=0.25)
    workers = (builders.worker("w0", load=load, max_adapters=4), builders.worker("w1"))
    status = dataclasses.replace(
        builders.cluster_status(*workers), adapters={workers[0].info.content_id: {poet.name: poet}}
    )
    first, second = wire.status_as_json(wire.status_response(status))["workers"]
    assert (first["adapters"], first["max_adapters"]) == (["poet", "cd" * 6], 4)
    assert first["adapter_load_s"] == 0.25
    assert (second["adapters"], second["max_adapters"]) == ([], 0)


def test_registered_adapters_are_listed_by_name() -> None:
    adapters = {name: builders.registered_adapter(name) for name in ("prose", "poet")}
    shown = [wire.adapter_as_json(each) for each in wire.adapters_response({"tiny": adapters}).adapters]
    assert [each["name"] for each in shown] == ["poet", "prose"]
    poet = {"path": "/adapters/poet", "digest": "ab" * 32, "rank": 8, "num_bytes": 4096, "since_s": 1_700_000_000.0}
    assert shown[0] == {"name": "poet", **poet, "model": "tiny"}


def test_adapter_and_images_of_a_sequence_arrive() -> None:
    images = tuple(
        m.PlacedImage(digest=bytes([n] * 16), offset=3 * n, num_tokens=2, grid=(1, n, 4)) for n in range(1, 3)
    )
    adapter = m.Adapter(name="cats", path="/adapters/cats", digest="ab", rank=8)
    spec = dataclasses.replace(builders.sequence_spec(range(12), "r"), adapter=adapter, images=images)
    message = worker_pb2.SequenceSpec()
    wire.write_sequence(spec, message)
    assert wire.sequence_from_pb(message) == spec
