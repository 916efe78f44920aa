"""The KV pool of a GPU, of what weights and the largest step leave. A CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, ModelLoadError
from baton.memory import CONTEXT_BYTES, GIB, GpuMemory
from engine.core.runner import KVSpec, LayerGroup, OnLayerDone
from engine.core.scheduler import MAX_SCORED
from engine.model import device_memory
from engine.model.kv_cache import KVCache
from engine.model.rank_step import RankStep
from engine.model.transformers_model import ModelRank
from engine.model.transformers_runner import TransformersRunner, largest_step
from tests.integration.test_engine_models import answers, engine_of, make_engine, make_spec, save_tiny

ENGINE = EngineConfig(runner="transformers", max_num_seqs=6, max_num_batched_tokens=40)
MIB = 2**20
SPEC = KVSpec((LayerGroup(name="all", layers=(0,), block_size=16, num_kv_heads=1, k_dim=1, v_dim=1, dtype="float32"),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", {}, folder)
    return folder


class Gpu:
    """A CPU that says of its memory what a GPU might."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: GpuMemory) -> None:
        self.memory = memory
        self.num_measured = 0
        self.shapes: list[tuple[int, int]] = []
        """Sequences and tokens of each step that was computed meanwhile."""
        self._patch = monkeypatch
        monkeypatch.setattr(device_memory, "MEASURED_DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(device_memory, "measured", self._measured)

    def _measured(self, device: torch.device, work: Callable[[], object]) -> GpuMemory:
        self.num_measured += 1
        compute = ModelRank.compute

        def noted(rank: ModelRank, step: RankStep, on_layer_done: OnLayerDone, filling: Any = None) -> torch.Tensor:
            self.shapes.append((len(step.parts), sum(len(part.token_ids) for part in step.parts)))
            return compute(rank, step, on_layer_done, filling)

        with self._patch.context() as patch:
            patch.setattr(ModelRank, "compute", noted)
            work()
        return self.memory


def memory(**values: int) -> GpuMemory:
    return GpuMemory(**{"total": 100 * GIB, "free": 60 * GIB, "held": 20 * GIB, "peak": 19 * GIB, **values})


def test_the_room_is_what_the_largest_step_leaves() -> None:
    assert memory().room(1.0).pool_gib("auto") == pytest.approx(0.9 * (60 + 20 - 19))
    assert memory(held=40 * GIB).room(1.0).pool_gib("auto") == pytest.approx(0.9 * (100 - 0.75 - 19)), "its context"


def test_workers_of_one_gpu_share_it_whoever_comes_first() -> None:
    first, second = (
        memory(free=95 * GIB, held=4 * GIB, peak=4 * GIB),
        memory(free=45 * GIB + GIB // 4, held=4 * GIB, peak=4 * GIB),
    )
    each = 0.9 * (50 - CONTEXT_BYTES / GIB - 4)
    assert first.room(0.5, 10 * GIB).pool_gib("auto") == pytest.approx(each / 0.9 - 10), "what transfers may take"
    assert first.room(0.5).pool_gib("auto") == pytest.approx(each)
    assert second.room(0.5).pool_gib("auto") == pytest.approx(each), "what the first one has is none of its share"


def test_a_pool_for_which_there_is_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_gib to auto or at most"):
        memory().room(1.0).pool_gib(60.0)
    assert memory().room(1.0).pool_gib(50.0) == 50.0
    with pytest.raises(ConfigError, match="no room for KV"):
        memory(peak=80 * GIB).room(1.0).pool_gib("auto")


def test_the_pool_is_made_after_the_largest_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_engine(model, replace(ENGINE, num_blocks=40))
    wanted = 70 * plain.runner.spec.block_bytes
    gpu = Gpu(monkeypatch, memory(total=GIB, free=int(wanted / 0.9) + 100, held=20 * MIB, peak=20 * MIB))
    engine = make_engine(model, ENGINE)
    assert engine.runner.num_blocks == (70,)
    assert gpu.num_measured == 1
    assert gpu.shapes == [(6, 40)] * 2, "steps as large as the settings allow"
    specs = [make_spec(f"{n}", list(range(n, 30 + 5 * n)), 8, ignore_eos=True) for n in range(5)]
    assert answers(engine, specs, 0)[0] == answers(plain, specs, 0)[0]


def test_what_transfers_may_take_is_not_the_pools(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = make_engine(model, replace(ENGINE, num_blocks=4)).runner.spec.block_bytes
    Gpu(monkeypatch, memory(total=GIB, free=170 * block_bytes + 100, held=20 * MIB, peak=20 * MIB))
    runner = TransformersRunner(ModelConfig(path=str(model), device="cpu"), ENGINE, 100 * block_bytes)
    assert runner.num_blocks == (70,)


def test_a_pool_in_blocks_is_not_measured_away(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, memory(free=0, held=0))
    assert make_engine(model, replace(ENGINE, num_blocks=33)).runner.num_blocks == (33,)
    assert gpu.num_measured == 1


def test_the_share_that_ray_gives_is_heeded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, memory(total=4 * CONTEXT_BYTES, free=4 * CONTEXT_BYTES, held=0, peak=0))
    with pytest.raises(ConfigError, match="no room for KV"):
        make_engine(model, replace(ENGINE, memory_share=0.25))


def test_a_step_that_does_not_fit_beside_the_weights_names_what_to_lower(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpu(monkeypatch, memory())

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRank, "compute", full)
    with pytest.raises(ModelLoadError, match=r"engine\.max_num_batched_tokens, engine\.max_num_seqs or"):
        make_engine(model, ENGINE)


def test_a_pool_that_the_device_refuses_names_what_to_lower(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, memory())
    make = KVCache.__init__

    def full(cache: KVCache, spec: Any, num_blocks: int | tuple[int, ...], *rest: Any, **more: Any) -> None:
        if isinstance(num_blocks, tuple) and max(num_blocks) > 4:  # those of the first steps are fewer
            raise torch.OutOfMemoryError("CUDA out of memory")
        make(cache, spec, num_blocks, *rest, **more)

    monkeypatch.setattr(KVCache, "__init__", full)
    with pytest.raises(ModelLoadError, match=r"lower engine\.kv_cache_gib or engine\.num_blocks"):
        make_engine(model, ENGINE)


def test_the_largest_step_samples_for_all_and_names_no_block_beyond_the_probe() -> None:
    step = largest_step(EngineConfig(max_num_seqs=64, max_num_batched_tokens=512), 4096, SPEC)
    assert step.num_scheduled_tokens == 512
    assert len(step.parts) == 64
    assert all(part.sample for part in step.parts)
    assert max(part.end for part in step.parts) == 4096
    assert {block for part in step.parts for table in part.block_ids for block in table} == {0, 1}
    short = largest_step(EngineConfig(max_num_seqs=64, max_num_batched_tokens=512), 20, SPEC)
    assert max(part.end for part in short.parts) == 20
    assert all(part.num_computed_tokens >= 0 for part in short.parts)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "counts"),
    [(64, 2048, [128] * 15 + [80] + [1] * 48), (6, 40, [35] + [1] * 5), (2, 4096, [128, 128]), (300, 300, [1] * 300)],
)
def test_the_largest_step_scores_no_more_of_a_prompt_than_a_step_does(
    max_num_seqs: int, max_num_batched_tokens: int, counts: list[int]
) -> None:
    """A row of logits in float32 for each token of a long prompt would take gigabytes from the pool."""
    engine = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    step = largest_step(engine, 8192, SPEC)
    assert [part.num_scheduled_tokens for part in step.parts] == counts
    # The last token of a prompt has none behind it.
    assert [len(part.scored_token_ids) for part in step.parts] == [count - 1 for count in counts]
    assert max(len(part.scored_token_ids) for part in step.parts) <= MAX_SCORED
    whole = largest_step(engine, 8192, SPEC, is_scored=False)
    assert [part.num_scheduled_tokens for part in whole.parts] == [
        max_num_batched_tokens - max_num_seqs + 1,
        *[1] * (max_num_seqs - 1),
    ]
    assert not any(part.scored_token_ids for part in whole.parts)
    assert {part.end for part in (*step.parts, *whole.parts) if part.num_scheduled_tokens > 1} <= {8192}


# -- weights -----------------------------------------------------------------------------------------------------------


class Loading(Exception):
    """What transformers was asked for."""


@pytest.mark.parametrize(("device", "placed"), [("meta", {"": torch.device("meta")}), ("cpu", None)])
def test_weights_go_straight_to_their_device(
    device: str, placed: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine(model, replace(ENGINE, num_blocks=4)).runner
    asked: dict[str, Any] = {}

    def load(*_: Any, **values: Any) -> Any:
        asked.update(values)
        raise Loading

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    with pytest.raises(ModelLoadError, match="cannot load the weights"):
        ModelRank(ModelConfig(path=str(model)), ENGINE, KVCache(plain.spec, 2, 1, torch.device(device)))
    assert asked.get("device_map") == placed


def test_a_model_that_is_placed_at_once_computes_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = PreTrainedModel.from_pretrained.__func__
    specs = [make_spec("one", list(range(40)), 8, ignore_eos=True)]
    wanted = answers(make_engine(model, replace(ENGINE, num_blocks=16)), specs, 0)[0]

    def placed(cls: Any, *args: Any, **values: Any) -> Any:
        return load(cls, *args, device_map={"": torch.device("cpu")}, **values)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(placed))
    engine = replace(ENGINE, num_blocks=16)
    runner = TransformersRunner(ModelConfig(path=str(model), device="cpu"), engine)
    assert answers(engine_of(runner, engine), specs, 0)[0] == wanted


def test_weights_that_do_not_fit_name_what_to_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    with pytest.raises(ModelLoadError, match=r"do not fit into the GPU's memory: take a narrower model\.dtype"):
        make_engine(model, replace(ENGINE, num_blocks=4))
