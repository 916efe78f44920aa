"""Which engines of other makes a benchmark compares, and that the others are named with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import engine_peer, engine_peers, stats
from tests.bench.engine_sides import Measured

ANSWERING = f"""#!{sys.executable}
import json, sys
kind, precision, model, scratch = sys.argv[2:]
if precision == "Q4_1":
    sys.exit("cannot")
if kind == "vllm" or precision == "Q8_0":
    print(json.dumps({{"error": "no such weights"}}), flush=True)
    sys.exit()
print(json.dumps({{"name": kind, "precision": precision}}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps({{"num_tokens": question["num_steps"], "wall_s": 1.0, "cpu_s": 0.5, "answers": question["prompts"]}}), flush=True)
"""  # noqa: E501


def test_every_engine_is_compared_or_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(ANSWERING)
    python.chmod(0o755)
    monkeypatch.setenv("BENCH_PEERS", f"llama.cpp={python},openvino={tmp_path}/none,vllm={python},other={python}")
    with engine_peers.started(tmp_path, tmp_path) as peers:
        assert list(peers.sides) == ["llama.cpp, float32"]
        side = peers.sides["llama.cpp, float32"]
        assert side.decode([[1, 2], [3]], 7) == Measured(7, 1.0, 0.5, ((1, 2), (3,)))
        assert side.prefill([[4]]) == Measured(0, 1.0, 0.5, ((4,),))
    absent = peers.absent
    names = ["openvino, float32", "openvino, default", f"openvino, {engine_peer.WITHOUT_AMX}"]
    assert list(absent) == [*names, "llama.cpp, Q8_0", "llama.cpp, Q4_1", "vllm, float32", "vllm, bfloat16", "other"]
    assert absent["llama.cpp, Q8_0"] == "no such weights"
    assert absent["llama.cpp, Q4_1"].startswith("its process ended with status 1")
    assert absent["other"] == "this bench does not drive it"


def test_peers_of_float32_are_started_alone_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(ANSWERING)
    python.chmod(0o755)
    monkeypatch.setenv("BENCH_PEERS", f"llama.cpp={python}")
    with engine_peers.started(tmp_path, tmp_path, float32_only=True) as peers:
        assert list(peers.sides) == ["llama.cpp, float32"]
        assert list(peers.absent) == ["openvino", "vllm"]


def test_without_the_variable_all_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_PEERS", raising=False)
    with engine_peers.started(tmp_path, tmp_path) as peers:
        assert not peers.sides
        assert list(peers.absent) == ["openvino", "llama.cpp", "vllm"]
        assert peers.absent["openvino"] == "BENCH_PEERS does not name it"


def test_a_python_without_the_engine_says_so(tmp_path: Path) -> None:
    """As the peer's script runs: by path, in isolation."""
    command = [
        sys.executable,
        "-I",
        engine_peer.__file__,
        "openvino",
        "float32",
        str(tmp_path),
        str(tmp_path / "scratch"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == {"error": "ModuleNotFoundError: No module named 'openvino'"}


def test_what_a_living_child_computes_is_its_own() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        since = stats._own_s()
        child.stdout.readline()
        assert stats._own_s() - since >= 0.4
        child.stdin.close()
        child.wait()
        assert stats._own_s() - since >= 0.4, "nor is it lost once the child has ended"
