"""`baton doctor` beside a cluster that runs: well, with what was broken in it, and without a trace of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent import futures
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from baton.config import IndexConfig
from deploy.cli.app import app
from deploy.doctor import redis
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection
from tests.integration.cluster import Cluster, Served
from tests.support.waiting import wait_until

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
    workers = (f"{name} ({role})" for role in ("prefill", "decode") for name in arithmetic_cluster.ids(role))
    well = (*workers, "router", "pool prefill", "pool decode", "controller", "redis", "redis version",
            "redis eviction", "redis persistence", "clock", "leases", "clocks of the nodes",
            "kv compatibility", "prefix index", "metrics")  # fmt: skip
    assert {name: checks[name]["state"] for name in well} == dict.fromkeys(well, "ok")
    # Four workers, the router's two ports, the controller.
    assert checks["reachable"]["found"] == "7 of 7 addresses of the cluster can be reached from here"
    endpoints = {name: check["state"] for name, check in checks.items() if name.startswith("endpoint: ")}
    assert endpoints == dict.fromkeys(
        ("endpoint: clients", "endpoint: controller", "endpoint: workers", "endpoint: redis"), "ok"
    )
    assert f"port {arithmetic_cluster.grpc.rpartition(':')[2]}" not in checks, "the cluster itself has it"


def test_an_eviction_policy_that_somebody_sets_fails(arithmetic_cluster: Cluster) -> None:
    asyncio.run(ask(arithmetic_cluster, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))
    try:
        returncode, checks = doctor(arithmetic_cluster)
    finally:
        asyncio.run(ask(arithmetic_cluster, "CONFIG", "SET", "maxmemory-policy", "noeviction"))
    assert (returncode, checks["redis eviction"]["state"]) == (1, "fail")


def test_workers_that_cannot_transfer_to_each_other_are_seen_in_their_leases(arithmetic_cluster: Cluster) -> None:
    """A third one, of another build, is written into Redis as it would write itself."""
    keys = [key.decode() for key in asyncio.run(ask(arithmetic_cluster, "KEYS", "kv:*:workers"))]
    (workers,) = keys
    prefix = workers.removesuffix("workers")
    of_one = f"{prefix}lease:{arithmetic_cluster.ids('decode')[0]}"
    fields = asyncio.run(ask(arithmetic_cluster, "HMGET", of_one, "info", "load"))
    info = json.loads(fields[0]) | {"id": "worker-9", "wire_compat": "f" * 32, "block_size": 32}
    lease = f"{prefix}lease:worker-9"
    asyncio.run(
        ask(arithmetic_cluster, "HSET", lease, "epoch", info["epoch"], "info", json.dumps(info), "load", fields[1])
    )
    asyncio.run(ask(arithmetic_cluster, "PEXPIRE", lease, 600_000))
    asyncio.run(ask(arithmetic_cluster, "SADD", workers, "worker-9"))
    try:
        returncode, checks = doctor(arithmetic_cluster)
    finally:
        asyncio.run(ask(arithmetic_cluster, "DEL", lease))
        asyncio.run(ask(arithmetic_cluster, "SREM", workers, "worker-9"))
    assert (returncode, checks["kv compatibility"]["state"]) == (1, "fail")
    assert "ffffffff: worker-9 (decode)" in checks["kv compatibility"]["found"]
    assert "32: worker-9" in checks["block size in pool decode"]["found"]


def test_a_worker_that_hangs_is_told_by_its_lease(arithmetic_cluster: Cluster) -> None:
    """The lease is held where it is told: it might end while a busy machine starts the command."""
    hanging = arithmetic_cluster.ids("decode")[0]
    process = psutil.Process(arithmetic_cluster.worker(hanging)["pid"])
    left_ms = int(IndexConfig().lease_s * 400)
    process.suspend()
    try:
        (lease,) = asyncio.run(ask(arithmetic_cluster, "KEYS", f"kv:*:lease:{hanging}"))
        wait_until(lambda: asyncio.run(ask(arithmetic_cluster, "PTTL", lease)) <= left_ms)
        with futures.ThreadPoolExecutor(1) as pool:
            looking = pool.submit(doctor, arithmetic_cluster)
            while not futures.wait([looking], 0.1).done:
                assert asyncio.run(ask(arithmetic_cluster, "PEXPIRE", lease, left_ms)) == 1
        _, checks = looking.result()
    finally:
        process.send_signal(signal.SIGCONT)
    assert checks["leases"]["state"] == "warn"
    assert f"{hanging} (decode): " in checks["leases"]["found"]
    arithmetic_cluster.wait_for(lambda status: all(worker["state"] == "ready" for worker in status["workers"]))


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
    assert asked >= {"time", "scan", "info"}
    assert {name for name in asked if not name.startswith("client")} <= {
        "hello", "ping", "time", "info", "config|get", "scan", "smembers", "hmget", "pttl", "select",
    }  # fmt: skip
