"""What a cluster may go through while prompts are transferred: each client gets the answer to its own prompt."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster import Role
from baton.errors import TransferError, TransferRefused
from baton.v1 import kv_pb2_grpc
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner, expected_tokens
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.endpoint import KvEndpoint
from kvstore.transfer.protocol.chunk_header import PROTOCOL_VERSION
from router.placement import Mode
from tests.support.asking import prompt_of
from tests.support.event_log import EventLog
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import Worker, engine_worker, make_spec, read_all, with_link
from tests.unit.router.serve.scripted_workers import Bench
from tests.unit.scenarios.cluster import ask, router_of

CONFIG = with_link("tcp")
NUM_BLOCKS = 512
Endpoint = Callable[[KvEndpoint], kv_pb2_grpc.KvControlServicer]


def roles(prefill: Worker, decode: Worker) -> list[tuple[Role, Worker]]:
    return [(Role.PREFILL, prefill), (Role.DECODE, decode)]


@contextlib.asynccontextmanager
async def pair(
    mode: str = "disaggregated",
    *,
    num_blocks: int = NUM_BLOCKS,
    endpoint: Endpoint = lambda kv: kv,
    held: Mapping[str, int] | None = None,
) -> AsyncIterator[tuple[Bench, Worker, Worker]]:
    """A router, a prefill worker p0 and a decode worker d0, which has the endpoint."""
    async with (
        engine_worker("p0", ArithmeticRunner(num_blocks), CONFIG) as prefill,
        engine_worker("d0", ArithmeticRunner(num_blocks), CONFIG, endpoint=endpoint) as decode,
        router_of(roles(prefill, decode), mode, held) as router,
    ):
        yield router, prefill, decode
        await prefill.check_idle()
        await decode.check_idle()


# -- a failed transfer leaves nothing in a cache -----------------------------------------------------------------------


@pytest.mark.parametrize("faults", ["corrupt_chunk=7", "drop_chunk=7", "link_kill=7", "link_truncate=7"])
async def test_blocks_of_a_failed_transfer_are_in_no_cache(faults: str) -> None:
    """Neither in the worker's own table nor in what it tells, from which the index and every mirror are made."""
    told = EventLog()
    prompt = prompt_of(1, 400)
    config = with_link("tcp", slot_bytes=1024)  # some thirty chunks: the fault is in the middle
    async with (
        engine_worker("p0", ArithmeticRunner(NUM_BLOCKS), config, faults) as prefill,
        engine_worker("d0", ArithmeticRunner(NUM_BLOCKS), config, on_event=told) as decode,
        router_of(roles(prefill, decode), "disaggregated") as router,
    ):
        with pytest.raises(TransferError, match="4 placements failed"):
            await ask(router, make_spec(prompt, num_tokens=20))
        await decode.check_idle()
        assert decode.runner.cache.groups[0].any(), "some of its KV is in the blocks"
        assert (decode.loop.keys(), told.changes) == ([], [])
        async with decode.loop.sequence(make_spec(prompt, num_tokens=20), Purpose.GENERATE) as sequence:
            assert await read_all(sequence) == expected_tokens(prompt, 20)
            assert sequence._sequence.num_cached_tokens == 0
        assert len(decode.loop.keys()) == len(told.changes) == 419 // 16, "what it has computed itself is"
        await prefill.check_idle()
        await decode.check_idle()


# -- the first token and the KV, in any order --------------------------------------------------------------------------


class LateCommits(kv_pb2_grpc.KvControlServicer):
    """Holds every commit back for a while of its own, and lets what comes behind it pass."""

    def __init__(self, endpoint: KvEndpoint) -> None:
        self._endpoint = endpoint
        self._random = random.Random(1)
        self.num_overtaken = 0

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        arrived = asyncio.Queue[Any]()
        reading = asyncio.create_task(self._read(request_iterator, arrived))
        try:
            await self._endpoint.Session(self._in_order_of_arrival(arrived), context)
        finally:
            reading.cancel()

    async def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._endpoint.Pull(request, context)

    async def _read(self, requests: Any, arrived: asyncio.Queue[Any]) -> None:
        loop, due_s = asyncio.get_running_loop(), 0.0
        async for request in requests:
            if request.WhichOneof("message") != "commit":
                arrived.put_nowait(request)
                continue
            delay_s = self._random.uniform(0.0, 0.3)
            self.num_overtaken += loop.time() + delay_s < due_s
            due_s = max(due_s, loop.time() + delay_s)
            loop.call_later(delay_s, arrived.put_nowait, request)
        arrived.put_nowait(None)

    @staticmethod
    async def _in_order_of_arrival(arrived: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        while (request := await arrived.get()) is not None:
            yield request


async def test_each_client_gets_its_own_first_token_though_commits_are_late_and_overtake_each_other() -> None:
    """Half of the answers have one token, which is the last: nobody wants their KV any more."""
    endpoints: list[LateCommits] = []

    def late(kv: KvEndpoint) -> LateCommits:
        endpoints.append(LateCommits(kv))
        return endpoints[0]

    prompts = [prompt_of(seed, 20 + seed) for seed in range(40)]
    async with pair(endpoint=late) as (router, _, decode):
        answers = await asyncio.gather(
            *(
                ask(router, make_spec(prompt, num_tokens=1 + number % 2, request_id=f"r{number}"))
                for number, prompt in enumerate(prompts)
            )
        )
        assert decode.kv.counts().received_committed >= 20
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.token_ids == expected_tokens(prompt, 1 + number % 2)
        assert (answer.choice.timeline.retries, answer.choice.timeline.mode) == (0, Mode.DISAGGREGATED)
    assert endpoints[0].num_overtaken > 5


# -- the same id twice -------------------------------------------------------------------------------------------------


async def test_one_id_through_two_routers_at_once_is_two_requests() -> None:
    """A client whose router died, or who mistakes ids: the workers and the transfer between them keep them apart."""
    ours, theirs = prompt_of(1, 300), prompt_of(2, 200)
    async with engine_worker("p0", ArithmeticRunner(NUM_BLOCKS), CONFIG) as prefill:
        for incarnation in (1, 2):  # the decode worker is started again, under its name and elsewhere
            runner = ArithmeticRunner(NUM_BLOCKS)
            async with engine_worker("d0", runner, CONFIG, incarnation=incarnation) as decode:
                workers = roles(prefill, decode)
                async with router_of(workers, "disaggregated") as one, router_of(workers, "disaggregated") as other:
                    for prompts in ((ours, theirs), (ours, ours)):
                        asked = zip((one, other), prompts, strict=True)
                        specs = [(router, make_spec(prompt, num_tokens=20, request_id="r")) for router, prompt in asked]
                        answers = await asyncio.gather(*(ask(router, spec) for router, spec in specs))
                        for prompt, answer in zip(prompts, answers, strict=True):
                            assert answer.token_ids == expected_tokens(prompt, 20)
                            assert (answer.choice.timeline.retries, answer.choice.timeline.mode) == (
                                0,
                                Mode.DISAGGREGATED,
                            )
                await decode.check_idle()
                await prefill.check_idle()
                assert decode.kv.counts().received_committed == 4


async def test_of_one_id_that_runs_twice_each_can_be_left_alone() -> None:
    prompt = prompt_of(3, 300)
    spec = make_spec(prompt, num_tokens=200, request_id="r")
    async with pair() as (one, prefill, decode), router_of(roles(prefill, decode), "disaggregated") as other:
        leaving, staying = one.tokens(spec=spec), other.tokens(spec=spec)
        first = await anext(leaving), await anext(staying)
        await leaving.aclose()
        assert [first[1], *[token async for token in staying]] == expected_tokens(prompt, 200)
        assert first[0] == first[1]


# -- blocks that are taken again at once -------------------------------------------------------------------------------


class HeldCopy:
    """Replaces `BlockCopier.gather` or `scatter`: a copy begins, and ends once `may_end` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._copy = getattr(BlockCopier, name)
        self.began, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(BlockCopier, name, lambda copier, *args: self._held(copier, *args))

    def _held(self, copier: BlockCopier, *args: Any) -> None:
        self.began.set()
        assert self.may_end.wait(30), "the test has ended without letting go of the copy"
        self._copy(copier, *args)


@pytest.mark.parametrize(("name", "owner"), [("gather", 0), ("scatter", 1)])
async def test_blocks_of_a_client_that_leaves_go_to_the_next_when_no_copy_uses_them(
    name: str, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool holds either prompt and not both. The next one computes in place what the held copy would overwrite."""
    copy = HeldCopy(monkeypatch, name)
    prompt = prompt_of(2, 320)
    async with pair(num_blocks=24) as (router, *workers):
        worker = workers[owner]
        leaving = asyncio.create_task(ask(router, make_spec(prompt_of(1, 160))))
        assert await asyncio.to_thread(copy.began.wait, 30)
        leaving.cancel()
        await asyncio.wait({leaving})
        worker.runner.layer_s = 0.01
        next_one = asyncio.create_task(worker.generate(make_spec(prompt, num_tokens=40)))
        try:
            await until(lambda: worker.loop.load().waiting + worker.loop.load().running)
            await asyncio.sleep(0.2)  # a worker that gives blocks away too early does so at once
            assert worker.loop.load().running == 0, "somebody has got blocks that a copy uses"
        finally:
            copy.may_end.set()
            tokens = await next_one
        assert tokens == expected_tokens(prompt, 40)


# -- two versions of the KV transfer -----------------------------------------------------------------------------------


def speak(worker: Worker, version: int) -> None:
    """As a sender, to all that it has no connection to."""
    connections = worker.kv.sender._connections
    connections._hello = replace(connections._hello, protocol_version=version)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_workers_of_two_versions_serve_without_a_kv_transfer(version: int) -> None:
    """The prompt's prefix is where it may not be transferred from: it is computed once more, and nobody is refused."""
    prompts = [prompt_of(seed, 300) for seed in range(3)]
    async with pair("auto", held={"p0": 18}) as (router, prefill, decode):
        speak(prefill, version)
        for prompt in prompts:
            answer = await ask(router, make_spec(prompt, num_tokens=20))
            assert answer.token_ids == expected_tokens(prompt, 20)
        assert prefill.kv.counts().refused > 0, "nobody has tried"
        assert decode.kv.counts().received_committed == 0


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_where_prompts_must_be_transferred_two_versions_are_refused_in_words(version: int) -> None:
    sentence = f"worker p0 speaks version {version} of the KV transfer, worker d0 version {PROTOCOL_VERSION}"
    async with pair("disaggregated") as (router, prefill, _):
        speak(prefill, version)
        with pytest.raises(TransferRefused, match=sentence):
            await ask(router, make_spec(prompt_of(1, 100), num_tokens=20))
