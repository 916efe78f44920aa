"""What `baton status --watch` makes of two looks at a cluster."""

from __future__ import annotations

import io
import math
import random
import re
import signal
from typing import Any

import pytest
from rich.console import Console

from baton.config import SloClassConfig
from baton.errors import InvalidRequest, NoWorker
from baton.telemetry.instruments import Instruments
from baton.telemetry.request_metrics import TOKEN_BOUNDS, TTFT_BOUNDS
from deploy.operator.scrape import Samples, Scraper, parse, seen_from
from deploy.operator.watch import (
    ClassView,
    Quantile,
    Quantiles,
    Snapshot,
    View,
    picture,
    quantile,
    sparkline,
    view,
    watch,
)
from tests.support.builders import cluster_status

BEFORE = """
baton_requests_slo_total{model="m",outcome="met",slo_class="default"} 10.0
baton_requests_slo_total{model="m",outcome="ttft_missed",slo_class="default"} 1.0
baton_tokens_slo_met_total{model="m"} 100.0
baton_prompt_tokens_total{model="m"} 1000.0
baton_slo_misses_total{model="m",outcome="ttft_missed",slo_class="default",stage="queue"} 1.0
gen_ai_server_time_to_first_token_seconds_bucket{le="0.1"} 5.0
gen_ai_server_time_to_first_token_seconds_bucket{le="0.5"} 5.0
gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"} 5.0
"""
AFTER = """
baton_requests_slo_total{model="m",outcome="met",slo_class="default"} 40.0
baton_requests_slo_total{model="m",outcome="ttft_missed",slo_class="default"} 9.0
baton_requests_slo_total{model="m",outcome="itl_missed",slo_class="batch"} 2.0
baton_requests_slo_total{model="m",outcome="cancelled",slo_class="batch"} 50.0
baton_requests_slo_total{model="m",outcome="met",slo_class="batch"} 6.0
baton_tokens_slo_met_total{model="m"} 400.0
baton_prompt_tokens_total{model="m"} 3000.0
baton_prefix_hit_tokens_total{model="m"} 500.0
baton_prefix_ceiling_tokens_total{model="m"} 1000.0
baton_slo_misses_total{model="m",outcome="ttft_missed",slo_class="default",stage="queue"} 3.0
baton_slo_misses_total{model="m",outcome="ttft_missed",slo_class="default",stage="prefill"} 6.0
baton_slo_misses_total{model="m",outcome="itl_missed",slo_class="batch",stage="decode"} 2.0
gen_ai_server_time_to_first_token_seconds_bucket{le="0.1"} 15.0
gen_ai_server_time_to_first_token_seconds_bucket{le="0.5"} 25.0
gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"} 25.0
"""


def router(met: int, missed: int = 0, pid: int = 1, router_id: str = "router-0") -> dict[str, Any]:
    return {"id": router_id, "pid": pid, "met": met, "missed": missed, "rejected": 0}


def snapshot(at_s: float, *routers: dict[str, Any], metrics: str | None = None) -> Snapshot:
    return Snapshot(at_s, {"routers": list(routers)}, None if metrics is None else parse(metrics))


def test_figures_are_differences_of_two_looks() -> None:
    seen = view([snapshot(0, router(10, 1), metrics=BEFORE), snapshot(10, router(40, 11), metrics=AFTER)])
    assert seen == View(
        goodput=3.0,
        attainment=30 / 40,
        line=(3.0,),
        tokens=30.0,
        classes=(ClassView("batch", 0.6, 6 / 8), ClassView("default", 3.0, 30 / 38)),
        blame=(("prefill", 0.6), ("queue", 0.2), ("decode", 0.2)),
        ttft=Quantiles(Quantile(0.1, is_below=True), Quantile(0.492)),
        hit_rate=0.25,
        hit_ceiling=0.5,
    )


def test_goodput_now_is_that_of_the_last_seconds_and_of_every_router() -> None:
    looks = [snapshot(at, router(at * 2), router(at * 3, router_id="router-1")) for at in range(30)]
    stopped = [snapshot(at, router(58), router(87, router_id="router-1")) for at in range(30, 36)]
    assert view(looks).goodput == pytest.approx(5.0)
    assert view(looks + stopped).goodput == pytest.approx(5.0 * 4 / 10)
    assert view(looks + stopped).line[-8:] == (5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    looks = [snapshot(0, router(0, 100)), snapshot(50, router(0, 100)), snapshot(100, router(10, 100))]
    assert view(looks).attainment == 1.0


def test_a_router_that_starts_again_counts_from_nothing() -> None:
    assert view([snapshot(0, router(1000)), snapshot(1, router(4, pid=2))]).goodput == 4.0
    assert view([snapshot(0, router(1000)), snapshot(1)]).goodput == 0.0


def test_without_metrics_goodput_is_still_known() -> None:
    seen = view([snapshot(0, router(0)), snapshot(2, router(4))])
    assert (seen.goodput, seen.attainment, seen.tokens, seen.ttft.p99) == (2.0, 1.0, None, None)
    assert view([]) == View()
    assert view([snapshot(0, router(3))]) == View()


@pytest.mark.parametrize(
    ("q", "counts", "value"),
    [
        (0.5, {1.0: 10, 2.0: 20, math.inf: 20}, Quantile(1.0, is_below=True)),
        (0.75, {1.0: 10, 2.0: 20, math.inf: 20}, Quantile(1.5)),
        (0.25, {1.0: 10, math.inf: 10}, Quantile(1.0, is_below=True)),
        (0.5, {1.0: 0, 2.0: 4, math.inf: 4}, Quantile(1.5)),
        (0.5, {1.0: 1, 2.0: 50, math.inf: 100}, Quantile(2.0)),
        (0.51, {1.0: 1, 2.0: 50, math.inf: 100}, Quantile(2.0, is_above=True)),
        (0.99, {1.0: 100, 2.0: 100, math.inf: 9000}, Quantile(2.0, is_above=True)),
        (0.5, {1.0: 0, math.inf: 0}, None),
        (0.5, {}, None),
    ],
)
def test_a_quantile_is_prometheus_own_and_says_when_it_lies_beyond_the_bounds(
    q: float, counts: dict[float, float], value: Quantile | None
) -> None:
    assert quantile(q, counts) == value


def test_the_line_is_drawn_against_its_highest() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"


STATUS: dict[str, Any] = {
    "models": [{"id": "m"}],
    "pools": {"decode": {"ready": 1, "desired": 2}},
    "routers": [router(0), router(0, router_id="router-1")],
    "redis": {"ok": False, "garbage": []},
    "workers": [
        {"id": "d0", "role": "decode", "state": "draining", "running": 3, "waiting": 4, "self_check": "a leak",
         "node": "n1", "blocks": {"total": 100, "in_use": 25, "cached": 50, "free": 25}},
    ],
}  # fmt: skip


def shown(seen: View, **how: Any) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(picture(seen, STATUS, "h:1", **{"has_metrics": True, "lost": "", **how}))
    return captured.get()


def test_the_picture_has_what_an_operator_looks_for() -> None:
    text = shown(
        View(goodput=2.5, attainment=0.5, ttft=Quantiles(Quantile(0.05), Quantile(2.0)), blame=(("queue", 1.0),))
    )
    for wanted in (
        "decode 1 of 2 ready", "controller none", "Redis lost", "2.5 requests/s", "50.0%", "p50 50 ms", "p99 2.00 s",
        "queue 100.0%", "draining: a leak", "25.0%", "one router of 2",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert max(map(len, text.splitlines())) <= 80


def late_answers() -> tuple[str, str]:
    """A router's /metrics before and after 100 requests, of which 40 are slower than any bound."""
    instruments = Instruments(cluster_status)
    latencies = (instruments.time_to_first_token, instruments.inter_token_latency, instruments.request_duration)
    for latency in latencies:
        latency.record(0.0)
    before = instruments.exposition().decode()
    for latency, slow_s, slower_s in zip(latencies, (400.0, 20.0, 3000.0), (700.0, 31.0, 4000.0), strict=True):
        latency.record(slow_s, times=60)
        latency.record(slower_s, times=40)
    return before, instruments.exposition().decode()


def test_what_lies_above_the_last_bound_is_not_shown_as_the_bound() -> None:
    before, after = late_answers()
    text = shown(view([snapshot(0, router(0), metrics=before), snapshot(1, router(1), metrics=after)]))
    assert re.search(r"first token +p50 430\.00 s +p99 > 600 s", text), text
    assert re.search(r"between tokens +p50 19\.47 s +p99 > 30 s", text), text
    assert "p50 < 1.0 ms" in shown(View(itl=Quantiles(Quantile(0.001, is_below=True))))
    assert "p50 2.4 ms" in shown(View(itl=Quantiles(Quantile(0.0024))))
    assert "p50 > 3,600 s" in shown(View(itl=Quantiles(Quantile(3600.0, is_above=True))))


MIXES = {
    "40 s": ([40.0], [1.0]),
    "some 40 s among quick ones": ([0.13, 40.0], [0.7, 0.3]),
    "around 40 s": ([31.0, 37.0, 41.5, 43.9, 58.0], [0.3, 0.3, 0.2, 0.19, 0.01]),
    "near a bound": ([2.0, 2.01], [0.985, 0.015]),
    "quick": ([0.0072, 0.0083], [0.9, 0.1]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num", [7, 1000])
def test_a_p99_is_within_a_fifth_of_what_clients_saw(mix: str, num: int) -> None:
    """Or shown as above the last bound: of the gaps, 40 s are."""
    values, weights = MIXES[mix]
    rng = random.Random(7)
    seen = [value * rng.uniform(0.98, 1.02) for value in rng.choices(values, weights, k=num)]
    instruments = Instruments(cluster_status, {"default": SloClassConfig()})
    latencies = instruments.time_to_first_token, instruments.inter_token_latency
    for latency in latencies:
        latency.record(0.0)
    before = instruments.exposition().decode()
    for value in seen:
        for latency in latencies:
            latency.record(value)
    after = instruments.exposition().decode()
    found = view([snapshot(0, router(0), metrics=before), snapshot(1, router(1), metrics=after)])
    truth = sorted(seen)[math.ceil(0.99 * num) - 1]
    for shown_p99, last in ((found.ttft.p99, TTFT_BOUNDS[-1]), (found.itl.p99, TOKEN_BOUNDS[-1])):
        assert shown_p99 is not None
        assert shown_p99.is_above == (truth > last)
        assert shown_p99.is_above or shown_p99.value == pytest.approx(truth, rel=0.2)


def test_what_is_skipped_in_redis_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = [{"what": "lease", "times": 3, "latest": "kv:{x}:lease:w: no number"}]
    monkeypatch.setitem(STATUS, "redis", {"ok": True, "garbage": garbage})
    assert "in Redis, lease skipped 3 times: kv:{x}:lease:w: no number" in shown(View())


def test_what_is_not_known_is_said_and_not_shown_as_nothing() -> None:
    assert "no metrics from here" in shown(View(), has_metrics=False)
    assert "lost: gone; last known state" in shown(View(), lost="gone")
    assert "goodput          - requests/s" in shown(View())


def test_a_watch_needs_a_terminal() -> None:
    with pytest.raises(InvalidRequest, match="needs a terminal"):
        watch("127.0.0.1:1", Console(force_terminal=False))


def test_an_interrupt_that_is_lost_in_a_destructor_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class AskedTwice:
        num_calls = 0

        def __init__(self, *_: object, model: str) -> None: ...

        def status(self) -> Any:
            self.num_calls += 1
            assert self.num_calls < 3, "it goes on"
            if self.num_calls == 2:
                Interrupted()  # which ends at once
            return STATUS | {"routers": [STATUS["routers"][0] | {"http": "127.0.0.1:1"}]}

        def close(self) -> None: ...

    monkeypatch.setattr("deploy.operator.watch.Client", AskedTwice)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    try:
        watch("127.0.0.1:1", Console(file=io.StringIO(), force_terminal=True), seconds=30.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_labels_and_sums_of_metrics() -> None:
    samples = parse('a_total{x="1",y="q\\"\\\\"} 2\na_total{x="2",y="n"} 3\nb 1\n')
    assert (samples.sum("a_total"), samples.sum("a_total", x="2"), samples.sum("none")) == (5.0, 3.0, 0.0)
    assert samples.by("y", "a_total") == {'q"\\': 2.0, "n": 3.0}
    assert next(samples.of("b")).value == 1.0
    assert Samples([]).buckets("a") == {}
    assert (samples.without("x").sum("a_total"), samples.without("x").sum("b")) == (0.0, 1.0)


def test_a_router_is_looked_for_where_it_may_be_reached() -> None:
    assert seen_from("10.0.0.1:8000", "127.0.0.1:50051") == ["10.0.0.1:8000", "127.0.0.1:8000"]
    assert seen_from("0.0.0.0:8000", "baton.example:443") == ["baton.example:8000"]
    assert seen_from("127.0.0.1:8000", "127.0.0.1:50051") == ["127.0.0.1:8000"]


def test_where_no_metrics_are_is_told() -> None:
    with pytest.raises(NoWorker, match=r"127\.0\.0\.1:1"):
        Scraper(["127.0.0.1:1", "nonsense"]).read()
