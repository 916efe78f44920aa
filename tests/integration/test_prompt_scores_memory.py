"""The scores of a long prompt, over a large vocabulary, need no memory for all of its logits."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton.config import EngineConfig, ModelConfig
from engine.core.engine import Engine
from engine.core.outputs import Generated
from engine.core.sequence import Purpose
from engine.model.transformers_runner import TransformersRunner
from tests.integration.test_engine_models import engine_of, save_tiny
from tests.support.builders import sequence_spec

VOCAB_SIZE, NUM_TOKENS = 150_000, 8_000
GIB = 2**30


@pytest.mark.chaos
def test_memory_rises_by_less_than_a_gib(tmp_path: Path) -> None:
    """All logits would be 4.5 GiB. In a process of its own, whose peak nothing before has raised."""
    save_tiny("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2 * NUM_TOKENS}, tmp_path)
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    told = subprocess.run(command, check=True, timeout=250, capture_output=True, text=True).stdout
    rise, peak = map(int, told.split()[-2:])
    print(f"{rise / GIB:.2f} GiB more, of {peak / GIB:.2f}")
    assert rise < GIB


def main(folder: Path) -> None:
    """Prints in bytes how far the peak with a prompt's scores is above what the process has before, and the peak."""
    config = EngineConfig(num_threads=1, kv_cache_gib=0.25, max_model_len=NUM_TOKENS + 16, max_num_batched_tokens=2048)
    runner = TransformersRunner(ModelConfig(path=str(folder), dtype="float32", device="cpu"), config)
    engine = engine_of(runner, config)
    _peak(engine, num_top=None)
    Path("/proc/self/clear_refs").write_text("5")  # else the peak may be that of loading, of pages since given back
    before = psutil.Process().memory_info().rss
    after = _peak(engine, num_top=20)
    print(after - before, after)


def _peak(engine: Engine, num_top: int | None) -> int:
    """Returns the most bytes that the process has had by the end of a prompt."""
    prompt = random.Random(num_top).choices(range(VOCAB_SIZE), k=NUM_TOKENS)
    engine.add(sequence_spec(prompt, f"{num_top}", max_tokens=2, prompt_logprobs=num_top), Purpose.GENERATE, 0.0)
    num_scores = 0
    while not engine.is_idle:
        step, _ = engine.schedule(0.0)
        for output in engine.commit(step, engine.runner.execute(step), 0.0):
            if isinstance(output, Generated) and output.report is not None:
                num_scores = len(output.report.prompt_scores)
    assert num_scores == (0 if num_top is None else NUM_TOKENS - 1)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
