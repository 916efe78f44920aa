"""vLLM under Baton's hooks against plain vLLM: the time of a decode step, and how soon an idle host hears a command.

It needs an environment with vLLM (`make test-vllm` makes one), whose interpreter TEST_VLLM_PYTHON names.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from baton.config import EngineConfig, ModelConfig, load
from deploy.models import cache_dir, resolve
from engine.vllm.arguments import arguments_of, cpu_arguments_of
from engine.vllm.messages import Channel, Ping, Pong, Start
from engine.vllm.process import HostProcess
from tests.bench.report import Report, Table
from tests.bench.stats import spread

ROOT = Path(__file__).parents[2]
GATE, LATE_S = 1.02, 0.005
BATCH = 32


def run(quick: bool) -> Report:
    python = os.environ["TEST_VLLM_PYTHON"]
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    steps = Table(
        f"A decode step of {BATCH} sequences, alternately",
        ("sampling", "plain ms", "with hooks ms", "ratio of the medians", f"<= {GATE}"),
    )
    for kind in ("greedy", "drawn"):
        pairs = _pairs(python, model.path, 40 if quick else 200, kind)
        plain, hosted = ([pair[index] for pair in pairs] for index in (0, 1))
        found = statistics.median(hosted) / statistics.median(plain)
        ms = [spread([1e3 * each for each in side]) for side in (plain, hosted)]
        steps.rows.append((kind, *ms, f"{found:.3f}", "yes" if found <= GATE else "no"))
    table = Table("An idle host answers", ("command", "p50 ms", "p99 ms", f"< {1e3 * LATE_S:g}"))
    late = sorted(_answers(python, model.path, 200 if quick else 2000))
    p50, p99 = late[len(late) // 2], late[int(0.99 * len(late))]
    table.rows.append(("Ping", f"{1e3 * p50:.2f}", f"{1e3 * p99:.2f}", "yes" if p99 < LATE_S else "no"))
    return Report("vllm", [steps, table])


def _pairs(python: str, folder: Path, num_steps: int, kind: str) -> list[tuple[float, float]]:
    """Seconds of steps of both sides, which compute alternately; the other one waits."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sides = {}
    for side in ("plain", "hosted"):
        words = [python, "-m", "tests.bench.vllm_peer", side, str(folder), str(BATCH), str(num_steps), kind]
        pipe = subprocess.PIPE
        sides[side] = subprocess.Popen(words, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    try:
        for process in sides.values():
            while _line(process) != "ready":
                pass
        pairs = []
        for number in range(num_steps):
            took = {}
            for side in list(sides)[:: 1 if number % 2 else -1]:
                stdin = sides[side].stdin
                assert stdin is not None
                stdin.write("step\n")
                took[side] = float(_line(sides[side]))
            pairs.append((took["plain"], took["hosted"]))
    finally:
        for process in sides.values():
            process.kill()
            process.wait()
    return pairs


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a side of the benchmark has ended"
    return line.strip()


def _answers(python: str, folder: Path, number: int) -> list[float]:
    """Seconds from a command to its answer, with pauses in which the host falls asleep."""
    model = ModelConfig(path=str(folder))
    engine = EngineConfig(
        runner="vllm", vllm_python=python, vllm_args={"enforce_eager": True}, num_blocks=128, max_model_len=1024
    )
    start = Start(arguments_of(model, engine, 1.0), [], cpu_arguments_of(model, engine, 8 << 30))
    with tempfile.TemporaryDirectory() as cache:
        host = HostProcess.start(python, start, Path(cache), 1)
        try:
            host.connection.setblocking(True)
            channel, found = Channel(host.connection), []
            for _ in range(number):
                time.sleep(0.002)
                began_s = time.perf_counter()
                channel.send(Ping())
                while not any(isinstance(message, Pong) for message in channel.receive()):
                    pass
                found.append(time.perf_counter() - began_s)
        finally:
            host.close()
    return found
