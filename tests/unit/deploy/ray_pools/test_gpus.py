"""Every worker finds its part of a GPU, or the start is refused with what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import ClusterConfig, Config, EngineConfig, KubernetesConfig, PoolConfig, PoolsConfig
from baton.errors import ConfigError
from deploy.ray_pools.actors import node_gpus
from deploy.ray_pools.gpus import UNITS, NodeGpus, free_gpus, gpus_per_worker, kept_gpus, memory_share, num_placed

P, D = Role.PREFILL, Role.DECODE
MUCH = 256


def node(num_gpus: int, num_workers: int = MUCH, pool: Role | None = None) -> NodeGpus:
    return NodeGpus(num_gpus=num_gpus, num_workers=num_workers, pool=pool)


def share_of(nodes: Sequence[NodeGpus], prefill: int, decode: int, ranks: int = 1, asked: float = 0.0) -> float:
    """The share of every worker, where the pools have the same settings."""
    config = Config(engine=EngineConfig(tensor_parallel=ranks), cluster=ClusterConfig(gpus_per_worker=asked))
    shares = gpus_per_worker(config, nodes, {P: prefill, D: decode})
    assert shares[P] == shares[D]
    return shares[P]


def is_placed(nodes: Sequence[NodeGpus], num_workers: int, share: float) -> bool:
    """Puts one worker after the other where Ray would: on one GPU that has so many of its units left."""
    units = round(share * UNITS)
    free = [[UNITS] * node.num_gpus for node in nodes]
    slots = [node.num_workers for node in nodes]
    for _ in range(num_workers):
        for number, gpus in enumerate(free):
            fitting = [place for place, left in enumerate(gpus) if left >= units]
            if fitting and slots[number]:
                gpus[fitting[0]] -= units
                slots[number] -= 1
                break
        else:
            return False
    return True


@pytest.mark.parametrize(("num_workers", "num_gpus"), list(product(range(1, 10), range(1, 9))))
def test_workers_on_gpus_are_all_placed(num_workers: int, num_gpus: int) -> None:
    share = share_of([node(num_gpus)], num_workers - 1, 1)
    workers_of_a_gpu = -(-num_workers // num_gpus)
    assert share == UNITS // workers_of_a_gpu / UNITS
    assert is_placed([node(num_gpus)], num_workers, share)
    assert workers_of_a_gpu * memory_share(share) <= 1, "their KV pools fit beside each other"


def test_a_part_is_never_made_up_of_pieces_of_several_gpus() -> None:
    assert num_placed([node(2)], {P: 1, D: 2}, {P: 2 / 3, D: 2 / 3}) == 2
    assert num_placed([node(3)], {P: 4, D: 4}, {P: 0.4, D: 0.4}) == 6


def test_nodes_that_differ_have_room_for_all_between_them() -> None:
    for gpus in product(range(4), repeat=3):
        for slots in product((1, 3, MUCH), repeat=3):
            nodes = [node(num, most) for num, most in zip(gpus, slots, strict=True)]
            for num_workers in range(1, 10):
                most = sum(slot for num, slot in zip(gpus, slots, strict=True) if num)
                if not any(gpus):
                    assert share_of(nodes, num_workers - 1, 1) == 0.0
                elif most < num_workers:
                    with pytest.raises(ConfigError, match="room for"):
                        share_of(nodes, num_workers - 1, 1)
                else:
                    share = share_of(nodes, num_workers - 1, 1)
                    assert is_placed(nodes, num_workers, share)
                    assert round(1 / share) == 1 or not is_placed(nodes, num_workers, 1 / (round(1 / share) - 1))


def test_a_pool_that_has_fewer_gpus_of_its_own_decides() -> None:
    nodes = [node(1, pool=P), node(8, pool=D)]
    assert share_of(nodes, 1, 8) == 1.0
    assert share_of(nodes, 4, 2) == 0.25, "the decode pool's GPUs are no use to prefill workers"
    assert share_of([*nodes, node(3)], 4, 2) == 1.0, "those for all are"


def of_pools(prefill: dict[str, Any], decode: dict[str, Any]) -> Config:
    return Config(pools=PoolsConfig(prefill=PoolConfig(**prefill), decode=PoolConfig(**decode)))


TWO_RANKS = {"engine": {"tensor_parallel": 2}}


@pytest.mark.parametrize(
    ("config", "nodes", "workers", "expected"),
    [
        (of_pools({}, TWO_RANKS), [node(8)], (2, 3), (1.0, 2.0)),
        (of_pools({}, TWO_RANKS), [node(8)], (4, 3), (0.5, 2.0)),  # four share what the ranks of three leave
        (of_pools({}, TWO_RANKS), [node(3), node(2)], (1, 2), (1.0, 2.0)),
        (of_pools({}, TWO_RANKS), [node(1, pool=P), node(2, pool=D)], (2, 1), (0.5, 2.0)),
        (of_pools({"gpus_per_worker": 0.25}, TWO_RANKS), [node(3)], (1, 1), (0.25, 2.0)),
        (of_pools({"gpus_per_worker": 4}, {"gpus_per_worker": 1}), [node(1)], (1, 1), (4.0, 1.0)),  # others may join
        (of_pools({}, TWO_RANKS), [node(0)], (1, 1), (0.0, 0.0)),
    ],
)
def test_pools_may_need_different_gpus(
    config: Config, nodes: list[NodeGpus], workers: tuple[int, int], expected: tuple[float, float]
) -> None:
    shares = gpus_per_worker(config, nodes, {P: workers[0], D: workers[1]})
    assert (shares[P], shares[D]) == expected


def test_pools_that_need_different_gpus_are_refused_with_what_each_needs() -> None:
    sentence = (
        "each prefill worker needs 1 GPU and each decode worker 2 GPUs of one Ray node .* suffice for 1 of 2 workers: "
        ".* set pools.prefill.gpus_per_worker to 1 and pools.decode.gpus_per_worker to 2"
    )
    with pytest.raises(ConfigError, match=sentence):
        gpus_per_worker(of_pools({}, TWO_RANKS), [node(2)], {P: 1, D: 1})


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        (of_pools({}, {}), (0.25, 0.25), (0.25, 0.25)),
        (of_pools({}, TWO_RANKS), (0.25, 0.25), (0.25, 2.0)),
        (of_pools({}, {}), (1.0, 2.0), (1.0, 1.0)),  # it had two ranks
        (of_pools({"gpus_per_worker": 0.5}, TWO_RANKS), (0.25, 2.0), (0.5, 2.0)),
        (of_pools({"gpus_per_worker": 0.5}, TWO_RANKS), (0.0, 0.0), (0.0, 0.0)),  # the nodes have none
    ],
)
def test_replacements_get_the_gpus_of_those_that_left_unless_their_settings_have_changed(
    config: Config, before: tuple[float, float], after: tuple[float, float]
) -> None:
    assert kept_gpus(config, dict(zip((P, D), before, strict=True))) == dict(zip((P, D), after, strict=True))


def test_on_kubernetes_the_chart_says_how_many_gpus_a_worker_has() -> None:
    config = replace(of_pools({"gpus_per_worker": 0.5}, {}), kubernetes=KubernetesConfig(namespace="serving"))
    assert kept_gpus(config, {P: 0.0, D: 2.0}) == {P: 0.5, D: 0.0}


@pytest.mark.parametrize(
    ("nodes", "workers", "ranks", "asked", "expected"),
    [
        ([], 4, 1, 0.0, 0.0),
        ([node(8)], 4, 1, 0.0, 1.0),
        ([node(8)], 4, 1, 0.5, 0.5),
        ([node(1, 1)], 4, 1, 1.0, 1.0),  # others are still to come
        ([node(8)], 4, 2, 0.0, 2.0),
        ([node(4), node(5)], 4, 2, 0.0, 2.0),
        ([node(1)], 4, 2, 2.0, 2.0),
        ([node(0)], 4, 2, 0.0, 0.0),
        ([node(8, 0), node(0, 4)], 4, 1, 0.0, 0.0),  # GPUs of a node that takes no workers
    ],
)
def test_ranks_have_whole_gpus_and_a_setting_holds(
    nodes: list[NodeGpus], workers: int, ranks: int, asked: float, expected: float
) -> None:
    assert share_of(nodes, 1, workers - 1, ranks, asked) == expected


@pytest.mark.parametrize(
    ("nodes", "workers", "ranks", "asked", "sentence"),
    [
        ([node(1)], 2, 2, 0.0, "each worker needs 2 GPUs of one Ray node .* suffice for 0 of 2 .* lower engine.tensor"),
        ([node(3), node(3)], 3, 2, 0.0, "suffice for 2 of 3 workers: add GPUs"),
        ([node(2, 1), node(2, 1)], 3, 1, 0.0, "room for 2 of 3 workers, by their resource `baton_worker`.*more of the"),
        ([node(2, 2), node(0, 9)], 3, 1, 0.0, "nodes with GPUs have room for 2 of 3 workers"),
        ([node(8)], 2, 1, 1.5, r"gpus_per_worker is 1\.5: above 1 it must be a whole number"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_to_change(
    nodes: list[NodeGpus], workers: int, ranks: int, asked: float, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        share_of(nodes, 1, workers - 1, ranks, asked)


def test_a_node_is_read_as_ray_describes_it() -> None:
    described = {"Resources": {"GPU": 2.0, "baton_worker": 4.0, "CPU": 8.0}, "Labels": {"baton.dev/pool": "decode"}}
    assert node_gpus(described) == node(2, 4, D)
    assert node_gpus({"Resources": {"CPU": 8.0}, "Labels": {"baton.dev/pool": "spare"}}) == node(0, 0)


@pytest.mark.parametrize(
    ("assigned", "share", "in_use", "known", "expected"),
    [
        (["0"], 1.0, {}, [], ["0"]),
        (["0"], 1.0, {"0": 1.0}, ["0"], None),
        (["0"], 1.0, {"0": 1.0}, ["0", "1"], ["1"]),  # Ray has assigned 1 to the actor of the worker that uses 0
        (["1", "2"], 1.0, {"1": 1.0, "3": 1.0}, ["0", "1", "3"], ["2", "0"]),
        (["1", "2"], 1.0, {"1": 1.0, "0": 1.0}, ["0", "1"], None),
        (["0"], 0.3333, {"0": 0.6666}, ["0"], ["0"]),
        (["0"], 0.5, {"0": 0.6666}, ["0", "1"], ["1"]),
        (["0"], 0.5, {"0": 0.5, "1": 1.0}, ["0", "1"], ["0"]),
        ([], 0.0, {"0": 1.0}, ["0"], []),
    ],
)
def test_gpus_that_running_workers_use_are_replaced_by_free_ones(
    assigned: list[str], share: float, in_use: dict[str, float], known: list[str], expected: list[str] | None
) -> None:
    assert free_gpus(assigned, share, in_use, known) == expected
