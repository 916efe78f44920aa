"""Whether more workers fit on the machine that has all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cluster import Role
from baton.config import Config, EngineConfig, ModelConfig, PoolConfig, PoolsConfig, TestingConfig
from baton.memory import GIB, PROCESS_BYTES
from deploy.controller.room import bytes_per_worker, gpu_problem, memory_problem
from deploy.ray_pools.gpus import NodeGpus


def a_config(folder: Path, **engine: object) -> Config:
    """The configuration of a model with a GiB of weights in float32."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**28], "data_offsets": [0, 2**29]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**29)  # a hole
    return Config(model=ModelConfig(path=str(folder)), engine=EngineConfig(**engine))  # type: ignore[arg-type]


def test_a_worker_takes_its_weights_its_processes_and_its_pools(tmp_path: Path) -> None:
    config = a_config(tmp_path, kv_cache_gib=2.0)
    assert bytes_per_worker(config, Role.DECODE) == 3 * GIB + PROCESS_BYTES
    two = replace(config, pools=PoolsConfig(decode=PoolConfig(engine={"tensor_parallel": 2})))
    assert bytes_per_worker(two, Role.DECODE) == 5 * GIB + 2 * PROCESS_BYTES
    assert bytes_per_worker(two, Role.PREFILL) == 3 * GIB + PROCESS_BYTES
    assert bytes_per_worker(a_config(tmp_path), Role.DECODE) == 0, "on a GPU"
    assert bytes_per_worker(replace(config, testing=TestingConfig(arithmetic=True)), Role.DECODE) == 0


@pytest.mark.parametrize(
    ("num_more", "reason"),
    [(0, ""), (-1, ""), (2, ""), (3, "3 more need 12.0 GiB, but only 8.0 GiB are free, enough for 2")],
)
def test_more_than_the_memory_holds_is_refused(num_more: int, reason: str) -> None:
    per_worker = {Role.PREFILL: 9 * GIB, Role.DECODE: 4 * GIB}
    assert memory_problem(per_worker, {Role.PREFILL: 0, Role.DECODE: num_more}, free=8 * GIB) == reason
    unknown = dict.fromkeys(Role, 0)
    assert memory_problem(unknown, dict.fromkeys(Role, 1000), free=1) == "", "nobody knows what they take"


def test_more_than_the_gpus_hold_is_refused() -> None:
    nodes = [NodeGpus(num_gpus=2, num_workers=256)]
    assert gpu_problem(nodes, {Role.PREFILL: 1, Role.DECODE: 1}, both(1.0)) == ""
    assert gpu_problem(nodes, {Role.PREFILL: 1, Role.DECODE: 3}, both(0.5)) == ""
    sentence = "the GPUs here suffice for 2 of 3 workers with 1 GPUs each"
    assert gpu_problem(nodes, {Role.PREFILL: 1, Role.DECODE: 2}, both(1.0)) == sentence
    assert gpu_problem(nodes, {Role.PREFILL: 9, Role.DECODE: 9}, both(0.0)) == ""
    unequal = {Role.PREFILL: 1.0, Role.DECODE: 2.0}
    sentence = "the GPUs here suffice for 1 of 2 workers with 1 or 2 GPUs each"
    assert gpu_problem(nodes, {Role.PREFILL: 1, Role.DECODE: 1}, unequal) == sentence
    assert gpu_problem(nodes, {Role.PREFILL: 2, Role.DECODE: 0}, unequal) == ""


def both(gpus: float) -> dict[Role, float]:
    return dict.fromkeys(Role, gpus)
