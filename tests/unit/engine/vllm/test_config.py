"""Settings of `engine.runner` vllm: what is unknown, missing or not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config import Config, EngineConfig, PoolConfig, PoolsConfig, RouterConfig
from baton.config.engine import UNKNOWN_TO_VLLM, VLLM_ARGS
from baton.errors import ConfigError

PYTHON = "/opt/vllm/bin/python"


def vllm_config(**values: Any) -> EngineConfig:
    return EngineConfig(**{"runner": "vllm", "vllm_python": PYTHON} | values)


def test_every_argument_in_the_list_is_accepted() -> None:
    assert vllm_config(vllm_args=dict.fromkeys(VLLM_ARGS, 1)).vllm_args.keys() == VLLM_ARGS.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("enforce_eagre", "enforce_eager"),
        ("quantisation", "quantization"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("kv-cache-dtype", "kv_cache_dtype"),
    ],
)
def test_an_argument_with_a_slip_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        vllm_config(vllm_args={"enforce_eager": True, name: True})
    assert str(refused.value) == (
        f"engine.vllm_args has {name}, which Baton does not pass on to vLLM; did you mean {meant}?"
    )


@pytest.mark.parametrize("name", ["seed", "tensor_parallel_size", "async_scheduling", "kv_transfer_config", "dtype"])
def test_an_argument_that_baton_sets_is_refused_with_those_that_it_passes_on(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^engine.vllm_args has {name}, .*Baton passes on: attention_backend, "):
        vllm_config(vllm_args={name: 1})


@pytest.mark.parametrize("name", ["block_size", "max_model_len", "max_num_seqs"])
def test_an_argument_that_is_a_setting_of_batons_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"has {name}, which Baton does not pass on to vLLM; set engine.{name}$"):
        vllm_config(vllm_args={name: 1})


@pytest.mark.parametrize("share", ["lots", None, 0, -0.5, 1.5, float("nan"), [0.5]])
def test_a_share_of_the_memory_is_one(share: Any) -> None:
    """Baton itself computes with it: it is a share of the worker's share."""
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization in engine.vllm_args must be .* at most 1, got "):
        vllm_config(vllm_args={"gpu_memory_utilization": share})


def test_vllm_needs_its_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"^engine.runner vllm needs engine.vllm_python: the Python interpreter"):
        vllm_config(vllm_python="")


@pytest.mark.parametrize("python", ["vllm/bin/python", "../python", "~/vllm/bin/python", "python3"])
def test_the_interpreters_path_is_absolute(python: str) -> None:
    """Workers and `baton up` may have different working directories."""
    with pytest.raises(ConfigError, match=f"^engine.vllm_python must be an absolute path, got '{python}'$"):
        vllm_config(vllm_python=python)


@pytest.mark.parametrize("of_pool", [False, True])
def test_workers_with_several_ranks_serve_aggregated(of_pool: bool) -> None:
    ranks = {"tensor_parallel": 2}
    pools = PoolsConfig(decode=PoolConfig(engine=ranks)) if of_pool else PoolsConfig()
    engine = vllm_config(**{} if of_pool else ranks)
    with pytest.raises(ConfigError, match=r"^router.mode is disaggregated, but vLLM workers with several ranks \("):
        Config(engine=engine, pools=pools, router=RouterConfig(mode="disaggregated"))
    for mode in ("auto", "aggregated"):
        Config(engine=engine, pools=pools, router=RouterConfig(mode=mode))


@pytest.mark.parametrize("runner", ["auto", "native", "transformers"])
@pytest.mark.parametrize("given", [{"vllm_python": PYTHON}, {"vllm_args": {"enforce_eager": True}}])
def test_settings_of_vllm_need_its_runner(runner: str, given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"^engine.vllm_python and engine.vllm_args are .* engine.runner is {runner};"
    ):
        EngineConfig(runner=runner, **given)


UNSUPPORTED: dict[str, Any] = {
    "snapshot_tokens": 64,
    "plan_ahead": True,
    "kv_dtype": "fp8",
    "attention": "flashinfer",
    "batch_invariant": True,
    "speculation": "off",
    "max_draft_tokens": 3,
    "draft_model": "/models/draft",
    "draft_kv_cache_gib": 1.0,
    "max_adapters": 2,
    "max_adapter_rank": 8,
    "images": "off",
    "image_cache_gib": 1.0,
    "max_image_pixels": 100,
    "max_image_tokens": 9,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_that_vllm_does_not_support_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^engine.{name} is not supported by engine.runner vllm; unset it$"):
        vllm_config(**{name: UNSUPPORTED[name]})


def test_all_of_them_are_tried_and_named_together() -> None:
    assert UNSUPPORTED.keys() == UNKNOWN_TO_VLLM
    with pytest.raises(ConfigError, match=r"^engine.images and engine.kv_dtype are not .* vllm; unset them$"):
        vllm_config(images="off", kv_dtype="int8")
