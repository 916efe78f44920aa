"""Ray itself places workers on GPUs, which it need only be told of."""

from __future__ import annotations

import asyncio
import logging

import pytest
import ray

from baton.cluster import Role
from baton.config import Config
from deploy.ray_pools import actors as ray_actors
from deploy.ray_pools.actor import RESOURCE
from deploy.ray_pools.actors import RayActors
from deploy.ray_pools.gpus import gpus_per_worker


@pytest.mark.chaos
async def test_three_workers_find_their_parts_of_two_gpus() -> None:
    ray.init(
        address="local",
        namespace="gpus",
        num_cpus=1,
        num_gpus=2,
        resources={RESOURCE: 9},
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    try:
        share = gpus_per_worker(Config(), await ray_actors.nodes(), {Role.PREFILL: 1, Role.DECODE: 2})
        actors = RayActors(Config(), "127.0.0.1", share)
        made = [await actors.create(f"worker-{number}", Role.DECODE, Role.DECODE) for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*map(actors.placed, made)), 120)
    finally:
        ray.shutdown()
    assert share == dict.fromkeys(Role, 0.5)
