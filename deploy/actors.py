"""A worker as a Ray actor: one process, one engine, its own gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from baton.cluster import Role
from baton.config import Config
from baton.errors import ConfigError
from baton.telemetry import logs, tracing
from kvstore.transfer.nccl_env import nccl_environment

if TYPE_CHECKING:
    from baton.engine.runner import Runner  # torch comes with it, and only the worker's own process needs that

ARITHMETIC_LAYERS = 2
RESOURCE = "baton_worker"
"""Both roles ask for the same Ray resource, so that a role flip changes nothing for Ray."""


class WorkerActor:
    """The methods run on the actor's own event loop."""

    def __init__(self, role: str, worker_id: str, host: str, config_json: str) -> None:
        self._role = Role(role)
        self._worker_id = worker_id
        self._host = host
        self._config = Config.from_json(config_json)
        self._resources = contextlib.AsyncExitStack()
        self._ended: asyncio.Task[None] | None = None
        logs.configure(self._config.telemetry.log_level)
        self._tracer = tracing.configure(f"baton-{role}", worker_id, self._config.telemetry)

    async def start(self) -> dict[str, Any]:
        """Loads the model, joins the cluster and takes traffic.

        Returns:
            `pid` and `address`.

        Raises:
            ModelLoadError, ConfigError: this worker cannot run as configured.
        """
        runner = await asyncio.to_thread(build_runner, self._config)
        # Each role is a package of its own; the actor is where they meet.
        if self._role is Role.PREFILL:
            from prefill_worker.worker import running
        else:
            from decode_worker.worker import running
        member, self._ended = await self._resources.enter_async_context(
            running(self._config, self._worker_id, self._host, runner)
        )
        return {"pid": os.getpid(), "address": member.info.address}

    async def ended(self) -> None:
        """Returns only by an exception: the worker is no longer part of the cluster."""
        assert self._ended is not None, "start first"
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Leaves the cluster and frees everything but the process."""
        await self._resources.aclose()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)


def worker_environment(config: Config) -> dict[str, str]:
    """What must be set before the worker's process imports torch."""
    threads = str(config.engine.num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **nccl_environment(),
    }


def build_runner(config: Config) -> Runner:
    """The model that `engine.runner` names. Takes seconds."""
    if config.engine.runner == "arithmetic":
        from baton.engine.arithmetic import ArithmeticRunner

        num_blocks = config.engine.num_blocks or 4096
        max_model_len = config.engine.max_model_len or 8192
        return ArithmeticRunner(
            num_blocks,
            config.engine.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.engine.max_num_seqs,
            num_layers=ARITHMETIC_LAYERS,
            layer_s=config.engine.arithmetic_step_ms / 1e3 / ARITHMETIC_LAYERS,
            token_s=config.engine.arithmetic_token_ms / 1e3,
        )
    if config.engine.runner == "transformers":
        from baton.engine.transformers_runner import TransformersRunner

        return TransformersRunner(config.model, config.engine)
    raise ConfigError(f"engine.runner must be transformers or arithmetic, got {config.engine.runner!r}")
