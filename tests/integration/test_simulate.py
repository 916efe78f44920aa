"""`baton simulate` as its user runs it, on a small trace."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from lab.simulate.command import scenario_of
from lab.simulate.options import SimulateOptions
from lab.traces.shape import TraceOptions

ARGUMENTS = ("--decode", "3", "--blocks", "400", "--policy", "baton", "--policy", "greedy_4", "--jobs", "1")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty conversations of three turns, whose prompts share the first block and all of their past."""
    lines = []
    for number in range(20):
        for turn in range(3):
            num_blocks = 3 + 2 * turn
            ids = [0, *(1 + number * 10 + block for block in range(num_blocks))]
            at_ms = 3000 * (number + 7 * turn)
            lines.append((at_ms, {"input_length": 512 * len(ids), "output_length": 20 + turn, "hash_ids": ids}))
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"timestamp": at_ms, **line}) + "\n" for at_ms, line in sorted(lines, key=str)))
    return path


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_policies_are_compared_on_a_trace(trace: Path) -> None:
    first = baton(str(trace), *ARGUMENTS, "--json")
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert (report["trace"], report["num_requests"]) == ("talk", 60)
    assert {(result["prefill"], result["decode"], result["load"]) for result in report["policies"]} == {(0, 3, 1.0)}
    by_name = {result["policy"]: result for result in report["policies"]}
    assert list(by_name) == ["baton", "greedy_4"]
    for result in by_name.values():
        assert 0.3 < result["hit_rate"] <= report["ceiling"]
        assert result["good_share"] == 1.0
        assert result["ttft_s"] == sorted(result["ttft_s"])
    assert baton(str(trace), *ARGUMENTS, "--json").stdout == first.stdout, "the same arguments give the same figures"


def test_the_table_fits_a_terminal_and_the_workers_may_be_split(trace: Path) -> None:
    done = baton(str(trace), *ARGUMENTS, "--prefill", "2", "--requests", "30", "--speed", "2")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} >= {"policy", "baton", "greedy_4"}
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "30 requests, prefill:decode workers 2:3" in done.stderr.replace("\n", " ")


@pytest.mark.chaos
def test_a_grid_of_loads_and_pools_in_a_table_and_in_pictures(trace: Path, tmp_path: Path) -> None:
    grid = ("--pools", "0:3", "--pools", "1:2", "--load", "1", "--load", "4", "--plot", str(tmp_path / "pictures"))
    done = baton(str(trace), *ARGUMENTS, *grid)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    cells = [tuple(row[:3]) for row in rows if len(row) > 2 and row[1] in ("baton", "greedy_4")]
    wanted = [(x, policy, pools) for x in "14" for policy in ("baton", "greedy_4") for pools in ("0:3", "1:2")]
    assert sorted(cells) == wanted
    assert max(map(len, done.stdout.splitlines())) <= 80
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [picture.name for picture in pictures] == ["cache.png", "goodput.png", "ttft.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_what_the_workers_are_told_is_what_sets_policies_apart(trace: Path) -> None:
    """One worker, long prompts, a tight objective between tokens: who is told of it computes in smaller chunks."""

    def itl_p99(*more: str) -> float:
        arguments = ("--decode", "1", "--blocks", "400", "--policy", "least_load", "--itl-ms", "30", "--load", "20")
        report = json.loads(baton(str(trace), *arguments, *more, "--json").stdout)
        value: float = report["policies"][0]["itl_s"][2]
        return value

    assert itl_p99("--tell-all") < 0.5 * itl_p99()


def test_wrong_grids_are_refused_in_a_sentence(trace: Path) -> None:
    for arguments, sentence in (
        (("--pools", "8"), "--pools takes PREFILL:DECODE"),
        (("--error", "0"), "--error must be more than 0"),
    ):
        done = baton(str(trace), *arguments)
        assert done.returncode == 1, done
        assert sentence in done.stderr.replace("\n", " ")


OPTIONS = SimulateOptions(
    trace=TraceOptions(path=None),
    prefill=0,
    decode=8,
    blocks=5000,
    profile="llama-3-8b@h200",
    costs=None,
    max_output=0,
    policies=(),
    ttft_ms=5000.0,
    itl_ms=100.0,
    jobs=1,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"profile": "abacus"}, "no profile is called 'abacus'; there are llama-3-8b@h200"),
        ({"prefill_profile": "abacus"}, "no profile is called 'abacus'; there are llama-3-8b@h200"),
        ({"prefill_blocks": 0}, "--prefill-blocks must be more than 0"),
        ({"prefill": 1, "prefill_blocks": 10}, "tokens; a worker's blocks hold 5120"),
        ({"costs": Path("bench.json"), "prefill_profile": "llama-3-8b@h200"}, "measured on workers of both pools"),
        ({"decode": 0}, "a pool needs a worker that decodes, got 0 prefill and 0 decode"),
        ({"blocks": 10}, "tokens; a worker's blocks hold 5120"),
        ({"ttft_ms": 0.0}, "--ttft-ms must be more than 0"),
        ({"snapshot_tokens": 0}, "--snapshot-tokens must be more than 0"),
        ({"window": -1}, "--window must be at least 0, got -1"),
        ({"state_tokens": math.nan}, "--state-tokens must be at least 0, got nan"),
        ({"full_share": 1.5}, "--full-share must be from 0 to 1, got 1.5"),
        ({"costs": Path("nowhere.json")}, "cannot read the costs nowhere.json"),
        ({"trace": TraceOptions(path=Path("nowhere.jsonl"))}, "cannot read the trace nowhere.jsonl"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    values = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}
    with pytest.raises(ConfigError) as error:
        scenario_of(SimulateOptions(**{**values, **changes}))
    assert sentence in str(error.value)


def test_layers_with_windows_and_states_are_simulated(trace: Path) -> None:
    options = replace(OPTIONS, trace=TraceOptions(path=trace))
    dense = scenario_of(options)
    layers = scenario_of(replace(options, window=1024, full_share=0.25, state_tokens=400.0))
    assert dense.shape.table_sizes == (5000,)
    assert layers.shape.table_sizes == (5000, 2500, 2 * 128 + 2500)
    per_token_s = dense.costs.transfer_s_per_token
    more_s = layers.costs.transfer_s(4096, 1024) - layers.costs.transfer_latency_s
    assert more_s == pytest.approx(per_token_s * (0.25 * 4096 + 0.75 * 1024 + 400))
    assert layers.costs.steps.s_per_kv_token == pytest.approx(0.25 * dense.costs.steps.s_per_kv_token)


def test_an_unknown_policy_is_named(trace: Path) -> None:
    done = baton(str(trace), "--policy", "magic")
    assert done.returncode == 1
    assert "no policy is called 'magic'; there are baton, random" in done.stderr.replace("\n", " ")
