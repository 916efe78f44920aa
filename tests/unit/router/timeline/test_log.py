"""What a router remembers of requests: which, how long, and where their time went. Workers follow scripts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.api import GenerateRequest, TokenIds
from baton.cluster import Role
from baton.errors import InvalidRequest, NoWorker, WorkerFailed
from baton.messages import FirstToken, NewTokens, PrefillReport, Transferred
from baton.sampling import FinishReason
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.prompt import Tokenizer
from router.serve.choice import Choice, ChoiceGroup
from router.timeline import log as request_log
from router.timeline.events import MOST_EVENTS, ChoiceTimeline, Decoded
from router.timeline.log import RequestFilter, RequestLog
from tests.support.described import check_described
from tests.support.waiting import until
from tests.unit.router.serve.scripted_workers import Bench, ScriptedWorkers, bench_of, ticket
from tests.unit.router.test_service import MODEL, OneToken, Router

PROMPT = tuple(range(5, 405))
SETTINGS = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
FIRST = FirstToken(
    token_id=5, finish_reason=None, report=PrefillReport(num_cached_tokens=16, queue_s=0.02, prefill_s=0.03)
)
TRANSFERRED = Transferred(exposed_s=0.001, transfer_s=0.002, num_bytes=2**20, num_chunks=1)
LAST = NewTokens(token_ids=(8,), finish_reason=FinishReason.LENGTH)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture
def router(tokenizer: Tokenizer) -> Iterator[Router]:
    found = Router(tokenizer)
    yield found
    found.close()


def request(request_id: str = "r", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=TokenIds(PROMPT), request_id=request_id, sampling=SETTINGS, **fields)


async def answered(router: Router, asked: GenerateRequest, tenant: Tenant = DEFAULT_TENANT) -> float:
    """The seconds that the answer took, as its reader sees it."""
    began_s, ended_s = time.monotonic(), 0.0
    async for _ in router.service.generate(asked, tenant=tenant):
        ended_s = time.monotonic()
    return ended_s - began_s


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer, workers: ScriptedWorkers, roles: dict[str, Role], mode: str
) -> AsyncIterator[tuple[Router, Bench]]:
    """A router's service over workers that follow a script."""
    async with bench_of(workers, roles, mode) as bench:
        driver: Any = bench.driver
        router = Router(tokenizer, driver)
        try:
            yield router, bench
        finally:
            router.close()


async def test_the_life_of_a_request_whose_worker_died_is_accounted_for(tokenizer: Tokenizer) -> None:
    """It dies in the midst of the answer, which goes on elsewhere."""
    dies, goes_on = asyncio.Event(), asyncio.Event()
    two = NewTokens(token_ids=(6,), finish_reason=None)
    workers = ScriptedWorkers(
        decode=[
            [ticket, two, dies, WorkerFailed("killed")],
            [ticket, NewTokens(token_ids=(7,), finish_reason=None), goes_on, LAST],
        ],
        prefill=[[FIRST, TRANSFERRED], [FIRST, TRANSFERRED]],
    )
    roles = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    async with served(tokenizer, workers, roles, "disaggregated") as (router, _):
        answering = asyncio.create_task(answered(router, request()))
        for event in (dies, goes_on):
            await asyncio.sleep(1.0)
            event.set()
        took_s = await answering
        (timeline,) = router.front.requests.explain("r")
    summary = timeline.summary
    assert (summary.outcome, summary.retries, summary.num_tokens) == ("met", 1, 5)
    assert timeline.phases[0].begin_s == 0.0
    assert [each.end_s for each in timeline.phases[:-1]] == [each.begin_s for each in timeline.phases[1:]]
    accounted_s = sum(phase.end_s - phase.begin_s for phase in timeline.phases)
    assert 0.95 * took_s <= accounted_s <= took_s
    named = [phase.stage for phase in timeline.phases if phase.stage not in ("queue", "transfer")]
    once = [stage for stage, _ in itertools.groupby(named)]
    assert once == ["decode_admission", "prefill", "decode", "recovery", "decode"]
    (recovery,) = (phase for phase in timeline.phases if phase.stage == "recovery")
    happened = [(event.what, event.attempt) for event in timeline.events]
    died = happened.index(("failed", 0))
    assert happened[:2] == [("arrived", 0), ("admitted", 0)]
    assert set(happened[2:died]) == {
        ("placed", 0), ("room", 0), ("computed", 0), ("first_token", 0), ("transferred", 0)
    }  # fmt: skip
    assert happened[died + 1 : died + 4] == [("placed", 1), ("room", 1), ("computed", 1)]
    assert {what for what, _ in happened[-2:]} == {"finished", "ended"}
    dead = (summary.decode_worker == "d0" and "d1") or "d0"
    failed = timeline.events[died]
    assert failed.worker == dead
    assert recovery.begin_s <= failed.at_s <= recovery.end_s
    assert failed.text == f"failed on {dead} (decode) after 2 tokens: WorkerFailed: killed"
    assert [event.at_s for event in timeline.events] == sorted(event.at_s for event in timeline.events)


async def test_what_was_measured_stands_beside_what_was_predicted(tokenizer: Tokenizer) -> None:
    workers = ScriptedWorkers(
        decode=[[ticket, NewTokens(token_ids=(6, 7), finish_reason=None), LAST]], prefill=[[FIRST, TRANSFERRED]]
    )
    async with served(tokenizer, workers, {"p0": Role.PREFILL, "d0": Role.DECODE}, "disaggregated") as (router, _):
        await answered(router, request())
        (timeline,) = router.front.requests.explain("r")
    (placement,) = timeline.placements
    assert (placement.prefill_worker, placement.decode_worker) == ("p0", "d0")
    measured = placement.measured
    assert (measured.wait_s, measured.pull_s, measured.compute_s, measured.exposed_s) == (0.02, 0.0, 0.03, 0.001)
    assert measured.room_s is not None
    assert measured.room_s > 0
    assert measured.step_s == timeline.summary.itl_s
    assert placement.predicted.compute_s is not None
    assert [option.worker_id for option in placement.options] == ["p0", "d0"]
    texts = {event.what: event.text for event in timeline.events}
    assert texts["placed"].startswith("placed: disaggregated on p0 (prefill) -> d0 (decode); first token predicted in ")
    assert (
        texts["computed"]
        == "p0 (prefill) has the first token: 0.020 s in its queue, 0.030 s computing; 16 tokens were cached"
    )
    assert texts["transferred"].startswith(
        "KV is on d0 (decode): 1.0 MiB in 0.002 s, of which 0.001 s after the prompt"
    )
    assert texts["finished"] == "finished after 4 tokens: length"


async def test_the_wait_for_a_worker_is_named(tokenizer: Tokenizer) -> None:
    workers = ScriptedWorkers(decode=[[LAST]])
    async with served(tokenizer, workers, {}, "aggregated") as (router, bench):
        answering = asyncio.create_task(answered(router, request()))
        log = router.front.requests
        await until(lambda: any(event.what == "admitted" for call in log.explain("r") for event in call.events))
        await asyncio.sleep(0.1)
        (running,) = log.explain("r")
        await bench.lease("d0", Role.DECODE)
        await answering
        (timeline,) = log.explain("r")
    assert (running.summary.outcome, running.summary.ttft_s) == ("running", None)
    assert running.summary.total_s == pytest.approx(sum(phase.end_s - phase.begin_s for phase in running.phases))
    (placed,) = (event for event in timeline.events if event.what == "placed")
    assert "; waited 0." in placed.text
    assert placed.text.endswith(" s for a suitable worker")
    assert timeline.summary.stages.queue >= 0.1


async def test_a_request_that_was_not_placed_says_why(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, ScriptedWorkers(), {}, "aggregated") as (router, _):
        with pytest.raises(NoWorker):
            await answered(router, request())
        (timeline,) = router.front.requests.explain("r")
    assert timeline.summary.outcome == "error"
    assert timeline.summary.error.startswith("NoWorker: no worker became ready within 1 s")
    assert timeline.events[-1].text == f"error: {timeline.summary.error}"
    assert timeline.placements == ()


async def test_what_may_quote_a_request_is_not_remembered(router: Router) -> None:
    with pytest.raises(InvalidRequest):
        await answered(router, request(model="a secret"))
    (timeline,) = router.front.requests.explain("r")
    assert (timeline.summary.outcome, timeline.summary.error) == ("invalid", "ModelNotFound")
    assert "secret" not in str(timeline)


async def test_requests_are_listed_the_latest_first_and_filtered(router: Router) -> None:
    for number, tenant in enumerate(("acme", "zeta", "acme")):
        await answered(router, request(f"r{number}"), Tenant(id=tenant))
    with pytest.raises(InvalidRequest):
        await answered(router, request("bad", ttft_ms=-1.0), Tenant(id="acme"))

    def ids(**wanted: Any) -> list[str]:
        return [each.request_id for each in router.front.requests.listed(RequestFilter(**wanted)).requests]

    assert ids() == ["bad", "r2", "r1", "r0"]
    assert ids(limit=2) == ["bad", "r2"]
    assert ids(tenant="acme") == ["bad", "r2", "r0"]
    assert ids(tenant="acme", outcomes=("met", "error")) == ["r2", "r0"]
    assert ids(outcomes=("invalid",)) == ["bad"]
    assert ids(slo_class="default") == ["r2", "r1", "r0"], "what is not valid is in no class"
    assert ids(slo_class="interactive") == []
    summaries = router.front.requests.listed(RequestFilter()).requests
    ((name, release),) = {(each.model, each.release) for each in summaries}
    assert name != release
    assert ids(model=name) == ids(model=release) == ids()
    assert ids(model="another") == []
    assert router.front.requests.listed(RequestFilter(limit=1)).num_kept == 4


async def test_ids_may_come_again_and_are_per_tenant(router: Router) -> None:
    for tenant in ("acme", "acme", "zeta"):
        await answered(router, request(), Tenant(id=tenant))
    found = router.front.requests.explain("r")
    assert [each.summary.tenant for each in found] == ["zeta", "acme", "acme"]
    assert [each.summary.tenant for each in router.front.requests.explain("r", "acme")] == ["acme", "acme"]
    assert router.front.requests.explain("unheard of") == []


@pytest.mark.parametrize("wanted", [{"limit": 0}, {"limit": 1001}, {"outcomes": ("late",)}])
def test_what_cannot_be_asked_for_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        RequestFilter(**wanted)


class SometimesFails(OneToken):
    """A driver whose workers fail at two requests."""

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        if group.choices[0].spec.request_id in ("r1", "r2"):
            raise WorkerFailed("gone")
        async for each in super().run(group):
            yield each


async def test_the_latest_are_kept_and_for_longer_what_failed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "LATEST", 3)
    router = Router(tokenizer, SometimesFails())
    for number in range(8):
        with contextlib.suppress(WorkerFailed):
            await answered(router, request(f"r{number}"))
    listed = router.front.requests.listed(RequestFilter())
    router.close()
    assert [each.request_id for each in listed.requests] == ["r7", "r6", "r5", "r2", "r1"]
    assert RequestLog()._troubled.maxlen == request_log.TROUBLED


async def test_nothing_of_a_request_stays_behind_that_its_record_does_not_name(router: Router) -> None:
    """Its tokens, for one."""
    await answered(router, request())
    log = router.front.requests
    assert not log._running
    (record,) = log._latest
    assert str(PROMPT[-3:])[1:-1] not in str(record)


def test_of_many_events_those_in_the_middle_are_left_out() -> None:
    choice = ChoiceTimeline()
    for number in range(MOST_EVENTS + 10):
        choice.add(Decoded(float(number), 0))
    assert [event.at_s for event in choice.events] == [
        *range(MOST_EVENTS // 2),
        *range(MOST_EVENTS // 2 + 10, MOST_EVENTS + 10),
    ]
    assert choice.num_left_out == 10


async def test_operators_ask_over_http(router: Router) -> None:
    body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 1, "request_id": "a/b"}
    assert (await router.post("/v1/completions", body)).status_code == 200
    listed = await router.get("/api/requests?outcome=met&outcome=error&limit=5")
    (summary,) = listed.json()["requests"]
    assert listed.headers["cache-control"] == "no-store"
    assert (summary["request_id"], summary["outcome"], summary["e2e_objective_s"]) == ("a/b", "met", None)
    assert set(summary["stages"]) == {"queue", "decode_admission", "prefill", "transfer", "decode", "recovery"}
    check_described("/api/requests", listed.json())
    found = await router.get("/api/requests/a/b")
    check_described("/api/requests/{request_id}", found.json())
    (detail,) = found.json()["requests"]
    assert summary.items() <= detail.items()
    assert [event["what"] for event in detail["events"]] == ["arrived", "admitted", "first_token", "finished", "ended"]
    assert (await router.get("/api/requests?tenant=nobody")).json()["requests"] == []
    for path, status, said in (
        ("/api/requests/none", 404, "this router does not know a request 'none'; it keeps the latest 1024"),
        ("/api/requests/a/b?tenant=nobody", 404, "does not know"),
        ("/api/requests?limit=0", 400, "limit must be from 1 to 1000"),
        ("/api/requests?limit=x", 400, "limit"),
        ("/api/requests?outcome=late", 400, "outcome must be one of running, met, "),
    ):
        refused = await router.get(path)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (status, True), path
