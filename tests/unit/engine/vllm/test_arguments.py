"""Settings of Baton as arguments of vLLM: each one that holds for vLLM is passed on, and no other."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from baton.config import EngineConfig, ModelConfig
from baton.config.engine import UNKNOWN_TO_VLLM, EveryEngineConfig
from baton.errors import ConfigError
from baton.memory import GIB, VLLM_PROCESS_BYTES
from engine.vllm.arguments import CPU_BLOCK_SIZE, arguments_of, cpu_arguments_of

MODEL = ModelConfig(path="/models/m")
AS_IT_IS: dict[str, Any] = {
    "model": "/models/m",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "language_model_only": True,
    "dtype": "auto",
    "seed": 0,
    "max_model_len": -1,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "tensor_parallel_size": 1,
    "enable_expert_parallel": False,
    "disable_log_stats": True,
    "async_scheduling": False,
}
"""Arguments of vLLM if no setting is set."""


def settings(**values: Any) -> EngineConfig:
    return EngineConfig(runner="vllm", vllm_python="/opt/vllm/bin/python", **values)


def changed(share: float = 1.0, model: ModelConfig = MODEL, **values: Any) -> dict[str, Any]:
    """The arguments that these settings change."""
    found = arguments_of(model, settings(**values), share)
    assert found.keys() >= AS_IT_IS.keys()
    return {name: value for name, value in found.items() if name not in AS_IT_IS or AS_IT_IS[name] != value}


def test_without_settings_vllm_gets_what_baton_needs() -> None:
    assert arguments_of(MODEL, settings(), 1.0) == AS_IT_IS


PASSED_ON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block_size": ({"block_size": 64}, {"block_size": 64}),
    "kv_cache_gib": ({"kv_cache_gib": 1.5}, {"kv_cache_memory_bytes": 3 * GIB // 2}),
    "num_blocks": ({"num_blocks": 64}, {"num_gpu_blocks_override": 65}),
    "max_num_seqs": ({"max_num_seqs": 8}, {"max_num_seqs": 8}),
    "max_num_batched_tokens": (
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    ),
    "max_model_len": ({"max_model_len": 512}, {"max_model_len": 512}),
    "tensor_parallel": (
        {"tensor_parallel": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    "expert_parallel": (
        {"tensor_parallel": 2, "expert_parallel": True},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": True},
    ),
    "vllm_args": (
        {"vllm_args": {"enforce_eager": True, "quantization": "awq"}},
        {"enforce_eager": True, "quantization": "awq"},
    ),
}
ELSEWHERE = {
    "runner", "vllm_python",  # they select vLLM
    "memory_share",  # `share`
    "max_waiting", "output_reservation", "step_timeout_s",  # the worker's own
    "num_threads",  # OMP_NUM_THREADS
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_setting_is_passed_on(name: str) -> None:
    given, expected = PASSED_ON[name]
    assert changed(**given) == expected


def test_every_setting_is_passed_on_used_elsewhere_or_refused() -> None:
    names = {each.name for kind in (EveryEngineConfig, EngineConfig) for each in fields(kind)}
    kinds = (set(PASSED_ON), ELSEWHERE, set(UNKNOWN_TO_VLLM))
    assert names == set.union(*kinds)
    assert sum(map(len, kinds)) == len(names), "a setting has one of these fates"


def test_the_number_of_blocks_is_without_the_one_that_stands_for_none_and_wins_over_their_size() -> None:
    assert changed(num_blocks=10, kv_cache_gib=4.0) == {"num_gpu_blocks_override": 11}


@pytest.mark.parametrize(
    ("share", "values", "expected"),
    [
        (0.5, {}, {"gpu_memory_utilization": 0.45}),
        (0.5, {"vllm_args": {"gpu_memory_utilization": 0.8}}, {"gpu_memory_utilization": 0.4}),
        (1.0, {"vllm_args": {"gpu_memory_utilization": 0.8}}, {"gpu_memory_utilization": 0.8}),
        (0.25, {"num_blocks": 8}, {"gpu_memory_utilization": 0.225, "num_gpu_blocks_override": 9}),
    ],
)
def test_a_share_of_a_gpu_scales_vllms_own(share: float, values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed(share, **values) == pytest.approx(expected)


def test_the_models_settings_are_passed_on() -> None:
    assert changed(model=ModelConfig(path="/models/m", dtype="bfloat16")) == {"dtype": "bfloat16"}
    assert changed(model=ModelConfig(path="/other", weights="fp8")) == {"model": "/other", "quantization": "fp8"}
    asked: dict[str, Any] = {"vllm_args": {"quantization": "fbgemm_fp8"}}
    assert changed(model=ModelConfig(path="/models/m", weights="fp8"), **asked) == {"quantization": "fp8"}
    assert changed(**asked) == {"quantization": "fbgemm_fp8"}


@pytest.mark.parametrize("weights", ["bf16", "int8g"])
def test_weights_of_the_native_step_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.weights {weights} needs the native step, and engine.runner is vllm"):
        changed(model=ModelConfig(path="/models/m", weights=weights))


# -- on CPUs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    """A model whose weights take 1 GiB in float32. They are stored in two bytes each, in a file without content."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**14, 2**14], "data_offsets": [0, 2**29]}}).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + 2**29)
    (tmp_path / "config.json").write_text("{}")
    return ModelConfig(path=str(tmp_path))


def pool_gib(model: ModelConfig, free_gib: float, **values: Any) -> float:
    """The size of each rank's pool, from its arguments."""
    pool: int = cpu_arguments_of(model, settings(**values), int(free_gib * GIB))["kv_cache_memory_bytes"]
    return pool / GIB


def test_on_cpus_vllm_gets_a_type_a_block_size_limits_and_a_pool(model: ModelConfig) -> None:
    assert cpu_arguments_of(model, settings(), 16 * GIB) == {
        "dtype": "float32",
        "block_size": CPU_BLOCK_SIZE,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 3 * GIB,  # as much as the weights and a process
    }


def test_on_cpus_what_is_set_holds(model: ModelConfig) -> None:
    values: dict[str, Any] = {"block_size": 48, "kv_cache_gib": 0.5, "max_num_seqs": 3, "max_num_batched_tokens": 96}
    narrow = ModelConfig(path=model.path, dtype="bfloat16")
    assert cpu_arguments_of(narrow, settings(**values), 16 * GIB) == {
        "dtype": "bfloat16",
        "block_size": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 96,
        "kv_cache_memory_bytes": GIB // 2,
    }
    assert pool_gib(model, 16, kv_cache_gib=9.0, num_blocks=64) == 3, "the number of blocks is what counts"


def test_on_cpus_ranks_divide_weights_and_memory(model: ModelConfig) -> None:
    """Each rank needs memory for its process. The pools share half of the rest."""
    assert pool_gib(model, 8) == (8 - 1 - 2) / 2
    assert pool_gib(model, 8, tensor_parallel=2) == (8 / 2 - 1 / 2 - 2) / 2


def test_on_cpus_a_model_or_a_pool_that_does_not_fit_is_refused(model: ModelConfig) -> None:
    process_gib = VLLM_PROCESS_BYTES / GIB
    with pytest.raises(ConfigError, match=r"^there is no room for KV: of the 3\.0 GiB that are free, .* need 3\.0;"):
        pool_gib(model, 1 + process_gib)
    with pytest.raises(ConfigError, match=r"^1 KV pool of 8 GiB does not fit: .* set engine.kv_cache_gib to auto or"):
        pool_gib(model, 8, kv_cache_gib=8.0)


def test_on_cpus_quantized_weights_count_as_they_are_stored(model: ModelConfig) -> None:
    (Path(model.path) / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert pool_gib(model, 7) == (7 - 1 / 2 - 2) / 2
