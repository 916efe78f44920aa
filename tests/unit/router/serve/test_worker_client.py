"""One stream carries all calls of a router to a worker: each keeps its order, and none hurts another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

from baton import wire
from baton.cluster import Worker
from baton.errors import BatonError, InvalidRequest, Overloaded, TransferCorrupted, WorkerFailed
from baton.kv_layout import GroupLayout, KvLayout
from baton.messages import (
    CallEnded,
    CancelCall,
    DecodeRequest,
    Decoding,
    Event,
    Failed,
    Migrate,
    NewTokens,
    PrefillReport,
    PrefillRequest,
    SequenceSpec,
    StartCall,
    Ticket,
)
from baton.rpc import RpcServer, channel
from baton.rpc.member_auth import WORKERS_RULES, member_auth
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.tasks import cancel_and_wait
from baton.tls import Tls
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.serve.worker_client import MAX_JOINED, WorkerCallError, WorkerClient, WorkerStream
from tests.support import builders
from tests.support.waiting import until
from worker.calls import CallServicer

pytestmark = pytest.mark.asyncio
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
Stream = WorkerStream[Decoding]


def spec(name: str) -> SequenceSpec:
    return builders.sequence_spec((1, 2, 3), name, max_tokens=4)


def tokens_of(name: str, index: int) -> NewTokens:
    return NewTokens(token_ids=(100 * int(name) + index,), finish_reason=None)


@dataclass(slots=True, kw_only=True)
class Engine:
    """A worker by hand: a call says what it is told to, and what it holds is known."""

    said: dict[str, asyncio.Queue[Event | BaseException | None]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    freed: list[str] = field(default_factory=list)
    traces: list[Context] = field(default_factory=list)
    cleaning: asyncio.Event | None = None
    """What every call waits for when it is left."""

    def say(self, name: str, *events: Event | BaseException | None) -> None:
        for event in events:
            self.said.setdefault(name, asyncio.Queue()).put_nowait(event)

    async def decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        name = request.sequence.request_id
        said = self.said.setdefault(name, asyncio.Queue())
        self.held.add(name)
        self.traces.append(trace)
        try:
            while (event := await said.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if self.cleaning is not None:
                await self.cleaning.wait()
            self.held.remove(name)
            self.freed.append(name)


def serving(
    engine: Engine, port: int = 0, tls: Tls | None = None
) -> contextlib.AbstractAsyncContextManager[tuple[RpcServer, int]]:
    return served(CallServicer(decode=engine.decode), port, tls=tls)


@contextlib.asynccontextmanager
async def served(
    servicer: worker_pb2_grpc.WorkerCallsServicer,
    port: int = 0,
    endpoints: Sequence[grpc.aio.ServerInterceptor] = (),
    tls: Tls | None = None,
) -> AsyncIterator[tuple[RpcServer, int]]:
    rpc = RpcServer(("baton.v1.WorkerCalls",), endpoints)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, rpc.server)
    port = rpc.bind("127.0.0.1", port, tls)
    await rpc.start()
    try:
        yield rpc, port
    finally:
        await rpc.stop(0)


@contextlib.asynccontextmanager
async def router(keys: KeyFile | None = None) -> AsyncIterator[WorkerClient]:
    calls = WorkerClient(keys)
    try:
        yield calls
    finally:
        await calls.close()


@contextlib.asynccontextmanager
async def joined(engine: Engine) -> AsyncIterator[Callable[[str], Stream]]:
    """How a router opens a call to the engine."""
    async with serving(engine) as (_, port), router() as calls:
        yield lambda name: calls.decode(worker_at(port), spec(name), await_kv=False, trace=Context())


def worker_at(port: int, worker_id: str = "worker-0", incarnation: str = "") -> Worker:
    address = f"127.0.0.1:{port}"
    return builders.worker(worker_id, address=address, known_fields=wire.KNOWN_FIELDS, incarnation=incarnation)


async def read(stream: Stream) -> Decoding:
    async with asyncio.timeout(10):
        return await stream.read()


async def read_ids(stream: Stream, count: int) -> list[int]:
    """The ids of the next tokens; as many messages as it takes."""
    token_ids: list[int] = []
    while len(token_ids) < count:
        message = await read(stream)
        assert isinstance(message, NewTokens)
        token_ids += message.token_ids
    return token_ids


def ids_of(name: str, count: int) -> list[int]:
    return [100 * int(name) + index for index in range(count)]


async def failure_of(reading: Awaitable[Any]) -> WorkerCallError:
    async with asyncio.timeout(10):
        with pytest.raises(WorkerCallError) as caught:
            await reading
    return caught.value


async def test_every_call_gets_its_own_events_in_order() -> None:
    engine = Engine()
    async with joined(engine) as call, contextlib.AsyncExitStack() as stack:
        names = [str(number) for number in range(1, 21)]
        streams = {name: await stack.enter_async_context(call(name)) for name in names}
        for index in range(50):
            for name in names:
                engine.say(name, tokens_of(name, index))
            if index % 7 == 0:
                await asyncio.sleep(0)  # so that frames hold now few events and now many
        for name, stream in streams.items():
            assert await read_ids(stream, 50) == ids_of(name, 50)


async def test_tokens_that_wait_are_read_as_one_message_but_no_more_than_the_loop_has_time_for() -> None:
    engine, score = Engine(), TokenScores((-0.5,), (3,), (-0.25,))
    report = PrefillReport(num_cached_tokens=2)
    scored = [replace(tokens_of("1", index), scores=score, num_searched=2) for index in range(MAX_JOINED + 3)]
    async with joined(engine) as call, call("1") as stream, call("2") as other:
        engine.say("1", replace(scored[0], report=report), *scored[1:])
        engine.say("1", replace(tokens_of("1", 99), finish_reason=FinishReason.STOP), None)
        await until(lambda: engine.freed == ["1"])
        engine.say("2", tokens_of("2", 0))
        await read(other)
        assert await read(stream) == NewTokens(
            token_ids=tuple(ids_of("1", MAX_JOINED)),
            finish_reason=None,
            report=report,
            scores=TokenScores((-0.5,) * MAX_JOINED, (3,) * MAX_JOINED, (-0.25,) * MAX_JOINED),
            num_searched=2 * MAX_JOINED,
        )
        last = await read(stream)
        assert isinstance(last, NewTokens)
        assert (last.token_ids[-1], len(last.token_ids), last.finish_reason) == (199, 4, FinishReason.STOP)
        assert last.report is None


async def test_tokens_are_not_joined_over_another_answer_nor_with_what_comes_later() -> None:
    engine = Engine()
    async with joined(engine) as call, call("1") as stream, call("2") as other:
        engine.say("1", tokens_of("1", 0), Migrate(), tokens_of("1", 1), tokens_of("1", 2))
        engine.say("2", tokens_of("2", 0))
        await read(other)
        assert [await read(stream) for _ in range(2)] == [tokens_of("1", 0), Migrate()]
        assert await read_ids(stream, 2) == [101, 102]
        engine.say("1", tokens_of("1", 3))
        assert await read(stream) == tokens_of("1", 3)


async def test_what_is_ready_together_travels_in_one_frame() -> None:
    """As seen by a router that reads frames, not events."""
    engine = Engine()
    async with serving(engine) as (_, port), channel(f"127.0.0.1:{port}") as open_channel:
        stub: Any = worker_pb2_grpc.WorkerCallsStub(open_channel)
        stream = stub.Serve()
        starts = [
            wire.start_command(StartCall(call_id, DecodeRequest(spec(f"{call_id}"), False), {}))
            for call_id in (1, 2, 3)
        ]
        await stream.write(wire.serve_request(starts))
        await until(lambda: len(engine.held) == 3)
        for step in range(3):
            for name in "123":
                engine.say(name, tokens_of(name, step))
            assert wire.events(await stream.read()) == [(int(name), tokens_of(name, step)) for name in "123"]
        stream.cancel()
        await until(lambda: not engine.held)


@pytest.mark.parametrize("num_read", [0, 1])
async def test_leaving_a_call_frees_it_and_leaves_the_others_alone(num_read: int) -> None:
    engine = Engine()
    async with joined(engine) as call, call("2") as other:
        async with call("1") as left:
            engine.say("1", tokens_of("1", 0))
            for index in range(num_read):
                assert await read(left) == tokens_of("1", index)
            engine.say("1", tokens_of("1", num_read))
            await until(lambda: len(engine.held) == 2)
        await until(lambda: engine.freed == ["1"])
        engine.say("2", tokens_of("2", 0))
        assert await read(other) == tokens_of("2", 0)
        assert engine.held == {"2"}


async def test_a_call_that_is_left_before_it_began_never_begins() -> None:
    engine = Engine()
    async with joined(engine) as call, call("1") as first:
        engine.say("1", tokens_of("1", 0))
        await read(first)
        async with call("2"):
            pass
        async with call("3") as third:
            engine.say("3", tokens_of("3", 0))
            await read(third)
        await until(lambda: engine.freed == ["3"])
        assert (len(engine.traces), engine.held) == (2, {"1"})


async def test_what_comes_of_a_call_after_it_was_left_is_dropped() -> None:
    """Its tokens are under way, then its failure, while the next call is served already."""
    received: list[StartCall | CancelCall] = []

    class Late(CallServicer):
        async def Serve(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            async for frame in requests:
                received.extend(wire.commands(frame))
                if len(received) == 1:
                    await context.write(wire.serve_response([(1, tokens_of("1", 0))]))
                if len(received) == 3:  # start, cancel, start
                    late: list[tuple[int, Event]] = [(1, tokens_of("1", 1)), (1, Failed("WorkerFailed", "late"))]
                    await context.write(wire.serve_response([*late, (1, CallEnded()), (2, tokens_of("2", 0))]))

    async with served(Late()) as (_, port), router() as calls:
        async with calls.decode(worker_at(port), spec("1"), await_kv=False, trace=Context()) as first:
            assert await read(first) == tokens_of("1", 0)
        async with calls.decode(worker_at(port), spec("2"), await_kv=False, trace=Context()) as second:
            assert await read(second) == tokens_of("2", 0)
    assert [type(command) for command in received[:3]] == [StartCall, CancelCall, StartCall]


async def test_an_event_of_a_newer_version_fails_its_call() -> None:
    class Newer(CallServicer):
        async def Serve(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            async for _ in requests:
                await context.write(worker_pb2.ServeResponse(events=[worker_pb2.Event(call_id=1)]))

    async with served(Newer()) as (_, port), router() as calls:
        stream = calls.decode(worker_at(port), spec("1"), await_kv=False, trace=Context())
        failure = await failure_of(stream.read())
    assert (type(failure.error), "newer version" in str(failure)) == (WorkerFailed, True)


async def test_a_call_that_has_ended_is_not_cancelled() -> None:
    """The last tokens and the end come in one frame, so that a served call costs the router one message."""
    engine, received = Engine(), list[StartCall | CancelCall]()

    class Recording(CallServicer):
        async def Serve(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            async def recorded() -> AsyncIterator[worker_pb2.ServeRequest]:
                async for frame in requests:
                    received.extend(wire.commands(frame))
                    yield frame

            await super().Serve(recorded(), context)

    async with served(Recording(decode=engine.decode)) as (_, port), router() as calls:
        for name in "12":
            async with calls.decode(worker_at(port), spec(name), await_kv=False, trace=Context()) as stream:
                engine.say(name, NewTokens(token_ids=(7,), finish_reason=FinishReason.LENGTH), None)
                assert await read(stream) == NewTokens(token_ids=(7,), finish_reason=FinishReason.LENGTH)
        assert "ended the call early" in str(await failure_of(stream.read())), "and nothing more comes"
        async with calls.decode(worker_at(port), spec("3"), await_kv=False, trace=Context()):
            await until(lambda: engine.held)
        await until(lambda: len(engine.freed) == 3)
    assert [(type(command), command.call_id) for command in received] == [
        (StartCall, 1),
        (StartCall, 2),
        (StartCall, 3),
        (CancelCall, 3),
    ]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (Overloaded("full", retry_after_s=2.5), Overloaded("full", retry_after_s=2.5)),
        (InvalidRequest("too long"), InvalidRequest("too long")),
        (TransferCorrupted("by the link"), TransferCorrupted("by the link")),
        (ValueError("a defect"), WorkerFailed("worker-0 (decode) failed: internal error; the worker's log says more")),
        (BatonError("odd"), WorkerFailed("worker-0 (decode) failed: odd")),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_arrives_as_what_it_was_and_after_what_came_before(
    raised: Exception, expected: BatonError, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    async with joined(engine) as call, call("2") as other, call("1") as stream:
        engine.say("1", tokens_of("1", 0), raised)
        await until(lambda: engine.freed == ["1"])
        assert await read(stream) == tokens_of("1", 0)
        failure = await failure_of(stream.read())
        assert (type(failure.error), str(failure.error)) == (type(expected), str(expected))
        assert failure.worker.info.id == "worker-0"
        if isinstance(failure.error, Overloaded):
            assert failure.error.retry_after_s == 2.5
        engine.say("2", tokens_of("2", 0))
        assert await read(other) == tokens_of("2", 0), "another call goes on"
    assert ("a call failed unexpectedly" in caplog.text) == isinstance(raised, ValueError)


async def test_a_worker_that_does_not_do_this_says_so() -> None:
    async with serving(Engine()) as (_, port), router() as calls:
        stream = calls.prefill(worker_at(port), spec("1"), TICKET, source=None, trace=Context())
        failure = await failure_of(stream.read())
    assert type(failure.error).__name__ == "Unsupported"


async def test_the_end_of_the_stream_fails_all_its_calls_at_once_and_the_next_call_opens_another() -> None:
    engine = Engine()
    async with router() as calls:
        async with serving(engine) as (rpc, port):
            worker = worker_at(port)
            streams = [calls.decode(worker, spec(name), await_kv=False, trace=Context()) for name in "12345"]
            reading = [asyncio.ensure_future(failure_of(stream.read())) for stream in streams[1:]]
            engine.say("1", tokens_of("1", 0))
            await until(lambda: len(engine.held) == 5)
            await asyncio.sleep(0.05)
            await rpc.stop(0)
            await until(lambda: not engine.held)
            assert await read(streams[0]) == tokens_of("1", 0), "what came before the end is not lost"
            failures = [await failure_of(streams[0].read()), *[await each for each in reading]]
            assert {(type(f.error), f.worker) for f in failures} == {(WorkerFailed, worker)}
            assert all("worker-0 (decode)" in str(failure) for failure in failures)
        failure = await failure_of(calls.decode(worker, spec("6"), await_kv=False, trace=Context()).read())
        assert isinstance(failure.error, WorkerFailed), "nobody listens"
        async with serving(again := Engine(), port):
            async with asyncio.timeout(20):
                again.say("7", tokens_of("7", 0))
                while True:  # grpc's channel waits a moment before it tries again
                    async with calls.decode(worker, spec("7"), await_kv=False, trace=Context()) as stream:
                        with contextlib.suppress(WorkerCallError):
                            assert await stream.read() == tokens_of("7", 0)
                            break
                    await asyncio.sleep(0.1)
        for stream in streams:
            await stream.__aexit__(None, None, None)  # after the end: there is nobody to tell


async def test_a_router_that_goes_away_frees_all_its_calls_and_no_other_routers() -> None:
    """Both count their calls from one."""
    engine = Engine()
    async with serving(engine) as (_, port), router() as staying:
        others = [staying.decode(worker_at(port), spec(name), await_kv=False, trace=Context()) for name in "789"]
        await until(lambda: len(engine.held) == 3)
        async with router() as leaving:
            for name in "12":
                leaving.decode(worker_at(port), spec(name), await_kv=False, trace=Context())
            await until(lambda: len(engine.held) == 5)
        await until(lambda: sorted(engine.freed) == ["1", "2"])
        for name, other in zip("789", others, strict=True):
            engine.say(name, tokens_of(name, 0))
            assert await read(other) == tokens_of(name, 0)


async def test_nothing_breaks_into_the_cleaning_up_of_a_call_that_was_left(caplog: pytest.LogCaptureFixture) -> None:
    """Not even the stream's end: what is freed half way would leak."""
    engine = Engine(cleaning=asyncio.Event())
    assert engine.cleaning is not None
    async with serving(engine) as (_, port):
        async with router() as calls:
            async with calls.decode(worker_at(port), spec("1"), await_kv=False, trace=Context()):
                await until(lambda: engine.held)
            engine.say("2", tokens_of("2", 0))
            await read(calls.decode(worker_at(port), spec("2"), await_kv=False, trace=Context()))
        await asyncio.sleep(0.1)
        assert engine.held == {"1", "2"}
        engine.cleaning.set()
        await until(lambda: sorted(engine.freed) == ["1", "2"])
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_call_that_nobody_reads_holds_up_no_other() -> None:
    engine = Engine()
    num_unread = 50_000  # more than gRPC's flow control would let through
    async with joined(engine) as call, call("1") as unread, call("2") as other:
        engine.say("1", *(tokens_of("1", index) for index in range(num_unread)))
        engine.say("2", tokens_of("2", 0))
        assert await read(other) == tokens_of("2", 0)
        assert await read_ids(unread, num_unread) == ids_of("1", num_unread)


async def test_a_read_that_is_given_up_loses_nothing() -> None:
    engine = Engine()
    async with joined(engine) as call, call("1") as stream:
        reading = asyncio.create_task(stream.read())
        await until(lambda: engine.held)
        await cancel_and_wait((reading,))
        engine.say("1", tokens_of("1", 0))
        assert await read(stream) == tokens_of("1", 0)


async def test_each_call_has_its_own_trace() -> None:
    engine = Engine()
    spans = [SpanContext(number, number, True, TraceFlags(1)) for number in (5, 6)]
    async with serving(engine) as (_, port), router() as calls, contextlib.AsyncExitStack() as stack:
        for name, span in zip("12", spans, strict=True):
            trace = set_span_in_context(NonRecordingSpan(span))
            await stack.enter_async_context(calls.decode(worker_at(port), spec(name), await_kv=False, trace=trace))
        await until(lambda: len(engine.held) == 2)
    found = [get_current_span(trace).get_span_context().trace_id for trace in engine.traces]
    assert found == [5, 6]


async def test_the_stream_of_a_past_incarnation_is_closed() -> None:
    engine, newer = Engine(), Engine()
    async with serving(engine) as (_, port), serving(newer) as (_, other_port), router() as calls:
        stream = calls.decode(worker_at(port), spec("1"), await_kv=False, trace=Context())
        await until(lambda: engine.held)
        await calls.forget_past_incarnations([worker_at(other_port)])
        assert isinstance((await failure_of(stream.read())).error, WorkerFailed)
        await until(lambda: engine.freed == ["1"])
        again = calls.decode(worker_at(other_port), spec("2"), await_kv=False, trace=Context())
        newer.say("2", tokens_of("2", 0))
        assert await read(again) == tokens_of("2", 0)


# -- what no router of ours sends --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def raw_stream(servicer: CallServicer) -> AsyncIterator[Any]:
    async with served(servicer) as (_, port), channel(f"127.0.0.1:{port}") as open_channel:
        stub: Any = worker_pb2_grpc.WorkerCallsStub(open_channel)
        stream = stub.Serve()
        yield stream
        stream.cancel()


async def write_starts(stream: Any, *starts: StartCall) -> None:
    await stream.write(wire.serve_request([wire.start_command(start) for start in starts]))


def write_fields(sequence: worker_pb2.SequenceSpec, change: dict[str, Any]) -> None:
    """What no router of ours would write, by the names of the sequence's fields and of its sampling's."""
    for name, value in change.items():
        message: Any = sequence if name in sequence.DESCRIPTOR.fields_by_name else sequence.sampling
        message.ClearField(name)
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif value is not None:
            setattr(message, name, value)


async def heard(stream: Any) -> list[tuple[int, Event | None]]:
    async with asyncio.timeout(10):
        return wire.events(await stream.read())


def decoding(call_id: int, request: SequenceSpec) -> StartCall:
    return StartCall(call_id, DecodeRequest(request, await_kv=False), {})


async def test_a_call_id_that_is_taken_is_refused_and_nothing_of_it_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The first call goes on, ends with the stream, and a worker that drains waits for neither."""
    engine = Engine()
    calls = CallServicer(decode=engine.decode)
    async with raw_stream(calls) as stream:
        await write_starts(stream, decoding(7, spec("1")))
        await until(lambda: engine.held == {"1"})
        await write_starts(stream, decoding(7, spec("2")))
        ((call_id, refusal),) = await heard(stream)
        assert isinstance(refusal, Failed)
        assert (call_id, refusal.kind) == (7, "InvalidRequest")
        assert "call 7 of this stream is running already" in refusal.message
        engine.say("1", tokens_of("1", 0))
        assert await heard(stream) == [(7, tokens_of("1", 0))]
        assert (engine.held, calls.num_running) == ({"1"}, 1)
    async with asyncio.timeout(10):
        await calls.wait_until_idle()
    assert (engine.freed, calls.num_running) == (["1"], 0)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    # gRPC's own poller finds its socket read already, now and then, where several tests have had loops in this process.
    assert [error for error in errors if "PollerCompletionQueue" not in error] == []


async def test_the_id_of_a_call_that_has_ended_may_come_again() -> None:
    engine = Engine()
    async with raw_stream(CallServicer(decode=engine.decode)) as stream:
        for name in "12":
            await write_starts(stream, decoding(7, spec(name)))
            engine.say(name, tokens_of(name, 0), None)
            said: list[tuple[int, Event | None]] = []
            while len(said) < 2:
                said += await heard(stream)
            assert said == [(7, tokens_of(name, 0)), (7, CallEnded())]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 2**31 - 1}, "top_k"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"seed": None}, "seed"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("x",)}, "stop strings"),
        ({"n": 2}, "stop strings and n"),
        ({"token_ids": (1,) * 7}, "max_tokens"),
        ({"ttft_s": float("nan")}, "ttft_s"),
        ({"itl_s": float("nan")}, "itl_s"),
        ({"itl_s": -1.0}, "itl_s"),
        ({"stop_token_ids": (1,) * 5000}, "stop_token_ids"),
        ({"cache_seed": b"x" * 17}, "cache_seed"),
        ({"request_id": "x" * 200_000}, "bytes"),
        ({"token_ids": (1,) * 200_000}, "bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_sequence_that_no_engine_could_serve_never_reaches_one(change: dict[str, Any], rule: str) -> None:
    """Such a value fails the step in which it is sampled, and every other sequence of it: again on the next worker."""
    engine = Engine()
    async with raw_stream(CallServicer(decode=engine.decode, max_model_len=8192)) as stream:
        commands = [wire.start_command(decoding(number, spec(str(number)))) for number in (1, 2)]
        write_fields(commands[0].decode.sequence, change)
        await stream.write(wire.serve_request(commands))
        ((call_id, refusal),) = await heard(stream)
        assert isinstance(refusal, Failed)
        assert (call_id, refusal.kind) == (1, "InvalidRequest")
        assert rule in refusal.message
        engine.say("2", tokens_of("2", 0))
        assert await heard(stream) == [(2, tokens_of("2", 0))]
        assert engine.held == {"2"}


async def test_a_ticket_that_is_too_long_is_not_read() -> None:
    long = replace(
        TICKET,
        layout=replace(
            TICKET.layout,
            groups=(GroupLayout(name="x" * 1000, layers=(), num_kv_heads=0, k_dim=0, v_dim=0, dtype=""),) * 4_000,
        ),
    )
    async with raw_stream(CallServicer(decode=Engine().decode, max_model_len=8192)) as stream:
        await write_starts(stream, StartCall(1, PrefillRequest(spec("1"), long), {}))
        ((_, refusal),) = await heard(stream)
    assert isinstance(refusal, Failed)
    assert "bytes is not read here" in refusal.message


async def test_more_commands_than_a_router_writes_end_its_stream() -> None:
    engine = Engine()
    calls = CallServicer(decode=engine.decode)
    async with raw_stream(calls) as stream:
        await write_starts(stream, decoding(1, spec("1")))
        await until(lambda: engine.held == {"1"})
        await stream.write(worker_pb2.ServeRequest(commands=[worker_pb2.Command()] * 100_000))
        with pytest.raises(grpc.aio.AioRpcError, match="a frame has 100000 commands"):
            await heard(stream)
        await until(lambda: engine.freed == ["1"])
    assert calls.num_running == 0


async def test_a_worker_that_refuses_this_router_is_lost_to_it_until_its_next_lease(tmp_path: Path) -> None:
    """The client's own key is not at fault. One proof opens a stream for all calls."""
    write_private(tmp_path / "secret", draw_secret())
    engine = Engine()
    endpoints = member_auth(KeyFile(tmp_path / "secret", Principal.WORKER), "now", WORKERS_RULES)
    servicer = CallServicer(decode=engine.decode)
    async with (
        served(servicer, endpoints=endpoints) as (_, port),
        router(KeyFile(tmp_path / "secret", Principal.ROUTER)) as calls,
        router() as stranger,
    ):
        for client, incarnation in ((stranger, "now"), (calls, "before")):
            worker = worker_at(port, incarnation=incarnation)
            async with client.decode(worker, spec("1"), await_kv=False, trace=Context()) as stream:
                failure = await failure_of(read(stream))
            assert type(failure.error) is WorkerFailed, "no client of ours is unauthenticated"
            assert "worker-0 (decode) does not serve this router: " in str(failure.error)
        assert not engine.said, "no call began"
        for name in ("1", "2"):
            engine.say(name, tokens_of(name, 0))
            worker = worker_at(port, incarnation="now" if name == "1" else "before")
            async with calls.decode(worker, spec(name), await_kv=False, trace=Context()) as stream:
                assert await read_ids(stream, 1) == ids_of(name, 1)
