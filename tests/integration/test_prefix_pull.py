"""A conversation's next turn finds what the turn before left, wherever it is; and no hand-over delays a first token."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.context import Context

from baton import wire
from baton.cluster import ClusterStatus, Role, Worker, WorkerInfo, WorkerLoad, WorkerState
from baton.config import RouterConfig
from baton.engine.arithmetic import expected_tokens
from baton.errors import BatonError, Overloaded, TransferCorrupted, TransferError, WorkerFailed
from baton.messages import FirstToken, KvLayout, NewTokens, PrefixSource, SequenceSpec, Ticket
from baton.rpc import RpcServer
from baton.sampling import FinishReason
from baton.telemetry.instruments import Instruments
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.dispatch import ChoiceRecord, Dispatcher
from router.pools import PoolView
from router.worker_calls import WorkerCalls
from tests.integration.cluster import Answer, Cluster, request, running_cluster
from tests.integration.test_plumbing import metric, prompt_of, sampling
from tests.integration.test_real_model import Reference, greedy, num_excepted

BLOCK = 16
ARITHMETIC = {"engine_runner": "arithmetic", "engine_num_blocks": "1024"}


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def told() -> None:
    """The index is told within one step, and the router's mirror follows at once: half a second is long."""
    time.sleep(0.5)


class Conversation:
    """Two turns of arithmetic: the second prompt is the first with its answer and something new."""

    def __init__(self, seed: int, num_prompt: int = 200, num_answer: int = 100, num_new: int = 80) -> None:
        self.first_prompt = prompt_of(seed, num_prompt)
        self.num_answer = num_answer
        self.answer = expected_tokens(self.first_prompt, num_answer)
        self.so_far = self.first_prompt + self.answer
        self.second_prompt = self.so_far + prompt_of(seed + 1, num_new)
        self.num_held = whole_blocks(len(self.so_far) - 1)
        """Of the second prompt, by the decode worker: the KV of a token is computed with the next one."""

    def first_turn(self, cluster: Cluster) -> Answer:
        answer = cluster.generate(token_ids=self.first_prompt, sampling=sampling(self.num_answer))
        assert answer.token_ids == self.answer
        told()
        return answer

    def second_turn(self, cluster: Cluster) -> Answer:
        answer = cluster.generate(token_ids=self.second_prompt, sampling=sampling(20))
        assert answer.token_ids == expected_tokens(self.second_prompt, 20)
        return answer


@pytest.fixture(scope="module", params=["split", "auto"])
def cluster(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Cluster]:
    with running_cluster("--prefill", "2", "--decode", "2", router_mode=request.param, **ARITHMETIC) as running:
        yield running


def test_the_next_turn_finds_what_decoding_left(cluster: Cluster) -> None:
    """The prefill worker that computes the rest pulls the generated tokens' KV from the decode worker."""
    conversation = Conversation(100)
    first = conversation.first_turn(cluster)
    before = metric(cluster, "baton_kv_pulled_tokens_total")
    second = conversation.second_turn(cluster)
    assert second.usage.cached_tokens == conversation.num_held
    assert (second.timing.mode, second.timing.retries) == ("split", 0)
    assert second.timing.prefill_worker == first.timing.prefill_worker, "which holds the first prompt"
    held_there = whole_blocks(len(conversation.first_prompt))
    cluster.wait_until_idle()
    assert _soon(cluster, "baton_kv_pulled_tokens_total", before + conversation.num_held - held_there)
    third = conversation.second_turn(cluster)
    assert third.usage.cached_tokens == whole_blocks(len(conversation.second_prompt) - 1), "by whoever pulled it"


def test_the_source_dies_just_before_the_next_turn(cluster: Cluster) -> None:
    cluster.wait_for(lambda s: s["pools"]["decode"]["ready"] == 2)
    conversation = Conversation(200)
    first = conversation.first_turn(cluster)
    source = cluster.worker(first.timing.decode_worker)
    psutil.Process(source["pid"]).kill()
    second = conversation.second_turn(cluster)
    assert second.timing.decode_worker != source["id"]
    assert second.usage.cached_tokens == whole_blocks(len(conversation.first_prompt)), "what the prefill worker held"
    cluster.wait_for(
        lambda s: s["pools"]["decode"]["ready"] == 2 and cluster.worker(source["id"])["epoch"] > source["epoch"]
    )
    cluster.wait_until_idle()


@pytest.fixture(scope="module")
def slow_cluster(model_dir: Path) -> Iterator[Cluster]:
    """Two workers that compute what they decode, and 400 ms for each chunk that travels."""
    with running_cluster(
        "--prefill", "0", "--decode", "2", router_mode="aggregated", faults="link_delay_ms=400", **ARITHMETIC
    ) as running:
        yield running


class Busy:
    """A stream that keeps the owner of a conversation busy, so that its next turn is placed elsewhere."""

    def __init__(self, cluster: Cluster, conversation: Conversation) -> None:
        self._prompt = conversation.so_far + prompt_of(7, 800)
        self._num_tokens = 6000
        self._messages = cluster.inference.Generate(
            request(token_ids=self._prompt, sampling=sampling(self._num_tokens)), timeout=240
        )
        self._tokens = list(next(self._messages).token_ids)

    def finish(self) -> Answer:
        messages = list(self._messages)
        tokens = self._tokens + [token_id for message in messages for token_id in message.token_ids]
        assert tokens == expected_tokens(self._prompt, self._num_tokens)
        return Answer(messages)


def test_a_busy_owner_is_a_source_of_its_peers(slow_cluster: Cluster) -> None:
    """Decode worker to decode worker: the whole prefix comes over."""
    conversation = Conversation(300)
    owner = conversation.first_turn(slow_cluster).timing.decode_worker
    busy = Busy(slow_cluster, conversation)
    second = conversation.second_turn(slow_cluster)
    assert busy.finish().timing.decode_worker == owner
    assert second.timing.decode_worker != owner
    assert second.usage.cached_tokens == conversation.num_held
    slow_cluster.wait_until_idle()


def test_the_source_dies_while_it_sends(slow_cluster: Cluster) -> None:
    """The prompt is computed after all, in the same attempt; the owner's own stream goes on elsewhere."""
    cluster = slow_cluster
    conversation = Conversation(400)
    owner = cluster.worker(conversation.first_turn(cluster).timing.decode_worker)
    busy = Busy(cluster, conversation)
    before = metric(cluster, "baton_kv_transfers_total", 'outcome="failed_pulls"')
    timer = threading.Timer(0.2, psutil.Process(owner["pid"]).kill)
    timer.start()
    second = conversation.second_turn(cluster)
    timer.join()
    assert (second.timing.retries, second.usage.cached_tokens) == (0, 0)
    assert second.timing.decode_worker != owner["id"]
    assert second.timing.ttft_s < 5
    assert busy.finish().timing.retries == 1
    assert _soon(cluster, "baton_kv_transfers_total", before + 1, 'outcome="failed_pulls"')
    cluster.wait_for(lambda s: s["pools"]["decode"]["ready"] == 2)
    cluster.wait_until_idle()


def _soon(cluster: Cluster, name: str, value: float, label: str = "") -> bool:
    """Whether a metric of the workers' leases, which they renew every second, comes to a value."""
    deadline = time.monotonic() + 10
    while (seen := metric(cluster, name, label)) != value:
        assert time.monotonic() < deadline, f"{name} is {seen}, not {value}"
        time.sleep(0.1)
    return True


# -- the first token waits for no hand-over ----------------------------------------------------------------------------

LINK_DELAY_MS = 500
NUM_PAIRS = 11


def test_a_slow_link_delays_no_first_token(model_dir: Path) -> None:
    """500 ms for every chunk of the hand-over: the second token waits for it, the first does not."""
    with (
        running_cluster(router_mode="split", **ARITHMETIC) as fast,
        running_cluster(router_mode="split", faults=f"link_delay_ms={LINK_DELAY_MS}", **ARITHMETIC) as slow,
    ):
        for cluster in (fast, slow):
            for seed in range(5):
                _first_two(cluster, prompt_of(seed, 100))
        seen: list[tuple[FirstTwo, FirstTwo]] = []
        for i in range(NUM_PAIRS):
            prompt = prompt_of(1000 + i, 100)
            if i % 2:
                slowly = _first_two(slow, prompt)
                seen.append((_first_two(fast, prompt), slowly))
            else:
                seen.append((_first_two(fast, prompt), _first_two(slow, prompt)))
    fast_ttft_ms, slow_ttft_ms = ([1e3 * pair[i].first_s for pair in seen] for i in (0, 1))
    moved_ms = statistics.median(slow - fast for fast, slow in zip(fast_ttft_ms, slow_ttft_ms, strict=True))
    gap_ms = 1e3 * statistics.median(pair[1].gap_s - pair[0].gap_s for pair in seen)
    print(
        f"TTFT {statistics.median(fast_ttft_ms):.2f} ms, with a slow link {statistics.median(slow_ttft_ms):.2f} ms: "
        f"moved by {moved_ms:+.2f} ms (median of {NUM_PAIRS} pairs; the aim is 5); second token {gap_ms:.0f} ms later"
    )
    assert abs(moved_ms) < 100
    assert all(pair[1].gap_s >= 0.9 * LINK_DELAY_MS / 1e3 for pair in seen), "the link is slow"
    for _, slowly in seen:
        assert slowly.timing.transfer_s >= 0.9 * LINK_DELAY_MS / 1e3
        timing = slowly.timing
        stages_s = timing.queue_s + timing.prefill_s + timing.transfer_s + timing.decode_s
        assert stages_s == pytest.approx(timing.total_s, abs=0.1)


@dataclass(frozen=True, slots=True)
class FirstTwo:
    """As the client sees them."""

    first_s: float
    gap_s: float
    timing: Any


def _first_two(cluster: Cluster, prompt: list[int]) -> FirstTwo:
    began_s = time.perf_counter()
    messages = cluster.inference.Generate(request(token_ids=prompt, sampling=sampling(2)), timeout=60)
    first = next(messages)
    first_s = time.perf_counter()
    second = next(messages)
    gap_s = time.perf_counter() - first_s
    assert [*first.token_ids, *second.token_ids] == expected_tokens(prompt, 2)
    return FirstTwo(first_s - began_s, gap_s, second.timing)


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


def test_a_pulled_prefix_gives_the_tokens_of_generate(split_cluster: Cluster, reference: Reference) -> None:
    prompt = reference.tokenizer.encode("Once upon a time, in a village by the sea, there lived a fisherman who")
    first = split_cluster.generate(token_ids=prompt, sampling={"temperature": 0, "max_tokens": 100, "ignore_eos": True})
    told()
    so_far = prompt + first.token_ids
    second_prompt = so_far + reference.tokenizer.encode(" The next morning, the fisherman")
    before = metric(split_cluster, "baton_kv_pulled_tokens_total")
    second = greedy(split_cluster, second_prompt)
    assert second.usage.cached_tokens == whole_blocks(len(so_far) - 1)
    assert second.timing.retries == 0
    num_pulled = whole_blocks(len(so_far) - 1) - whole_blocks(len(prompt))
    assert _soon(split_cluster, "baton_kv_pulled_tokens_total", before + num_pulled)
    excepted = num_excepted(second.token_ids, *reference.generate(second_prompt, len(second.token_ids)))
    print(f"{num_pulled} tokens pulled, {excepted} answers excepted at a near tie")


# -- what a request that is placed again has learned ------------------------------------------------------------------


@dataclass(slots=True)
class Workers(worker_pb2_grpc.DecodeWorkerServicer, worker_pb2_grpc.PrefillWorkerServicer):
    """Workers behind one address: the first call fails with `failure`, in split mode the first hand-over."""

    failure: BatonError
    sources: list[PrefixSource | None] = field(default_factory=list)

    async def Decode(  # noqa: N802 - the generated name
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        spec, await_kv, source = wire.decode_request_from_pb(request)
        if await_kv:
            yield wire.decode_response(_ticket(spec))
            await asyncio.Event().wait()
        self._count(source)
        yield wire.decode_response(NewTokens((5,), FinishReason.LENGTH))

    async def Prefill(  # noqa: N802 - the generated name
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        self._count(wire.prefill_request_from_pb(request)[2])
        yield wire.prefill_response(FirstToken(5, FinishReason.LENGTH, 0, 0.0, 0.0))

    def _count(self, source: PrefixSource | None) -> None:
        self.sources.append(source)
        if len(self.sources) == 1:
            raise self.failure


@contextlib.asynccontextmanager
async def dispatcher(
    workers: Workers, names: dict[str, Role], held: dict[str, int], mode: str
) -> AsyncIterator[tuple[Dispatcher, str]]:
    """A real dispatcher of workers that are not; and their address."""
    rpc = RpcServer(("baton.v1.DecodeWorker", "baton.v1.PrefillWorker"))
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(workers, rpc.server)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(workers, rpc.server)
    address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    pools = PoolView(lambda keys: held, time.monotonic)
    await pools.update([_worker(name, address, role) for name, role in names.items()])
    calls = WorkerCalls()
    instruments = Instruments("router", lambda: ClusterStatus({}, (), (), "", True, ()))
    try:
        yield Dispatcher(pools, calls, RouterConfig(mode=mode, worker_wait_s=1), instruments), address
    finally:
        await calls.close()
        await rpc.stop(0)
        instruments.shutdown()


SPEC = SequenceSpec("r", 0, tuple(range(400)), 400, 1, 0.0, 0, 1.0, 0.0, 0, (), False, b"seed")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (WorkerFailed("gone"), ["owner", "next"]),
        (TransferError("lost"), ["owner", "next"]),
        (Overloaded("full"), ["owner", "owner"]),
    ],
)
async def test_a_failed_attempts_source_is_not_named_again(failure: BatonError, expected: list[str]) -> None:
    """A worker that refused at once says nothing about the source."""
    workers = Workers(failure)
    names = {"a": Role.DECODE, "b": Role.DECODE, "owner": Role.PREFILL, "next": Role.PREFILL}
    async with dispatcher(workers, names, {"owner": 20, "next": 10}, "aggregated") as (dispatch, address):
        tokens = [message.token_ids async for message in dispatch.run(SPEC, ChoiceRecord(), Context())]
    assert tokens == [(5,)]
    held = {"owner": 320, "next": 160}
    assert workers.sources == [PrefixSource(name, address, held[name]) for name in expected]


@pytest.mark.parametrize(
    ("failure", "names", "stays"),
    [
        (TransferError("d0 is gone"), {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}, False),
        (TransferCorrupted("by the link"), {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}, True),
        (TransferError("d0 is gone"), {"p0": Role.PREFILL, "d0": Role.DECODE}, True),
    ],
)
async def test_who_did_not_answer_in_a_hand_over_is_left_at_once(
    failure: BatonError, names: dict[str, Role], stays: bool
) -> None:
    """The prefill worker says so: the decode worker's own stream, which hangs, may tell seconds later."""
    workers, record = Workers(failure), ChoiceRecord()
    async with dispatcher(workers, names, {"d0": 4}, "split") as (dispatch, _):
        tokens = [message.token_ids async for message in dispatch.run(SPEC, record, Context())]
    assert tokens == [(5,)]
    assert (record.retries, record.decode_worker == "d0") == (1, stays)


def _ticket(spec: SequenceSpec) -> Ticket:
    layout = KvLayout(BLOCK, 1, ())
    return Ticket(spec.sequence_id, 1, "d", "i", "h:1", len(spec.token_ids), 0, 30_000, "wire", layout)


def _worker(worker_id: str, address: str, role: Role) -> Worker:
    info = WorkerInfo(worker_id, role, address, 1, "node", 1, "content", "wire", BLOCK, 8192)
    return Worker(info, WorkerLoad(WorkerState.READY))
