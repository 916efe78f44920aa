"""Checks that more workers fit on the machine of `baton up`. In other clusters more nodes may join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.cluster import Role
from baton.config import Config
from baton.memory import GIB, PROCESS_BYTES, VLLM_PROCESS_BYTES, available_memory, bytes_of_vllm, weights_bytes
from deploy.ray_pools.gpus import NodeGpus, num_placed


def bytes_per_worker(config: Config, pool: Role) -> int:
    """Return the memory of a worker of this pool on CPUs: its weights, processes and KV pools.

    It is 0 if it is unknown, or on a GPU, whose shares Ray assigns.
    """
    engine, model = config.engine_of(pool), config.model
    if config.testing.arithmetic or engine.kv_cache_gib == "auto":
        return 0
    folder, dtype = Path(model.path), "float32" if model.dtype == "auto" else model.dtype
    pools = engine.tensor_parallel * int(engine.kv_cache_gib * GIB)
    if engine.runner == "vllm":
        return bytes_of_vllm(folder, dtype) + engine.tensor_parallel * VLLM_PROCESS_BYTES + PROCESS_BYTES + pools
    return weights_bytes(folder, dtype) + engine.tensor_parallel * PROCESS_BYTES + pools


def memory_problem(per_worker: Mapping[Role, int], num_more: Mapping[Role, int], free: int | None = None) -> str:
    """Return the reason why the additional workers do not fit into this machine's memory; empty: they do.

    Args:
        per_worker: bytes per worker of each pool; 0: unknown.
        num_more: number of workers to start in each pool; below 0: workers stop.
        free: free bytes; None: as the system reports them.
    """
    needed = sum(per_worker[pool] * num_more[pool] for pool in Role)
    if needed <= 0 or (total := sum(num_more.values())) <= 0:
        return ""
    free = available_memory() if free is None else free
    if needed <= free:
        return ""
    return (
        f"{total} more need {needed / GIB:,.1f} GiB, but only {free / GIB:.1f} GiB are free, enough "
        f"for {free * total // needed}"
    )


def gpu_problem(nodes: Sequence[NodeGpus], desired: Mapping[Role, int], shares: Mapping[Role, float]) -> str:
    """Return the reason why the workers do not fit on the GPUs; empty: they do, or there are no GPUs.

    Args:
        nodes: the machine, as Ray describes it.
        desired: number of workers of each pool.
        shares: GPUs per worker of each pool; 0: none.
    """
    num_workers = sum(desired.values())
    if not all(shares.values()) or (num_fitting := num_placed(nodes, desired, shares)) >= num_workers:
        return ""
    each = " or ".join(dict.fromkeys(f"{share:g}" for share in shares.values()))
    return f"the GPUs here suffice for {num_fitting} of {num_workers} workers with {each} GPUs each"
