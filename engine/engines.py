"""Selection of a worker's engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.config import Config, EngineConfig
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.runner import Runner
from engine.core.scheduler import SchedulerLimits
from engine.core.serving import ServingEngine
from engine.runners import make_runner


def make_engine(config: Config, cache: Path) -> ServingEngine:
    """Build the engine of a worker, of either role. Loading the model takes seconds.

    If speculation is on, a draft model is loaded for both roles, because the worker's role may change.

    Args:
        cache: Baton's cache folder.

    Raises:
        ModelLoadError, ConfigError: the engine cannot run as configured, or does not support a setting.
    """
    settings = config.engine if config.engine.speculation != "off" else replace(config.engine, draft_model="")
    if config.testing.arithmetic:
        from engine.testing import arithmetic_runner

        return engine_over(arithmetic_runner(config.model, settings, config.testing), settings)
    if settings.runner == "vllm":
        from engine.vllm.engine import vllm_engine

        return vllm_engine(config, cache)
    set_aside = config.transfer.gpu_bytes(settings.tensor_parallel)
    return engine_over(make_runner(config.model, settings, cache, set_aside), settings)


def engine_over(runner: Runner, settings: EngineConfig) -> EngineLoop:
    """Return Baton's own engine, whose steps a runner executes. `EngineLoop.close` closes the runner."""
    batch = settings.batch(on_gpu=bool(runner.computes.gpu))
    limits = SchedulerLimits(
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        output_reservation=settings.output_reservation,
        max_draft_tokens=settings.max_draft_tokens if settings.speculation == "ngram" else 0,
        snapshot_tokens=settings.snapshot_tokens,
    )
    return EngineLoop(
        Engine(runner, limits),
        settings.max_waiting,
        plans_ahead=batch.plans_ahead,
        step_timeout_s=settings.step_timeout_s,
    )
