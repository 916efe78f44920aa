"""Share of the GPUs that each worker requests from Ray. Pure.

Every worker of a cluster requests the same share: a whole GPU for each of its ranks or, if a worker has one rank and
there are fewer GPUs than workers, an equal part of one GPU. A part lies on one GPU. So with 3 workers on 2 GPUs it is a
half, and not two thirds, because no GPU has room for two such parts.
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


def gpus_per_worker(config: Config, nodes: Sequence[NodeGpus], desired: Mapping[Role, int]) -> float:
    """Return the GPUs that Ray must assign to each worker; 0: none, because the nodes have none.

    A value of `cluster.gpus_per_worker` always applies, because more nodes may join.

    Raises:
        ConfigError: the workers cannot all be placed, or no worker can get the configured GPUs; the message says what
            to change.
    """
    asked, ranks = config.cluster.gpus_per_worker, config.engine.tensor_parallel
    if asked > 1 and asked != int(asked):
        raise ConfigError(f"cluster.gpus_per_worker is {asked:g}: above 1 it must be a whole number")
    if not any(node.num_gpus and node.num_workers for node in nodes):
        return 0.0
    if asked:
        return asked
    num_workers = sum(desired.values())
    shares = [float(ranks)] if ranks > 1 else [UNITS // k / UNITS for k in range(1, max(num_workers, 1) + 1)]
    for share in shares:
        if num_placed(nodes, desired, share) == num_workers:
            return share
    raise ConfigError(_problem(ranks, num_placed(nodes, desired, shares[-1]), num_workers))


def num_placed(nodes: Sequence[NodeGpus], desired: Mapping[Role, int], share: float) -> int:
    """Return how many of the desired workers fit on the nodes, if each requests `share` GPUs."""
    room: dict[Role | None, int] = {None: 0, Role.PREFILL: 0, Role.DECODE: 0}
    for node in nodes:
        room[node.pool] += min(node.num_workers, _num_on(node.num_gpus, share))
    at_home = {role: min(desired[role], room[role]) for role in Role}
    return sum(at_home.values()) + min(room[None], sum(desired[role] - at_home[role] for role in Role))


def memory_share(gpus: float) -> float:
    """Return the share of one GPU's memory of a worker to which Ray has assigned `gpus` GPUs."""
    return min(1.0, gpus)


def _num_on(num_gpus: int, share: float) -> int:
    """Return how many workers fit on a node: in Ray, a part of a GPU never spans several GPUs."""
    if share >= 1:
        return int(num_gpus // share)
    return num_gpus * (UNITS // max(1, round(share * UNITS)))


def _problem(ranks: int, num_fitting: int, num_workers: int) -> str:
    if ranks > 1:
        return (
            f"each worker needs {ranks} GPUs of one Ray node (engine.tensor_parallel), and the nodes' GPUs suffice for "
            f"{num_fitting} of {num_workers} workers: add GPUs, or lower engine.tensor_parallel, cluster.prefill or "
            f"cluster.decode; if more nodes will join, set cluster.gpus_per_worker to {ranks}"
        )
    return (
        f"the Ray nodes with GPUs have room for {num_fitting} of {num_workers} workers, by their resource "
        "`baton_worker` and their pools (label baton.dev/pool): start those nodes with more of the resource, or "
        "lower cluster.prefill or cluster.decode; if more nodes will join, set cluster.gpus_per_worker"
    )
