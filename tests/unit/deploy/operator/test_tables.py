"""What `baton status` prints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from rich.table import Table

from baton.api import Explanation, Option
from baton.errors import InvalidRequest
from deploy.operator.tables import (
    engine_lines,
    garbage_lines,
    moved_lines,
    option_table,
    print_explanations,
    transfer_table,
    worker_table,
)

WORKER = {
    "id": "decode-0",
    "role": "decode",
    "state": "draining",
    "pid": 123456,
    "address": "127.0.0.1:50052",
    "running": 64,
    "waiting": 12,
    "self_check": "ok",
    "blocks": {"total": 5000, "free": 4000, "cached": 950, "in_use": 50},
    "transfers": {
        "open_pairs": 4,
        "slots_in_use": 3,
        "unsent_bytes": 3 * 2**19,
        "committed": 12,
        "failed": 6,
        "pulled_tokens": 320,
    },
}


def printed(table: Table) -> tuple[str, str]:
    """The heading and the row, in a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    heading, row = captured.get().splitlines()
    return heading, row


def test_a_worker_whose_name_is_of_the_other_role_is_pointed_out() -> None:
    moved = {**WORKER, "id": "prefill-3"}
    named_otherwise = {**WORKER, "id": "w1"}
    assert moved_lines([WORKER, moved, named_otherwise]) == ["prefill-3 began as a prefill worker, and keeps its name"]


def test_the_status_table_fits_a_terminal_whole() -> None:
    heading, row = printed(worker_table([WORKER]))
    assert row.split() == [
        "decode-0",
        "decode",
        "draining",
        "123456",
        "127.0.0.1:50052",
        "64/12",
        "4000/950/50",
    ]
    assert heading.split()[0] == "worker"


def test_the_status_shows_what_is_wrong_with_a_worker() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(worker_table([WORKER | {"self_check": "3 blocks are lost"}]))
    assert "draining: 3 blocks are lost" in captured.get()


def test_the_status_shows_what_is_skipped_in_redis() -> None:
    garbage = [{"what": "lease", "times": 3, "latest": "kv:{x}:lease:w: [1] is no object"}]
    assert garbage_lines({"garbage": garbage}) == ["  lease skipped 3 times: kv:{x}:lease:w: [1] is no object"]


def test_the_status_shows_a_workers_transfers() -> None:
    heading, row = printed(transfer_table([WORKER]))
    wanted = {"committed": "12", "failed": "6", "pulled tokens": "320", "unsent MiB": "1.5", "pairs": "4", "slots": "3"}
    for name, value in wanted.items():
        assert row[heading.index(name) :].split()[0] == value, name


PREFILL = Option(
    worker_id="prefill-12",
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
    worker_id="decode-3",
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
    mode="split",
    prefill_worker="prefill-12",
    decode_worker="decode-3",
    source="decode-4",
    source_tokens=1024,
    outcome="let in",
    predicted_ttft_s=14.095,
    measured_ttft_s=15.5,
    options=(PREFILL, DECODE),
)


def shown(capsys: pytest.CaptureFixture[str], explanation: Explanation, as_json: bool = False) -> str:
    print_explanations([explanation], explanation.request_id, as_json)
    return capsys.readouterr().out


def test_an_explanation_tells_where_to_and_why_with_predicted_and_measured_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, EXPLANATION)
    assert "req-7/1: split on prefill-12 -> decode-3, pulls 1024 tokens from decode-4; let in" in out
    assert "tenant acme, class interactive, priority 3; objectives: first token 2.5 s, between tokens 0.05 s" in out
    assert "2000 prompt tokens, room for 128 tokens of answer" in out
    assert "first token: predicted 14.095 s, measured 15.500 s" in out


def test_an_explanation_leaves_out_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    refused = replace(
        EXPLANATION, mode="aggregated", prefill_worker="", source="", outcome="refused: too late", measured_ttft_s=0.0
    )
    out = shown(capsys, refused)
    assert "req-7/1: aggregated on decode-3; refused: too late" in out
    assert "measured not yet" in out
    assert "pulls" not in out


def test_an_explanation_as_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    (document,) = json.loads(shown(capsys, EXPLANATION, as_json=True))
    assert document == asdict(EXPLANATION) | {"options": [asdict(PREFILL), asdict(DECODE)]}


def test_an_explanation_as_json_is_json_where_a_class_has_no_objective(capsys: pytest.CaptureFixture[str]) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    out = shown(capsys, replace(EXPLANATION, ttft_objective_s=math.inf), as_json=True)
    json.loads(out, parse_constant=no_constant)


def test_an_unknown_request_is_told_in_a_sentence() -> None:
    with pytest.raises(InvalidRequest, match="the router does not know a request 'req-9'; it keeps the latest few"):
        print_explanations([], "req-9", as_json=False)


def test_the_options_fit_a_terminal_in_milliseconds_and_only_who_decodes_has_room_and_steps() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(option_table([PREFILL, DECODE]))
    heading, prefill, decode = captured.get().splitlines()
    assert heading.split() == [
        "worker",
        "(ms)",
        "cached",
        "wait",
        "pull",
        "compute",
        "cost",
        "room",
        "exposed",
        "step",
    ]
    assert prefill.split() == ["prefill-12", "1536", "1250.0", "500.0", "12345.0", "15000.0"]
    row = ["decode-3", "0", "500.0", "0.0", "98765.4", "120500.0", "2500.0", "125.0", "62.5"]
    assert decode.split() == row
    assert max(map(len, (heading, prefill, decode))) <= 80


def test_workers_are_listed_by_engine_and_sampler() -> None:
    makes = {"d0": ("transformers", "s/1"), "d1": ("", ""), "d2": ("transformers", "s/1"), "d3": ("arithmetic", "s/1")}
    workers = [WORKER | {"id": name, "engine": engine, "sampler": sampler} for name, (engine, sampler) in makes.items()]
    assert engine_lines(workers) == [
        "engine unknown, sampler unknown: d1",
        "engine arithmetic, sampler s/1: d3",
        "engine transformers, sampler s/1: d0, d2",
    ]
