"""A request for an adapter goes to workers that serve adapters, and is refused with a sentence if there are none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton import wire
from baton.cluster import Role, WorkerLoad, WorkerState
from baton.errors import AdapterUnreadable, NoWorker, Overloaded, Unsupported
from baton.messages import DecodeRequest, FetchRequest, FirstToken, Migrate, NewTokens, PrefillReport, PrefillRequest
from baton.sampling import FinishReason
from tests.support.builders import READY, registered_adapter
from tests.unit.router.serve.scripted_workers import SPEC, Bench, ScriptedWorkers, bench_of, new_choice, ticket

POET = registered_adapter("poet").adapter
OF_POET = replace(SPEC, adapter=POET)
LAST = NewTokens(token_ids=(5,), finish_reason=FinishReason.LENGTH)
FIRST_IS_LAST = FirstToken(token_id=5, finish_reason=FinishReason.LENGTH, report=PrefillReport())
HOLDS = WorkerLoad(state=WorkerState.READY, adapters=(POET.digest,))


async def collected(tokens: AsyncIterator[int]) -> list[int]:
    return [token async for token in tokens]


async def able(bench: Bench, **roles: Role) -> None:
    for name, role in roles.items():
        await bench.lease(name, role, max_adapters=4)


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
async def test_workers_without_adapters_are_passed_over(mode: str) -> None:
    workers = ScriptedWorkers(
        decode=[[ticket] if mode == "disaggregated" else [LAST]] * 8, prefill=[[FIRST_IS_LAST]] * 8
    )
    roles = {"p0": Role.PREFILL, "d0": Role.DECODE}
    async with bench_of(workers, roles, mode) as bench:
        await able(bench, p1=Role.PREFILL, d1=Role.DECODE)
        for _ in range(4):
            choice = new_choice()
            assert await collected(bench.tokens(choice, spec=OF_POET)) == [5]
            assert choice.timeline.decode_worker == "d1"
            assert choice.timeline.prefill_worker == ("p1" if mode == "disaggregated" else "")
    sent = [each for each in workers.requests if isinstance(each, DecodeRequest | PrefillRequest)]
    assert {each.sequence.adapter for each in sent} == {POET}


async def test_the_worker_that_holds_the_adapter_gets_the_request() -> None:
    workers = ScriptedWorkers(decode=[[LAST]] * 8)
    async with bench_of(workers, {}, "aggregated") as bench:
        await able(bench, **{f"d{i}": Role.DECODE for i in range(4)})
        await bench.lease("d2", Role.DECODE, HOLDS, max_adapters=4)
        for index in range(6):
            choice = new_choice()
            spec = replace(OF_POET, token_ids=tuple(range(index, index + len(SPEC.token_ids))))
            await collected(bench.tokens(choice, spec=spec))
            assert choice.timeline.decode_worker == "d2"
            placed = choice.timeline.placed
            assert placed is not None
            loads = {terms.worker_id: terms.load_s for terms in placed.placement.considered}
            assert loads == {"d0": 0.5, "d1": 0.5, "d2": 0.0, "d3": 0.5}


async def test_requests_of_one_adapter_go_to_the_worker_that_the_first_one_makes_load_it() -> None:
    workers = ScriptedWorkers(decode=[[LAST]] * 8)
    async with bench_of(workers, {}, "aggregated") as bench:
        await able(bench, **{f"d{i}": Role.DECODE for i in range(4)})
        used = set()
        for index in range(6):
            choice = new_choice()
            spec = replace(OF_POET, token_ids=tuple(range(index, index + len(SPEC.token_ids))))
            await collected(bench.tokens(choice, spec=spec))
            used.add(choice.timeline.decode_worker)
    assert len(used) == 1


@pytest.mark.parametrize(
    ("mode", "without", "role"),
    [
        ("auto", {"p0": Role.PREFILL, "d0": Role.DECODE}, "decode"),
        ("disaggregated", {"p0": Role.PREFILL}, "prefill"),
    ],
)
async def test_a_cluster_without_adapters_says_what_to_set_at_once(
    mode: str, without: dict[str, Role], role: str
) -> None:
    began_s = time.monotonic()
    async with bench_of(ScriptedWorkers(), without, mode) as bench:
        if role == "prefill":
            await able(bench, d0=Role.DECODE)
        with pytest.raises(Unsupported, match=rf"no {role} worker serves adapters.*'poet'.*engine\.max_adapters"):
            await collected(bench.tokens(spec=OF_POET))
    assert time.monotonic() - began_s < 0.9


async def test_a_prompt_is_computed_where_it_is_decoded_if_no_prefill_worker_serves_adapters() -> None:
    async with bench_of(ScriptedWorkers(decode=[[LAST]]), {"p0": Role.PREFILL}, "auto") as bench:
        await able(bench, d0=Role.DECODE)
        choice = new_choice()
        assert await collected(bench.tokens(choice, spec=OF_POET)) == [5]
        assert (choice.timeline.mode, choice.timeline.decode_worker) == ("aggregated", "d0")


async def test_workers_that_are_not_ready_are_waited_for() -> None:
    starting = replace(READY, state=WorkerState.STARTING)
    async with bench_of(ScriptedWorkers(), {}, "aggregated") as bench:
        await bench.lease("d0", Role.DECODE, starting, max_adapters=4)
        with pytest.raises(NoWorker, match="within 1 s"):
            await collected(bench.tokens(spec=OF_POET))


async def test_a_worker_of_an_older_release_gets_no_request_for_an_adapter() -> None:
    known = " ".join(
        f"{name}:{numbers}"
        for name, _, numbers in (each.partition(":") for each in wire.KNOWN_FIELDS.split(" "))
        if name != "Adapter"
    )
    workers = ScriptedWorkers(decode=[[LAST]] * 8)
    async with bench_of(workers, {}, "aggregated") as bench:
        await bench.lease("old", Role.DECODE, max_adapters=4, known_fields=known)
        await able(bench, new=Role.DECODE)
        for _ in range(4):
            choice = new_choice()
            await collected(bench.tokens(choice, spec=OF_POET))
            assert choice.timeline.decode_worker == "new"


async def test_an_answer_migrates_only_to_a_worker_that_serves_adapters() -> None:
    workers = ScriptedWorkers(decode=[[NewTokens(token_ids=(4,), finish_reason=None), Migrate()], [LAST]])
    async with bench_of(workers, {}, "aggregated") as bench:
        await able(bench, d0=Role.DECODE)
        tokens = bench.tokens(spec=replace(OF_POET, sampling=replace(SPEC.sampling, max_tokens=9)))
        assert await anext(tokens) == 4
        await bench.lease("d1", Role.DECODE)
        choice = new_choice()
        choice.spec = OF_POET
        assert bench.driver._selector.destination(choice, OF_POET, {"d0"}) is None
        await able(bench, d2=Role.DECODE)
        found = bench.driver._selector.destination(choice, OF_POET, {"d0"})
        assert found is not None
        assert found[0].decode_worker == "d2"
        await tokens.aclose()
    assert not any(isinstance(each, FetchRequest) and each.sequence.adapter is None for each in workers.requests)


UNREADABLE = AdapterUnreadable("this worker cannot read the folder of adapter poet")


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
async def test_a_worker_that_cannot_read_an_adapter_is_passed_over_and_serves_other_requests(mode: str) -> None:
    """Whichever of the two workers computes the prompt cannot read the adapter."""
    if mode == "aggregated":
        workers = ScriptedWorkers(decode=[[UNREADABLE], *[[LAST]] * 8])
        roles = {"d0": Role.DECODE, "d1": Role.DECODE}
    else:
        workers = ScriptedWorkers(decode=[[ticket]] * 8, prefill=[[UNREADABLE], *[[FIRST_IS_LAST]] * 8])
        roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE}
    async with bench_of(workers, {}, mode) as bench:
        await able(bench, **roles)
        choice = new_choice()
        assert await collected(bench.tokens(choice, spec=OF_POET)) == [5]
        assert choice.timeline.retries == 1
        used = set()
        for index in range(6):
            choice = new_choice()
            spec = replace(SPEC, token_ids=tuple(range(index, index + len(SPEC.token_ids))))
            await collected(bench.tokens(choice, spec=spec))
            used.add(choice.timeline.decode_worker if mode == "aggregated" else choice.timeline.prefill_worker)
    assert len(used) == 2, "no worker is suspected"


@pytest.mark.parametrize("num_workers", [1, 2, 6])
async def test_an_adapter_that_no_worker_can_read_is_refused_and_all_workers_stay(num_workers: int) -> None:
    workers = ScriptedWorkers(decode=[[UNREADABLE]] * min(num_workers, 4) + [[LAST]])
    began_s = time.monotonic()
    async with bench_of(workers, {}, "aggregated") as bench:
        await able(bench, **{f"d{i}": Role.DECODE for i in range(num_workers)})
        with pytest.raises(AdapterUnreadable, match="cannot read the folder of adapter poet"):
            await collected(bench.tokens(spec=OF_POET))
        assert await collected(bench.tokens()) == [5]
    assert time.monotonic() - began_s < 0.9


async def test_a_full_queue_does_not_hide_that_an_adapter_cannot_be_read() -> None:
    workers = ScriptedWorkers(decode=[[UNREADABLE], [Overloaded("full")]])
    async with bench_of(workers, {}, "aggregated") as bench:
        await able(bench, d0=Role.DECODE, d1=Role.DECODE)
        with pytest.raises(AdapterUnreadable):
            await collected(bench.tokens(spec=OF_POET))
