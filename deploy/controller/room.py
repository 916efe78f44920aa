"""Whether more workers fit on the one machine that has all of them (`baton up`). Elsewhere nodes may be yet to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.cluster import Role
from baton.config import Config
from baton.memory import GIB, PROCESS_BYTES, available_memory, weights_bytes
from deploy.ray_pools.gpus import NodeGpus, num_placed


def bytes_per_worker(config: Config) -> int:
    """Returns the memory that a worker takes where CPUs compute: its weights, processes and KV pools.

    It is 0 where it is unknown, or is a GPU's, whose parts Ray assigns.
    """
    engine, model = config.engine, config.model
    if engine.runner == "arithmetic" or engine.kv_cache_gib == "auto":
        return 0
    weights = weights_bytes(Path(model.path), "float32" if model.dtype == "auto" else model.dtype)
    return weights + engine.tensor_parallel * (PROCESS_BYTES + int(engine.kv_cache_gib * GIB))


def memory_problem(per_worker: int, num_more: int, free: int | None = None) -> str:
    """The reason why so many more workers do not fit into the memory of this machine; empty: they do.

    Args:
        per_worker: bytes that each takes.
        num_more: workers that are to be started.
        free: bytes that are free; None: as the system reports them.
    """
    if per_worker <= 0 or num_more <= 0:
        return ""
    free = available_memory() if free is None else free
    if num_more * per_worker <= free:
        return ""
    return (
        f"{num_more} more want {num_more * per_worker / GIB:,.1f} GiB, and {free / GIB:.1f} GiB are free, enough for "
        f"{free // per_worker}"
    )


def gpu_problem(nodes: Sequence[NodeGpus], desired: Mapping[Role, int], share: float) -> str:
    """The reason why so many workers do not fit on the GPUs; empty: they do, or there are none.

    Args:
        nodes: the machine, as Ray describes it.
        desired: the workers of each pool.
        share: the GPUs of each worker; 0: none.
    """
    num_workers = sum(desired.values())
    if not share or (num_fitting := num_placed(nodes, desired, share)) >= num_workers:
        return ""
    return f"the GPUs here suffice for {num_fitting} of {num_workers} workers, each of which has {share:g}"
