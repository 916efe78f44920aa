"""The contract of `ServingEngine`: what the services, the KV endpoint and the member of a worker rely on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.errors import DeviceLost, InvalidRequest, Overloaded, WorkerDraining
from baton.messages import DecodeRequest, FirstToken, NewTokens, PrefillRequest, PrefixSource, SequenceSpec, Ticket
from baton.sampling import FinishReason
from decode_worker.service import DecodeService
from engine.core.block_pool import Stored
from engine.core.outputs import Admitted, Generated, KvProgress, Reserved
from engine.core.sequence import Purpose
from prefill_worker.service import PrefillService
from tests.support.builders import sequence_spec
from tests.support.waiting import until
from tests.unit.engine.contract.subjects import (
    CACHES_NOTHING,
    OF_REAL_MODELS,
    OF_VLLM,
    SOON_S,
    STARTS_AT_ONCE,
    SUBJECTS,
    Subject,
    read,
)
from tests.unit.engine.workers import serving, split
from tests.unit.kvstore.transfer.peers import with_link

PROMPT = [5 + 3 * i % 400 for i in range(100)]
MARKS = dict.fromkeys(OF_REAL_MODELS, pytest.mark.slow) | dict.fromkeys(OF_VLLM, pytest.mark.vllm)


def params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in sorted(names)]


@pytest.fixture(params=params(SUBJECTS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    made = SUBJECTS[request.param](tmp_path)
    yield made
    made.engine.close()


@contextlib.asynccontextmanager
async def closed_at_the_end(subject: Subject) -> AsyncIterator[None]:
    try:
        yield
    finally:
        subject.engine.close()


def spec_of(prompt: list[int], num_tokens: int = 8, name: str = "r", **values: Any) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=num_tokens, **values)


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_an_answer_is_the_models_and_its_first_output_reports_the_prompt(subject: Subject) -> None:
    async with subject.running():
        tokens, outputs = await subject.answer(spec_of(PROMPT, 20))
    assert tokens == subject.expected(PROMPT, 20)
    with_tokens = [output for output in outputs if output.token_ids]
    assert [output.report is not None for output in with_tokens] == [True] + [False] * (len(with_tokens) - 1)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]


async def test_answers_beside_each_other_do_not_mix(subject: Subject) -> None:
    """They differ in length, and there are more than the engine computes at a time."""
    prompts = [PROMPT[number : 20 + 13 * number] for number in range(6)]
    async with subject.running():
        specs = [spec_of(prompt, 4 + 3 * number, f"r{number}") for number, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(subject.answer, specs))
    for number, prompt in enumerate(prompts):
        assert answers[number][0] == subject.expected(prompt, 4 + 3 * number)


async def test_an_answer_ends_with_a_stop_token_or_goes_on_from_where_another_worker_was(subject: Subject) -> None:
    expected = subject.expected(PROMPT, 12)
    stop = expected[5]
    async with subject.running():
        stopped, outputs = await subject.answer(spec_of(PROMPT, 12, stop_token_ids=(stop,)))
        resumed, _ = await subject.answer(spec_of(PROMPT + expected[:7], 12, num_prompt_tokens=len(PROMPT)))
    assert stopped == expected[: expected.index(stop) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert resumed == expected[7:]


@pytest.mark.parametrize("subject", params(OF_REAL_MODELS), indirect=True)
async def test_a_drawn_answer_depends_on_its_seed_and_continues_as_it_would_have(subject: Subject) -> None:
    """Each token is drawn by the seed and its position: not by what was drawn before on this worker."""
    drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}
    async with subject.running():
        answers = [(await subject.answer(spec_of(PROMPT, 16, seed=seed, **drawn)))[0] for seed in (7, 7, 8)]
        continued = spec_of(PROMPT + answers[0][:6], 16, seed=7, num_prompt_tokens=len(PROMPT), **drawn)
        beside = [subject.answer(spec_of(PROMPT[:40], 16, f"b{n}", seed=n, **drawn)) for n in range(3)]
        (resumed, _), *_ = await asyncio.gather(subject.answer(continued), *beside)
    assert answers[0] == answers[1] != answers[2]
    assert resumed == answers[0][6:]


# -- what is held ------------------------------------------------------------------------------------------------------


async def test_who_leaves_frees_everything(subject: Subject) -> None:
    """Before anything is computed, after the first tokens, and many at a time; `running` checks the blocks."""
    async with subject.running() as engine:
        async with engine.sequence(spec_of(PROMPT, 200, "at once"), Purpose.GENERATE):
            pass
        async with asyncio.timeout(SOON_S), contextlib.AsyncExitStack() as stack:
            for number in range(4):
                spec = spec_of(PROMPT[number : number + 40], 100, f"r{number}")
                handle = await stack.enter_async_context(engine.sequence(spec, Purpose.GENERATE))
                await handle.next()
            assert engine.load().running == 4
            assert engine.load().blocks.in_use > 0
        num_computed = engine.load().computed_tokens
        await subject.is_empty()
        assert engine.load().computed_tokens < num_computed + 100, "it computed for clients that had left"
        assert (await subject.answer(spec_of(PROMPT, 6)))[0] == subject.expected(PROMPT, 6)
        assert engine.load().computed_tokens >= len(PROMPT)


async def test_the_index_gets_what_the_engine_has(subject: Subject) -> None:
    """The events, replayed, are the keys of the cached prefixes, also after evictions."""
    async with subject.running() as engine:
        # More than the pool holds: each prompt leaves at least three cached blocks, of 32 tokens.
        for number in range(26):
            await subject.answer(spec_of([number + 1, *PROMPT], 4, f"r{number}"))
        known: set[bytes] = set()
        for change in subject.events.changes:
            if isinstance(change, Stored):
                known.add(change.key)
            else:
                known.remove(change.key)
        assert known == set(engine.keys())
        assert not engine.keys() or len(subject.events.changes) > len(known), "nothing was evicted"
        spec = spec_of([26, *PROMPT], 4)
        assert not engine.keys() or set(spec.block_keys(spec.token_ids, block_size=engine.spec.block_size)) <= known, (
            "the last prompt is still there"
        )


async def test_a_cached_prefix_is_used_by_its_own_tenant_alone(subject: Subject) -> None:
    async with subject.running() as engine:
        found = []
        for number, seed in enumerate((b"one", b"one", b"other")):
            tokens, outputs = await subject.answer(spec_of(PROMPT, 6, f"r{number}", cache_seed=seed))
            assert tokens == subject.expected(PROMPT, 6)
            found.append(next(output.report.num_cached_tokens for output in outputs if output.report))
        assert found == ([0, 96, 0] if engine.keys() else [0, 0, 0])


# -- refusals and failures ---------------------------------------------------------------------------------------------


async def test_what_cannot_be_computed_is_refused_and_harms_nobody(subject: Subject) -> None:
    async with subject.running() as engine:
        too_long = [7] * engine.max_model_len
        for prompt in ([], too_long, [engine.vocab_size], [-1]):
            with pytest.raises(InvalidRequest):
                await subject.answer(spec_of(prompt))
        assert (await subject.answer(spec_of(PROMPT, 4)))[0] == subject.expected(PROMPT, 4)


@pytest.mark.parametrize("subject", params(SUBJECTS.keys() - STARTS_AT_ONCE), indirect=True)
async def test_a_queue_is_bounded_and_handed_back(subject: Subject) -> None:
    engine = subject.engine
    async with contextlib.AsyncExitStack() as stack:
        most = int(engine.max_waiting(spec_of(PROMPT)))
        handles = []
        for number in range(most):
            spec = spec_of(PROMPT, name=f"r{number}")
            handles.append(await stack.enter_async_context(engine.sequence(spec, Purpose.GENERATE)))
        assert engine.load().waiting == most
        with pytest.raises(Overloaded):
            await stack.enter_async_context(engine.sequence(spec_of(PROMPT), Purpose.GENERATE))
        engine.hand_back(WorkerDraining("it takes no new work"))
        for handle in handles:
            with pytest.raises(WorkerDraining):
                await asyncio.wait_for(handle.next(), SOON_S)
    assert engine.load().waiting == 0


async def test_a_lost_device_ends_every_sequence_and_the_run(subject: Subject) -> None:
    engine = subject.engine
    running = asyncio.create_task(engine.run(subject.events))
    async with asyncio.timeout(SOON_S), engine.sequence(spec_of(PROMPT, 200), Purpose.GENERATE) as handle:
        await handle.next()
        with pytest.raises(DeviceLost, match="a transfer found it"):
            engine.lose("a transfer found it")
        with pytest.raises(DeviceLost):
            await read(handle)
    with pytest.raises(DeviceLost):
        async with engine.sequence(spec_of(PROMPT), Purpose.GENERATE):
            pass
    running.cancel()  # if `lose` has not ended it: its caller must
    await asyncio.wait((running,), timeout=SOON_S)
    assert running.done()


# -- KV that leaves and arrives ----------------------------------------------------------------------------------------


async def test_a_prompt_computed_for_another_worker_reports_its_kv(subject: Subject) -> None:
    """Reports only grow, and the last one covers the whole prompt in all layers. Pinned blocks outlive their owner."""
    engine = subject.engine
    told: list[KvProgress] = []
    async with subject.running():
        async with asyncio.timeout(SOON_S):
            async with engine.sequence(spec_of(PROMPT, 1), Purpose.PREFILL) as handle:
                admitted = await handle.next()
                assert isinstance(admitted, Admitted)
                handle.watch(told.append)
                generated = await handle.next()
                assert isinstance(generated, Generated)
                assert list(generated.token_ids) == subject.expected(PROMPT, 1)
                assert generated.report is not None
                pin = await handle.pin()
            # After another answer the engine has noticed that the owner has left.
            assert (await subject.answer(spec_of(PROMPT[50:], 3, "after")))[0] == subject.expected(PROMPT[50:], 3)
            in_use = engine.load().blocks.in_use
            assert in_use >= len(PROMPT) // engine.spec.block_size
            engine.unpin(pin)
        await until(lambda: engine.load().blocks.in_use < in_use, SOON_S)
    assert told[-1][:2] == (len(PROMPT), engine.spec.num_layers)
    ends = [progress.num_tokens for progress in told if progress.num_layers == engine.spec.num_layers]
    assert ends == sorted(ends)


@pytest.mark.parametrize("subject", params(SUBJECTS.keys() - CACHES_NOTHING), indirect=True)
async def test_kv_goes_to_another_worker_which_continues_and_pulls_prefixes(
    subject: Subject, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Between two engines of one make: greedy, drawn, cached in part, of one block, left half-way, and pulled."""
    name = request.node.callspec.params["subject"]
    (tmp_path / "other").mkdir()
    other = SUBJECTS[name](tmp_path / "other")
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 5} if name in OF_REAL_MODELS else {}
    specs = [
        spec_of(PROMPT, 12, "greedy"),
        spec_of(PROMPT[:70] + PROMPT[:20], 12, "starts alike"),
        spec_of(PROMPT[3:10], 12, "short", **drawn),
        spec_of(PROMPT[1:], 12, "drawn", **drawn),
        spec_of(PROMPT[2:], 1, "one token"),
    ]
    transfer = with_link("tcp", slot_bytes=1 << 18, span_tokens=32)
    async with (
        closed_at_the_end(other),
        subject.running(),
        other.running(),
        serving(subject.engine, "here", transfer) as here,
        serving(other.engine, "there", transfer) as there,
    ):
        alone = [(await subject.answer(spec))[0] for spec in specs]
        async with asyncio.timeout(2 * SOON_S):
            assert await asyncio.gather(*(split(here, there, spec) for spec in specs[:-1])) == alone[:-1]
            only = PrefillService(here).prefill(PrefillRequest(specs[-1], None), Context())
            assert [event.token_id async for event in only if isinstance(event, FirstToken)] == alone[-1]
            calls = DecodeService(there).decode(DecodeRequest(specs[0], True), Context())
            async with contextlib.aclosing(calls) as left:
                assert isinstance(await anext(left), Ticket)  # its KV never comes
            pulled = spec_of([400, *PROMPT], 6, "pulled")
            await subject.answer(pulled)
            block_size = subject.engine.spec.block_size
            num_tokens = len(pulled.token_ids) // block_size * block_size
            source = PrefixSource(
                worker_id="here", address=here.kv.receiver.kv_address, num_tokens=num_tokens, incarnation="here.1"
            )
            call = DecodeService(there).decode(DecodeRequest(pulled, False, source), Context())
            messages = [each async for each in call if isinstance(each, NewTokens)]
    assert [token for message in messages for token in message.token_ids] == subject.expected(pulled.token_ids, 6)
    report = next(message.report for message in messages if message.report)
    assert report.num_pulled_tokens == report.num_cached_tokens == num_tokens


async def test_blocks_are_reserved_before_kv_arrives_and_freed_if_it_never_does(subject: Subject) -> None:
    engine = subject.engine
    async with subject.running():
        async with asyncio.timeout(SOON_S), engine.sequence(spec_of(PROMPT, 4), Purpose.RECEIVE) as handle:
            reserved = await handle.next()
            assert isinstance(reserved, Reserved)
            assert reserved.num_tokens in (len(PROMPT), len(PROMPT) - 1)
            num_blocks = sum(len(blocks) for blocks in reserved.block_ids)
            # An engine in another process may count the blocks when its step has ended.
            await until(lambda: engine.load().blocks.in_use >= num_blocks > 0, SOON_S)
        await until(lambda: engine.load().blocks.in_use == 0, SOON_S)


async def test_kv_that_has_not_arrived_is_computed(subject: Subject) -> None:
    """And a first token that another worker has drawn is what the answer goes on from, whatever is drawn here."""
    engine = subject.engine
    first = (subject.expected(PROMPT, 1)[0] + 1) % 400
    async with subject.running():
        for given, expected in (
            (None, subject.expected(PROMPT, 6)),
            (first, subject.expected([*PROMPT, first], 5)),
        ):
            async with asyncio.timeout(SOON_S), engine.sequence(spec_of(PROMPT, 6), Purpose.RECEIVE) as handle:
                assert isinstance(await handle.next(), Reserved)
                handle.insert(given, 0)
                tokens, outputs = await read(handle)
            assert tokens == expected
            assert outputs[-1].finish_reason is FinishReason.LENGTH
