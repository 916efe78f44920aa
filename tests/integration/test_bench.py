"""`baton bench` as its user runs it, against a real cluster whose model can be worked out by hand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.traces.files import read_trace
from lab.traces.shape import faster, scaled
from tests.integration.cluster import Cluster, free_port, running_cluster

pytestmark = pytest.mark.chaos

COMMAND = (sys.executable, "-m", "deploy.cli", "bench")
NUM_ROOM = 8


@pytest.fixture(scope="module")
def cluster(model_dir: Path) -> Iterator[Cluster]:
    """Two workers a pool, and room for few requests."""
    with running_cluster(
        "--prefill", "2", "--decode", "2",
        testing_arithmetic="true", engine_num_blocks="1024", router_max_in_flight=str(NUM_ROOM),
    ) as cluster:  # fmt: skip
        yield cluster


def mooncake(at_ms: int, input_length: int, output_length: int, ids: list[int]) -> str:
    line = {"timestamp": at_ms, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    return json.dumps(line) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight conversations of three turns, 3 s between turns. Prompts extend the one before of their conversation."""
    path = tmp_path / "talk.jsonl"
    with path.open("w") as file:
        for turn in range(3):
            for talk in range(8):
                ids = [0, *(1 + talk * 100 + block for block in range(4 + 3 * turn))]
                file.write(mooncake(3000 * turn + 300 * talk, 512 * len(ids) + 100, 320, [*ids, 9000 + len(ids)]))
    return path


def bench(*arguments: str, returncode: int = 0) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == returncode, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_trace_is_replayed_with_its_prefixes_lengths_and_times(cluster: Cluster, trace: Path) -> None:
    options = (str(trace), "--address", cluster.grpc, "--scale", "32", "--speed", "2", "--concurrency", str(NUM_ROOM))
    report = bench(*options, "--ttft-ms", "60000", "--itl-ms", "20000")
    expected = faster(scaled(read_trace(trace), 32, 16), 2)
    assert (report["num_requests"], report["num_served"], report["num_rejected"]) == (24, 24, 0)
    assert report["good_share"] == 1.0
    assert report["goodput_per_s"] == pytest.approx(24 / expected.requests[-1].arrival_s)
    assert report["ceiling"] == pytest.approx(expected.ceiling)
    assert 0.5 * report["ceiling"] < report["hit_rate"] <= report["ceiling"], "a turn finds what the one before left"
    num_prompt_tokens = sum(request.num_prompt_tokens for request in expected.requests)
    assert sum(report["computed_tokens"].values()) == round(num_prompt_tokens * (1 - report["hit_rate"]))
    assert sum(report["modes"].values()) == 24
    assert report["output_tokens_per_s"] == pytest.approx(240 / report["lasted_s"])
    assert report["lasted_s"] > expected.requests[-1].arrival_s
    again = bench(*options)
    assert again["hit_rate"] > again["ceiling"], "equal prompts, which the first replay has left in the caches"
    cluster.wait_until_idle()


def test_what_was_measured_can_be_simulated(cluster: Cluster, trace: Path, tmp_path: Path) -> None:
    part = (str(trace), "--scale", "32", "--speed", "2", "--seed", "5")
    report = bench(*part, "--address", cluster.grpc, "--concurrency", str(NUM_ROOM))
    workers = cluster.client.status()["workers"]
    for role, name in (("prefill", "prefill_steps"), ("decode", "steps")):
        of_role = [w["costs"]["s_overhead"] for w in workers if w["role"] == role]
        assert min(of_role) <= report["costs"][name]["s_overhead"] <= max(of_role)
    assert 0 < report["costs"]["request_overhead_s"] < 5
    assert report["worker"] == {"num_blocks": 1024, "block_tokens": 16, "chunk_tokens": 512, "max_model_len": 8192}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    arguments = ("--costs", str(path), "--prefill", "2", "--decode", "2", "--policy", "baton", "--jobs", "1", "--json")
    command = [sys.executable, "-m", "deploy.cli", "simulate", *part, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    simulated = json.loads(done.stdout)
    assert simulated["costs"] == report["costs"]
    assert (simulated["blocks"], simulated["ceiling"]) == (1024, report["ceiling"])
    assert simulated["policies"][0]["num_requests"] == report["num_requests"]
    assert simulated["policies"][0]["hit_rate"] == pytest.approx(report["hit_rate"], abs=0.1)
    assert simulated["policies"][0]["ttft_s"][0] >= report["costs"]["request_overhead_s"]


def test_refusals_are_counted_apart(cluster: Cluster, trace: Path) -> None:
    """All requests at once, where there is room for a third of them."""
    burst = (str(trace), "--address", cluster.grpc, "--scale", "32", "--speed", "100000", "--seed", "2")
    report = bench(*burst)
    assert report["num_rejected"] > 0
    assert report["num_served"] >= NUM_ROOM
    assert report["num_served"] + report["num_rejected"] == report["num_requests"] == 24
    assert report["good_share"] <= report["num_served"] / 24, "who is refused has not met the objective"
    assert list(report["errors"]) == ["Overloaded"]
    assert report["errors"]["Overloaded"]["count"] == report["num_rejected"]
    assert "try again later" in report["errors"]["Overloaded"]["example"]
    held_back = bench(*burst, "--concurrency", str(NUM_ROOM))
    assert held_back["num_rejected"] == 0
    assert held_back["num_late"] > 0, "those that waited for a place were due long before"


def test_what_does_not_fit_the_model_is_cut_or_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """It takes 8,192 tokens; the router would refuse more, and that would count as failed."""
    path = tmp_path / "long.jsonl"
    ids = list(range(18))
    path.write_text(mooncake(0, 9000, 8, ids) + mooncake(0, 100, 8192, [50]) + mooncake(0, 8188, 4, ids[:16]))
    report = bench(str(path), "--address", cluster.grpc, "--seed", "3")
    names = ("num_requests", "num_served", "num_clipped", "num_skipped", "num_failed")
    assert [report[name] for name in names] == [2, 2, 1, 1, 0]
    cut = bench(str(path), "--address", cluster.grpc, "--seed", "4", "--max-output", "2")
    assert [cut[name] for name in names] == [3, 3, 1, 0, 0]


def test_ctrl_c_cancels_all_requests_and_tells_what_was_measured(cluster: Cluster, trace: Path) -> None:
    command = [*COMMAND, str(trace), "--address", cluster.grpc, "--scale", "32", "--speed", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("talk: 24 requests in 4")
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "interrupted: " in out
    assert "measured" in out
    cluster.wait_until_idle()


def test_a_dead_router_and_a_small_vocabulary_are_told_in_a_sentence(cluster: Cluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    dead = subprocess.run([*COMMAND, "--address", address], capture_output=True, text=True, timeout=60, check=False)
    assert dead.returncode == 1
    assert dead.stdout == ""
    assert dead.stderr == (
        f"error: no router answers at {address} (Connection refused); start one with `baton up`, or name another with "
        "--address\n"
    )
    small = subprocess.run(
        [*COMMAND, "--address", cluster.grpc, "--requests", "5", "--vocab", "60000"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert small.returncode == 1
    assert "token id 59999 is outside the vocabulary" in small.stderr
    assert "lower --vocab" in small.stderr
