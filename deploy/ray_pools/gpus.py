"""The part of the GPUs that each worker asks Ray for. Pure.

Every worker of a cluster asks for the same: a whole GPU for each of its ranks, or, where a worker has one rank and the
GPUs are fewer than the workers, an equal part of one GPU. A part lies on one GPU, so with 3 workers on 2 GPUs it is a
half, and not two thirds, of which no GPU has room for two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role
from baton.config import Config
from baton.errors import ConfigError

UNITS = 10_000
"""Ray counts a resource in units of 0.0001. A part is rounded down to them, or the last worker of a GPU has no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    """What one Ray node has for workers."""

    num_gpus: int
    num_workers: int
    """Workers for which the node has room, whatever their GPUs: its resource `baton_worker`."""
    pool: Role | None = None
    """The pool for whose workers alone the node is; None: it is for all."""


def gpus_per_worker(config: Config, nodes: Sequence[NodeGpus], desired: Mapping[Role, int]) -> float:
    """The GPUs that Ray is to assign to each worker; 0: none, because the nodes have none.

    A value of `cluster.gpus_per_worker` holds whatever the nodes have: more of them may be still to come.

    Raises:
        ConfigError: the workers cannot all be placed, or no worker can have what the configuration says; the message
            says what to change.
    """
    asked, ranks = config.cluster.gpus_per_worker, config.engine.tensor_parallel
    if asked > 1 and asked != int(asked):
        raise ConfigError(f"cluster.gpus_per_worker is {asked:g}: more than one GPU can only be a whole number of them")
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
    """How many of the desired workers have room on the nodes, if each asks for `share` GPUs."""
    room: dict[Role | None, int] = {None: 0, Role.PREFILL: 0, Role.DECODE: 0}
    for node in nodes:
        room[node.pool] += min(node.num_workers, _num_on(node.num_gpus, share))
    at_home = {role: min(desired[role], room[role]) for role in Role}
    return sum(at_home.values()) + min(room[None], sum(desired[role] - at_home[role] for role in Role))


def memory_share(gpus: float) -> float:
    """The share of one GPU's memory that a worker has, to which Ray has assigned so many GPUs."""
    return min(1.0, gpus)


def _num_on(num_gpus: int, share: float) -> int:
    """Workers that find `share` on a node: as Ray does it, a part of a GPU is never made up of pieces of several."""
    if share >= 1:
        return int(num_gpus // share)
    return num_gpus * (UNITS // max(1, round(share * UNITS)))


def _problem(ranks: int, num_fitting: int, num_workers: int) -> str:
    if ranks > 1:
        return (
            f"each worker needs {ranks} GPUs of one Ray node (engine.tensor_parallel), and the nodes' GPUs suffice for "
            f"{num_fitting} of {num_workers} workers: add GPUs, or lower engine.tensor_parallel, cluster.prefill or "
            f"cluster.decode; if nodes are still to come, set cluster.gpus_per_worker to {ranks}"
        )
    return (
        f"the Ray nodes with GPUs have room for {num_fitting} of {num_workers} workers, by their resource "
        "`baton_worker` and their pools (label baton.dev/pool): raise the resource where those nodes are started, or "
        "lower cluster.prefill or cluster.decode; if nodes are still to come, set cluster.gpus_per_worker"
    )
