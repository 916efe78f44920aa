"""`baton doctor` beside a cluster that runs: well, with what was broken in it, and without a trace of its own."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.doctor import redis
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection
from tests.integration.cluster import Cluster, Served

pytestmark = pytest.mark.first


def doctor(cluster: Served, *words: str, **settings: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Its exit status, and its checks by name; in this process, which has imported torch already."""
    unset = {name: None for name in os.environ if name.startswith("BATON_") and name != "BATON_CACHE"}
    environment = {**unset, "BATON_ADDRESS": cluster.grpc, **settings}
    done = CliRunner().invoke(app, ["doctor", "--json", *words], env=environment)
    return done.exit_code, {check["name"]: check for check in json.loads(done.stdout)}


async def ask(cluster: Cluster, *command: Any) -> Any:
    connection = RedisConnection(cluster.client.status()["redis"]["address"])
    try:
        return await connection.call(*command)
    finally:
        await connection.close()


def test_a_cluster_that_is_well_has_nothing_that_fails(arithmetic_cluster: Cluster) -> None:
    returncode, checks = doctor(arithmetic_cluster)
    assert (returncode, [check for check in checks.values() if check["state"] == "fail"]) == (0, [])
    well = ("router", "redis", "redis version", "redis eviction", "redis persistence", "clock", "prefix index",
            "endpoints", "api key")  # fmt: skip
    assert {name: checks[name]["state"] for name in well} == dict.fromkeys(well, "ok")
    # Four workers, the router's two ports, the controller.
    assert checks["reachable"]["found"] == "7 of 7 addresses of the cluster can be reached from here"
    assert f"port {arithmetic_cluster.grpc.rpartition(':')[2]}" not in checks, "the cluster itself has it"


def test_an_eviction_policy_that_somebody_sets_fails(arithmetic_cluster: Cluster) -> None:
    asyncio.run(ask(arithmetic_cluster, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))
    try:
        returncode, checks = doctor(arithmetic_cluster)
    finally:
        asyncio.run(ask(arithmetic_cluster, "CONFIG", "SET", "maxmemory-policy", "noeviction"))
    assert (returncode, checks["redis eviction"]["state"]) == (1, "fail")


def test_it_asks_redis_only_to_read() -> None:
    with EmbeddedRedis() as server:
        redis.look(server.url)
        connection = RedisConnection(server.url)

        async def commands() -> set[str]:
            try:
                return {name.removeprefix("cmdstat_") for name in await connection.call("INFO", "commandstats")}
            finally:
                await connection.close()

        asked = asyncio.run(commands())
    assert asked >= {"time", "info"}
    assert {name for name in asked if not name.startswith("client")} <= {
        "hello", "ping", "time", "info", "config|get", "select",
    }  # fmt: skip
