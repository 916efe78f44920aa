"""Share of the GPUs that each worker requests from Ray. Pure.

Every worker of a pool requests the same share: as configured, else a whole GPU for each of its ranks. If workers with
one rank, whose share is not configured, are more than there are GPUs for, each of them gets an equal part of one GPU. A
part lies on one GPU. So with 3 workers on 2 GPUs it is a half, and not two thirds, because no GPU has room for two such
parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role
from baton.config import Config
from baton.errors import ConfigError

UNITS = 10_000
"""Ray counts resources in units of 0.0001. Parts are rounded down, so that the last worker of a GPU has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    """Resources of one Ray node for workers."""

    num_gpus: int
    num_workers: int
    """Number of workers for which the node has room, apart from GPUs: its resource `baton_worker`."""
    pool: Role | None = None
    """Pool to which the node is restricted; None: it is for all pools."""


def gpus_per_worker(config: Config, nodes: Sequence[NodeGpus], desired: Mapping[Role, int]) -> dict[Role, float]:
    """Return the GPUs that Ray must assign to each worker of a pool; 0: none, because the nodes have none.

    A configured value always applies, because more nodes may join.

    Raises:
        ConfigError: the workers cannot all be placed, or no worker can get the configured GPUs; the message says what
            to change.
    """
    return gpus_of_models([(config, desired)], nodes)[0]


def gpus_of_models(
    models: Sequence[tuple[Config, Mapping[Role, int]]], nodes: Sequence[NodeGpus]
) -> list[dict[Role, float]]:
    """Return the GPUs per worker of each pool of several models, whose workers share the nodes.

    Args:
        models: configuration of each model, and the desired sizes of its pools.

    Raises:
        ConfigError: see `gpus_per_worker`.
    """
    asked = [{pool: config.gpus_per_worker(pool) for pool in Role} for config, _ in models]
    for (config, _), shares in zip(models, asked, strict=True):
        for pool, share in shares.items():
            if share > 1 and share != int(share):
                raise ConfigError(f"{config.name_of_gpus(pool)} is {share:g}: above 1 it must be a whole number")
    if not any(node.num_gpus and node.num_workers for node in nodes):
        return [dict.fromkeys(Role, 0.0) for _ in models]
    if all(all(shares.values()) for shares in asked):
        return asked
    fixed = [
        {pool: shares[pool] or _of_ranks(config, pool) for pool in Role}
        for (config, _), shares in zip(models, asked, strict=True)
    ]
    sizes = [desired for _, desired in models]
    num_workers = sum(sum(desired.values()) for desired in sizes)
    num_sharing = sum(d[pool] for d, own in zip(sizes, fixed, strict=True) for pool in Role if not own[pool])
    found, num_fitting = fixed, 0
    for part in (UNITS // k / UNITS for k in range(1, max(num_sharing, 1) + 1)):
        found = [{pool: own[pool] or part for pool in Role} for own in fixed]
        num_fitting = _num_fitting(nodes, list(zip(sizes, found, strict=True)))
        if num_fitting == num_workers:
            return found
    raise ConfigError(_problem(models[0][0], num_fitting, num_workers))


def _of_ranks(config: Config, pool: Role) -> float:
    """Return the GPUs of a worker with several ranks; 0: it has one rank, and may share a GPU."""
    ranks = config.engine_of(pool).tensor_parallel
    return float(ranks) if ranks > 1 else 0.0


def kept_gpus(config: Config, shares: Mapping[Role, float]) -> dict[Role, float]:
    """Return the GPUs per worker of a cluster that runs already, after a start of its controller.

    Replacements get the GPUs of the workers that left, unless the pool's settings have changed since then.

    Args:
        shares: GPUs per worker so far; 0: the nodes had none.
    """
    if config.kubernetes.namespace:  # the pods are replaced with the settings
        return {pool: config.gpus_per_worker(pool) for pool in Role}
    ranks = {pool: config.engine_of(pool).tensor_parallel for pool in Role}
    by_ranks = {pool: float(ranks[pool]) if ranks[pool] > 1 else min(shares[pool], 1.0) for pool in Role}
    return {pool: shares[pool] and (config.gpus_per_worker(pool) or by_ranks[pool]) for pool in Role}


def num_placed(nodes: Sequence[NodeGpus], desired: Mapping[Role, int], shares: Mapping[Role, float]) -> int:
    """Return how many of the desired workers fit on the nodes, if each requests its pool's share of GPUs.

    Workers with the largest shares are placed first, and on nodes of their own pool before others.
    """
    return _num_fitting(nodes, [(desired, shares)])


def _num_fitting(nodes: Sequence[NodeGpus], models: Sequence[tuple[Mapping[Role, int], Mapping[Role, float]]]) -> int:
    """Return how many workers of all models fit: see `num_placed`."""
    free = [[UNITS] * node.num_gpus for node in nodes]
    places = [node.num_workers for node in nodes]
    order = sorted(range(len(nodes)), key=lambda at: nodes[at].pool is None)
    num = 0
    wanted = [(shares[pool], pool, desired[pool]) for desired, shares in models for pool in Role]
    for share, pool, number in sorted(wanted, key=lambda each: -each[0]):
        left = number
        for at in order:
            while left and places[at] and nodes[at].pool in (None, pool) and _take(free[at], share):
                left, places[at] = left - 1, places[at] - 1
        num += number - left
    return num


def _take(free: list[int], share: float) -> bool:
    """Take a share from a node's GPUs, if there is room: whole GPUs, or a part that lies on one of them.

    Args:
        free: the free units of each GPU, which this changes.
    """
    num_gpus, units = max(1, int(share)), UNITS if share >= 1 else max(1, round(share * UNITS))
    fitting = [at for at, left in enumerate(free) if left >= units][:num_gpus]
    if len(fitting) < num_gpus:
        return False
    for at in fitting:
        free[at] -= units
    return True


def free_gpus(
    assigned: Sequence[str], share: float, in_use: Mapping[str, float], known: Sequence[str]
) -> Sequence[str] | None:
    """Return the GPUs for a new worker's process: those that Ray has assigned to it, or other free GPUs of its node.

    After a restart, Ray does not know which GPUs the running workers use. It may assign a worker's GPU to another actor
    and count a free GPU as taken. The number of free GPUs is the same, so a free one replaces each assigned one that is
    in use.

    Args:
        assigned: GPUs that Ray has assigned to the worker's actor.
        share: share of each GPU that the worker needs.
        in_use: share of each GPU that other workers of this node use.
        known: GPUs of this node that other workers use, or that Ray has assigned to their actors.

    Returns:
        As many GPUs as are assigned, or None if too few are free.
    """
    candidates = dict.fromkeys((*assigned, *known))
    free = [gpu for gpu in candidates if round((in_use.get(gpu, 0.0) + share) * UNITS) <= UNITS]
    return free[: len(assigned)] if len(free) >= len(assigned) else None


def memory_share(gpus: float) -> float:
    """Return the share of one GPU's memory of a worker to which Ray has assigned `gpus` GPUs."""
    return min(1.0, gpus)


def _problem(config: Config, num_fitting: int, num_workers: int) -> str:
    ranks = {pool: config.engine_of(pool).tensor_parallel for pool in Role}
    most = max(ranks.values())
    if most == 1:
        return (
            f"the Ray nodes with GPUs have room for {num_fitting} of {num_workers} workers, by their resource "
            "`baton_worker` and their pools (label baton.dev/pool): start those nodes with more of the resource, or "
            "lower cluster.prefill or cluster.decode; if more nodes will join, set cluster.gpus_per_worker"
        )
    if len(set(ranks.values())) == 1:
        needs, more = f"each worker needs {most} GPUs", f"cluster.gpus_per_worker to {most}"
    else:
        numbers = {pool: f"{num} GPU{'s' if num > 1 else ''}" for pool, num in ranks.items()}
        needs = f"each prefill worker needs {numbers[Role.PREFILL]} and each decode worker {numbers[Role.DECODE]}"
        more = " and ".join(f"pools.{pool}.gpus_per_worker to {ranks[pool]}" for pool in Role)
    return (
        f"{needs} of one Ray node (engine.tensor_parallel), and the nodes' GPUs suffice for {num_fitting} of "
        f"{num_workers} workers: add GPUs, or lower engine.tensor_parallel, cluster.prefill or cluster.decode; if more "
        f"nodes will join, set {more}"
    )
