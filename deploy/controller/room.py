"""Checks that more workers fit on the machine of `baton up`. In other clusters more nodes may join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.cluster import Role
from baton.config import Config
from baton.memory import GIB, PROCESS_BYTES, available_memory, weights_bytes
from deploy.ray_pools.gpus import NodeGpus, num_placed


def bytes_per_worker(config: Config) -> int:
    """Return the memory of a worker on CPUs: its weights, processes and KV pools.

    It is 0 if it is unknown, or on a GPU, whose shares Ray assigns.
    """
    engine, model = config.engine, config.model
    if config.testing.arithmetic or engine.kv_cache_gib == "auto":
        return 0
    weights = weights_bytes(Path(model.path), "float32" if model.dtype == "auto" else model.dtype)
    return weights + engine.tensor_parallel * (PROCESS_BYTES + int(engine.kv_cache_gib * GIB))


def memory_problem(per_worker: int, num_more: int, free: int | None = None) -> str:
    """Return the reason why the additional workers do not fit into this machine's memory; empty: they do.

    Args:
        per_worker: bytes per worker.
        num_more: number of workers to start.
        free: free bytes; None: as the system reports them.
    """
    if per_worker <= 0 or num_more <= 0:
        return ""
    free = available_memory() if free is None else free
    if num_more * per_worker <= free:
        return ""
    return (
        f"{num_more} more need {num_more * per_worker / GIB:,.1f} GiB, but only {free / GIB:.1f} GiB are free, enough "
        f"for {free // per_worker}"
    )


def gpu_problem(nodes: Sequence[NodeGpus], desired: Mapping[Role, int], share: float) -> str:
    """Return the reason why the workers do not fit on the GPUs; empty: they do, or there are no GPUs.

    Args:
        nodes: the machine, as Ray describes it.
        desired: number of workers of each pool.
        share: GPUs per worker; 0: none.
    """
    num_workers = sum(desired.values())
    if not share or (num_fitting := num_placed(nodes, desired, share)) >= num_workers:
        return ""
    return f"the GPUs here suffice for {num_fitting} of {num_workers} workers with {share:g} GPUs each"
