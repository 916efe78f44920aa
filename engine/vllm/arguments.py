"""Baton's settings as arguments of vLLM's engine. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, ModelLoadError
from baton.memory import GIB, VLLM_PROCESS_BYTES, Room, bytes_of_vllm

QUANTIZED = {"exact": None, "fp8": "fp8"}
"""`model.weights` -> vLLM's quantization of weights that are not quantized."""
CPU_BLOCK_SIZE = 32
"""vLLM's attention on CPUs takes blocks of a multiple of this number of tokens. vLLM's default is four times as many;
with it short prefixes would not be reused."""


def arguments_of(model: ModelConfig, engine: EngineConfig, share: float) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` for any device.

    Args:
        share: share of a GPU that this worker may use, at most 1.

    Raises:
        ConfigError: vLLM does not support the value of `model.weights`.
    """
    if model.weights not in QUANTIZED:
        raise ConfigError(
            f"model.weights {model.weights} needs the native step, and engine.runner is vllm; set it to exact or fp8"
        )
    arguments: dict[str, Any] = {
        "model": model.path,
        "skip_tokenizer_init": True,  # routers tokenize
        "generation_config": "vllm",  # the router applies the folder's recommended sampling
        "language_model_only": True,
        "dtype": model.dtype,
        "seed": 0,
        "max_model_len": engine.max_model_len or -1,  # -1: as many tokens as the pool holds
        **_batch(engine, on_gpu=True),
        "tensor_parallel_size": engine.tensor_parallel,
        "enable_expert_parallel": engine.expert_parallel,
        "disable_log_stats": True,
        "async_scheduling": False,  # the sampler must know the last token when it draws the next one
        **engine.vllm_args,
    }
    if engine.block_size != EngineConfig().block_size:
        arguments["block_size"] = engine.block_size  # otherwise vLLM chooses it
    if share < 1:
        arguments["gpu_memory_utilization"] = share * float(arguments.get("gpu_memory_utilization", 0.9))
    if quantization := QUANTIZED[model.weights]:
        arguments["quantization"] = quantization
    if engine.num_blocks:
        arguments["num_gpu_blocks_override"] = engine.num_blocks + 1  # vLLM reserves one as the null block
    elif engine.kv_cache_gib != "auto":
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * GIB)
    if engine.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def cpu_arguments_of(model: ModelConfig, engine: EngineConfig, free_bytes: int) -> dict[str, Any]:
    """Return the arguments that replace those of `arguments_of` if vLLM computes on CPUs.

    Args:
        free_bytes: memory that the worker and its host may use.

    Raises:
        ConfigError: there is no room for a KV cache.
    """
    dtype = "float32" if model.dtype == "auto" else model.dtype
    needed = bytes_of_vllm(Path(model.path), dtype) // engine.tensor_parallel + VLLM_PROCESS_BYTES
    room = Room(free=free_bytes, num_pools=engine.tensor_parallel, needed=needed)
    pool_gib = room.pool_gib("auto" if engine.num_blocks else engine.kv_cache_gib)
    return {
        "dtype": dtype,
        "block_size": num_blocks_for(engine.block_size, CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE,
        "kv_cache_memory_bytes": int(pool_gib * GIB),
        **_batch(engine, on_gpu=False),
    }


def require_device(asked: str, gpu: str) -> None:
    """Require that vLLM computes on the device that the settings name.

    Args:
        asked: `model.device`.
        gpu: name of vLLM's GPU; empty: it computes on CPUs.

    Raises:
        ModelLoadError, ConfigError: it does not; the message says how.
    """
    if asked == "cuda" and not gpu:
        raise ModelLoadError("model.device is cuda, but the vLLM of engine.vllm_python computes on CPUs")
    if asked == "cpu" and gpu:
        raise ConfigError("model.device is cpu, but the vLLM of engine.vllm_python computes on GPUs; set it to auto")


def _batch(engine: EngineConfig, *, on_gpu: bool) -> dict[str, int]:
    batch = engine.batch(on_gpu=on_gpu)
    return {"max_num_seqs": batch.max_num_seqs, "max_num_batched_tokens": batch.max_num_batched_tokens}


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the host's process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it calls no logits processors of this interface
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # 64 bits of a hash are not enough to name a block
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of the host's environment."""
PREFERRED = {
    "VLLM_LOGGING_LEVEL": "WARNING",  # its usual log has lines of ten thousand characters
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker on this machine would bind its ranks to the same cores
}
"""Variables of the host's environment, unless the worker's environment sets them."""
