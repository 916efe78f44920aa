"""Settings of one pool that differ from `engine` and `cluster`."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from baton.cluster import Role
from baton.config.engine import EngineConfig
from baton.config.section import JSON, NUMBER, Must, section
from baton.errors import ConfigError
from baton.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

POOL_SETTINGS = frozenset(
    {
        *("tensor_parallel", "expert_parallel", "num_threads", "attention", "plan_ahead", "step_timeout_s"),
        *("kv_cache_gib", "memory_share", "num_blocks", "kv_dtype", "output_reservation", "image_cache_gib"),
        *("max_num_seqs", "max_num_batched_tokens", "max_waiting"),
        *("speculation", "max_draft_tokens", "draft_model", "draft_kv_cache_gib"),
    }
)
"""Settings of `engine` that may differ between the pools. Peers, routers or the index need one value of the others."""


@section()
class PoolConfig:
    """Settings of the workers that start in this pool. What is not set is as in `engine` and `cluster`."""

    engine: Annotated[dict[str, Any], JSON] = field(default_factory=dict)
    """Settings of `engine` with other values in this pool, such as {tensor_parallel: 2}. These may differ: attention,
    draft_kv_cache_gib, draft_model, expert_parallel, image_cache_gib, kv_cache_gib, kv_dtype, max_draft_tokens,
    max_num_batched_tokens, max_num_seqs, max_waiting, memory_share, num_blocks, num_threads, output_reservation,
    plan_ahead, speculation, step_timeout_s, tensor_parallel. A worker keeps its engine when its role changes, so pools
    with different engines do not exchange workers."""
    gpus_per_worker: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER, Must.be("at least 0")] = 0.0
    """GPUs per worker of this pool. 0: `cluster.gpus_per_worker`."""

    def applied(self, engine: EngineConfig, name: str) -> EngineConfig:
        """Return the engine of this pool's workers.

        Args:
            engine: the engine of both pools.
            name: name of the setting that holds the differences, for errors.

        Raises:
            ConfigError: a setting is unknown, must be the same in both pools, or has a value that is not allowed.
        """
        for each in self.engine.keys() - POOL_SETTINGS:
            if each in EngineConfig.__dataclass_fields__:
                raise ConfigError(f"{name}.{each} must be the same in both pools; set engine.{each}")
            meant = nearest(each, sorted(POOL_SETTINGS))
            advice = f"did you mean {name}.{meant}?" if meant else f"known here: {', '.join(sorted(POOL_SETTINGS))}"
            raise ConfigError(f"unknown setting {name}.{each}; {advice}")
        if not self.engine:
            return engine
        try:
            return dataclasses.replace(engine, **self.engine)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


@section("pools")
class PoolsConfig:
    """Settings of one pool, if the pools must differ. In the environment BATON_POOLS_PREFILL and BATON_POOLS_DECODE
    are JSON, for example {"engine": {"tensor_parallel": 2}}.
    """

    prefill: Annotated[PoolConfig, JSON] = field(default_factory=PoolConfig)
    """Workers that start in the prefill pool."""
    decode: Annotated[PoolConfig, JSON] = field(default_factory=PoolConfig)
    """Workers that start in the decode pool."""

    def of(self, pool: Role) -> PoolConfig:
        """Return the settings of this pool."""
        return self.prefill if pool is Role.PREFILL else self.decode

    def with_engine(self, settings: Mapping[Role, Mapping[str, Any]]) -> PoolsConfig:
        """Return these settings, with some settings of the pools' engines added or replaced."""
        own = {
            pool.value: dataclasses.replace(self.of(pool), engine={**self.of(pool).engine, **engine})
            for pool, engine in settings.items()
        }
        return dataclasses.replace(self, **own)
