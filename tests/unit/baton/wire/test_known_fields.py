"""Fields of another release are refused by their number or sent elsewhere, and never dropped in silence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role, Worker
from baton.config import RouterConfig
from baton.errors import BatonError, InvalidRequest, Unsupported, WorkerFailed
from baton.kv_layout import KvLayout
from baton.messages import (
    DecodeRequest,
    Event,
    FetchRequest,
    FirstToken,
    NewTokens,
    PrefillReport,
    PrefillRequest,
    PrefixSource,
    SequenceSpec,
    StartCall,
    Ticket,
)
from baton.rpc import RpcServer, channel, from_rpc_error
from baton.rpc.errors import _guard_unary, abort
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry.instruments import Instruments
from baton.v1 import admin_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.index import Mirror
from kvstore.leases.codec import decode_info, decode_load, encode
from router.placement.pool_view import HintTracker, PoolView
from router.serve.choice import Choice, ChoiceGroup
from router.serve.driver import ChoiceDriver
from router.serve.worker_client import WorkerCallError
from tests.support import builders
from tests.support.waiting import until
from tests.unit.router.serve.scripted_workers import new_choice
from tests.unit.router.serve.test_worker_client import router
from worker.calls import CallServicer

FIELD_99 = b"\x98\x06\x01"
ENTRY_WITH_FIELD_9 = b"\x52\x06\x08\x01\x10\x03\x48\x01"
"""Of `resume_from`, which is field 10: key 1, value 3, and 1 in a field 9."""
REQUEST_ID_AS_NUMBER = b"\x08\x05"
SPEC = SequenceSpec(
    request_id="r",
    choice_index=0,
    token_ids=(1, 2, 3),
    num_prompt_tokens=3,
    sampling=SamplingParams(max_tokens=4, temperature=0.0, seed=0),
    cache_seed=b"seed",
)
WITH_MIN_P = replace(SPEC, sampling=replace(SPEC.sampling, min_p=0.5))
TICKET = Ticket(
    transfer_id="t",
    generation=1,
    decode_worker_id="d",
    incarnation="i",
    kv_address="h:1",
    num_tokens=3,
    skip_tokens=0,
    wire_compat="wire",
    layout=KvLayout(16, 1, ()),
)
OLDER = wire.KNOWN_FIELDS.replace("SamplingParams:1,2,3,4,5,6,", "SamplingParams:1,2,3,4,6,")
"""The list of a release without `min_p`, field 5."""
assert OLDER != wire.KNOWN_FIELDS
LAST = NewTokens(token_ids=(5,), finish_reason=FinishReason.LENGTH)


# -- a client's --------------------------------------------------------------------------------------------------------


def chat_of(*messages: inference_pb2.ChatMessage) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput(messages=messages, tools=[inference_pb2.Tool()]))


PLACES: dict[str, Callable[[inference_pb2.GenerateRequest], Message]] = {
    "99": lambda request: request,
    "sampling.99": lambda request: request.sampling,
    "slo.99": lambda request: request.slo,
    "stream_options.99": lambda request: request.stream_options,
    "chat.99": lambda request: request.chat,
    "chat.messages[0].99": lambda request: request.chat.messages[0],
    "chat.messages[1].tool_calls[0].99": lambda request: request.chat.messages[1].tool_calls[0],
    "chat.tools[0].99": lambda request: request.chat.tools[0],
    "token_ids.99": lambda request: request.token_ids,
}


@pytest.mark.parametrize("path", PLACES)
def test_a_field_that_is_not_known_is_found_at_any_depth(path: str) -> None:
    call = inference_pb2.ToolCall(id="c")
    request = chat_of(inference_pb2.ChatMessage(role="user"), inference_pb2.ChatMessage(tool_calls=[call]))
    assert wire.unknown_field(request) == ""
    PLACES[path](request).MergeFromString(FIELD_99)
    request = inference_pb2.GenerateRequest.FromString(request.SerializeToString())
    assert wire.unknown_field(request) == path


@pytest.mark.parametrize(("odd", "path"), [(ENTRY_WITH_FIELD_9, "10"), (REQUEST_ID_AS_NUMBER, "1")])
def test_what_is_not_of_a_fields_form_counts_as_not_known(odd: bytes, path: str) -> None:
    assert wire.unknown_field(inference_pb2.GenerateRequest.FromString(odd)) == path


def holders_of_message_maps(descriptor: Descriptor) -> set[str]:
    found = set()
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None:
            continue
        if inner.GetOptions().map_entry and inner.fields_by_name["value"].message_type is not None:
            found.add(field.full_name)
        found |= holders_of_message_maps(inner)
    return found


METHODS = {
    f"/{service.full_name}/{method.name}": method.input_type
    for file in (inference_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_no_map_holds_messages_that_would_have_to_be_looked_into() -> None:
    for descriptor in (*METHODS.values(), worker_pb2.Command.DESCRIPTOR):
        assert holders_of_message_maps(descriptor) == set()
    pools = {"baton.v1.GetStatusResponse.pools", "baton.v1.ServedModel.pools"}
    assert holders_of_message_maps(admin_pb2.GetStatusResponse.DESCRIPTOR) == pools


@pytest.fixture
async def client() -> AsyncIterator[grpc.aio.Channel]:
    """Of a server whose every method answers with nothing."""

    async def whole(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return b""

    async def streamed(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        yield b""

    rpc = RpcServer(("baton.v1.Inference", "baton.v1.Admin"))
    for method, message in METHODS.items():
        service, name = method[1:].split("/")
        read: Any = message_factory.GetMessageClass(message).FromString
        if name == "Generate":
            handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(streamed, read)
        else:
            handler = grpc.unary_unary_rpc_method_handler(whole, read)
        rpc.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as connection:
        yield connection
    await rpc.stop(0)


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_for_clients_refuses_a_field_that_it_does_not_know(
    client: grpc.aio.Channel, method: str
) -> None:
    streams: Any = client.unary_stream(method)  # a single answer is a stream of one
    assert [answer async for answer in streams(b"")] == [b""]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(streams(FIELD_99)))
    error = from_rpc_error(caught.value, "router")
    assert (type(error), caught.value.code()) == (Unsupported, grpc.StatusCode.UNIMPLEMENTED)
    assert str(error).startswith(f"{METHODS[method].name} has a field 99 that this release does not know")


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_the_clients_fault(client: grpc.aio.Channel, method: str) -> None:
    """gRPC itself would say UNKNOWN, as of a defect of the server."""
    streams: Any = client.unary_stream(method)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(streams(b"\xff")))
    error = from_rpc_error(caught.value, "router")
    assert (type(error), caught.value.code()) == (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT)
    assert "the message is not in protobuf's form" in str(error)


async def test_a_client_that_leaves_while_it_is_refused_is_no_defect() -> None:
    class Left:
        """A call whose client is gone, as gRPC shows it."""

        async def abort(self, *said: object) -> None:
            raise grpc.aio.InternalError("Failed")

    left: Any = Left()
    with pytest.raises(asyncio.CancelledError):
        await abort(left, InvalidRequest("no"))


async def test_a_client_that_leaves_before_a_write_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async def writes(request: Message, context: object) -> bytes:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    with pytest.raises(asyncio.CancelledError):
        await _guard_unary(writes)(inference_pb2.GenerateRequest(), None)
    assert not caplog.records


# -- a router's --------------------------------------------------------------------------------------------------------


def leased(worker_id: str, address: str, known_fields: str = wire.KNOWN_FIELDS, role: Role = Role.DECODE) -> Worker:
    return builders.worker(worker_id, role, address=address, known_fields=known_fields)


class Workers:
    """Answer with one token. What they were asked is known.

    Args:
        failures: raised first, one a call.
    """

    def __init__(self, *failures: BatonError) -> None:
        self.asked: list[PrefillRequest | DecodeRequest | FetchRequest] = []
        self.failures = list(failures)

    async def decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        if request.await_kv:
            yield replace(TICKET, transfer_id=request.sequence.sequence_id)
            await asyncio.Event().wait()
        yield LAST

    async def prefill(self, request: PrefillRequest, trace: Context) -> AsyncGenerator[Event]:
        self.asked.append(request)
        yield FirstToken(
            token_id=5,
            finish_reason=FinishReason.LENGTH,
            report=PrefillReport(),
        )


@contextlib.asynccontextmanager
async def serving(workers: Workers) -> AsyncIterator[str]:
    """Its address."""
    rpc = RpcServer(("baton.v1.WorkerCalls",))
    servicer = CallServicer(prefill=workers.prefill, decode=workers.decode)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, rpc.server)
    address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    try:
        async with asyncio.timeout(20):
            yield address
    finally:
        await rpc.stop(0)


COMMANDS: dict[str, tuple[PrefillRequest | DecodeRequest | FetchRequest, Callable[[worker_pb2.Command], Message]]] = {
    "99": (DecodeRequest(SPEC, False), lambda command: command),
    "decode.99": (DecodeRequest(SPEC, False), lambda command: command.decode),
    "decode.sequence.99": (DecodeRequest(SPEC, False), lambda command: command.decode.sequence),
    "prefill.ticket.layout.99": (PrefillRequest(SPEC, TICKET), lambda command: command.prefill.ticket.layout),
    "fetch.source.99": (
        FetchRequest(SPEC, PrefixSource(worker_id="w", address="h:1", num_tokens=16)),
        lambda command: command.fetch.source,
    ),
}


async def test_a_worker_refuses_a_command_with_a_field_that_it_does_not_know_and_serves_the_others() -> None:
    workers = Workers()
    commands = [wire.start_command(StartCall(1, DecodeRequest(SPEC, False), {}))]
    for call_id, (request, place) in enumerate(COMMANDS.values(), 2):
        command = wire.start_command(StartCall(call_id, request, {}))
        place(command).MergeFromString(FIELD_99)
        commands.append(command)
    async with serving(workers) as address, channel(address) as connection:
        stub: Any = worker_pb2_grpc.WorkerCallsStub(connection)
        stream = stub.Serve()
        await stream.write(wire.serve_request(commands))
        answers: dict[int, list[Any]] = {}
        while len(answers) < len(commands) or len(answers[1]) < 2:
            for call_id, event in wire.events(await stream.read()):
                answers.setdefault(call_id, []).append(event)
        stream.cancel()
    assert answers[1][0] == LAST
    refusals = [answers[call_id][0] for call_id in range(2, len(commands) + 1)]
    assert {refusal.kind for refusal in refusals} == {"Unsupported"}
    told = [f"this worker does not know the field {path} of a router's command" for path in COMMANDS]
    assert [refusal.message for refusal in refusals] == told
    assert len(workers.asked) == 1


async def test_no_field_reaches_a_worker_that_does_not_know_it() -> None:
    workers = Workers()
    async with serving(workers) as address, router() as calls:
        older = leased("old", address, OLDER)
        with pytest.raises(
            WorkerCallError, match=r"old \(decode\) is of an older .* SamplingParams\.min_p \(5\)$"
        ) as refusal:
            calls.decode(older, WITH_MIN_P, await_kv=False, trace=Context()).take()
        assert isinstance(refusal.value.error, Unsupported)
        with pytest.raises(WorkerCallError, match=r"silent \(decode\) is of an older .* SequenceSpec\.sampling \(19\)"):
            calls.decode(leased("silent", address, ""), SPEC, await_kv=False, trace=Context()).take()
        for worker, spec in (
            (older, SPEC),
            (leased("new", address), WITH_MIN_P),
            (leased("newer", address, f"{wire.KNOWN_FIELDS} Riddle:1,2"), WITH_MIN_P),
        ):
            async with calls.decode(worker, spec, await_kv=False, trace=Context()) as stream:
                assert await stream.read() == LAST
    assert len(workers.asked) == 3


@contextlib.asynccontextmanager
async def dispatching(
    workers: Workers, known: Mapping[str, str], mode: str = "aggregated", worker_wait_s: float = 0.3
) -> AsyncIterator[tuple[PoolView, Callable[[SequenceSpec, Choice], Any]]]:
    """The pools, and how a choice is served. A worker whose name begins with p prefills.

    Args:
        known: by worker, what its lease says of it.
    """
    async with serving(workers) as address, router() as calls:
        pools = PoolView(lambda keys: {}, time.monotonic)
        roles = {name: Role.PREFILL if name.startswith("p") else Role.DECODE for name in known}
        await pools.update([leased(name, address, fields, roles[name]) for name, fields in known.items()])
        instruments = Instruments(builders.cluster_status)
        hints, config = HintTracker(Mirror(), instruments), RouterConfig(mode=mode, worker_wait_s=worker_wait_s)
        driver = ChoiceDriver(
            pools=pools, client=calls, hints=hints, config=config, instruments=instruments, waker=builders.waker(pools)
        )

        async def serve(spec: SequenceSpec, choice: Choice) -> list[int]:
            choice.spec = spec
            choice.claim = builders.claim()
            messages = driver.run(ChoiceGroup(choices=(choice,)))
            return [token async for _, message in messages for token in message.token_ids]

        yield pools, serve


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
async def test_a_request_goes_only_to_workers_that_know_all_of_it(mode: str) -> None:
    known = {"d-old": OLDER, "d-new": wire.KNOWN_FIELDS, "p-old": OLDER, "p-new": wire.KNOWN_FIELDS}
    async with dispatching(Workers(), known, mode) as (_, serve):
        served: dict[SequenceSpec, set[str]] = {SPEC: set(), WITH_MIN_P: set()}
        for spec, names in served.items():
            for index in range(12):
                record = new_choice()
                assert await serve(
                    replace(spec, token_ids=(*range(index, index + 50),), num_prompt_tokens=50), record
                ) == [5]
                assert record.timeline.retries == 0
                names |= {record.timeline.decode_worker, record.timeline.prefill_worker} - {""}
    assert served[WITH_MIN_P] == ({"d-new", "p-new"} if mode == "disaggregated" else {"d-new"})
    assert served[SPEC] == (known.keys() if mode == "disaggregated" else {"d-new", "d-old"})


async def test_where_nobody_knows_all_of_a_request_it_is_refused_by_name_and_at_once() -> None:
    workers = Workers()
    known = {"old": OLDER, "p-old": OLDER}
    async with dispatching(workers, known, "auto", worker_wait_s=600.0) as (_, serve), asyncio.timeout(60):
        with pytest.raises(Unsupported, match=r"no worker is ready that knows SamplingParams\.min_p \(5\)"):
            await serve(WITH_MIN_P, new_choice())
        assert workers.asked == []
        assert await serve(SPEC, new_choice()) == [5]


async def test_who_waits_in_vain_for_one_that_knows_is_told_so() -> None:
    """A decode worker knows all of it, and there may soon be a prefill worker that does."""
    async with dispatching(Workers(), {"d-new": wire.KNOWN_FIELDS, "p-old": OLDER}, "disaggregated") as (_, serve):
        with pytest.raises(Unsupported, match=r"no worker is ready that knows SamplingParams\.min_p \(5\)"):
            await serve(WITH_MIN_P, new_choice())


async def test_a_choice_that_has_begun_waits_for_a_worker_that_knows_all_of_it() -> None:
    workers = Workers(WorkerFailed("gone"))
    async with dispatching(workers, {"old": OLDER, "new": wire.KNOWN_FIELDS}) as (pools, serve):
        record = new_choice()
        serving = asyncio.create_task(serve(WITH_MIN_P, record))
        await until(lambda: record.timeline.retries)
        old, new = pools.get("old"), pools.get("new")
        await pools.update([old])
        await asyncio.sleep(0.05)
        await pools.update([old, replace(new, info=replace(new.info, epoch=2))])
        assert await serving == [5]
    assert (record.timeline.decode_worker, record.timeline.retries) == ("new", 1)


async def test_a_worker_that_says_it_does_not_know_is_not_asked_again() -> None:
    workers = Workers(Unsupported("no riddles"))
    async with dispatching(workers, dict.fromkeys("ab", wire.KNOWN_FIELDS)) as (_, serve):
        record = new_choice()
        assert await serve(SPEC, record) == [5]
        assert (len(workers.asked), record.timeline.retries) == (2, 1)
        workers.failures = [Unsupported("no riddles"), Unsupported("none here")]
        with pytest.raises(Unsupported, match="none here"):
            await serve(SPEC, new_choice())
    assert len(workers.asked) == 4


# -- what a lease tells ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [":", "SequenceSpec:", "9", "\0", "SequenceSpec:1-99999999999", "x" * 9999])
async def test_what_cannot_be_read_of_a_list_takes_out_no_other_worker(garbage: str) -> None:
    pools = PoolView(lambda keys: {}, time.monotonic)
    await pools.update([leased("a", "h:1", garbage), leased("b", "h:1")])
    assert set(pools.unfit(SPEC)) == {"a"}


def test_a_lease_tells_what_its_worker_knows_and_an_older_one_nothing() -> None:
    worker = leased("a", "h:1")
    info, load = encode(worker.info).encode(), encode(worker.load).encode()
    assert Worker(decode_info(info), decode_load(load)) == worker
    older = info.replace(b"known_fields", b"not_told")
    assert decode_info(older).known_fields == ""


def test_the_fields_of_a_sequence_are_known() -> None:
    assert wire.fields_unknown_to("") >= {f"SequenceSpec.{number}" for number in (*range(1, 5), *range(13, 20))}
