"""Alerts of a router: when each is raised, and that its rule is the one for Prometheus."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster import (
    BlockCounts,
    CertificateTerm,
    ControllerInfo,
    ModelState,
    PoolScaling,
    PoolStatus,
    PoolTrouble,
    RouterInfo,
    ServedModel,
    StoreMemory,
    WorkerLoad,
    WorkerState,
)
from baton.telemetry.request_metrics import RequestMetrics
from router.cluster.history import SLOT_S, ClusterHistory, MemoryHistory
from router.cluster.watch import (
    RULES,
    WINDOWS_S,
    AlertBook,
    AlertWatch,
    Condition,
    LoadMeter,
    Outcomes,
    RouterLoad,
    RouterView,
    conditions,
)
from tests.observability.shipped import alerts
from tests.support.builders import READY, cluster_status, worker

SHIPPED = {rule["alert"]: rule for rule in alerts()}
SECONDS = {"m": 60, "h": 3600}
LOAD = RouterLoad(
    cpu_share=0.1, long_cpu_share=0.1, loop_lag_s=0.001, memory_bytes=1, open_files=8, max_files=100,
    connections=1, max_connections=10, in_flight=0, max_in_flight=10,
)  # fmt: skip
CONTROLLER = ControllerInfo(pid=1, address="h:1")
NOW_S, DAY_S = 1_000_000.0, 86_400


def sight(
    *, outcomes: Outcomes | None = None, by_window: Mapping[float, Outcomes] | None = None, load: RouterLoad = LOAD,
    **status: Any,
) -> RouterView:  # fmt: skip
    """A cluster that is well but for what is given."""
    given = {"controller": CONTROLLER, **status}
    found = by_window or dict.fromkeys(WINDOWS_S, outcomes or {})
    workers = given.pop("workers", ())
    return RouterView(router_id="r0", now_s=NOW_S, status=cluster_status(*workers, **given), load=load, outcomes=found)


def raised(seen: RouterView) -> list[tuple[str, str]]:
    return [(name, about) for name, about, _ in conditions(seen)]


def seconds(found: str) -> int:
    """The seconds of a duration as Prometheus writes it: 5m."""
    return int(found[:-1]) * SECONDS[found[-1]]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_the_one_for_prometheus(name: str) -> None:
    rule, shipped = RULES[name], SHIPPED[name]
    assert rule.severity == shipped["labels"]["severity"]
    assert rule.for_s == seconds(shipped["for"])
    thresholds = re.findall(r"[<>] (\d[\d.]*(?: \* \d[\d.]*)?)(?! ?\*? ?\d)", shipped["expr"])
    assert [math.prod(map(float, each.split(" * "))) for each in thresholds] == pytest.approx(rule.above)
    windows = re.findall(r"(?:\[|_rate)(\d+[mh])", shipped["expr"])
    assert {seconds(each) for each in windows} == set(rule.windows_s)


def load(**values: Any) -> WorkerLoad:
    return replace(READY, **values)


def blocks(in_use: int) -> BlockCounts:
    return BlockCounts(total=100, free=100 - in_use, in_use=in_use)


def term(left_s: float, whole_s: float) -> CertificateTerm:
    return CertificateTerm("members", NOW_S + left_s - whole_s, NOW_S + left_s)


def lagging(lag_s: float) -> RouterInfo:
    return RouterInfo(id="r1", pid=1, grpc="", http="", mirror_lag_s=lag_s)


def scaled(utilisation: float, wanted: int) -> dict[str, Any]:
    controller = replace(CONTROLLER, scaling=(PoolScaling("decode", utilisation, wanted),))
    return {"controller": controller, "pools": {"decode": PoolStatus(2, 2)}}


def default(**counts: float) -> Outcomes:
    return {(outcome, "default"): number for outcome, number in counts.items()}


def in_state(state: ModelState) -> dict[str, Any]:
    model = ServedModel(id="m", path="/m", content_id="c", release="m-1", state=state, controller=CONTROLLER)
    return {"models": (model,)}


CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "BatonModelDoesNotWake": ([in_state(ModelState.WAKING)], [in_state(ModelState.ASLEEP)]),
    "BatonPoolEmpty": ([{"pools": {"decode": PoolStatus(2, 0)}}], [{"pools": {"decode": PoolStatus(0, 0)}}]),
    "BatonPoolBelowDesired": ([{"pools": {"decode": PoolStatus(2, 1)}}], [{"pools": {"decode": PoolStatus(1, 2)}}]),
    "BatonRedisDown": ([{"redis_ok": False}], [{}]),
    "BatonRedisFull": (
        [{"store_memory": StoreMemory(86, 100, 0)}],
        [{"store_memory": StoreMemory(85, 100, 0)}, {"store_memory": StoreMemory(86, 0, 0)}],
    ),
    "BatonCertificateExpiresNow": (
        [{"certificates": (term(DAY_S - 1, 90 * DAY_S),)}, {"certificates": (term(-5, 90 * DAY_S),)}],
        [{"certificates": (term(DAY_S + 1, 90 * DAY_S),)}, {"certificates": (term(3600, 18 * 3600),)}],
    ),
    "BatonCertificateExpiresSoon": (
        [{"certificates": (term(13 * DAY_S, 365 * DAY_S),)}],
        [{"certificates": (term(15 * DAY_S, 365 * DAY_S),)}, {"certificates": (term(13 * DAY_S, 60 * DAY_S),)}],
    ),
    "BatonControllerDown": ([{"controller": None}], [{}]),
    "BatonSelfCheckFails": ([{"workers": (worker(load=load(self_check="3 blocks")),)}], [{"workers": (worker(),)}]),
    "BatonDrainStuck": (
        [{"workers": (worker(load=load(state=WorkerState.DRAINING)),)}],
        [{"workers": (worker(load=load(state=WorkerState.STARTING)),)}],
    ),
    "BatonKVCacheFull": (
        [{"workers": (worker(load=load(blocks=blocks(91))),)}],
        [{"workers": (worker(load=load(blocks=blocks(90))),)}],
    ),
    "BatonWireMismatch": (
        [{"workers": (worker("a", wire_compat="1"), worker("b", wire_compat="2"))}],
        [{"workers": (worker("a"), worker("b"))}],
    ),
    "BatonNoRoom": (
        [{"controller": replace(CONTROLLER, trouble=(PoolTrouble("decode", 1, 0),))}],
        [{"controller": replace(CONTROLLER, trouble=(PoolTrouble("decode", 0, 9),))}],
    ),
    "BatonAutoscalerAtLimit": ([scaled(0.95, 2)], [scaled(0.9, 2), scaled(0.95, 3)]),
    "BatonMirrorLags": ([{"routers": (lagging(5.1),)}], [{"routers": (lagging(5.0),)}]),
    "BatonRouterBusy": (
        [{"load": replace(LOAD, long_cpu_share=0.96)}],
        [{"load": replace(LOAD, cpu_share=2.0, long_cpu_share=0.95)}],
    ),
    "BatonRouterOutOfFiles": (
        [{"load": replace(LOAD, open_files=81)}],
        [{"load": replace(LOAD, open_files=80)}, {"load": replace(LOAD, open_files=81, max_files=0)}],
    ),
    "BatonRequestsFail": (
        [{"outcomes": default(error=2, met=98, cancelled=1000)}],
        [{"outcomes": default(error=1, met=99)}, {"outcomes": default(cancelled=3)}],
    ),
    "BatonRequestsRefused": (
        [{"outcomes": default(rejected=6, met=94, cancelled=1000)}],
        [{"outcomes": default(rejected=5, met=95)}],
    ),
    "BatonFirstTokensLate": (
        [{"outcomes": default(ttft_missed=2, met=98, rejected=900)}],
        [{"outcomes": default(ttft_missed=1, met=99)}, {"outcomes": default(rejected=900)}],
    ),
    "BatonTokensSlow": ([{"outcomes": default(itl_missed=2, met=98)}], [{"outcomes": default(itl_missed=1, met=99)}]),
    "BatonGoodputBurnsFast": (
        [{"outcomes": default(rejected=15, met=85)}],
        [
            {"outcomes": default(rejected=14, met=86)},
            {"outcomes": default(rejected=20)},
            {"by_window": {300: default(met=9), 600: {}, 3600: default(rejected=15, met=85)}},
        ],
    ),
}  # fmt: skip
"""An alert -> what raises it, and what does not."""


def test_every_rule_has_cases() -> None:
    assert CASES.keys() == RULES.keys()
    assert conditions(sight()) == []


@pytest.mark.parametrize("name", CASES)
def test_an_alert_is_raised_beyond_its_threshold(name: str) -> None:
    wrong, well = CASES[name]
    for given in wrong:
        assert name in {each for each, _ in raised(sight(**given))}, given
    for given in well:
        assert name not in {each for each, _ in raised(sight(**given))}, given


def test_conditions_name_what_they_are_about_and_the_worst_come_first() -> None:
    seen = sight(
        pools={"decode": PoolStatus(2, 0)},
        workers=(worker("w7", load=load(blocks=blocks(95))),),
        outcomes={("met", "batch"): 90, ("rejected", "batch"): 10, ("met", "default"): 50},
        load=replace(LOAD, open_files=90),
    )
    assert raised(seen) == [
        ("BatonPoolEmpty", "decode"),
        ("BatonRouterOutOfFiles", "r0"),
        ("BatonPoolBelowDesired", "decode"),
        ("BatonRequestsRefused", "batch"),
        ("BatonKVCacheFull", "w7 (decode)"),
    ]
    assert conditions(seen)[3][2] == "10.0% of the requests of class batch are refused"


def test_workers_of_one_id_are_told_apart_by_their_release() -> None:
    models = tuple(
        ServedModel(id="m", path="/m", content_id=content, release=f"m-{content}", controller=CONTROLLER)
        for content in "ab"
    )
    workers = [worker("w0", load=load(self_check="fails"), content_id=content) for content in "ab"]
    assert raised(sight(workers=workers, models=models)) == [
        ("BatonSelfCheckFails", "m-a/w0 (decode)"),
        ("BatonSelfCheckFails", "m-b/w0 (decode)"),
    ]


class Clock:
    now = NOW_S

    def __call__(self) -> float:
        return self.now


EMPTY: Condition = ("BatonPoolEmpty", "decode", "Pool decode has no worker that is ready")
LAGS: Condition = ("BatonMirrorLags", "r1", "Router r1 is behind")


def test_an_alert_fires_once_its_condition_has_lasted() -> None:
    clock, found = Clock(), [LAGS]
    book = AlertBook(lambda: found, clock)
    (first,) = book.alerts()
    assert (first.name, first.about, first.severity) == ("BatonMirrorLags", "r1", "warning")
    assert (first.since_s, first.for_s, first.is_firing) == (NOW_S, 120, False)
    clock.now += 119
    found.append(EMPTY)
    assert [(each.name, each.is_firing) for each in book.alerts()] == [
        ("BatonPoolEmpty", False),
        ("BatonMirrorLags", False),
    ]
    clock.now += 1
    assert [(each.name, each.since_s) for each in book.alerts() if each.is_firing] == [("BatonMirrorLags", NOW_S)]
    assert book.alerts()[0].name == "BatonMirrorLags", "what fires stands first"
    found.remove(LAGS)
    book.alerts()
    found.append(LAGS)
    assert {each.name: each.since_s for each in book.alerts()}["BatonMirrorLags"] == clock.now, "it began anew"


async def test_the_book_looks_by_itself() -> None:
    looks = 0

    def look() -> list[Condition]:
        nonlocal looks
        looks += 1
        return [EMPTY]

    clock = Clock()
    book = AlertBook(look, clock)
    task = asyncio.create_task(book.run())
    await asyncio.sleep(0)
    clock.now += 60
    assert book.alerts()[0].is_firing, "nobody had asked before"
    task.cancel()
    assert looks == 2


def watch(history: ClusterHistory, clock: Callable[[], float]) -> AlertWatch:
    meter = LoadMeter(lambda: (0, 1), lambda: (0, 1))
    return AlertWatch("r0", lambda: cluster_status(controller=CONTROLLER), meter, history, clock=clock)


async def test_requests_of_all_routers_count_for_as_long_as_the_rule_says() -> None:
    clock, store = Clock(), MemoryHistory()
    metrics, others = RequestMetrics(), RequestMetrics()
    history, other = ClusterHistory(store, "r0", metrics, clock), ClusterHistory(store, "r1", others, clock)
    look = watch(history, clock)
    assert look() == []
    others.requests_slo.add(3, {"slo_class": "default", "outcome": "error"})
    metrics.requests_slo.add(7, {"slo_class": "default", "outcome": "met"})
    await other.look()
    await history.look()
    assert [(name, text) for name, _, text in look()] == [
        ("BatonRequestsFail", "30.0% of the requests end with an error")
    ]
    clock.now += 300 - SLOT_S
    assert [name for name, *_ in look()] == ["BatonRequestsFail"]
    clock.now += SLOT_S
    assert look() == []
