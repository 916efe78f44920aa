"""What was packed at a native worker's first start serves the later ones: the same bits, without transformers. Where
nothing can be, transformers computes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import EngineConfig, ModelConfig, load
from deploy.models import cache_dir
from engine.model.shapes import longest_sequence
from engine.model.transformers_runner import TransformersRunner
from engine.native import build
from engine.native.runner import NativeRunner
from engine.native.spec import FAMILIES, describe
from engine.native.weights_cache import StoredConfig
from engine.runners import make_runner
from tests.integration.test_engine_models import (
    ENGINE,
    EXTRAS,
    SIZES,
    VOCAB_SIZE,
    answers,
    engine_of,
    load_reference,
    make_spec,
    refer,
    same_up_to_near_ties,
    save_tiny,
)
from tests.integration.test_native_models import all_logits, same_bits

pytestmark = pytest.mark.integration
LONGER = 2 * 2048
"""Tokens, beyond what the model's configuration says."""
START = """
import json, sys
from pathlib import Path
import torch
from baton.config import EngineConfig, ModelConfig
from engine.native.weights_cache import logits_digest
from engine.runners import make_runner

print("imported", flush=True)
sys.stdin.readline()
model, cache = sys.argv[1:]
engine = EngineConfig(num_blocks=96, max_num_seqs=8, max_num_batched_tokens=48, runner="native")
runner = make_runner(ModelConfig(path=model, device="cpu"), engine, Path(cache))
maps = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".packed")]
print(json.dumps({
    "transformers": "transformers" in sys.modules,
    "logits": logits_digest(runner._warm_up(runner._compute)),
    "maps": maps,
    "threads": torch.get_num_threads(),
}))
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with the library and no weights."""
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy2(build.library(cache_dir(load().cluster) / "native", build.variant_of(build.cpu_flags())), folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_tiny("llama", {}, folder)
    return folder


def started(model: Path, cache: Path, engine: EngineConfig = ENGINE) -> NativeRunner:
    return NativeRunner(ModelConfig(path=str(model), device="cpu"), engine, cache)


def logits_of(runner: NativeRunner) -> list[torch.Tensor]:
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (70, 1, 130)]
    return all_logits(runner, prompts, draw, 40)


def packed_in(cache: Path) -> Path:
    (path,) = cache.glob("*.packed")
    return path


@pytest.mark.chaos
def test_two_that_start_together_and_one_later_compute_the_same_and_one_packs(model: Path, cache: Path) -> None:
    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", START, str(model), str(cache.parent)]
        env = os.environ | {"OMP_NUM_THREADS": "2"}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def go_on(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        process.stdin.write("\n")
        process.stdin.flush()

    together = [begin(), begin()]
    try:
        for process in together:
            go_on(process)
        found: list[dict[str, Any]] = [json.loads(process.communicate(timeout=120)[0]) for process in together]
    finally:
        for process in together:
            process.kill()
    assert sorted(one["transformers"] for one in found) == [False, True]
    with begin() as later:
        go_on(later)
        found.append(json.loads(later.communicate(timeout=120)[0]))
    assert not found[-1]["transformers"]
    assert len({one["logits"] for one in found}) == 1
    assert [one["maps"] for one in found] == [["r--s"]] * 3
    assert [one["threads"] for one in found] == [1] * 3
    assert packed_in(cache).exists()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_configuration_means_the_same_when_it_was_kept(kind: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **(SIZES | EXTRAS.get(kind, {})))
    stored = StoredConfig.of(config)
    assert describe(stored) == describe(config)
    assert longest_sequence(stored, 0) == longest_sequence(config, 0)


def test_a_configuration_that_means_something_else_is_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((model / "config.json").read_text())
    for other in (StoredConfig(values | {"num_hidden_layers": 3}), StoredConfig({})):
        monkeypatch.setattr(StoredConfig, "of", lambda config, other=other: other)
        started(model, cache).close()
    assert list(cache.glob("*.packed")) == []


@pytest.mark.parametrize("what", ["a bit of a weight", "its end"])
def test_a_file_that_is_broken_is_made_anew(
    what: str, model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(model, cache)
    expected = logits_of(first)
    first.close()
    path = packed_in(cache)
    whole = path.read_bytes()
    if what == "its end":
        path.write_bytes(whole[:-4096])
    else:
        place = len(whole) - 2001
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    again = started(model, cache)
    assert same_bits(logits_of(again), expected)
    assert ("it has " if what == "its end" else "do not give the logits recorded when they were packed") in caplog.text
    assert packed_in(cache).read_bytes() == whole
    caplog.clear()
    assert same_bits(logits_of(started(model, cache)), expected)
    assert caplog.text == ""


def test_another_checkpoint_of_the_same_name_has_its_own_weights(model: Path, cache: Path, tmp_path: Path) -> None:
    before = logits_of(started(model, cache))
    path = model / "model.safetensors"
    size = path.stat().st_size
    weights = load_file(path)
    save_file({name: torch.roll(weight, 1) for name, weight in weights.items()}, path, metadata={"format": "pt"})
    assert path.stat().st_size == size
    found = logits_of(started(model, cache))
    assert not same_bits(found, before)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    assert same_bits(logits_of(started(elsewhere, cache)), found)
    assert len(list(cache.glob("*.packed"))) == 2


def test_where_nothing_can_be_written_each_has_its_own(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(started(model, cache))
    monkeypatch.setattr(build, "library", lambda folder, variant: next(cache.glob("*.so")))
    (tmp_path / "file").write_text("")
    for _ in range(2):
        caplog.clear()
        assert same_bits(logits_of(started(model, tmp_path / "file" / "native")), expected)
        assert "the packed weights are not kept, each worker has its own" in caplog.text


def test_longer_sequences_than_before_have_a_longer_table(model: Path, cache: Path) -> None:
    started(model, cache).close()
    short = packed_in(cache).stat().st_size
    long = replace(ENGINE, max_model_len=LONGER, num_blocks=LONGER // ENGINE.block_size)
    started(model, cache, long).close()
    assert packed_in(cache).stat().st_size > short
    written = packed_in(cache).stat().st_ino
    for engine in (ENGINE, long):
        started(model, cache, engine).close()
    assert packed_in(cache).stat().st_ino == written, "it serves both"


@pytest.mark.parametrize("missing", ["compiler", "CPU", "type"])
def test_where_the_native_step_cannot_be_answers_are_still_those_of_generate(
    missing: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match missing:
        case "compiler":
            monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        case "CPU":
            monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
        case _:
            monkeypatch.delitem(FAMILIES, "llama")
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 33, 130)]
    reference = load_reference(model)
    references = [refer(reference, prompt, 12) for prompt in prompts]
    runner = make_runner(ModelConfig(path=str(model), device="cpu"), ENGINE, tmp_path / "cache")
    assert isinstance(runner, TransformersRunner)
    specs = [make_spec(f"{number}", prompt, 12, ignore_eos=True) for number, prompt in enumerate(prompts)]
    got, _ = answers(engine_of(runner, ENGINE), specs, steps_between=2)
    assert list(map(same_up_to_near_ties, got, references)).count(True) >= 3
    assert list((tmp_path / "cache").rglob("*.packed")) == []
