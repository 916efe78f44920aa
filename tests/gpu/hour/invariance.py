"""`engine.batch_invariant`, and what it costs."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from baton.errors import ConfigError
from engine.core.sequence import Purpose
from tests.gpu.hour.checks import Found, is_rehearsal, judged
from tests.gpu.hour.churn import variants
from tests.gpu.hour.models import engine_of, few_graphs, make_folder, prompts_of, runner_of, spec_of, synchronize
from tests.gpu.hour.speed import model_8b, step

CASES = {"1": (1, 512), "64": (64, 512)}
NUM_STEPS = 16


def batch_invariant() -> Found:
    """Nothing changes an answer or its log probabilities with `engine.batch_invariant`, in bfloat16; where it cannot be
    kept, it is refused by name."""
    if is_rehearsal():
        try:
            runner_of(make_folder(), batch_invariant=True)
        except ConfigError as error:
            return judged("engine.batch_invariant" in str(error), "not refused by name", refusal=str(error))
        return judged(False, "torch's products on a CPU depend on how many rows there are: not refused")
    parted: dict[str, dict[str, int]] = {}
    for name, temperature in (("greedily", 0.0), ("drawn", 0.8)):
        alone, others = variants("bfloat16", temperature, batch_invariant=True)
        parted[name] = {
            way: sum(one[::2] != reference[::2] for one, reference in zip(found, alone, strict=True))
            for way, found in others.items()
        }
    return judged(
        not any(number for by_way in parted.values() for number in by_way.values()),
        "a token or a log probability of an answer depends on what is beside it",
        parted=parted,
    )


def cost() -> Found:
    """Medians of decode steps of 1 and 64 streams, and of a prompt of 2,048 tokens, of 8B parameters."""
    few_graphs(1, 64)
    settings = {"without": False} if is_rehearsal() else {"without": False, "with": True}
    figures: dict[str, Any] = {name: _times(batch_invariant) for name, batch_invariant in settings.items()}
    if not is_rehearsal():
        without, with_it = figures["without"], figures["with"]
        figures["times"] = {name: round(with_it[name] / without[name], 2) for name in without}
    return judged(True, **figures)


def _times(batch_invariant: bool) -> dict[str, float]:
    num_prompt = 64 if is_rehearsal() else 2048
    dtype = "float32" if is_rehearsal() else "bfloat16"
    runner = runner_of(model_8b(), dtype=dtype, num_blocks=3072, batch_invariant=batch_invariant)
    found = {}
    for name, (batch, length) in CASES.items():
        if is_rehearsal():
            batch, length = min(batch, 3), 32
        engine = engine_of(runner, step_tokens=2048)
        for number, prompt in enumerate(prompts_of([length] * batch)):
            engine.add(spec_of(f"{name}-{number}", prompt, 3 * NUM_STEPS), Purpose.GENERATE, now=0.0)
        while any(sequence.num_computed_tokens < length for sequence in engine.sequences.values()):
            _step_s(engine)
        found[f"decode_{name}_ms"] = _median_ms([_step_s(engine) for _ in range(2 * NUM_STEPS)][NUM_STEPS:])
    times = []
    for number, prompt in enumerate(prompts_of([num_prompt] * 4)):
        engine = engine_of(runner, step_tokens=num_prompt)
        engine.add(spec_of(f"p{number}", prompt, 1), Purpose.GENERATE, now=0.0)
        times.append(_step_s(engine))
    found["prompt_ms"] = _median_ms(times[1:])
    del runner, engine
    gc.collect()
    if not is_rehearsal():
        torch.cuda.empty_cache()
    return found


def _step_s(engine: Any) -> float:
    synchronize()
    began = time.perf_counter()
    step(engine)
    return time.perf_counter() - began


def _median_ms(times: list[float]) -> float:
    return round(1e3 * statistics.median(times), 2)
