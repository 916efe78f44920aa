"""Whatever a router or a peer sends to a worker, it ends with a typed error or works, and everybody else is served.

Two real workers share one event loop, in a thread of its own, with real gRPC, links and Redis. What is sent begins as
what ours would send, and then some of its fields are changed to what no honest one holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import psutil
import pytest
from google.protobuf.message import Message
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.context import Context

from baton import wire
from baton.blocks import block_keys
from baton.cluster import Role, Worker, WorkerLoad, WorkerState
from baton.config import ClusterConfig, Config, EngineConfig, IndexConfig, TestingConfig, TransferConfig
from baton.errors import BatonError, TransferCorrupted
from baton.messages import (
    Abort,
    CallEnded,
    Commit,
    DecodeRequest,
    Decoding,
    Event,
    Failed,
    FetchRequest,
    FirstToken,
    Grant,
    Hello,
    NewTokens,
    Offer,
    Ping,
    PrefillRequest,
    PrefixSource,
    Pull,
    SequenceSpec,
    StartCall,
    Ticket,
    TransportReady,
    Welcome,
)
from baton.rpc import channel
from baton.rpc.errors import ERROR_KEY
from baton.rpc.member_auth import member_metadata
from baton.trust import PERMIT_S, Party, Permit, Principal, keys_digest
from baton.v1 import kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from deploy.embedded_redis import EmbeddedRedis
from engine.core.outputs import Reserved
from engine.core.sequence import Purpose
from engine.engines import engine_over
from engine.testing import ArithmeticRunner, expected_tokens
from kvstore.transfer.connection.reservations import Expected
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from kvstore.transfer.transport.shm import host_id
from router.serve.worker_client import WorkerCallError, WorkerClient, WorkerStream
from tests.support.builders import sequence_spec
from tests.support.members import engine_of, keys_of, secret_file
from tests.support.spoiling import spoiled, varint
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import served
from worker.member import Member
from worker.process import running

T = TypeVar("T")
HOST = "127.0.0.1"
NUM_BLOCKS, MAX_MODEL_LEN = 256, 1024
PROMPT = tuple(range(1000, 1100))
NUM_ROUNDS = int(os.environ.get("HOSTILE_ROUNDS", "3"))
"""Of the random test; each sends PER_ROUND messages at a time."""
PER_ROUND = 24
ANSWER_S = 20.0
"""On a machine that does other things; alone it is the links' timeouts, under a second."""
MAX_HELD_S = 0.5
"""Of the processor, that the event loop may spend between two looks at what is ready."""
MAX_GROWTH = 128 * 2**20


def small_spec(name: str, prompt: tuple[int, ...] = PROMPT) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=4)


# -- the workers -----------------------------------------------------------------------------------------------------


class Loop:
    """An event loop in a thread, and the longest time for which anything held it, in seconds of the processor."""

    def __init__(self) -> None:
        self.longest_held_s = 0.0
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._beating = asyncio.run_coroutine_threadsafe(self._beat(), self._loop)

    def __call__(self, work: Coroutine[Any, Any, T], within_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def close(self) -> None:
        self._is_closing = True
        self._beating.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _beat(self) -> None:
        while not self._is_closing:
            began_s = time.thread_time()
            await asyncio.sleep(0.005)
            self.longest_held_s = max(self.longest_held_s, time.thread_time() - began_s)


@dataclass
class Cluster:
    prefill: Member
    decode: Member
    calls: WorkerClient
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    async def serve_well(self) -> None:
        """A request that both of them serve, and one that each serves alone."""
        spec = small_spec(f"good-{next(self.numbers)}")
        expected = expected_tokens(PROMPT, 4)
        async with asyncio.timeout(ANSWER_S), self._calls_of(spec) as decode:
            ticket = await decode.read()
            async with self.calls.prefill(at(self.prefill), spec, ticket, source=None, trace=Context()) as prefill:
                first = await prefill.read()
                assert isinstance(first, FirstToken)
                tokens = [first.token_id]
                await prefill.read()
            while len(tokens) < len(expected):
                tokens += tokens_in(await decode.read())
        assert tokens == expected
        for member in (self.prefill, self.decode):
            alone = self.calls.decode(at(member), spec, await_kv=False, trace=Context())
            async with asyncio.timeout(ANSWER_S), alone as stream:
                tokens = []
                while len(tokens) < len(expected):
                    tokens += tokens_in(await stream.read())
            assert tokens == expected

    def _calls_of(self, spec: SequenceSpec) -> Any:
        return self.calls.decode(at(self.decode), spec, await_kv=True, trace=Context())

    async def check(self) -> None:
        """Nobody holds anything any more, the books are in order, and both still serve."""
        for member in (self.prefill, self.decode):
            await until(lambda: engine_of(member).is_idle, ANSWER_S, seen=lambda: member.worker_id)  # noqa: B023 - at once
            engine_of(member).check()
            member.kv.receiver.check()
            assert engine_of(member).pool.counts().in_use == 0
        await self.serve_well()


def tokens_in(event: Any) -> tuple[int, ...]:
    assert isinstance(event, NewTokens), event
    return event.token_ids


def at(member: Member) -> Worker:
    return Worker(member.info, WorkerLoad(state=WorkerState.READY))


@contextlib.asynccontextmanager
async def started(redis_url: str) -> AsyncIterator[Cluster]:
    config = Config(
        cluster=ClusterConfig(secret=secret_file()),
        engine=EngineConfig(max_num_seqs=32),
        testing=TestingConfig(arithmetic=True),
        index=IndexConfig(redis_url=redis_url),
        transfer=TransferConfig(
            slot_bytes=4096, open_timeout_s=0.5, op_timeout_s=0.5, pull_timeout_s=0.5, ping_s=0.2, resend_s=0.2,
            lease_s=1.0, transports=("shm", "tcp"),
        ),
    )  # fmt: skip
    calls = WorkerClient(keys_of(Principal.ROUTER))
    async with contextlib.AsyncExitStack() as stack:
        members = {}
        for number, role in enumerate(Role):
            runner = ArithmeticRunner(NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, max_num_seqs=32)
            control, _ = await stack.enter_async_context(
                running(config, role, f"worker-{number}", HOST, engine_over(runner, config.engine))
            )
            members[role] = control.member
        stack.push_async_callback(calls.close)
        yield Cluster(members[Role.PREFILL], members[Role.DECODE], calls)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    gc.collect()
    gc.freeze()  # A full collection of what other tests of this process have left holds the loop for half a second.
    yield loop
    gc.unfreeze()
    loop.close()


@pytest.fixture(scope="module")
def cluster(loop: Loop) -> Iterator[Cluster]:
    with EmbeddedRedis() as redis:
        context = started(redis.url)
        yield loop(context.__aenter__())
        loop(context.__aexit__(None, None, None))


# -- what is sent ----------------------------------------------------------------------------------------------------

Change = Callable[[Message], None]
"""Makes of an honest message, in place, what is sent."""


@dataclass(frozen=True)
class Answer:
    """What came back: the kinds of events or messages, and the typed error at the end, if there was one."""

    said: tuple[str, ...]
    kind: str = ""
    text: str = ""


SERVE, PULL, SESSION = "/baton.v1.WorkerCalls/Serve", "/baton.v1.KvControl/Pull", "/baton.v1.KvControl/Session"


def proof(member: Member, caller: Principal, method: str) -> tuple[tuple[str, bytes], ...]:
    """With which that caller's call of the member is admitted, if it may call the method."""
    return member_metadata(keys_of(caller), method, member.incarnation)


async def call(member: Member, request: Any, change: Change) -> Answer:
    """One call of a router. A decode worker that has given a ticket, or began to answer, has done its part."""
    command = wire.start_command(StartCall(1, request, {}))
    change(command)
    async with channel(member.info.address) as link:
        stub: Any = worker_pb2_grpc.WorkerCallsStub(link)
        stream = stub.Serve(metadata=proof(member, Principal.ROUTER, SERVE))
        await stream.write(worker_pb2.ServeRequest(commands=[command]))
        said: list[str] = []
        try:
            while True:
                for _, event in wire.events(await stream.read()):
                    said.append(type(event).__name__)
                    if isinstance(event, Failed):
                        return Answer(tuple(said), event.kind, event.message)
                    if is_enough(event):
                        return Answer(tuple(said))
        except grpc.aio.AioRpcError as error:
            return Answer(tuple(said), *typed(error))
        finally:
            stream.cancel()


def is_enough(event: Event | None) -> bool:
    return isinstance(event, (CallEnded, Ticket, NewTokens))


async def pull(member: Member, request: Pull, change: Change) -> Answer:
    message = wire.pull_to_pb(request)
    change(message)
    async with channel(member.info.address) as link:
        stub: Any = kv_pb2_grpc.KvControlStub(link)
        try:
            await stub.Pull(message, metadata=proof(member, Principal.WORKER, PULL))
        except grpc.aio.AioRpcError as error:
            return Answer((), *typed(error))
    return Answer(("PullResponse",))


async def session(member: Member, messages: list[Any], change: Change) -> Answer:
    """A peer that sends; `change` sees each of its messages."""
    requests = [wire.session_request(message) for message in messages]
    for request in requests:
        change(request)
    async with channel(member.info.address) as link:
        stub: Any = kv_pb2_grpc.KvControlStub(link)
        stream = stub.Session(metadata=proof(member, Principal.WORKER, SESSION))
        said: list[str] = []
        try:
            for request in requests:
                await stream.write(request)
            while (response := await stream.read()) is not grpc.aio.EOF:
                said.append(str(response.WhichOneof("message")))
                if said[-1] in ("session_failed", "nack", "abort_ack", "commit_ack"):
                    reason = getattr(getattr(response, said[-1]), "reason", "")
                    return Answer(tuple(said), *reason.split(": ", 1)) if ": " in reason else Answer(tuple(said))
        except asyncio.InvalidStateError:
            return Answer(tuple(said), ENDED)
        except grpc.aio.AioRpcError as error:
            return Answer(tuple(said), *typed(error))
        finally:
            stream.cancel()
    return Answer(tuple(said))


ENDED, TOO_LONG = "ended while we wrote", "too long to be parsed"


def typed(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    if error.details() == "Internal error from Core":  # what a client's write says of a stream that was ended
        return ENDED, ""
    if "Received message larger than max" in (error.details() or ""):
        return TOO_LONG, error.details() or ""
    kind = dict(error.trailing_metadata() or ()).get(ERROR_KEY, "")
    return str(kind) or f"untyped {error.code().name}", error.details() or ""


class HostileReceiver(kv_pb2_grpc.KvControlServicer):
    """Answers a sender's session with what it is given, each message changed."""

    def __init__(self, messages: list[Any], change: Change) -> None:
        self._responses = [wire.session_response(message) for message in messages]
        for response in self._responses:
            change(response)

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        await anext(aiter(request_iterator))
        for response in self._responses:
            await context.write(response)
        async for _ in request_iterator:
            pass

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@contextlib.asynccontextmanager
async def reserved(cluster: Cluster, spec: SequenceSpec) -> AsyncIterator[tuple[Ticket, WorkerStream[Decoding]]]:
    """For the whole of a sequence, at the decode worker, and the call that holds it."""
    async with cluster.calls.decode(at(cluster.decode), spec, await_kv=True, trace=Context()) as stream:
        ticket = await stream.read()
        assert isinstance(ticket, Ticket)
        yield ticket, stream


@contextlib.asynccontextmanager
async def reserved_for_a_prefix(cluster: Cluster, spec: SequenceSpec) -> AsyncIterator[Ticket]:
    """As a worker does it that pulls what the prefill worker holds."""
    alone = cluster.calls.decode(at(cluster.prefill), spec, await_kv=False, trace=Context())
    async with alone, cluster.decode.engine.sequence(spec.prefix(len(spec.token_ids)), Purpose.RECEIVE) as handle:
        await alone.read()
        output = await handle.next()
        assert isinstance(output, Reserved)
        receiver = cluster.decode.kv.receiver
        ticket = receiver.expect(
            f"{spec.request_id}/prefix",
            len(spec.token_ids),
            output.num_cached_tokens,
            output.block_ids,
            expected=Expected.PREFIX,
        )
        try:
            yield ticket
        finally:
            await receiver.release(ticket)


async def answer(cluster: Cluster, kind: str, change: Change) -> Answer:
    """Sends one message, or one conversation, of a kind; `change` makes it what it should not be."""
    prefill, decode = cluster.prefill, cluster.decode
    spec = small_spec(f"{kind}-{next(cluster.numbers)}")
    source = PrefixSource(
        worker_id=prefill.worker_id,
        address=prefill.info.address,
        num_tokens=len(PROMPT),
        incarnation=prefill.incarnation,
    )
    if kind == "decode":
        return await call(decode, DecodeRequest(spec, False, source), change)
    if kind == "reserve":
        return await call(decode, DecodeRequest(spec, True), change)
    if kind == "fetch":
        return await call(decode, FetchRequest(spec, source), change)
    if kind == "pull":
        spec = small_spec(spec.request_id, tuple(range(next(cluster.numbers), 100 + next(cluster.numbers))))
        async with reserved_for_a_prefix(cluster, spec) as ticket:
            named = tuple(block_keys(spec.cache_seed, spec.token_ids))
            return await pull(prefill, Pull(ticket, named, permitted(cluster, ticket, named)), change)
    async with reserved(cluster, spec) as (ticket, _):
        if kind == "prefill":
            return await call(prefill, PrefillRequest(spec, ticket, None), change)
        ids = (ticket.transfer_id, ticket.generation)
        if kind == "session":
            layout, links = prefill.kv.sender.layout, ("shm", "tcp")
            hello = Hello(
                protocol_version=PROTOCOL_VERSION,
                worker_id="hostile",
                incarnation="h.1",
                wire_compat=decode.wire_compat,
                transports=links,
                layout=layout,
                rank=0,
                peer_rank=0,
                host_id=host_id(),
            )
            offer = Offer(
                transfer_id=ticket.transfer_id,
                generation=ticket.generation,
                plan_digest=b"x" * 16,
                num_chunks=3,
                wire_dtype="auto",
                num_tokens=ticket.num_tokens,
                chunk_bytes=4096,
            )
            sent = [hello, Ping(), offer, Commit(*ids, 5), Abort(*ids, "no")]
            return await session(decode, sent, change)
        assert kind == "receive"
        said = [Welcome(ticket.incarnation, "shm", 1), TransportReady(), Ping(), Grant(*ids)]
        async with served(HostileReceiver(said, change)) as (address, _server):
            return await call(prefill, PrefillRequest(spec, replace(ticket, kv_address=address), None), lambda _: None)


def permitted(cluster: Cluster, ticket: Ticket, keys: Sequence[bytes]) -> bytes:
    """A router's permit for what is asked for."""
    return Permit(
        puller=Party(ticket.decode_worker_id, ticket.incarnation),
        address=ticket.kv_address,
        source=Party(cluster.prefill.worker_id, cluster.prefill.incarnation),
        keys=keys_digest(keys),
        num_tokens=ticket.num_tokens,
        until_s=time.time() + PERMIT_S,
    ).signed(keys_of(Principal.ROUTER).keys)


KINDS = ("decode", "reserve", "fetch", "prefill", "pull", "session", "receive")


def within_limits(loop: Loop, cluster: Cluster, work: Callable[[], Awaitable[T]]) -> T:
    """Does it, and sees to it that nobody else has noticed."""

    async def run() -> T:
        async with asyncio.timeout(ANSWER_S):
            return await work()

    loop.longest_held_s = 0.0
    before = psutil.Process().memory_info().rss
    result = loop(run())
    loop(cluster.check())
    assert loop.longest_held_s < MAX_HELD_S
    assert psutil.Process().memory_info().rss - before < MAX_GROWTH
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_what_ours_send_is_served(loop: Loop, cluster: Cluster, kind: str) -> None:
    """So that what is refused below is refused for what was changed."""
    got = within_limits(loop, cluster, lambda: answer(cluster, kind, lambda _: None))
    expected = {
        "decode": ("NewTokens",),
        "reserve": ("Ticket",),
        "fetch": ("Fetched", "CallEnded"),
        "prefill": ("FirstToken", "Transferred", "CallEnded"),
        "pull": ("PullResponse",),
    }
    if kind in expected:
        assert (got.said, got.kind) == (expected[kind], "")
    elif kind == "session":
        assert got.said[0] == "welcome"
        assert "the two sides plan this transfer differently" in got.text
    else:
        assert got.said[0] == "FirstToken"
        assert got.kind in ("TransferError", "TransferRefused"), "the link is never joined"


def ticket_with(**changes: Any) -> Change:
    """Of a router's call or of a pull."""

    def change(message: Any) -> None:
        ticket = message.prefill.ticket if message.DESCRIPTOR.name == "Command" else message.ticket
        layout = {name: changes[name] for name in ("block_size", "tp_size") if name in changes}
        ticket.MergeFrom(worker_pb2.Ticket(**{k: v for k, v in changes.items() if k not in layout}))
        for name, value in layout.items():
            setattr(ticket.layout, name, value)

    return change


def hello_with(**changes: Any) -> Change:
    def change(message: Any) -> None:
        if message.HasField("hello"):
            for name, value in changes.items():
                setattr(message.hello.layout if name in ("block_size", "tp_size") else message.hello, name, value)

    return change


def many_keys(message: Any) -> None:
    message.block_keys.extend([b"k" * 16] * 200_000)


def many_groups(message: Any) -> None:
    ticket = message.prefill.ticket if message.DESCRIPTOR.name == "Command" else message.ticket
    ticket.layout.groups.extend([worker_pb2.GroupLayout()] * 200_000)


@pytest.mark.parametrize(
    ("kind", "change", "expected", "sentence"),
    [
        ("prefill", ticket_with(num_tokens=2**32 - 1), "TransferRefused", "the ticket is for 4294967295 tokens"),
        ("prefill", ticket_with(block_size=0), "TransferRefused", "a layout has blocks of 0 tokens"),
        ("prefill", ticket_with(tp_size=0), "TransferRefused", "a layout has 0 ranks"),
        ("prefill", ticket_with(tp_size=2**32 - 1), "TransferRefused", "a layout has 4294967295 ranks"),
        ("prefill", many_groups, "InvalidRequest", "is not read here"),
        ("pull", ticket_with(block_size=0), "TransferRefused", "a layout has blocks of 0 tokens"),
        ("pull", ticket_with(tp_size=2**32 - 1), "TransferRefused", "a layout has 4294967295 ranks"),
        ("pull", many_keys, "TransferRefused", "block keys are requested; this worker has at most 256"),
        ("pull", many_groups, "TransferRefused", "is not read here"),
        ("session", hello_with(block_size=0), "TransferRefused", "a layout has blocks of 0 tokens"),
        ("session", hello_with(tp_size=0), "TransferRefused", "a layout has 0 ranks"),
        ("session", hello_with(tp_size=2**32 - 1), "TransferRefused", "a layout has 4294967295 ranks"),
        ("session", hello_with(rank=7), "TransferRefused", "worker hostile has no rank 7"),
        ("session", hello_with(host_id="x" * 1_000_000), "TransferRefused", "is not read here"),
    ],
)
def test_a_message_against_the_workers_own_facts_is_refused_at_once(
    loop: Loop, cluster: Cluster, kind: str, change: Change, expected: str, sentence: str
) -> None:
    loop(cluster.serve_well())  # so that there is a prefix to be pulled
    got = within_limits(loop, cluster, lambda: answer(cluster, kind, change))
    assert (got.kind, sentence in got.text) == (expected, True), got


DRAIN = "/baton.v1.WorkerControl/Drain"


@pytest.mark.parametrize(
    ("method", "caller"),
    [(SERVE, Principal.ROUTER), (DRAIN, Principal.CONTROLLER), (PULL, Principal.WORKER), (SESSION, Principal.WORKER)],
)
def test_a_endpoint_opens_for_one_kind_of_member(loop: Loop, cluster: Cluster, method: str, caller: Principal) -> None:
    """Not for a stranger, nor for a proof that was used, or was made for another worker."""
    member, other = cluster.prefill, cluster.decode
    used = proof(member, caller, method)

    async def knock(metadata: Any) -> grpc.StatusCode:
        async with channel(member.info.address) as link:
            # No message begins so: who reads it says so. A call that is refused while a message of its stream
            # is written may end with gRPC's own INTERNAL: this one sends all that it has at once.
            call: Any = link.unary_stream(method)
            answers = call(b"\xff", metadata=metadata)
            code: grpc.StatusCode = await answers.code()
        # On a machine that is busy a connection may fail, and the proof has not been seen then.
        return code if code is not grpc.StatusCode.UNAVAILABLE else await knock(metadata)

    async def refused() -> list[bool]:
        strangers = [proof(member, each, method) for each in Principal if each is not caller]
        return [
            await knock(metadata) is grpc.StatusCode.UNAUTHENTICATED
            for metadata in ((), used, used, proof(other, caller, method), *strangers)
        ]

    assert within_limits(loop, cluster, refused) == [True, False, *[True] * (1 + len(Principal))]


def test_a_message_that_no_router_could_send_is_not_even_parsed(loop: Loop, cluster: Cluster) -> None:
    """A gigabyte of memory and a second of the loop, in a prefill's ticket: its layout has 16 million groups."""
    raw = b"\x1a\x00" * 16_000_000
    for tag in (10, 2, 2, 1):  # layout, ticket, prefill, commands
        raw = bytes([tag << 3 | 2]) + varint(len(raw)) + raw

    async def send() -> Answer:
        async with grpc.aio.insecure_channel(cluster.prefill.info.address) as link:
            stream: Any = link.stream_stream(SERVE)(metadata=proof(cluster.prefill, Principal.ROUTER, SERVE))
            await stream.write(raw)
            try:
                await stream.read()
            except grpc.aio.AioRpcError as error:
                return Answer((), *typed(error))
        return Answer(())

    got = within_limits(loop, cluster, send)
    assert got.kind == TOO_LONG


def test_a_token_that_is_none_of_the_models_never_reaches_the_engine(loop: Loop, cluster: Cluster) -> None:
    """It would fail the step of all that decode there."""

    async def kv_transfer() -> None:
        spec = small_spec(f"token-{next(cluster.numbers)}", tuple(range(7, 7 + 32)))
        async with reserved(cluster, spec) as (ticket, stream):
            async with cluster.prefill.kv.sender.transfer(ticket) as transfer:
                transfer.extend(((0, 1),))
                await transfer.finish(2**32 - 1)
            with pytest.raises(WorkerCallError, match="token 4294967295 came with the KV") as caught:
                await stream.read()
            assert isinstance(caught.value.error, TransferCorrupted)

    within_limits(loop, cluster, kv_transfer)


# -- anything at all -------------------------------------------------------------------------------------------------


@settings(max_examples=NUM_ROUNDS, phases=(Phase.generate,))
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32)), min_size=PER_ROUND, max_size=PER_ROUND))
def test_whatever_is_sent_ends_and_harms_nobody(loop: Loop, cluster: Cluster, sent: list[tuple[str, int]]) -> None:
    async def send_all() -> list[Answer]:
        rolled = [(kind, random.Random(seed)) for kind, seed in sent]
        works = [answer(cluster, kind, lambda m, dice=dice: spoiled(m, dice)) for kind, dice in rolled]  # type: ignore[misc]
        return await asyncio.gather(*works)

    answers = within_limits(loop, cluster, send_all)
    known = {cls.__name__ for cls in tree(BatonError)}
    for (kind, seed), got in zip(sent, answers, strict=True):
        assert got.kind in {"", ENDED, TOO_LONG, *known}, (kind, seed, got)
        assert "internal error" not in got.text, (kind, seed, got)


def tree(cls: type[BatonError]) -> list[type[BatonError]]:
    return [each for sub in cls.__subclasses__() for each in (sub, *tree(sub))]
