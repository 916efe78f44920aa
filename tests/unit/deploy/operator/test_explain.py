"""What `baton requests` and `baton status --explain` print."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from baton.api import Explanation, Option, PlacementSeconds
from baton.errors import InvalidRequest
from baton.timelines import (
    RequestSummary,
    RequestTimeline,
    StageSeconds,
    TimelineEvent,
    TimelinePhase,
    timeline_json,
)
from deploy.operator.explain import option_table, print_requests, print_timelines

PREFILL = Option(
    worker_id="worker-12",
    role="prefill",
    num_cached_tokens=1536,
    wait_s=1.25,
    pull_s=0.5,
    compute_s=12.345,
    room_s=0.0,
    exposed_s=0.0,
    step_s=0.0,
    cost_s=15.0,
)
DECODE = Option(
    worker_id="worker-3",
    role="decode",
    num_cached_tokens=0,
    wait_s=0.5,
    pull_s=0.0,
    compute_s=98.7654,
    room_s=2.5,
    exposed_s=0.125,
    step_s=0.0625,
    cost_s=120.5,
)
EXPLANATION = Explanation(
    request_id="req-7",
    choice_index=1,
    tenant="acme",
    slo_class="interactive",
    priority=3,
    ttft_objective_s=2.5,
    itl_objective_s=0.05,
    num_prompt_tokens=2000,
    num_expected_tokens=128,
    mode="disaggregated",
    prefill_worker="worker-12",
    decode_worker="worker-3",
    source="worker-4",
    source_tokens=1024,
    outcome="admitted",
    predicted_ttft_s=14.095,
    measured_ttft_s=15.5,
    predicted=PlacementSeconds(wait_s=1.25, room_s=0.0, pull_s=0.5, compute_s=12.345, exposed_s=0.125, step_s=0.0625),
    measured=PlacementSeconds(wait_s=2.0, room_s=0.001, pull_s=0.4, compute_s=13.1),
    options=(PREFILL, DECODE),
)


SUMMARY = RequestSummary(
    request_id="req-7",
    router="router-1",
    tenant="acme",
    slo_class="interactive",
    priority=3,
    operation="chat",
    is_streamed=True,
    arrived_s=1.7e9,
    outcome="ttft_missed",
    blamed_stage="recovery",
    num_prompt_tokens=2000,
    num_cached_tokens=1536,
    num_tokens=64,
    num_choices=2,
    ttft_s=15.5,
    itl_s=0.0625,
    total_s=20.0,
    ttft_objective_s=2.5,
    itl_objective_s=0.05,
    stages=StageSeconds(queue=2.5, prefill=12.5, recovery=0.5, decode=4.5),
    mode="disaggregated",
    prefill_worker="worker-12",
    decode_worker="worker-3",
    retries=1,
)
TIMELINE = RequestTimeline(
    summary=SUMMARY,
    phases=(
        TimelinePhase(stage="queue", begin_s=0.0, end_s=2.5),
        TimelinePhase(stage="recovery", begin_s=2.5, end_s=3.0),
        TimelinePhase(stage="prefill", begin_s=3.0, end_s=15.5),
        TimelinePhase(stage="decode", begin_s=15.5, end_s=20.0),
    ),
    events=(
        TimelineEvent(at_s=0.0, what="arrived", text="arrived"),
        TimelineEvent(at_s=2.75, what="failed", choice_index=1, worker="worker-0", text="failed on worker-0 [gone]"),
    ),
    num_events_left_out=3,
    placements=(EXPLANATION,),
)


def shown(capsys: pytest.CaptureFixture[str], timeline: RequestTimeline, as_json: bool = False) -> str:
    print_timelines([timeline], timeline.summary.request_id, as_json)
    return capsys.readouterr().out


def placed(capsys: pytest.CaptureFixture[str], explanation: Explanation) -> str:
    return shown(capsys, replace(TIMELINE, placements=(explanation,)))


def test_a_request_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, TIMELINE)
    assert "req-7: ttft_missed because of recovery\n" in out
    assert "tenant acme, class interactive, priority 3; objectives: first token 2.5 s, between tokens 0.05 s\n" in out
    assert (
        "2000 prompt tokens, 1536 of them cached; 64 tokens of answer; choices: 2; retries: 1\n"
        "first token after 15.500 s, 0.062 s between tokens, 20.000 s in all\n" in out
    )
    refused = replace(SUMMARY, outcome="error", blamed_stage="", error="NoWorker: none", ttft_s=None, itl_s=None)
    assert "req-7: error (NoWorker: none)\n" in shown(capsys, replace(TIMELINE, summary=refused))
    assert "first token after none yet, 20.000 s in all" in shown(capsys, replace(TIMELINE, summary=refused))


def test_what_happened_is_listed_and_where_the_time_went_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in shown(capsys, TIMELINE).splitlines()]
    assert ["0.000", "arrived"] in rows
    assert ["2.750", "[1]", "failed", "on", "worker-0", "[gone]"] in rows
    assert ["(3", "events", "in", "the", "middle", "are", "left", "out)"] in rows
    assert ["2.500", "3.000", "0.500", "2.5%", "recovery"] in rows
    assert ["20.000", "100.0%", "in", "all,", "of", "20.000", "s"] in rows


def test_what_was_predicted_stands_above_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in shown(capsys, TIMELINE).splitlines()]
    at = rows.index(["predicted", "1250.0", "0.0", "500.0", "12345.0", "125.0", "62.5"])
    assert rows[at - 1] == ["(ms)", "wait", "room", "pull", "compute", "exposed", "step"]
    assert rows[at + 1] == ["measured", "2000.0", "1.0", "400.0", "13100.0", "-", "-"]


def test_a_placement_says_where_to_and_why_with_predicted_and_measured_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = placed(capsys, EXPLANATION)
    assert (
        "req-7/1: disaggregated on worker-12 (prefill) -> worker-3 (decode), pulls 1024 tokens from worker-4; admitted"
        in out
    )
    assert "2000 prompt tokens, room for 128 tokens of answer" in out
    assert "first token: predicted 14.095 s, measured 15.500 s" in out


def test_a_placement_leaves_out_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    refused = replace(
        EXPLANATION, mode="aggregated", prefill_worker="", source="", outcome="refused: too late", measured_ttft_s=0.0
    )
    out = placed(capsys, replace(refused, options=()))
    assert "req-7/1: aggregated on worker-3 (decode); refused: too late" in out
    assert "measured not yet" in out
    assert "pulls" not in out
    assert "worker (ms)" not in out


def test_a_time_line_as_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    (document,) = json.loads(shown(capsys, TIMELINE, as_json=True), parse_constant=no_constant)
    (placement,) = document["placements"]
    assert placement == asdict(EXPLANATION) | {"options": [asdict(PREFILL), asdict(DECODE)]}
    assert document["stages"] == asdict(SUMMARY.stages)
    assert document["phases"] == [asdict(phase) for phase in TIMELINE.phases]
    assert document["events"] == [asdict(event) for event in TIMELINE.events]
    flat = asdict(SUMMARY) | {"e2e_objective_s": None}
    assert {name: document[name] for name in flat} == flat
    assert set(document) - set(flat) == {"phases", "events", "num_events_left_out", "placements"}


def test_what_is_not_measured_yet_is_null_in_json() -> None:
    unmeasured = replace(EXPLANATION, measured_ttft_s=0.0, ttft_objective_s=math.inf)
    (placement,) = timeline_json(replace(TIMELINE, placements=(unmeasured,)))["placements"]
    assert (placement["measured_ttft_s"], placement["ttft_objective_s"]) == (None, None)


def test_an_unknown_request_is_answered_in_a_sentence() -> None:
    with pytest.raises(InvalidRequest, match="the router does not know a request 'req-9'; it keeps the latest"):
        print_timelines([], "req-9", as_json=False)


def test_the_options_fit_a_terminal_in_milliseconds_and_only_who_decodes_has_room_and_steps() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(option_table([PREFILL, DECODE]))
    heading, prefill, decode = captured.get().splitlines()
    assert heading.split() == [
        "worker",
        "(ms)",
        "role",
        "cached",
        "wait",
        "pull",
        "compute",
        "cost",
        "room",
        "exposed",
        "step",
    ]
    assert prefill.split() == ["worker-12", "prefill", "1536", "1250.0", "500.0", "12345.0", "15000.0"]
    row = ["worker-3", "decode", "0", "500.0", "0.0", "98765.4", "120500.0", "2500.0", "125.0", "62.5"]
    assert decode.split() == row
    assert max(map(len, (heading, prefill, decode))) <= 80


LONG = "chatcmpl-0123456789abcdef0123456789abcdef"


def test_requests_are_listed_with_the_stage_to_blame_or_that_took_longest(capsys: pytest.CaptureFixture[str]) -> None:
    met = replace(SUMMARY, request_id=LONG, outcome="met", blamed_stage="", slo_class="", ttft_s=None)
    print_requests([SUMMARY, met], as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][1:] == ["ttft_missed", "15.500", "20.000", "recovery", "0.500", "s", "interactive", "acme", "req-7"]
    assert rows[2][1:] == ["met", "-", "20.000", "prefill", "12.500", "s", "-", "acme", LONG]
    print_requests([met], as_json=True)
    (document,) = json.loads(capsys.readouterr().out)
    assert (document["request_id"], document["e2e_objective_s"]) == (LONG, None)
