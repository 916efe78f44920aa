"""What a worker on the default model takes: time to build the native step, CPU time to start, and memory when it has
computed; native and on transformers, alone on its host and as one of two.

Real clusters of `baton up`, on a cache and a copy of the model of their own: pages that other programs map as well
would count for less.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from engine.native import build, layout
from tests.bench.report import Report, Table
from tests.bench.stats import OtherWork, describe_load, verdict
from tests.integration.cluster import running_cluster
from tests.support.asking import prompt_of, sampling

NUM_BLOCKS = 256
PROMPTS = (512, 412, 312, 212)
"""Tokens of the prompts that are answered, one after the other, before memory is read."""
BUILD_GATE_S, FOUND_GATE_S = 10.0, 0.2
CPU_GATE_S = 2.0
"""Seconds of CPU time that a start may take which finds the weights packed."""
LESS_GATE_MB = 300
ALONE, TWO = ("--prefill", "0", "--decode", "1"), ("--prefill", "1", "--decode", "1")
KINDS = ("weights", "other files", "shared", "private")


@dataclass(frozen=True, slots=True)
class Measured:
    """A worker: the CPU time until it was ready, and its share of memory (PSS) by kind, in MB."""

    cpu_s: float
    memory: Mapping[str, float]

    @property
    def pss(self) -> float:
        return sum(self.memory.values())


def run(quick: bool) -> Report:
    model = resolve(ModelConfig(), cache_dir(load().cluster)).path
    with TemporaryDirectory(prefix="baton-memory-") as folder:
        cache = Path(folder)
        shutil.copytree(model, cache / "models" / model.name)
        building = _building(cache / "native")
        sides = {
            "transformers, alone": _measured(cache, "transformers", ALONE),
            "native, first start, alone": _measured(cache, "native", ALONE),
            "native, alone": _measured(cache, "native", ALONE),
            "transformers, each of two": _measured(cache, "transformers", TWO),
            "native, each of two": _measured(cache, "native", TWO),
        }
    table = Table(
        f"A worker of SmolLM2-135M in float32, {NUM_BLOCKS} blocks of KV",
        ("", "CPU s to start", "gate", "kept", "PSS, MB", *KINDS, "less than transformers, MB", "gate, MB", "MB kept"),
    )
    for name, workers in sides.items():
        beside = sides["transformers, alone" if name.endswith("alone") else "transformers, each of two"]
        table.rows += [_row(name, worker, beside) for worker in workers]
    table.note = "Private: Python, torch, the KV pool and what a step works in. Shared: what hands KV over."
    return Report("memory", [building, table])


def _building(folder: Path) -> Table:
    table = Table("The native step's library", ("", "CPU s", "wall s", "gate", "kept", "other work, cores"))
    variant = build.variant_of(build.cpu_flags())
    for name, gate_s in (("built", BUILD_GATE_S), ("found and loaded", FOUND_GATE_S)):
        began_s, cpu_s = time.perf_counter(), _cpu_s()
        with OtherWork() as others:
            layout.load(build.library(folder, variant))
        took_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
        times = f"{cpu_s:.3f}", f"{took_s:.3f}"
        kept = verdict(took_s < gate_s, others.cores)
        table.rows.append((f"{name}, {variant}", *times, f"< {gate_s}", kept, describe_load(others.cores, 1)))
    return table


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _measured(cache: Path, runner: str, workers: Sequence[str]) -> list[Measured]:
    """Starts a cluster, has each of its workers compute, and reads what they take."""
    mode = "disaggregated" if workers == TWO else "aggregated"
    settings = {"cache": str(cache), "engine_runner": runner, "engine_num_blocks": str(NUM_BLOCKS), "router_mode": mode}
    with running_cluster(*workers, **settings) as cluster:
        pids = [worker["pid"] for worker in cluster.client.status()["workers"]]
        cpu_s = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        for seed, num_tokens in enumerate(PROMPTS):
            cluster.generate(token_ids=prompt_of(seed, num_tokens), sampling=sampling(32))
        cluster.wait_until_idle()
        memory = [memory_of(Path(f"/proc/{pid}/smaps").read_text().splitlines()) for pid in pids]
    return [Measured(*both) for both in zip(cpu_s, memory, strict=True)]


def memory_of(smaps: Sequence[str]) -> Mapping[str, float]:
    """Returns a process's share of the memory that it has mapped, by kind, in MB.

    Args:
        smaps: lines of the kernel's list of its mappings.
    """
    found = Counter[str](dict.fromkeys(KINDS, 0))
    for path, kib in _mappings(smaps):
        if path.endswith((".packed", ".safetensors")):
            kind = "weights"
        elif path.startswith(("/memfd:", "/dev/shm/")):
            kind = "shared"
        else:
            kind = "other files" if path.startswith("/") else "private"
        found[kind] += kib
    return {kind: kib * 1024 / 1e6 for kind, kib in found.items()}


def _mappings(smaps: Sequence[str]) -> Iterator[tuple[str, int]]:
    path = ""
    for line in smaps:
        if begin := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line):
            path = begin[1]
        elif line.startswith("Pss:"):
            yield path, int(line.split()[1])


def _row(name: str, worker: Measured, beside: Sequence[Measured]) -> tuple[str, ...]:
    is_later = name.startswith("native") and "first" not in name
    kept = "yes" if worker.cpu_s < CPU_GATE_S else "no"
    start = f"{worker.cpu_s:.2f}", *((f"< {CPU_GATE_S}", kept) if is_later else ("", ""))
    cells = name, *start, f"{worker.pss:.0f}", *(f"{worker.memory[kind]:.0f}" for kind in KINDS)
    if name.startswith("transformers"):
        return (*cells, "", "", "")
    less = sum(one.pss for one in beside) / len(beside) - worker.pss
    return (*cells, f"{less:.0f}", f">= {LESS_GATE_MB}", "yes" if less >= LESS_GATE_MB else "no")
