"""LoRA adapters: what decode steps cost on transformers with none, with 32 that are loaded and unused, and in use."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from baton.config import EngineConfig, ModelConfig, load
from deploy.models import cache_dir, resolve
from engine.core.runner import StepInput, StepPart
from engine.model.logits_runner import NO_SAMPLING
from engine.model.transformers_runner import TransformersRunner
from tests.bench.report import Report, Table
from tests.bench.stats import OtherWork, interleaved, ratio, spread, verdict
from tests.support.adapters import save_adapter

NUM_ADAPTERS, RANK, CONTEXT = 32, 16, 128
NUM_STREAMS = (8, 32)
PARTS = tuple(map(str, NUM_STREAMS))
NONE, UNUSED, ONE, ALL = "no adapters", "32 loaded, unused", "32 loaded, one in use", "32 loaded, each its own"
GATE = 1.02


def run(quick: bool, parts: Collection[str] = PARTS) -> Report:
    path = Path(resolve(ModelConfig(), cache_dir(load().cluster)).path)
    plain, adapted = (_started(path, count) for count in (0, NUM_ADAPTERS))
    with tempfile.TemporaryDirectory() as folder:
        shapes = {
            name: (module.in_features, module.out_features)
            for name, module in plain.rank.model.named_modules()
            if type(module) is nn.Linear and name != "lm_head"
        }
        for slot in range(1, NUM_ADAPTERS + 1):
            adapted.read_adapter(save_adapter(Path(folder) / f"{slot}", shapes, RANK, slot))(slot)
    num_rounds, num_steps = (2, 5) if quick else (9, 12)
    table = Table(
        f"Decode steps, SmolLM2-135M in float32 on transformers, rank {RANK}, all projections, {num_rounds} rounds",
        ("streams", "", "ms a step", "times no adapters", "by CPU time", "gate", "kept"),
    )
    for count in (number for number in NUM_STREAMS if str(number) in parts):
        steps = {
            NONE: (plain, _step(count, [0])),
            UNUSED: (adapted, _step(count, [0])),
            ONE: (adapted, _step(count, [1])),
            ALL: (adapted, _step(count, range(1, NUM_ADAPTERS + 1))),
        }
        with OtherWork() as others:
            walls, cpus = _rounds(steps, num_rounds, num_steps)
        for name, times in walls.items():
            of_none, by_cpu = ratio(times, walls[NONE]), ratio(cpus[name], cpus[NONE])
            gate = (f"<= {GATE}", verdict(of_none.median <= GATE, others.cores)) if name == UNUSED else ("", "")
            table.rows.append((str(count), name, spread([1e3 * each for each in times]), of_none, by_cpu, *gate))
    return Report("adapters", [table])


def _started(path: Path, max_adapters: int) -> TransformersRunner:
    torch.set_num_threads(1)
    config = EngineConfig(
        num_blocks=NUM_STREAMS[-1] * (CONTEXT // 16 + 1), max_num_seqs=NUM_STREAMS[-1], max_adapters=max_adapters
    )
    return TransformersRunner(ModelConfig(path=str(path), device="cpu"), config)


def _step(count: int, slots: Sequence[int]) -> StepInput:
    """A step that computes the next token of so many sequences, whose KV is whatever is in the pages."""
    size = CONTEXT // 16 + 1
    return StepInput(
        tuple(
            StepPart(
                sequence_key=number,
                token_ids=(1000 + number,),
                num_computed_tokens=CONTEXT,
                block_ids=(tuple(range(number * size, (number + 1) * size)),),
                num_kv_tokens=(CONTEXT + 1,),
                sample=True,
                is_decoding=True,
                sampling=NO_SAMPLING,
                choice_index=0,
                num_prompt_tokens=CONTEXT,
                adapter=slots[number % len(slots)],
            )
            for number in range(count)
        )
    )


def _rounds(
    steps: Mapping[str, tuple[TransformersRunner, StepInput]], num_rounds: int, num_steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The median time of a step in each round, in which the arms take turns step by step; and its CPU time."""
    walls: dict[str, list[float]] = {name: [] for name in steps}
    cpus: dict[str, list[float]] = {name: [] for name in steps}
    for runner, step in steps.values():
        runner.execute(step)
    for _ in range(num_rounds):
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for name in interleaved(tuple(steps), num_steps):
            runner, step = steps[name]
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            runner.execute(step)
            took[name].append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
        for name, times in took.items():
            walls[name].append(statistics.median(wall_s for wall_s, _ in times))
            cpus[name].append(statistics.median(cpu_s for _, cpu_s in times))
    return walls, cpus
