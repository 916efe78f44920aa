"""What `baton up` finds out before it starts anything."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from baton.cluster import Role
from baton.config import (
    AutoscaleConfig,
    ClusterConfig,
    Config,
    EngineConfig,
    ModelConfig,
    PoolConfig,
    PoolsConfig,
    TestingConfig,
    TransferConfig,
)
from baton.errors import ConfigError
from baton.memory import GIB, weights_bytes
from baton.rpc import RpcServer
from deploy.doctor import machine, preflight

RAY_SERVICE = "ray.rpc.NodeInfoGcsService"


async def told_of(address: str) -> str:
    """Why there is no Ray; empty: there is one."""
    try:
        await asyncio.to_thread(preflight.require_ray, address)
    except ConfigError as error:
        return str(error)
    return ""


async def test_only_a_ray_answers_as_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", 0.5)
    no_ray = "no Ray answers at"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert no_ray in await told_of(f"127.0.0.1:{silent.getsockname()[1]}")
    assert no_ray in await told_of("127.0.0.1:1")
    stranger = RpcServer(("baton.v1.Admin",))
    port = stranger.bind("127.0.0.1", 0)
    await stranger.start()
    monkeypatch.setattr(preflight, "ANSWER_S", 10.0)
    assert no_ray in await told_of(f"127.0.0.1:{port}"), "a router's port"
    await stranger.stop(0)
    assert "is not host:port" in await told_of("somewhere")
    assert "is not host:port" in await told_of("ray://somewhere:x")


async def test_a_ray_that_wants_a_token_is_there() -> None:
    async def asks_for_one(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token, please")

    head = grpc.aio.server()
    handlers: dict[str, Any] = {"CheckAlive": grpc.unary_unary_rpc_method_handler(asks_for_one)}
    head.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(RAY_SERVICE, handlers),))
    port = head.add_insecure_port("127.0.0.1:0")
    await head.start()
    assert await told_of(f"127.0.0.1:{port}") == ""
    await head.stop(0)


def machine_with(
    monkeypatch: pytest.MonkeyPatch, free_gib: float = 0.0, gpus_gib: list[float] | None = None, cuda: str = "12.9"
) -> None:
    """Args: gpus_gib: what is free on each, as nvidia-smi would say; None: it says nothing."""
    monkeypatch.setattr(preflight, "available_memory", lambda share: int(share * free_gib * GIB))
    monkeypatch.setattr(preflight, "_torch_cuda", lambda: cuda)
    monkeypatch.setattr(
        preflight, "visible_gpus", lambda environ: None if gpus_gib is None else [int(gib * GIB) for gib in gpus_gib]
    )


def a_config(folder: Path, engine: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None) -> Config:
    """Of a model with a GiB of weights in float32."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**28], "data_offsets": [0, 2**29]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 2**29)
    return Config(
        model=ModelConfig(path=str(folder), served_name="tiny"),
        engine=EngineConfig(**(engine or {})),
        cluster=ClusterConfig(**(cluster or {})),
    )


def test_workers_on_cpus_have_pools_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, free_gib=9.0, gpus_gib=[])
    config = a_config(tmp_path)
    sized = preflight.with_kv_size(config)
    assert sized.engine.kv_cache_gib == (8 / 2 - 1.75) / 2, "two workers, a GiB for Ray and the routers"
    assert replace(sized, engine=config.engine) == config
    many = replace(config, autoscale=AutoscaleConfig(enabled=True, max_workers=4))
    assert preflight.with_kv_size(many).engine.kv_cache_gib == (8 / 4 - 1.75) / 2, "as many as there may come to be"
    narrow = replace(config, model=replace(config.model, dtype="bfloat16"))
    assert preflight.with_kv_size(narrow).engine.kv_cache_gib == (8 / 2 - 1.25) / 2
    others = replace(config, engine=EngineConfig(memory_share=0.75))
    assert preflight.with_kv_size(others).engine.kv_cache_gib == (5.75 / 2 - 1.75) / 2, "for what else is there"
    ranks = replace(config, engine=EngineConfig(tensor_parallel=2))
    assert preflight.with_kv_size(ranks).engine.kv_cache_gib == (8 / 4 - 1.25) / 2
    drafts: dict[str, Any] = {"draft_model": config.model.path, "draft_kv_cache_gib": 0.125}
    with_drafts = replace(config, engine=EngineConfig(**drafts))
    weights_gib = weights_bytes(Path(config.model.path), "float32") / GIB
    assert preflight.with_kv_size(with_drafts).engine.kv_cache_gib == (8 / 2 - 1.75 - weights_gib - 0.125) / 2
    without = replace(config, engine=EngineConfig(speculation="off", **drafts))
    assert preflight.with_kv_size(without).engine.kv_cache_gib == (8 / 2 - 1.75) / 2
    two = replace(config, engine=EngineConfig(kv_cache_gib=2.0))
    assert preflight.with_kv_size(two) == two
    with pytest.raises(ConfigError, match="2 KV pools of 3 GiB do not fit"):
        preflight.with_kv_size(replace(config, engine=EngineConfig(kv_cache_gib=3.0)))


def test_workers_on_cpus_have_room_beside_those_of_another_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, free_gib=9.0, gpus_gib=[])
    config = a_config(tmp_path)

    def sized(prefill: dict[str, Any], decode: dict[str, Any]) -> list[Any]:
        pools = PoolsConfig(prefill=PoolConfig(engine=prefill), decode=PoolConfig(engine=decode))
        found = preflight.with_kv_size(replace(config, pools=pools))
        return [found.engine_of(pool).kv_cache_gib for pool in Role]

    own = (9 - 1 - 2 * 1.75) / 2 / 2
    assert sized({"max_num_seqs": 5}, {}) == [own, own]
    ranks = (9 - 1 - 1.75 - 2 * 1.25) / 3 / 2
    assert sized({}, {"tensor_parallel": 2}) == [ranks, ranks], "three KV pools, of the ranks of two workers"
    assert sized({"kv_cache_gib": 1.0}, {}) == [1.0, (9 - 1 - 2 * 1.75 - 1) / 2]
    assert sized({"kv_cache_gib": 1.0}, {"kv_cache_gib": 3.0}) == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"1 KV pool of 2 GiB does not fit: .* set pools.prefill.engine.kv_cache_gib"):
        sized({"kv_cache_gib": 2.0}, {"kv_cache_gib": 3.0})
    assert sized({"num_blocks": 9}, {"tensor_parallel": 2})[0] == "auto"
    words = preflight.kv_sizes_in_words
    assert words(Config(engine=EngineConfig(kv_cache_gib=2.0))) == "2 GiB for each KV pool"
    assert words(Config()) == ""
    unequal = PoolsConfig(prefill=PoolConfig(engine={"kv_cache_gib": 1}), decode=PoolConfig(engine={"kv_cache_gib": 2}))
    assert words(Config(pools=unequal)) == (
        "1 GiB for each KV pool of a prefill worker and 2 GiB for each KV pool of a decode worker"
    )


def test_the_workers_of_all_models_share_the_memory_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, free_gib=9.0, gpus_gib=[])
    big = a_config(tmp_path)
    narrow = replace(big, model=replace(big.model, dtype="bfloat16"))
    own = (9 - 1 - 2 * 1.75 - 2 * 1.25) / 4 / 2
    assert preflight.with_kv_size(big, [narrow]).engine.kv_cache_gib == own
    assert preflight.with_kv_size(narrow, [big]).engine.kv_cache_gib == own, "each pool has the same size"
    fixed = replace(narrow, engine=EngineConfig(kv_cache_gib=0.5))
    assert preflight.with_kv_size(big, [fixed]).engine.kv_cache_gib == (9 - 1 - 2 * 1.75 - 2 * 1.75) / 2 / 2
    growing = replace(narrow, autoscale=AutoscaleConfig(enabled=True, max_workers=3))
    of_five = (9 - 1 - 2 * 1.75 - 3 * 1.25) / 5 / 2
    assert preflight.with_kv_size(big, [growing]).engine.kv_cache_gib == pytest.approx(of_five)
    elsewhere = replace(narrow, testing=TestingConfig(arithmetic=True))
    assert preflight.with_kv_size(big, [elsewhere]) == preflight.with_kv_size(big), "it has no weights"
    two = replace(big, engine=EngineConfig(kv_cache_gib=2.0))
    with pytest.raises(ConfigError, match="4 KV pools of 2 GiB do not fit"):
        preflight.with_kv_size(two, [replace(narrow, engine=two.engine)])


def test_the_workers_of_all_models_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller of each model sees all GPUs, and would give them all to its own workers."""
    machine_with(monkeypatch, gpus_gib=[80.0])
    big = a_config(tmp_path)
    small = replace(big, model=replace(big.model, served_name="small"), cluster=replace(big.cluster, prefill=0))
    assert preflight.with_gpu_shares([big]) == [big]
    shared = preflight.with_gpu_shares([big, small])
    assert [each.gpus_per_worker(pool) for each in shared for pool in Role] == [0.3333] * 4
    configured = replace(small, cluster=replace(small.cluster, gpus_per_worker=0.6))
    with pytest.raises(ConfigError, match="have room for 1 of 3 workers"):
        preflight.with_gpu_shares([big, configured])
    on_cpu = replace(small, model=replace(small.model, device="cpu"))
    assert preflight.with_gpu_shares([big, on_cpu])[1] == on_cpu
    assert preflight.with_gpu_shares([big, on_cpu])[0].gpus_per_worker(Role.DECODE) == 0.5
    ranks = a_config(tmp_path, {"tensor_parallel": 2})
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "580.1")
    machine_with(monkeypatch, gpus_gib=[80.0] * 4)
    on_gpus = replace(ranks, model=replace(ranks.model, device="cuda"))
    preflight.require_gpus(on_gpus)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel needs 8 here"):
        preflight.require_gpus(on_gpus, [on_gpus])
    machine_with(monkeypatch, gpus_gib=[])
    assert preflight.with_gpu_shares([big, small]) == [big, small]


def test_what_is_not_known_here_is_left_to_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, free_gib=0.1, gpus_gib=[])
    for config in (
        a_config(tmp_path, cluster={"ray_address": "127.0.0.1:6379"}),
        replace(a_config(tmp_path), testing=TestingConfig(arithmetic=True)),
        a_config(tmp_path, {"num_blocks": 64}),
    ):
        assert preflight.with_kv_size(config) == config
    machine_with(monkeypatch, free_gib=0.1, gpus_gib=None)
    config = a_config(tmp_path, {"kv_cache_gib": 500.0})
    assert preflight.with_kv_size(config) == config
    preflight.require_gpus(replace(config, model=replace(config.model, device="cuda")))


def test_pools_on_gpus_are_checked_and_sized_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, gpus_gib=[23.0, 24.0])
    assert preflight.with_kv_size(a_config(tmp_path)).engine.kv_cache_gib == "auto"
    tight = a_config(tmp_path, {"kv_cache_gib": 20.0})
    preflight.with_kv_size(replace(tight, transfer=TransferConfig(transports=("tcp",))))
    with pytest.raises(ConfigError, match=r"1 KV pool of 20 GiB does not fit: .* of which 3\.3 for transfers"):
        preflight.with_kv_size(tight)
    with pytest.raises(ConfigError, match=r"1 KV pool of 22 GiB does not fit: 23\.0 GiB are free"):
        preflight.with_kv_size(a_config(tmp_path, {"kv_cache_gib": 22.0}))
    with pytest.raises(ConfigError, match=r"1 KV pool of 20 GiB does not fit: 11\.5 GiB are free"):
        preflight.with_kv_size(a_config(tmp_path, {"kv_cache_gib": 20.0}, {"decode": 3}))


@pytest.mark.parametrize(
    ("gpus", "cuda", "driver", "ranks", "sentence"),
    [
        ([], "12.9", "", 1, "none: no NVIDIA driver here; request nvidia.com/gpu in"),
        (
            [],
            "",
            "550.1",
            1,
            "none for torch, which is a CPU build; the driver is 550.1; install a CUDA build of torch",
        ),
        (
            [],
            "12.9",
            "550.1",
            1,
            r"none for torch \(CUDA 12.9\), though there is a driver, 550.1; check whether CUDA_VISIBLE",
        ),
        (
            [],
            "13.0",
            "550.1",
            1,
            "CUDA 13.0 needs an NVIDIA driver of 580 or newer, and this one is 550.1; install that",
        ),
        ([8, 8], "12.9", "550.1", 2, "engine.tensor_parallel needs 4 here; lower engine.tensor_parallel"),
    ],
)
def test_gpus_that_are_asked_for_and_are_not_there(
    gpus: list[float],
    cuda: str,
    driver: str,
    ranks: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, gpus_gib=gpus, cuda=cuda)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    config = a_config(tmp_path, {"tensor_parallel": ranks})
    config = replace(config, model=replace(config.model, device="cuda"))
    with pytest.raises(ConfigError, match=f"model.device is cuda, GPUs found: .*{sentence}"):
        preflight.require_gpus(config)
    preflight.require_gpus(replace(config, cluster=ClusterConfig(ray_address="127.0.0.1:6379")))
    preflight.require_gpus(replace(config, engine=EngineConfig(), testing=TestingConfig(arithmetic=True)))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_gpu_that_torch_cannot_use_is_an_error_unless_the_cpu_is_wanted(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(monkeypatch, gpus_gib=[], cuda="13.0")
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "550.1")
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = a_config(tmp_path)
    config = replace(config, model=replace(config.model, device=device))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight.require_gpus(config)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        preflight.require_gpus(config)
    else:
        with pytest.raises(ConfigError, match=r"model.device is auto, .* driver of 580 or newer.* model.device to cpu"):
            preflight.require_gpus(config)


def test_gpus_are_those_that_torch_would_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_torch_cuda", lambda: "12.9")
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "550.1")
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.visible_gpus({}) is None, "nobody to ask"
    tool.write_text("#!/bin/sh\nprintf '100\\n200\\n'\n")
    tool.chmod(0o755)
    assert preflight.visible_gpus({}) == [100 * 2**20, 200 * 2**20]
    assert preflight.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [200 * 2**20]
    assert preflight.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}) is None
    assert preflight.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    tool.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert preflight.visible_gpus({}) is None
    monkeypatch.setattr(preflight, "_torch_cuda", lambda: "")
    assert preflight.visible_gpus({}) == []


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    assert preflight._torch_cuda() == (torch.version.cuda or "")


@pytest.mark.parametrize(("heads", "kv_heads", "what"), [(9, 3, "9 heads"), (8, 2, "2 KV heads")])
def test_ranks_have_to_divide_the_heads(heads: int, kv_heads: int, what: str, tmp_path: Path) -> None:
    config = a_config(tmp_path, {"tensor_parallel": 4})
    preflight.require_heads(config)  # the folder does not say
    said = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=f"engine.tensor_parallel is 4, which does not divide the {what} of tiny"):
        preflight.require_heads(config)
    preflight.require_heads(replace(config, engine=EngineConfig()))
    of_decode = PoolsConfig(decode=PoolConfig(engine={"tensor_parallel": 4}))
    with pytest.raises(ConfigError, match=r"^pools.decode.engine.tensor_parallel is 4, which does not divide the "):
        preflight.require_heads(replace(config, engine=EngineConfig(), pools=of_decode))
    (tmp_path / "config.json").write_text(json.dumps(said | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="which does not divide"):
        preflight.require_heads(config)
    (tmp_path / "config.json").write_text(json.dumps(said | {"model_type": "phi3"}))
    preflight.require_heads(config)  # each rank computes all heads
