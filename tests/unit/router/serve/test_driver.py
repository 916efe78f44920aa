"""What becomes of a choice when a worker fails, refuses, leaves or is slow, and what its next attempt has learned."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.cluster import BlockCounts, Role, Worker, WorkerState
from baton.costs import PRIOR
from baton.errors import (
    BatonError,
    DeviceLost,
    InvalidRequest,
    LostInStep,
    NoWorker,
    Overloaded,
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    WorkerDraining,
    WorkerFailed,
)
from baton.hypotheses import Beam, Hypotheses
from baton.messages import (
    DecodeRequest,
    Fetched,
    FetchRequest,
    FirstToken,
    Migrate,
    NewTokens,
    PrefillReport,
    PrefillRequest,
    PrefixSource,
    SequenceSpec,
    Transferred,
)
from baton.sampling import FinishReason
from baton.tasks import cancel_and_wait
from kvstore.leases import Noted
from router.admission.tenants import Tenant
from router.placement import NO_OBJECTIVE, Mode
from router.placement.pool_view import LEAVING_S, SUSPICION_S
from router.serve import driver
from router.serve.choice import ChoiceGroup
from router.serve.driver import ChoiceDriver
from router.serve.machine import Instruction, KeepOldCall
from router.serve.worker_client import WorkerCallError, WorkerClient, WorkerStream
from router.timeline.events import Left, Placed
from router.timeline.folds import Stage, choice_phases
from tests.support.builders import READY
from tests.support.waiting import until
from tests.unit.router.serve.scripted_workers import (
    BLOCK,
    CLAIM,
    NUM_PROMPT,
    SPEC,
    Bench,
    Script,
    ScriptedWorkers,
    bench_of,
    new_choice,
    ticket,
)

PAIR = {"p0": Role.PREFILL, "d0": Role.DECODE}
TWO = {"d0": Role.DECODE, "d1": Role.DECODE}
LAST = NewTokens(token_ids=(5,), finish_reason=FinishReason.LENGTH)
FIRST_IS_LAST = FirstToken(
    token_id=5,
    finish_reason=FinishReason.LENGTH,
    report=PrefillReport(),
)
GONE = WorkerFailed("gone")
LONG = replace(SPEC, sampling=replace(SPEC.sampling, max_tokens=100, ignore_eos=True))


def set_clock(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    for module in ("driver", "selector"):
        monkeypatch.setattr(f"router.serve.{module}.time", bench.clock)


def no_call_is_read() -> bool:
    """Whether no task waits for a worker's answer."""
    return not any("WorkerStream.read" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def collected(tokens: AsyncIterator[int]) -> list[int]:
    return [token async for token in tokens]


def sources(workers: ScriptedWorkers) -> list[PrefixSource | None]:
    """From which whoever was to compute the prompt was told to pull a prefix, call by call."""
    return [
        request.source for request in workers.requests if not (isinstance(request, DecodeRequest) and request.await_kv)
    ]


# -- what a choice that is placed again has learned --------------------------------------------------------------------


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
    workers = ScriptedWorkers(decode=[[failure], [LAST]])
    roles = {"a": Role.DECODE, "b": Role.DECODE, "owner": Role.PREFILL, "next": Role.PREFILL}
    async with bench_of(workers, roles, "aggregated", {"owner": 20, "next": 10}) as bench:
        assert await collected(bench.tokens()) == [5]
    held = {"owner": 320, "next": 160}
    assert sources(workers) == [
        PrefixSource(worker_id=name, address=bench.address, num_tokens=held[name]) for name in expected
    ]


async def test_a_failed_attempt_leaves_nothing_to_the_garbage_collector() -> None:
    def failures() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is WorkerCallError}

    gc.collect()
    of_other_tests = failures()
    gc.disable()
    try:
        async with bench_of(ScriptedWorkers(decode=[[GONE], [LAST]]), TWO, "aggregated") as bench:
            assert await collected(bench.tokens()) == [5]
            assert failures() <= of_other_tests
    finally:
        gc.enable()


async def test_kv_is_transferred_to_where_the_decode_workers_lease_is_from() -> None:
    """Not to where its ticket says."""
    workers = ScriptedWorkers(prefill=[[FIRST_IS_LAST]], decode=[[ticket]])
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        assert await collected(bench.tokens()) == [5]
    (asked,) = (request for request in workers.requests if isinstance(request, PrefillRequest))
    assert asked.ticket == replace(ticket(SPEC), kv_address=bench.address)


@pytest.mark.parametrize(
    ("failure", "roles", "stays"),
    [
        (TransferError("d0 is gone"), {**PAIR, "d1": Role.DECODE}, False),
        (TransferCorrupted("by the link"), {**PAIR, "d1": Role.DECODE}, True),
        (TransferRefused("of another kind"), {**PAIR, "d1": Role.DECODE}, False),
        (TransferError("d0 is gone"), PAIR, True),
    ],
)
async def test_who_did_not_answer_in_a_kv_transfer_is_left_at_once(
    failure: BatonError, roles: dict[str, Role], stays: bool
) -> None:
    """The prefill worker says so: the decode worker's own stream, which hangs, may tell seconds later."""
    workers = ScriptedWorkers(decode=[[ticket], [ticket]], prefill=[[failure], [FIRST_IS_LAST]])
    record = new_choice()
    async with bench_of(workers, roles, "disaggregated", {"d0": 4}) as bench:
        assert await collected(bench.tokens(record)) == [5]
    assert (record.timeline.retries, record.timeline.decode_worker == "d0") == (1, stays)


@pytest.mark.parametrize(
    ("failures", "num_calls"),
    [
        ([LostInStep("first"), LostInStep("second")], 2),
        ([LostInStep("first"), WorkerFailed("gone"), LostInStep("second")], 3),
        ([DeviceLost("waited"), DeviceLost("waited"), LostInStep("first")], 4),
    ],
)
async def test_a_choice_in_whose_steps_two_devices_were_lost_breaks_no_third(
    failures: list[BatonError], num_calls: int
) -> None:
    """One that only waited where another one broke the device goes on."""
    workers = ScriptedWorkers(decode=[*([failure] for failure in failures), [LAST]])
    roles = {f"d{number}": Role.DECODE for number in range(5)}
    async with bench_of(workers, roles, "aggregated", {}) as bench:
        if num_calls > len(failures):
            assert await collected(bench.tokens()) == [5]
        else:
            with pytest.raises(LostInStep, match=r"placements failed: .*first.*second"):
                await collected(bench.tokens())
    assert len(workers.requests) == num_calls


async def test_of_two_that_do_not_fit_each_other_neither_is_asked_again() -> None:
    """Whoever of them it is that fits no other."""
    workers = ScriptedWorkers(
        decode=[[ticket], [ticket]], prefill=[[TransferRefused("of another kind")], [FIRST_IS_LAST]]
    )
    record = new_choice()
    roles = {**PAIR, "p1": Role.PREFILL, "d1": Role.DECODE}
    async with bench_of(workers, roles, "disaggregated", {"p0": 8, "d0": 4}) as bench:
        assert await collected(bench.tokens(record)) == [5]
    assert (record.timeline.retries, record.timeline.prefill_worker, record.timeline.decode_worker) == (1, "p1", "d1")


async def test_a_doubted_prefill_worker_that_has_no_other_beside_it_takes_no_doubt_from_a_decode_worker() -> None:
    """Regression: cut from each other both doubted the other, and every attempt met again, until none was left."""
    is_asked = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[ticket, is_asked, TransferError("p0 is gone")], [ticket], [ticket]],
        prefill=[[lambda _: is_asked.set()], [TransferError("d0 is silent")], [FIRST_IS_LAST]],
    )
    record = new_choice()
    async with bench_of(workers, {**PAIR, "d1": Role.DECODE}, "disaggregated", {"d0": 4}) as bench:
        assert await collected(bench.tokens(record)) == [5]
    assert (record.timeline.retries, record.timeline.decode_worker) == (2, "d1")


async def test_a_decode_worker_that_dies_while_the_prompt_is_computed_is_left_at_once() -> None:
    """The prefill worker, which goes on for as long as its prompt takes, is not waited for."""
    is_asked, is_computed = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[ticket, is_asked, GONE], [ticket]],
        prefill=[[lambda _: is_asked.set(), is_computed], [FIRST_IS_LAST]],
    )
    record = new_choice()
    async with bench_of(workers, {**PAIR, "d1": Role.DECODE}, "disaggregated", {"d0": 4}) as bench:
        assert await asyncio.wait_for(collected(bench.tokens(record)), 10) == [5]
    assert (record.timeline.retries, record.timeline.decode_worker) == (1, "d1")


async def test_who_could_not_transfer_is_no_source_of_the_next_attempt() -> None:
    """It holds the longest prefix of all, and would send it over the same way."""
    roles = {**PAIR, "p1": Role.PREFILL}
    workers = ScriptedWorkers(decode=[[ticket], [LAST]], prefill=[[TransferRefused("of another shape")]])
    record = new_choice()
    async with bench_of(workers, roles, "auto", {"p0": 20, "p1": 10}) as bench:
        assert await collected(bench.tokens(record)) == [5]
    assert (record.timeline.retries, record.timeline.mode) == (1, Mode.AGGREGATED)
    assert sources(workers) == [None, PrefixSource(worker_id="p1", address=bench.address, num_tokens=160)]


@pytest.mark.parametrize(
    "failures",
    [[TransferCorrupted("once"), TransferCorrupted("twice")], [TransferRefused("of another shape")]],
    ids=["failed twice", "refused once"],
)
async def test_when_kv_transfers_fail_the_decode_worker_computes_the_prompt(failures: list[BatonError]) -> None:
    workers = ScriptedWorkers(decode=[*[[ticket]] * len(failures), [LAST]], prefill=[[failure] for failure in failures])
    record = new_choice()
    async with bench_of(workers, PAIR, "auto", {"p0": 20}) as bench:
        assert await collected(bench.tokens(record)) == [5]
    assert workers.kinds == [DecodeRequest, PrefillRequest] * len(failures) + [DecodeRequest]
    timeline = record.timeline
    assert (timeline.retries, timeline.mode, timeline.prefill_worker) == (len(failures), Mode.AGGREGATED, "")


async def test_who_died_is_passed_over_by_all_that_come_after() -> None:
    """Its lease lives on for seconds, and it holds the longest prefix."""
    workers = ScriptedWorkers(decode=[[GONE], [LAST], [LAST]])
    async with bench_of(workers, TWO, "aggregated", {"d0": 20}) as bench:
        for num_retries in (1, 0):
            record = new_choice()
            assert await collected(bench.tokens(record)) == [5]
            assert (record.timeline.decode_worker, record.timeline.retries) == ("d1", num_retries)


async def test_every_attempt_says_which_it_is_and_how_urgent() -> None:
    workers = ScriptedWorkers(decode=[[GONE], [LAST]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        assert await collected(bench.tokens(claim=replace(CLAIM, priority=3))) == [5]
    asked = [(request.sequence.attempt, request.sequence.priority) for request in workers.requests]
    assert asked == [(0, 3), (1, 3)]


async def test_of_a_prompt_that_came_before_a_cache_could_have_all_but_the_last_block() -> None:
    """The last token is computed in any case, and with it its block."""
    workers = ScriptedWorkers(decode=[[LAST], [LAST]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        choices = [new_choice(), new_choice()]
        for choice in choices:
            await collected(bench.tokens(choice))
    assert NUM_PROMPT % BLOCK == 0
    assert [choice.timeline.num_seen_tokens for choice in choices] == [0, NUM_PROMPT - BLOCK]


async def test_a_worker_that_drains_costs_no_attempt_and_is_asked_no_more() -> None:
    workers = ScriptedWorkers(decode=[[WorkerDraining("d0 drains")], [LAST], [LAST]])
    async with bench_of(workers, TWO, "aggregated", {"d0": 20}) as bench:
        for _ in range(2):
            record = new_choice()
            assert await collected(bench.tokens(record)) == [5]
            assert (record.timeline.decode_worker, record.timeline.retries) == ("d1", 0)
    assert len(workers.requests) == 3


async def test_an_answer_that_goes_on_outlives_any_number_of_workers_and_one_that_does_not_is_given_up() -> None:
    """Four failures in a row are too many, and sixteen tokens between two begin a new row."""
    dies_later: Script = [NewTokens(token_ids=tuple(range(16)), finish_reason=None), GONE]
    workers = ScriptedWorkers(decode=[*[dies_later] * 4, *[[GONE]] * 3])
    roles = {f"d{i}": Role.DECODE for i in range(8)}
    record = new_choice()
    async with bench_of(workers, roles, "aggregated") as bench:
        with pytest.raises(WorkerFailed, match=r"^4 placements failed: "):
            await collected(bench.tokens(record, spec=LONG))
    assert (len(record.emitted), record.timeline.retries, len(workers.requests)) == (64, 6, 7)
    assert workers.requests[-1].sequence.token_ids == (*SPEC.token_ids, *record.emitted)


async def test_what_does_not_fit_one_worker_goes_to_the_others() -> None:
    short = replace(SPEC, token_ids=SPEC.token_ids[:40], num_prompt_tokens=40)
    workers = ScriptedWorkers(decode=[[LAST]] * 24)
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated") as bench:
        await bench.lease("d1", Role.DECODE, max_model_len=64)
        served: dict[SequenceSpec, set[str]] = {SPEC: set(), short: set()}
        for spec, names in served.items():
            for token_id in range(12):
                record = new_choice()
                own = replace(spec, token_ids=(token_id, *spec.token_ids[1:]))
                assert await collected(bench.tokens(record, spec=own)) == [5]
                names.add(record.timeline.decode_worker)
    assert served[SPEC] == {"d0"}
    assert "d1" in served[short]


async def test_when_every_queue_is_full_the_client_is_told_so() -> None:
    workers = ScriptedWorkers(decode=[[Overloaded("full")], [Overloaded("full")]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        with pytest.raises(Overloaded, match="every worker's queue is full"):
            await collected(bench.tokens())
    assert len(workers.requests) == 2


async def test_what_a_worker_finds_wrong_with_a_request_is_told_at_once() -> None:
    """It would be wrong on every other worker too."""
    workers = ScriptedWorkers(decode=[[InvalidRequest("token 9 is not in the vocabulary")]])
    record = new_choice()
    async with bench_of(workers, TWO, "aggregated") as bench:
        with pytest.raises(InvalidRequest, match=r"^token 9 is not in the vocabulary$"):
            await collected(bench.tokens(record))
    assert (len(workers.requests), record.timeline.retries) == (1, 0)


# -- deadlines and the gate --------------------------------------------------------------------------------------------


async def test_a_stream_that_has_begun_outlives_its_worker_however_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the first token's, which came in time."""
    later = asyncio.Event()
    workers = ScriptedWorkers(decode=[[NewTokens(token_ids=(4,), finish_reason=None), later, GONE], [LAST]])
    record = new_choice()
    async with bench_of(workers, TWO, "aggregated") as bench:
        set_clock(monkeypatch, bench)
        claim = replace(CLAIM, objective=replace(NO_OBJECTIVE, ttft_s=60.0), arrived_s=time.monotonic())
        tokens: list[int] = []
        async for token in bench.tokens(record, claim=claim):
            tokens.append(token)
            bench.clock.ahead_s = 1000.0
            later.set()
    assert (tokens, record.timeline.retries) == ([4, 5], 1)


async def test_every_attempt_has_the_budget_that_is_left_of_the_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is placed again keeps its place in the queues; and waits no longer than twice its objective in all."""
    bench: Bench

    def seconds_go_by(_: SequenceSpec) -> None:
        bench.clock.ahead_s += 20.0

    dies_later: Script = [seconds_go_by, GONE]
    workers = ScriptedWorkers(decode=[dies_later, dies_later, [seconds_go_by, LAST]] * 2)
    async with bench_of(workers, {**TWO, "d2": Role.DECODE}, "aggregated") as bench:
        set_clock(monkeypatch, bench)
        claim = replace(CLAIM, objective=replace(NO_OBJECTIVE, ttft_s=50.0), arrived_s=time.monotonic() - 10.0)
        assert await collected(bench.tokens(claim=claim)) == [5]
        budgets = [request.sequence.ttft_s for request in workers.requests]
        assert budgets == pytest.approx([40.0, 20.0, 0.0], abs=2.0)

        record, arrived_s = new_choice(), bench.clock.monotonic() - 70.0
        with pytest.raises(Overloaded, match=r"no first token within 100"):
            await collected(bench.tokens(record, claim=replace(claim, arrived_s=arrived_s)))
        assert record.timeline.retries == 2


async def test_a_request_that_was_held_goes_on_though_the_gate_would_let_nobody_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was accepted before its model was awake; and then it waits for its first token as long as it takes."""
    reserved, computed = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(decode=[[reserved, ticket]], prefill=[[computed, FIRST_IS_LAST]])
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        set_clock(monkeypatch, bench)
        claim = replace(CLAIM, objective=replace(NO_OBJECTIVE, ttft_s=1.0))
        for worker_id, role in PAIR.items():
            await bench.lease(worker_id, role, replace(READY, queued_tokens=10**6))
        record = new_choice()
        answer = asyncio.create_task(collected(bench.tokens(record, claim=claim.released(bench.clock.monotonic()))))
        await until(lambda: len(workers.requests) == 1)
        bench.clock.ahead_s = 100.0
        reserved.set()  # the driver looks at its deadlines
        await until(lambda: len(workers.requests) == 2)
        computed.set()
        assert await answer == [5]
        assert workers.requests[0].sequence.ttft_s == pytest.approx(1.0, abs=0.5), (
            "workers compute it in the usual order"
        )


async def test_a_resumed_request_goes_on_though_the_gate_would_let_nobody_in() -> None:
    """Another router has let it in, and its client has some of its tokens."""
    workers = ScriptedWorkers(decode=[[LAST]])
    claim = replace(CLAIM, objective=replace(NO_OBJECTIVE, ttft_s=1.0), arrived_s=time.monotonic())
    async with bench_of(workers, TWO, "aggregated") as bench:
        for worker_id, role in TWO.items():
            await bench.lease(worker_id, role, replace(READY, queued_tokens=10**6))
        with pytest.raises(Overloaded, match="the first token would come"):
            await collected(bench.tokens(claim=claim))
        assert workers.requests == []
        record = new_choice(emitted=[3, 4])
        assert await collected(bench.tokens(record, claim=claim)) == [5]
    assert record.emitted == [3, 4, 5]
    assert workers.requests[0].sequence.token_ids == (*SPEC.token_ids, 3, 4)


async def test_a_choice_that_has_to_make_way_is_refused_at_once() -> None:
    """One tenant's prompts fill the queue; another's, which they would make late, ends the newest of them."""
    workers = ScriptedWorkers(decode=[[LAST], [], [], [], [LAST]])
    slow = replace(READY, costs=replace(PRIOR, s_per_token=0.02))
    large, small = (replace(CLAIM, tenant=Tenant(id=name), arrived_s=time.monotonic()) for name in ("large", "small"))
    async with bench_of(workers, {}, "aggregated") as bench:
        await bench.lease("d0", Role.DECODE, slow)
        record = new_choice()
        assert await collected(bench.tokens(record)) == [5]
        assert record.timeline.placed is not None
        compute_s = record.timeline.placed.prediction.compute_s
        assert compute_s > 5
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.ensure_future(anext(bench.tokens(claim=large))))
            await until(lambda: len(workers.requests) == 1 + len(waiting))
        urgent = replace(small, objective=replace(NO_OBJECTIVE, ttft_s=4 * compute_s))
        assert await collected(bench.tokens(claim=urgent)) == [5]
        with pytest.raises(Overloaded, match="preempted in the queue"):
            await asyncio.wait_for(waiting[2], 5)
        assert not waiting[0].done()
        for answer in waiting:
            answer.cancel()
        await asyncio.wait(waiting)


@pytest.mark.parametrize("mode", [Mode.AGGREGATED, Mode.DISAGGREGATED])
async def test_it_is_crowded_while_a_choice_waits_long_for_room(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """Not while its prompt is computed elsewhere, and not while it is decoded."""
    monkeypatch.setattr(driver, "LONG_S", 0.1)
    has_room, computes, goes_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = NewTokens(token_ids=(4,), finish_reason=None, report=PrefillReport())
    workers = ScriptedWorkers(decode=[[has_room, first, goes_on, LAST]])
    if mode is Mode.DISAGGREGATED:
        workers = ScriptedWorkers(decode=[[has_room, ticket]], prefill=[[computes, FIRST_IS_LAST]])
    async with bench_of(workers, PAIR, mode) as bench:
        tokens = asyncio.create_task(collected(bench.tokens()))
        await until(lambda: bool(workers.requests))
        assert not bench.driver.is_crowded
        await until(lambda: bench.driver.is_crowded)
        has_room.set()
        await until(lambda: not bench.driver.is_crowded)
        await asyncio.sleep(0.3)
        assert not bench.driver.is_crowded
        computes.set()
        goes_on.set()
        assert (await tokens)[-1] == 5
        assert not bench.driver.is_crowded


async def test_it_is_not_crowded_while_a_prompt_is_computed_as_long_as_was_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "LONG_S", 0.0)
    workers = ScriptedWorkers(decode=[[]])
    async with bench_of(workers, {}, "aggregated") as bench:
        await bench.lease("d0", Role.DECODE, replace(READY, costs=replace(PRIOR, s_per_token=0.02)))
        record = new_choice()
        tokens = asyncio.create_task(collected(bench.tokens(record)))
        await until(lambda: bool(workers.requests))
        await asyncio.sleep(0.3)
        assert record.timeline.placed is not None
        assert record.timeline.placed.prediction.compute_s > 5
        assert not bench.driver.is_crowded
        tokens.cancel()
        await asyncio.wait([tokens])


@pytest.mark.parametrize("mode", [Mode.AGGREGATED, Mode.DISAGGREGATED])
async def test_the_queues_forget_a_prompt_when_it_is_computed(mode: Mode) -> None:
    """A long answer is no part of its tenant's share of the queues."""
    waits, ends = asyncio.Event(), asyncio.Event()
    if mode is Mode.DISAGGREGATED:
        workers = ScriptedWorkers(
            decode=[[ticket, ends, LAST]],
            prefill=[
                [
                    waits,
                    FirstToken(
                        token_id=4,
                        finish_reason=None,
                        report=PrefillReport(),
                    ),
                    Transferred(10, 1, 0.0, 0.0),
                ]
            ],
        )
    else:
        workers = ScriptedWorkers(decode=[[waits, NewTokens(token_ids=(4,), finish_reason=None), ends, LAST]])
    async with bench_of(workers, PAIR, mode) as bench:
        gate, books = bench.driver._gate, bench.pools._loads.values()
        answer = bench.tokens()
        first = asyncio.ensure_future(anext(answer))
        await until(lambda: any(gate._queues.values()))
        assert any(book._jobs for book in books)
        waits.set()
        assert await first == 4
        assert not any(gate._queues.values())
        assert not gate._shares
        assert not any(book._jobs for book in books), "nor does the next prompt wait for it on that worker"
        ends.set()
        assert await collected(answer) == [5]


# -- KV transfer -------------------------------------------------------------------------------------------------------


async def test_a_report_on_the_kv_transfer_that_comes_late_is_recorded_and_holds_up_no_token() -> None:
    """The prefill worker reports only after the other has sent its last token, which waits until the client has seen
    the token before.
    """
    seen, all_sent = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(
        decode=[
            [
                ticket,
                NewTokens(token_ids=(6,), finish_reason=None),
                seen,
                NewTokens(token_ids=(7,), finish_reason=FinishReason.LENGTH),
                lambda _: all_sent.set(),
            ]
        ],
        prefill=[
            [
                FirstToken(
                    token_id=5,
                    finish_reason=None,
                    report=PrefillReport(),
                ),
                all_sent,
                Transferred(10, 1, 0.5, 0.25),
            ]
        ],
    )
    record = new_choice()
    tokens: list[int] = []
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        async for token in bench.tokens(record):
            tokens.append(token)
            if tokens == [5, 6]:
                seen.set()
    assert tokens == [5, 6, 7]
    noted = [phase for phase in choice_phases(record.timeline, time.monotonic()) if phase.stage is Stage.TRANSFER]
    assert (len(noted), record.timeline.retries) == (1, 0)
    assert 0 < noted[0].end_s - noted[0].begin_s < 0.25, "no more than the time to the second token"


async def test_a_first_token_that_is_the_last_is_waited_for_when_nobody_wants_the_kv() -> None:
    """The decode worker hears of it from the prefill worker, and may be the first to say so."""
    cancelled, told = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[ticket, cancelled, TransferCancelled("the sender gave up")]], prefill=[[told, FIRST_IS_LAST]]
    )
    record = new_choice()
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        answer = asyncio.ensure_future(anext(bench.tokens(record)))
        await until(lambda: PrefillRequest in workers.kinds)
        cancelled.set()
        asyncio.get_running_loop().call_later(0.05, told.set)
        assert await answer == 5
    assert record.timeline.retries == 0


@pytest.mark.parametrize(("mode", "held"), [("disaggregated", {"p": 10, "d": 20}), ("aggregated", {"d": 10, "p": 20})])
@pytest.mark.parametrize(
    ("num_cached", "num_pulled", "num_stale"),
    [(320, 160, 0), (160, 0, 0), (320, 320, 160), (0, 0, 160), (0, 80, 160)],
    ids=["it held it", "the pull failed", "it held nothing and pulled all", "it held nothing", "all was evicted again"],
)
async def test_what_was_pulled_neither_makes_nor_hides_a_stale_hint(
    mode: str, held: dict[str, int], num_cached: int, num_pulled: int, num_stale: int
) -> None:
    """The worker that computes is believed to hold 160 tokens, and told to pull 160 more."""
    found = NewTokens(
        token_ids=(5,),
        finish_reason=FinishReason.LENGTH,
        report=PrefillReport(num_cached_tokens=num_cached, num_pulled_tokens=num_pulled),
    )
    workers = ScriptedWorkers(
        decode=[[ticket if mode == "disaggregated" else found]],
        prefill=[
            [
                FirstToken(
                    token_id=5,
                    finish_reason=FinishReason.LENGTH,
                    report=PrefillReport(
                        num_cached_tokens=num_cached, queue_s=0.0, prefill_s=0.0, num_pulled_tokens=num_pulled
                    ),
                )
            ]
        ],
    )
    record = new_choice()
    async with bench_of(workers, {"p": Role.PREFILL, "d": Role.DECODE}, mode, held) as bench:
        assert await collected(bench.tokens(record)) == [5]
        counted = bench.instruments.exposition().decode()
    assert (record.timeline.mode, record.timeline.source) == (mode, "d" if mode == "disaggregated" else "p")
    assert ("baton_index_stale_hints_total 1.0" in counted) == bool(num_stale)
    assert (f"baton_index_stale_tokens_total {num_stale:.1f}" in counted) == bool(num_stale)


@pytest.mark.parametrize("prefill_s", [0.0, 100.0])
async def test_how_far_predictions_were_off_is_measured(prefill_s: float) -> None:
    first = FirstToken(token_id=5, finish_reason=FinishReason.LENGTH, report=PrefillReport(prefill_s=prefill_s))
    workers = ScriptedWorkers(decode=[[ticket]], prefill=[[first]])
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        assert await collected(bench.tokens(new_choice())) == [5]
        counted = bench.instruments.exposition().decode()
    assert 'baton_placement_prediction_error_count{of="ttft"} 1.0' in counted
    found = re.search(r'baton_placement_prediction_error_sum\{of="compute"\} (\S+)', counted)
    if prefill_s:
        assert found
        assert 0.99 < float(found[1]) < 1, "as a share of what was measured"
    else:
        assert found is None, "nothing was computed"


async def test_a_kv_transfer_is_priced_as_it_was_measured() -> None:
    """Else placement would go on with the prices that it began with."""
    first = FirstToken(token_id=5, finish_reason=None, report=PrefillReport())
    slow = Transferred(num_bytes=1, num_chunks=1, transfer_s=5.0, exposed_s=4.0)
    workers = ScriptedWorkers(decode=[[ticket, LAST]], prefill=[[first, slow]])
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        before = bench.driver._selector.prices.prices
        assert await collected(bench.tokens(new_choice())) == [5, 5]
        after = bench.driver._selector.prices.prices
    assert after.exposed_s + NUM_PROMPT * after.exposed_s_per_token > 0.1
    assert before.exposed_s + NUM_PROMPT * before.exposed_s_per_token < 0.01
    assert (after.pull_s, after.pull_s_per_token) == (before.pull_s, before.pull_s_per_token)


# -- several choices of one request ------------------------------------------------------------------------------------


def test_scores_of_the_prompt_are_asked_of_one_choice_alone() -> None:
    """And of none that goes on: its client has them."""
    spec = replace(SPEC, sampling=replace(SPEC.sampling, prompt_logprobs=2))
    for noted, expected in (({}, [2, None, None]), ({0: Noted((5,))}, [None, None, None])):
        group = ChoiceGroup.begin(spec, CLAIM, Context(), 3, noted)
        assert [choice.spec.sampling.prompt_logprobs for choice in group.choices] == expected
        assert [choice.spec.choice_index for choice in group.choices] == [0, 1, 2]


def group_of(num_choices: int) -> ChoiceGroup:
    return ChoiceGroup.begin(SPEC, CLAIM, Context(), num_choices, {})


def answers(*token_ids: int) -> Script:
    """Tokens one by one; then the call is silent."""
    return [NewTokens(token_ids=(token_id,), finish_reason=None) for token_id in token_ids]


def search_of(num_choices: int, width: int) -> ChoiceGroup:
    sampling = replace(SPEC.sampling, use_beam_search=True, beam_width=width, temperature=0.0)
    return ChoiceGroup.begin(replace(SPEC, sampling=sampling), CLAIM, Context(), num_choices, {})


def found(*token_ids: int) -> NewTokens:
    """The last message of a search, with answers of one token."""
    beams = tuple(Beam(token_ids=(token_id,), finish_reason=FinishReason.STOP) for token_id in token_ids)
    return NewTokens(token_ids=(), finish_reason=FinishReason.STOP, beams=beams)


@pytest.mark.parametrize("deaths", [0, 2])
async def test_one_search_finds_all_choices(deaths: int) -> None:
    """It begins again where its worker dies; the answers are the best of those that come at last."""
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport())
    dying: Script = [begun, WorkerFailed("died")]
    workers = ScriptedWorkers(decode=[*[dying] * deaths, [begun, found(7, 8, 9)]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE, "f": Role.DECODE}, "aggregated") as bench:
        group, came = search_of(2, 3), []
        async for choice, message in bench.driver.run(group):
            if message.finish_reason is not None:
                choice.is_answered = True
                came.append((choice.index, message.token_ids, message.finish_reason))
        await workers.servicer.wait_until_idle()
    assert came == [(0, (7,), FinishReason.STOP), (1, (8,), FinishReason.STOP)]
    assert [choice.emitted for choice in group.choices] == [[7], [8]]
    assert [request.sequence.choice_index for request in workers.requests] == [0] * (deaths + 1)
    assert {request.sequence.token_ids for request in workers.requests} == {SPEC.token_ids}
    assert group.choices[0].num_followers == 2, "what it reserves room for"
    assert group.choices[1].leader is None


async def test_a_search_that_has_begun_is_not_given_up_for_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Bench

    def seconds_go_by(_: SequenceSpec) -> None:
        bench.clock.ahead_s += 200.0

    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport())
    workers = ScriptedWorkers(decode=[[begun, seconds_go_by, GONE], [begun, found(7)]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        set_clock(monkeypatch, bench)
        group = search_of(1, 3)
        objective = replace(NO_OBJECTIVE, ttft_s=50.0)
        group.choices[0].claim = replace(CLAIM, objective=objective, arrived_s=time.monotonic())
        came = [message.token_ids async for _, message in bench.driver.run(group)]
    assert came == [(7,)]


async def test_what_is_computed_for_a_choice_counts_once_however_many_workers_die() -> None:
    workers = ScriptedWorkers(decode=[[*answers(1, 2), GONE], [*answers(3), LAST]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        choice = new_choice()
        assert await collected(bench.tokens(choice)) == [1, 2, 3, 5]
    assert choice.timeline.num_computed == 4


async def test_the_candidates_of_the_first_placement_alone_are_kept() -> None:
    """Those of a large pool take tens of KiB, and a long answer may outlive many workers."""
    workers = ScriptedWorkers(decode=[[*answers(1), GONE], [*answers(2), GONE], [LAST]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE, "f": Role.DECODE}, "aggregated") as bench:
        choice = new_choice()
        assert await collected(bench.tokens(choice)) == [1, 2, 5]
    placed = [event for event in choice.timeline.events if isinstance(event, Placed)]
    assert [len(event.placement.considered) for event in placed] == [3, 0, 0]


async def test_what_was_computed_and_not_read_counts_for_a_choice_that_is_left() -> None:
    many = NewTokens(token_ids=(2, 3, 4), finish_reason=None)
    goes_on = asyncio.Event()
    workers = ScriptedWorkers(decode=[[*answers(1), goes_on, many]])
    async with bench_of(workers, {"d": Role.DECODE}, "aggregated") as bench:
        choice = new_choice()
        tokens = bench.tokens(choice)
        assert await anext(tokens) == 1
        goes_on.set()
        await until(lambda: sum(call.num_unread for call in gc.get_objects() if type(call) is WorkerStream) == 3)
        await tokens.aclose()
    assert choice.timeline.num_computed == 4


async def test_a_search_counts_its_beams_tokens_and_those_of_a_search_that_died_no_more() -> None:
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport(), num_searched=1)
    going_on = NewTokens(token_ids=(), finish_reason=None, num_searched=3)
    last = replace(found(7, 8, 9), num_searched=3)
    workers = ScriptedWorkers(decode=[[begun, going_on, going_on, GONE], [begun, going_on, last]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        group = search_of(1, 3)
        assert [message.token_ids async for _, message in bench.driver.run(group)] == [(7,)]
    assert sum(each.num_computed for each in group.timelines) == 7


async def test_a_search_that_is_left_counts_what_it_was_until_then() -> None:
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport(), num_searched=1)
    going_on = NewTokens(token_ids=(), finish_reason=None, num_searched=3)
    workers = ScriptedWorkers(decode=[[begun, going_on]])
    async with bench_of(workers, {"d": Role.DECODE}, "aggregated") as bench:
        group = search_of(1, 3)
        reading = asyncio.ensure_future(anext(aiter(bench.driver.run(group))))
        await until(lambda: sum(each.num_computed for each in group.timelines) == 4)
        await cancel_and_wait((reading,))


async def test_a_search_goes_on_elsewhere_from_where_it_was() -> None:
    hypotheses = Hypotheses(
        running=(Beam(token_ids=(4, 8), logprob=-1.0), Beam(token_ids=(4, 9), logprob=-2.0)),
        finished=(Beam(token_ids=(2,), logprob=-0.5, finish_reason=FinishReason.STOP),),
    )
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport(), num_searched=1)
    continued = replace(begun, num_searched=0)
    going_on = NewTokens(token_ids=(), finish_reason=None, num_searched=2)
    last = replace(found(7), num_searched=2)
    never = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[
            [begun, going_on, Migrate(hypotheses), going_on, going_on, never],
            [ticket, continued, going_on, Migrate(), GONE],
            [continued, going_on, last],
        ],
        fetch=[[Fetched(NUM_PROMPT)]],
        prefill=[computes()],
    )
    async with bench_of(workers, TRIO | {"d2": Role.DECODE}, "aggregated") as bench:
        group = search_of(1, 3)
        choice = group.choices[0]
        choice.spec = replace(choice.spec, sampling=replace(choice.spec.sampling, prompt_logprobs=1))
        came = [message.token_ids async for _, message in bench.driver.run(group)]
    assert came == [(7,)]
    first, *later = (request.sequence for request in workers.requests)
    assert not first.hypotheses.running
    assert first.sampling.prompt_logprobs == 1
    served = [request.sequence for request in workers.requests[1:] if not isinstance(request, FetchRequest)]
    assert {spec.sampling.prompt_logprobs for spec in served} == {None}, "they came with the first report"
    assert {spec.hypotheses for spec in later} == {hypotheses}, "also where it begins again"
    assert {spec.token_ids[NUM_PROMPT:] for spec in later} == {(4,)}
    assert sum(each.num_computed for each in group.timelines) == 7, "what was drawn after that state was drawn again"


async def test_tokens_of_a_search_that_its_next_worker_draws_again_count_once() -> None:
    hypotheses = Hypotheses(running=(Beam(token_ids=(4, 8), logprob=-1.0), Beam(token_ids=(4, 9), logprob=-2.0)))
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport(), num_searched=1)
    going_on = NewTokens(token_ids=(), finish_reason=None, num_searched=2)
    is_behind, never = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(
        decode=[
            [begun, going_on, Migrate(hypotheses), going_on, going_on, never],
            [ticket, replace(begun, num_searched=0), replace(found(7), num_searched=2)],
        ],
        fetch=[[is_behind, Fetched(NUM_PROMPT)]],
        prefill=[[FirstToken(token_id=None, finish_reason=None, report=PrefillReport()), Transferred(10, 1, 0.0, 0.0)]],
    )
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        group = search_of(1, 3)

        async def heard() -> list[tuple[int, ...]]:
            return [message.token_ids async for _, message in bench.driver.run(group)]

        hearing = asyncio.ensure_future(heard())
        await until(lambda: sum(each.num_computed for each in group.timelines) == 7)
        is_behind.set()
        assert await hearing == [(7,)]
    assert sum(each.num_computed for each in group.timelines) == 5


async def test_a_search_stays_on_a_worker_that_leaves_where_its_state_does_not_travel() -> None:
    begun = NewTokens(token_ids=(), finish_reason=None, report=PrefillReport())
    has_ended = asyncio.Event()
    workers = ScriptedWorkers(decode=[[begun, Migrate(), has_ended, found(7)]], fetch=[[Fetched(NUM_PROMPT)]])
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        group = search_of(1, 3)
        asyncio.get_running_loop().call_later(0.2, has_ended.set)
        assert [message.token_ids async for _, message in bench.driver.run(group)] == [(7,)]
    assert len(workers.requests) == 1
    assert group.choices[0].timeline.retries == 0


async def test_a_search_that_finds_too_few_answers_says_so() -> None:
    workers = ScriptedWorkers(decode=[[found(7)]])
    async with bench_of(workers, {"d": Role.DECODE}, "aggregated") as bench:
        with pytest.raises(InvalidRequest, match="n is 2, but the beam search found only 1 answers"):
            [message async for message in bench.driver.run(search_of(2, 3))]


async def test_choices_are_served_side_by_side_each_to_its_end() -> None:
    workers = ScriptedWorkers(decode=[[*answers(1, 2), LAST], [*answers(3), LAST]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        group = group_of(2)
        came: dict[int, list[int]] = {0: [], 1: []}
        async for choice, message in bench.driver.run(group):
            came[choice.index] += message.token_ids
        await workers.servicer.wait_until_idle()
    assert came == {choice.index: choice.emitted for choice in group.choices}
    assert sorted(choice.emitted for choice in group.choices) == [[1, 2, 5], [3, 5]]
    assert {choice.finish_reason for choice in group.choices} == {FinishReason.LENGTH}
    assert sorted(request.sequence.choice_index for request in workers.requests) == [0, 1]


TRIO = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def computes(finish_reason: FinishReason | None = None) -> Script:
    first = FirstToken(token_id=4, finish_reason=finish_reason, report=PrefillReport())
    return [first] if finish_reason else [first, Transferred(10, 1, 0.0, 0.0)]


async def test_the_prompt_of_several_choices_is_computed_and_transferred_once() -> None:
    """The others follow once it is there, to the worker that has it."""
    arrives = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[ticket, arrives, *answers(1), LAST], [*answers(2), LAST], [*answers(3), LAST]], prefill=[computes()]
    )
    async with bench_of(workers, TRIO, "disaggregated") as bench:
        group, came = group_of(3), list[int]()
        async for choice, message in bench.driver.run(group):
            if not came:
                assert (choice.index, message.token_ids) == (0, (4,))
                assert not choice.has_begun, "the others wait for that"
                assert workers.kinds == [DecodeRequest, PrefillRequest]
                arrives.set()
            came += message.token_ids
        await workers.servicer.wait_until_idle()
    assert workers.kinds == [DecodeRequest, PrefillRequest, DecodeRequest, DecodeRequest]
    assert [r.await_kv for r in workers.requests if isinstance(r, DecodeRequest)] == [True, False, False]
    leader, *followers = group.choices
    assert {choice.timeline.decode_worker for choice in followers} == {leader.timeline.decode_worker}
    assert [choice.timeline.mode for choice in group.choices] == ["disaggregated", "aggregated", "aggregated"]
    assert sorted(came) == [1, 2, 3, 4, 5, 5, 5]


async def test_choices_go_their_own_way_where_the_first_one_needs_no_kv_transfer() -> None:
    """Its first token was the last: nobody decodes it, and nobody has the KV."""
    workers = ScriptedWorkers(
        decode=[[ticket], [ticket, *answers(1), LAST], [ticket, *answers(2), LAST]],
        prefill=[computes(FinishReason.LENGTH), computes(), computes()],
    )
    async with bench_of(workers, TRIO, "disaggregated") as bench:
        group = group_of(3)
        async for _ in bench.driver.run(group):
            pass
        await workers.servicer.wait_until_idle()
    assert [choice.timeline.mode for choice in group.choices] == ["disaggregated"] * 3
    assert sorted(len(choice.emitted) for choice in group.choices) == [1, 3, 3]


async def test_choices_go_their_own_way_where_the_first_ones_worker_leaves() -> None:
    workers = ScriptedWorkers(decode=[[*answers(1), Migrate()], [*answers(2), LAST]])
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated") as bench:
        group = group_of(2)
        leader, follower = group.choices
        leader.kv_is_on = "d7"
        assert bench.driver._selector.beside(follower, SPEC, bench.driver._selector.prompt(SPEC), leader) is None
        leader.kv_is_on = "d0"
        found = bench.driver._selector.beside(follower, SPEC, bench.driver._selector.prompt(SPEC), leader)
        assert found is not None
        assert found.placement.decode_worker == "d0"
        bench.pools.leaves(bench.pools.get("d0"))
        assert bench.driver._selector.beside(follower, SPEC, bench.driver._selector.prompt(SPEC), leader) is None


def test_choices_that_the_client_continues_follow_nobody() -> None:
    group = ChoiceGroup.begin(SPEC, CLAIM, Context(), 4, {0: Noted(), 2: Noted()})
    assert [choice.leader for choice in group.choices] == [None, None, None, group.choices[1]]
    assert [choice.num_followers for choice in group.choices] == [0, 1, 0, 0]


async def test_a_choice_that_is_answered_is_left_by_itself() -> None:
    """A stop string ends it; its worker must not go on, and the other choice must."""
    ends = asyncio.Event()
    workers = ScriptedWorkers(decode=[answers(1), [*answers(2), ends, LAST]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        group, seen = group_of(2), 0
        async with contextlib.aclosing(bench.driver.run(group)) as messages:
            async for choice, message in messages:
                seen += 1
                if message.token_ids == (1,):
                    choice.is_answered = True
                if seen == 2:
                    waiting = asyncio.ensure_future(anext(messages))
                    await until(lambda: workers.servicer.num_running == 1)
                    ends.set()
                    assert (await waiting)[1] == LAST
                    break
        await workers.servicer.wait_until_idle()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_leaving_the_choices_early_leaves_nothing_running(num_choices: int) -> None:
    workers = ScriptedWorkers(decode=[answers(1), answers(2)])
    async with bench_of(workers, TWO, "aggregated") as bench:
        async with contextlib.aclosing(bench.driver.run(group_of(num_choices))) as messages:
            await anext(messages)
            await until(lambda: workers.servicer.num_running == num_choices)
        assert no_call_is_read()
        await workers.servicer.wait_until_idle()


@pytest.mark.parametrize("has_first_token", [False, True])
async def test_leaving_a_kv_transfer_leaves_no_task_behind(has_first_token: bool) -> None:
    first = FirstToken(token_id=4, finish_reason=None, report=PrefillReport())
    workers = ScriptedWorkers(decode=[[ticket]], prefill=[[first] if has_first_token else []])
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        answer = bench.tokens()
        if has_first_token:
            assert await anext(answer) == 4
            await answer.aclose()
        else:
            waiting = asyncio.ensure_future(anext(answer))
            await until(lambda: PrefillRequest in workers.kinds)
            waiting.cancel()
            await asyncio.wait((waiting,))
        assert no_call_is_read()
        await workers.servicer.wait_until_idle()


@pytest.mark.parametrize("later", [NewTokens(token_ids=(7,), finish_reason=None), TransferCancelled("not needed")])
async def test_a_choice_that_its_first_token_answers_gets_nothing_that_had_come_before_it(
    later: NewTokens | BatonError,
) -> None:
    """The decode worker's message waits for the first token, and both belong to one step of the machine."""
    is_computed = asyncio.Event()
    first = FirstToken(token_id=4, finish_reason=None, report=PrefillReport())
    workers = ScriptedWorkers(decode=[[ticket, later]], prefill=[[is_computed, first]])
    async with bench_of(workers, PAIR, "disaggregated", max_attempts=1) as bench:
        asyncio.get_running_loop().call_later(0.2, is_computed.set)
        came = []
        async for choice, message in bench.driver.run(group_of(1)):
            came.append(message.token_ids)
            choice.is_answered = True
    assert came == [(4,)]


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_client_that_reads_slowly_costs_the_other_choices_no_time(
    is_placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that is placed while the client does not read nor one that is placed later."""
    arrives = asyncio.Event()
    workers = ScriptedWorkers(decode=[[*answers(1), LAST], [*answers(3), LAST]])
    if not is_placed:
        workers = ScriptedWorkers(decode=[[ticket, arrives, LAST], [*answers(3), LAST]], prefill=[computes()])
    roles = {"d": Role.DECODE} if is_placed else PAIR
    async with bench_of(workers, roles, "aggregated" if is_placed else "disaggregated") as bench:
        set_clock(monkeypatch, bench)
        group, came = group_of(2), list[int]()
        for choice in group.choices:
            objective = replace(NO_OBJECTIVE, ttft_s=2.0)
            choice.claim = replace(CLAIM, objective=objective, arrived_s=time.monotonic())
        async for _, message in bench.driver.run(group):
            if not came:
                bench.clock.ahead_s += 100.0
                arrives.set()
            came += message.token_ids
    assert sorted(came) == ([1, 3, 5, 5] if is_placed else [3, 4, 5, 5])
    assert min(request.sequence.ttft_s for request in workers.requests) > 1.0


async def test_a_client_that_reads_slowly_does_not_make_the_router_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LONG_S", 0.2)
    workers = ScriptedWorkers(decode=[answers(1), answers(3)])
    async with bench_of(workers, {"d": Role.DECODE}, "aggregated") as bench:
        messages = bench.driver.run(group_of(2))
        await anext(messages)
        await asyncio.sleep(0.4)
        assert len(workers.requests) == 2, "the other choice has its tokens"
        assert not bench.driver.is_crowded
        await messages.aclose()


@pytest.mark.parametrize("is_left", [True, False])
async def test_a_choice_for_which_no_worker_came_leaves_nothing_in_the_pools(is_left: bool) -> None:
    async with bench_of(ScriptedWorkers(), {"p": Role.PREFILL}, "aggregated") as bench:
        waiting = asyncio.ensure_future(anext(aiter(bench.driver.run(group_of(2)))))
        await until(lambda: bool(bench.pools._waiting))
        if is_left:
            await cancel_and_wait((waiting,))
        else:
            with pytest.raises(NoWorker):
                await waiting
        assert not bench.pools._waiting


async def test_the_refusal_of_one_choice_ends_all() -> None:
    workers = ScriptedWorkers(decode=[answers(1), [InvalidRequest("not this one")]])
    async with bench_of(workers, TWO, "aggregated") as bench:
        with pytest.raises(InvalidRequest, match="not this one"):
            async for _ in bench.driver.run(group_of(2)):
                pass
        await workers.servicer.wait_until_idle()


async def test_a_single_choice_that_is_answered_is_asked_for_nothing_more() -> None:
    workers = ScriptedWorkers(decode=[answers(1)])
    async with bench_of(workers, TWO, "aggregated") as bench:
        group = group_of(1)
        async for choice, _ in bench.driver.run(group):
            choice.is_answered = True
        await workers.servicer.wait_until_idle()
        assert group.unanswered().choices == ()
        assert [message async for message in bench.driver.run(group.unanswered())] == []


# -- moving ------------------------------------------------------------------------------------------------------------


def leaving_worker(*later: asyncio.Event | NewTokens | Migrate) -> ScriptedWorkers:
    """d0 decodes and leaves. Whoever takes the choice over pulls its KV and goes on after one more token of d0's."""
    return ScriptedWorkers(
        decode=[
            [NewTokens(token_ids=(4,), finish_reason=None), Migrate(), *later],
            [ticket, NewTokens(token_ids=(7,), finish_reason=FinishReason.LENGTH)],
        ],
        fetch=[[Fetched(NUM_PROMPT)]],
        prefill=[
            [
                FirstToken(
                    token_id=6,
                    finish_reason=None,
                    report=PrefillReport(),
                ),
                Transferred(10, 1, 0.0, 0.0),
            ]
        ],
    )


def leaves(bench: Bench, worker_id: str) -> bool:
    """Whether the router knows that a worker leaves."""
    return not bench.pools.is_trusted(bench.pools.get(worker_id))


@pytest.mark.parametrize(
    ("num_in_use", "held"), [(73, {}), (90, {"d1": 25})], ids=["not for the answer", "not though it has the prefix"]
)
async def test_a_choice_moves_to_nobody_without_room(
    num_in_use: int, held: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, and looks again: d2 comes later."""
    monkeypatch.setattr("router.serve.driver.MOVE_RETRY_S", 0.01)
    workers, record = leaving_worker(), new_choice()
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated", held) as bench:
        answer = bench.tokens(record, spec=LONG)
        assert await anext(answer) == 4
        await bench.lease(
            "d1", Role.DECODE, replace(READY, running=5, blocks=BlockCounts(total=100, in_use=num_in_use))
        )
        moved = asyncio.ensure_future(anext(answer))
        await until(lambda: leaves(bench, "d0"))
        assert workers.kinds == [DecodeRequest]
        await bench.lease("d2", Role.DECODE)
        assert await moved == 6
        await until(lambda: workers.servicer.num_running == 2)  # d0 decodes no more; it transfers
        assert await collected(answer) == [7]
        await workers.servicer.wait_until_idle()
    assert (record.timeline.decode_worker, record.timeline.retries) == ("d2", 0)
    fetch, decode, prefill = workers.requests[1:]
    assert isinstance(fetch, FetchRequest)
    assert fetch.source == PrefixSource(worker_id="d0", address=bench.address, num_tokens=NUM_PROMPT + 1)
    assert isinstance(decode, DecodeRequest)
    assert decode.await_kv
    assert decode.sequence.token_ids == prefill.sequence.token_ids == (*SPEC.token_ids, 4)


async def test_a_choice_does_not_move_to_who_could_not_pull_its_kv() -> None:
    """d1 holds the prompt, and would be asked again and again."""
    workers, choice = leaving_worker(), new_choice()
    workers._fetch = iter([[TransferError("lost")], [Fetched(NUM_PROMPT)]])
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated", {"d1": 25}) as bench:
        answer = bench.tokens(choice, spec=LONG)
        assert await anext(answer) == 4
        for worker_id in ("d1", "d2"):
            await bench.lease(worker_id, Role.DECODE)
        assert await collected(answer) == [6, 7]
        await workers.servicer.wait_until_idle()
    assert choice.timeline.decode_worker == "d2"


@pytest.mark.parametrize(
    ("unfit", "temperature"),
    [({"known_fields": "SequenceSpec:1,2"}, 0.0), ({"max_model_len": 64}, 0.0), ({"sampler": "b"}, 1.0)],
    ids=str,
)
async def test_a_choice_moves_to_nobody_who_does_not_know_or_cannot_hold_all_of_it(
    unfit: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serve.driver.MOVE_RETRY_S", 0.01)
    workers, record = leaving_worker(), new_choice()
    asked: list[str] = []
    fetch = WorkerClient.fetch

    def watched(self: WorkerClient, worker: Worker, *args: Any, **more: Any) -> WorkerStream[Fetched]:
        asked.append(worker.info.id)
        return fetch(self, worker, *args, **more)

    monkeypatch.setattr(WorkerClient, "fetch", watched)
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated") as bench:
        answer = bench.tokens(record, spec=replace(LONG, sampling=replace(LONG.sampling, temperature=temperature)))
        assert await anext(answer) == 4
        await bench.lease("d1", Role.DECODE, **unfit)
        moved = asyncio.ensure_future(anext(answer))
        await until(lambda: leaves(bench, "d0"))
        await until(lambda: record.machine.is_moving)
        await asyncio.sleep(0.05)  # a few looks
        await bench.lease("d2", Role.DECODE)
        assert await moved == 6
        assert await collected(answer) == [7]
    assert (asked, record.timeline.decode_worker) == (["d2"], "d2")


async def test_tokens_come_on_while_the_next_worker_pulls_their_kv() -> None:
    pulled = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[
            [NewTokens(token_ids=(4,), finish_reason=None), Migrate(), NewTokens(token_ids=(8,), finish_reason=None)],
            [ticket, NewTokens(token_ids=(7,), finish_reason=FinishReason.LENGTH)],
        ],
        fetch=[[pulled, Fetched(NUM_PROMPT)]],
        prefill=[
            [
                FirstToken(
                    token_id=6,
                    finish_reason=None,
                    report=PrefillReport(),
                ),
                Transferred(10, 1, 0.0, 0.0),
            ]
        ],
    )
    async with bench_of(workers, TWO, "aggregated", {"d0": 20}) as bench:
        answer = bench.tokens(spec=LONG)
        assert [await anext(answer), await anext(answer)] == [4, 8]
        rest = asyncio.ensure_future(collected(answer))
        await until(lambda: FetchRequest in workers.kinds)
        assert workers.kinds == [DecodeRequest, FetchRequest]
        pulled.set()
        assert await rest == [6, 7]
        assert 'baton_migrations_total{pulled="true"} 1.0' in bench.instruments.exposition().decode()
    assert workers.requests[-1].sequence.token_ids == (*SPEC.token_ids, 4, 8)


async def test_a_choice_does_not_move_when_its_worker_has_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no room elsewhere until its lease said for some seconds that it serves as before."""
    monkeypatch.setattr("router.serve.driver.MOVE_RETRY_S", 0.01)
    ends = asyncio.Event()
    workers, record = leaving_worker(ends, LAST), new_choice()
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated") as bench:
        answer = bench.tokens(record, spec=LONG)
        assert await anext(answer) == 4
        rest = asyncio.ensure_future(collected(answer))
        await until(lambda: leaves(bench, "d0"))
        bench.clock.ahead_s = LEAVING_S
        await bench.lease("d1", Role.DECODE)
        await until(lambda: not record.machine.is_moving)
        ends.set()
        assert await rest == [5]
    assert (workers.kinds, record.timeline.decode_worker) == ([DecodeRequest], "d0")


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old call outlives its attempt, and the attempt that would end it never begins."""
    workers = leaving_worker()
    async with bench_of(workers, TWO, "aggregated", {"d0": 20}) as bench:
        answer = asyncio.ensure_future(collected(bench.tokens(spec=LONG)))

        do = ChoiceDriver._do

        def cancelled(driver: ChoiceDriver, instruction: Instruction, run: Any) -> None:
            do(driver, instruction, run)
            if isinstance(instruction, KeepOldCall):
                answer.cancel()

        monkeypatch.setattr(ChoiceDriver, "_do", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert workers.kinds == [DecodeRequest, FetchRequest]
        await workers.servicer.wait_until_idle()


async def test_a_worker_that_leaves_is_rid_of_a_choice_when_another_one_fails_at_that_moment() -> None:
    """The next worker has pulled the KV, and the request ends before it gets the choice."""
    goes_on, ends = asyncio.Event(), asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[*answers(1), goes_on, *answers(9), ends, InvalidRequest("no")], [*answers(2), Migrate()]],
        fetch=[[ends, Fetched(NUM_PROMPT)]],
    )
    async with bench_of(workers, {"d": Role.DECODE, "e": Role.DECODE}, "aggregated") as bench:
        messages = bench.driver.run(group_of(2))
        assert [(await anext(messages))[1].token_ids for _ in range(2)] == [(1,), (2,)]
        waiting = asyncio.ensure_future(anext(messages))
        await until(lambda: FetchRequest in workers.kinds)
        goes_on.set()
        assert (await waiting)[1].token_ids == (9,)
        ends.set()
        await until(lambda: workers.servicer.num_running == 2)  # a call that has pulled waits to be left
        await asyncio.sleep(0.1)  # until the router has both messages
        with pytest.raises(InvalidRequest):
            await anext(messages)
        await workers.servicer.wait_until_idle()


async def test_a_worker_that_leaves_is_rid_of_a_choice_whose_next_worker_fails() -> None:
    """The move has begun, and the old call would go on beside whatever is tried next."""
    ends = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[NewTokens(token_ids=(4,), finish_reason=None), Migrate()], [GONE], [*answers(6), ends, LAST]],
        fetch=[[Fetched(NUM_PROMPT)]],
    )
    async with bench_of(workers, {**TWO, "d2": Role.DECODE}, "aggregated", {"d0": 20}) as bench:
        record = new_choice()
        answer = bench.tokens(record, spec=LONG)
        assert [await anext(answer), await anext(answer)] == [4, 6]
        await until(lambda: workers.servicer.num_running == 1)
        ends.set()
        assert await collected(answer) == [5]
    assert (record.emitted, record.timeline.retries) == ([4, 6, 5], 1)


async def test_a_worker_that_leaves_before_it_has_begun_is_asked_no_more() -> None:
    """Its lease does not say so yet, and it holds the longest prefix."""
    workers = ScriptedWorkers(decode=[[Migrate()], [LAST], [LAST]])
    async with bench_of(workers, TWO, "aggregated", {"d0": 20}) as bench:
        for _ in range(2):
            record = new_choice()
            assert await collected(bench.tokens(record)) == [5]
            assert (record.timeline.decode_worker, record.timeline.retries) == ("d1", 0)
    assert len(workers.requests) == 3


async def test_a_worker_that_leaves_again_after_it_had_stayed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serve.driver.MOVE_RETRY_S", 0.01)
    again = asyncio.Event()
    workers = leaving_worker(NewTokens(token_ids=(8,), finish_reason=None), again, Migrate())
    async with bench_of(workers, {"d0": Role.DECODE}, "aggregated") as bench:
        record = new_choice()
        answer = bench.tokens(record, spec=LONG)
        assert [await anext(answer), await anext(answer)] == [4, 8]
        rest = asyncio.ensure_future(collected(answer))
        await until(lambda: leaves(bench, "d0"))
        bench.clock.ahead_s = LEAVING_S
        await bench.lease("d0", Role.DECODE)
        await until(lambda: not record.machine.is_moving)
        await bench.lease("d1", Role.DECODE)
        again.set()
        assert await rest == [6, 7]


async def test_a_first_token_may_come_from_the_worker_that_decodes() -> None:
    """The prefill worker's engine draws none with the prompt; what it reports of the prompt counts all the same."""
    computed = FirstToken(token_id=None, finish_reason=None, report=PrefillReport(num_cached_tokens=160))
    tokens = NewTokens(token_ids=(5, 6), finish_reason=None)
    workers = ScriptedWorkers(decode=[[ticket, tokens, LAST]], prefill=[[computed, Transferred(10, 1, 0.5, 0.25)]])
    record = new_choice()
    async with bench_of(workers, PAIR, "disaggregated", {"p0": 10}) as bench:
        assert await collected(bench.tokens(record)) == [5, 6, *LAST.token_ids]
    assert (record.timeline.num_cached_tokens, record.timeline.retries) == (160, 0)


@pytest.mark.parametrize("token_id", [4, None])
async def test_a_kv_transfer_that_fails_behind_the_prompt_ends_the_wait_for_the_decode_worker(
    token_id: int | None,
) -> None:
    """The decode worker's own stream, which hangs, would say nothing."""
    first = FirstToken(token_id=token_id, finish_reason=None, report=PrefillReport())
    workers = ScriptedWorkers(decode=[[ticket], [LAST]], prefill=[[first, TransferRefused("of another shape")]])
    record = new_choice()
    async with bench_of(workers, PAIR, "auto", {"p0": 20}) as bench:
        async with asyncio.timeout(5):
            assert await collected(bench.tokens(record)) == [*([token_id] if token_id else []), 5]
    assert (record.timeline.retries, record.timeline.mode) == (1, Mode.AGGREGATED)


# -- samplers ----------------------------------------------------------------------------------------------------------

DRAWN = replace(SPEC, sampling=replace(SPEC.sampling, temperature=1.0))
DIES_LATER: Script = [NewTokens(token_ids=(4,), finish_reason=None), GONE]


@contextlib.asynccontextmanager
async def bench_with(
    workers: ScriptedWorkers, samplers: Mapping[str, str], held: Mapping[str, int], mode: str = "aggregated"
) -> AsyncIterator[Bench]:
    """Workers whose sampler is named, "p..." to prefill and "d..." to decode. Who holds more attracts."""
    async with bench_of(workers, {}, mode, held) as bench:
        for worker_id, sampler in samplers.items():
            await bench.lease(worker_id, Role.PREFILL if worker_id[0] == "p" else Role.DECODE, sampler=sampler)
        yield bench


@pytest.mark.parametrize(
    ("spec", "samplers", "worker_id"),
    [
        (DRAWN, {"d0": "a", "d1": "b", "d2": "a"}, "d2"),
        (DRAWN, {"d0": "a", "d1": "", "d2": "a"}, "d2"),
        (DRAWN, {"d0": "", "d1": "a", "d2": ""}, "d2"),
        (SPEC, {"d0": "a", "d1": "b", "d2": "a"}, "d1"),
        (SPEC, {"d0": "a", "d1": "", "d2": "a"}, "d1"),
    ],
    ids=["drawn", "not by the unknown", "unknown to unknown", "greedy", "greedy to the unknown"],
)
async def test_what_is_drawn_goes_on_with_the_same_sampler_and_a_greedy_answer_anywhere(
    spec: SequenceSpec, samplers: dict[str, str], worker_id: str
) -> None:
    workers, choice = ScriptedWorkers(decode=[DIES_LATER, [LAST]]), new_choice()
    async with bench_with(workers, samplers, {"d0": 20, "d1": 10}) as bench:
        assert await collected(bench.tokens(choice, spec=spec)) == [4, 5]
    assert (choice.timeline.decode_worker, choice.timeline.retries) == (worker_id, 1)


async def test_an_answer_of_which_nothing_is_drawn_may_change_the_sampler() -> None:
    workers, choice = ScriptedWorkers(decode=[[GONE], DIES_LATER, [LAST]]), new_choice()
    async with bench_with(workers, {"d0": "a", "d1": "b", "d2": "a", "d3": "b"}, {"d0": 20, "d1": 15}) as bench:
        assert await collected(bench.tokens(choice, spec=DRAWN)) == [4, 5]
    assert (choice.timeline.decode_worker, choice.sampler, choice.timeline.retries) == ("d3", "b", 2)


async def test_what_is_drawn_waits_for_the_same_sampler_and_not_for_ever() -> None:
    workers, waits = ScriptedWorkers(decode=[DIES_LATER, DIES_LATER, [LAST]]), [new_choice(), new_choice()]
    async with bench_with(workers, {"d0": "a", "d1": "b"}, {"d0": 20}) as bench:
        with pytest.raises(NoWorker, match=r"^no worker with the sampler a, which has drawn .* within 1 s; `baton sta"):
            await collected(bench.tokens(waits[0], spec=DRAWN))
        await bench.lease("d2", Role.DECODE, sampler="a")
        bench.clock.ahead_s = SUSPICION_S
        answer = bench.tokens(waits[1], spec=DRAWN)
        assert await anext(answer) == 4
        await bench.lease("d2", Role.DECODE, replace(READY, state=WorkerState.DRAINING), sampler="a")
        rest = asyncio.ensure_future(collected(answer))
        await until(lambda: waits[1].timeline.retries == 1)
        await bench.lease("d3", Role.DECODE, sampler="a")
        assert await rest == [5]
    assert waits[1].timeline.decode_worker == "d3"


@pytest.mark.parametrize(("spec", "prefill_worker"), [(DRAWN, "p1"), (SPEC, "p0")], ids=["drawn", "greedy"])
async def test_a_kv_transfer_of_what_is_drawn_is_between_equal_samplers(
    spec: SequenceSpec, prefill_worker: str
) -> None:
    """The prefill worker draws the first token."""
    workers, choice = ScriptedWorkers(decode=[[ticket]], prefill=[[FIRST_IS_LAST]]), new_choice()
    async with bench_with(workers, {"p0": "a", "p1": "b", "d0": "b"}, {"p0": 20}, "disaggregated") as bench:
        assert await collected(bench.tokens(choice, spec=spec)) == [5]
    assert (choice.timeline.prefill_worker, choice.timeline.decode_worker) == (prefill_worker, "d0")


async def test_an_answer_begins_with_the_sampler_that_will_be_done_soonest() -> None:
    workers, choice = ScriptedWorkers(decode=[[LAST]]), new_choice()
    async with bench_with(workers, {"d0": "b", "d1": "a", "d2": "c"}, {"d1": 20}) as bench:
        assert await collected(bench.tokens(choice, spec=DRAWN)) == [5]
    assert choice.timeline.decode_worker == "d1"


async def test_another_router_goes_on_with_the_sampler_that_was_noted() -> None:
    noted = {0: Noted((4,), sampler="b")}
    (choice,) = ChoiceGroup.begin(DRAWN, CLAIM, Context(), 1, noted).choices
    workers = ScriptedWorkers(decode=[[LAST]])
    async with bench_with(workers, {"d0": "a", "d1": "b"}, {"d0": 20}) as bench:
        assert await collected(bench.tokens(choice, spec=DRAWN)) == [5]
    assert choice.timeline.decode_worker == "d1"


@pytest.mark.parametrize("samplers", [{"d0": "a", "d1": "b"}, {"d0": "a", "d1": "a"}], ids=["two", "one"])
async def test_where_it_is_not_known_what_drew_a_clients_tokens_there_must_be_one_sampler(
    samplers: dict[str, str],
) -> None:
    """Those of another one would not go with the tokens that the client has."""
    (choice,) = ChoiceGroup.begin(DRAWN, CLAIM, Context(), 1, {0: Noted()}).choices
    workers = ScriptedWorkers(decode=[[LAST]])
    async with bench_with(workers, samplers, {}) as bench:
        if len(set(samplers.values())) == 1:
            assert await collected(bench.tokens(choice, spec=DRAWN)) == [5]
        else:
            with pytest.raises(NoWorker, match=r"not recorded, and the workers have several \(a, b\)"):
                await collected(bench.tokens(choice, spec=DRAWN))
            assert workers.requests == []


async def test_a_doubted_worker_is_taken_where_the_others_have_another_sampler() -> None:
    workers = ScriptedWorkers(decode=[[ticket], [ticket]], prefill=[[TransferError("lost")], [FIRST_IS_LAST]])
    choice = new_choice()
    async with bench_with(workers, {"p0": "a", "d0": "a", "d1": "b"}, {"d0": 20}, "disaggregated") as bench:
        assert await collected(bench.tokens(choice, spec=DRAWN)) == [5]
    assert (choice.timeline.decode_worker, choice.timeline.retries) == ("d0", 1)


async def test_a_preemption_that_comes_with_the_first_token_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate has not heard of the token yet; an answer that has begun is never refused."""
    goes_on = asyncio.Event()
    workers = ScriptedWorkers(
        decode=[[ticket, goes_on, NewTokens(token_ids=(6,), finish_reason=None), LAST]],
        prefill=[
            [FirstToken(token_id=4, finish_reason=None, report=PrefillReport()), goes_on, Transferred(10, 1, 0.0, 0.0)]
        ],
    )
    waits_no_more = ChoiceDriver._waits_no_more

    def preempted(choices: ChoiceDriver, run: Any) -> None:
        run.preempt()
        waits_no_more(choices, run)

    monkeypatch.setattr(ChoiceDriver, "_waits_no_more", preempted)
    async with bench_of(workers, PAIR, "disaggregated") as bench:
        answer = bench.tokens()
        assert await anext(answer) == 4
        rest = asyncio.ensure_future(collected(answer))
        await asyncio.sleep(0.05)
        goes_on.set()
        assert await rest == [6, 5]


# -- a model that sleeps -----------------------------------------------------------------------------------------------


async def test_requests_that_wait_for_a_model_without_workers_are_sent_when_its_pool_appears() -> None:
    """They do not wait for the next request; see llm-d/GAIE#2117."""
    workers = ScriptedWorkers(decode=[[LAST]] * 20)
    async with bench_of(workers, {}, "auto") as bench:
        bench.pools.note_sleep(is_asleep=True, num_desired=0, problem="")
        answers = [asyncio.create_task(collected(bench.tokens(new_choice()))) for _ in range(20)]
        await until(lambda: bench.num_wakes == 1)
        bench.clock.ahead_s = 2.0
        await bench.pools.update([])
        await until(lambda: bench.num_wakes == 2)
        assert workers.requests == []
        bench.pools.note_sleep(is_asleep=True, num_desired=1, problem="")
        await bench.lease("d0", Role.DECODE)
        assert await asyncio.gather(*answers) == [[5]] * 20
        assert bench.num_wakes == 2, "20 choices ask together"


async def test_a_choice_whose_last_worker_falls_asleep_wakes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller decided just before the request arrived."""
    workers = ScriptedWorkers(decode=[[WorkerDraining("d0 drains")], [LAST]])
    async with bench_of(workers, {"d0": Role.DECODE}, "auto") as bench:
        set_clock(monkeypatch, bench)
        choice = new_choice()
        answer = asyncio.create_task(collected(bench.tokens(choice)))
        await until(lambda: any(isinstance(event, Left) for event in choice.timeline.events))
        await bench.lease("d0", Role.DECODE, replace(READY, state=WorkerState.DRAINING))
        assert bench.num_wakes == 0
        bench.pools.note_sleep(is_asleep=True, num_desired=0, problem="")
        await until(lambda: bench.num_wakes == 1)
        bench.clock.ahead_s = 60.0  # far more than a worker is waited for
        await bench.pools.update([])
        await until(lambda: bench.num_wakes == 2)
        await bench.lease("d0", Role.DECODE, epoch=2)
        assert await answer == [5]


@pytest.mark.parametrize(("is_asleep", "after_s"), [(True, 100.5), (False, 9.6)])
async def test_a_choice_of_a_model_that_does_not_wake_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch, is_asleep: bool, after_s: float
) -> None:
    """In `router.wake_wait_s`, or in `router.worker_wait_s` after the sleep has ended."""
    async with bench_of(ScriptedWorkers(), {}, "auto", wake_wait_s=100.0) as bench:
        set_clock(monkeypatch, bench)
        bench.pools.note_sleep(is_asleep=True, num_desired=0, problem="no node has a GPU")
        answer = asyncio.create_task(collected(bench.tokens()))
        await until(lambda: bench.num_wakes == 1)
        for bench.clock.ahead_s in (4.0, 8.0):
            await bench.pools.update([])
            await asyncio.sleep(0.05)
            assert not answer.done()
        bench.pools.note_sleep(is_asleep=is_asleep, num_desired=0, problem="no node has a GPU")
        bench.clock.ahead_s = after_s
        await bench.pools.update([])
        reason = "was not awake within 100 s: no node has a GPU" if is_asleep else "no worker became ready within 1 s"
        with pytest.raises(NoWorker, match=reason):
            await answer
