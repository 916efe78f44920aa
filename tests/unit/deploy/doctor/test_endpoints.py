"""Which endpoints `baton doctor` names as open to others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.config import ClusterConfig, Config, IndexConfig, RouterConfig, TelemetryConfig
from deploy.doctor import Check, DoctorPart, diagnose, endpoints
from deploy.doctor.endpoints import Endpoints, announced, configured
from deploy.doctor.reach import takes_anybody
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection
from tests.integration.cluster import free_port

TOKEN = {"RAY_AUTH_MODE": "token"}
WIDE = Endpoints(
    clients=("0.0.0.0",),
    asks_key=False,
    metrics="0.0.0.0",
    controller="10.0.0.2",
    workers=("127.0.0.1", "10.0.0.3"),
    redis_url="redis://redis:6379/0",
    ray="10.0.0.4",
    traces="collector",
)
"""All is open to others."""
GUARDED = replace(
    WIDE,
    asks_key=True,
    clients_encrypted=True,
    metrics="127.0.0.1",
    asks_proof=True,
    members_encrypted=True,
    redis_url="rediss://redis:6379/0",
    redis_asks_password=True,
    ray_asks_token=True,
    traces="localhost",
)


def found(given: Endpoints) -> dict[str, Check]:
    return {check.name.removeprefix("endpoint: "): check for check in endpoints.checks(given)}


def is_open(given: Endpoints) -> set[str]:
    return {name for name, check in found(given).items() if check.state != "ok"}


def test_one_machine_has_no_open_endpoint() -> None:
    """`baton up` without a setting, and with everything else on this machine."""
    assert is_open(configured(Config(), {})) == set()
    local = Config(
        cluster=ClusterConfig(host="::1", controller_host="localhost", ray_address="127.0.0.1:6379"),
        index=IndexConfig(redis_url="redis://127.0.0.1:6379/0"),
        telemetry=TelemetryConfig(otlp_endpoint="http://localhost:4317"),
    )
    assert is_open(configured(local, {})) == set()
    assert is_open(configured(Config(index=IndexConfig(redis_url="unix:///run/redis.sock")), {})) == set()


def test_every_endpoint_that_is_open_to_others_is_named_with_what_it_gives_and_what_to_do() -> None:
    checks = found(WIDE)
    assert (
        is_open(WIDE)
        == checks.keys()
        == {
            *("clients", "clients' network", "metrics", "controller", "workers", "members' network", "redis"),
            *("redis' network", "ray", "traces"),
        }
    )
    assert all(check.state == "warn" and check.fix for check in checks.values()), "a network may stand before it"
    assert checks["workers"].found == "10.0.0.3 gives KV, and thereby prompts, to any client that can reach it"
    assert "router.tenants_file" in checks["clients"].fix
    assert "cluster.secret" in checks["controller"].fix


def test_what_is_guarded_is_shut() -> None:
    assert is_open(GUARDED) == set()
    assert all(check.fix == "" for check in found(GUARDED).values())


@pytest.mark.parametrize(
    ("changed", "opened"),
    [
        ({"asks_key": False}, "clients metrics"),
        ({"metrics": "10.0.0.1"}, "metrics"),
        ({"clients_encrypted": False}, "clients' network"),
        ({"asks_proof": False, "workers": ("127.0.0.1",)}, "controller"),
        ({"asks_proof": False, "controller": "127.0.0.1"}, "workers"),
        ({"members_encrypted": False}, "members' network"),
        ({"redis_asks_password": False}, "redis"),
        ({"redis_takes_anybody": True}, "redis"),
        ({"redis_url": "redis://redis:6379/0"}, "redis' network"),
        ({"ray_asks_token": False}, "ray"),
        ({"traces": "collector"}, "traces"),
    ],
)
def test_each_guard_shuts_a_endpoint_of_its_own(changed: dict[str, Any], opened: str) -> None:
    expected = {opened} if "'" in opened else set(opened.split())
    assert is_open(replace(GUARDED, **changed)) == expected


def test_a_configuration_says_where_the_endpoints_are() -> None:
    config = Config(
        cluster=ClusterConfig(host="0.0.0.0", controller_host="0.0.0.0", ray_address="head:6379", secret="/s"),
        index=IndexConfig(redis_url="redis://:pw@r:1/0"),
        router=RouterConfig(tenants_file="/tenants"),
        telemetry=TelemetryConfig(otlp_endpoint="collector:4317", host="0.0.0.0", port=9464),
    )
    assert configured(config, TOKEN, redis_takes_anybody=True) == Endpoints(
        clients=("0.0.0.0",),
        asks_key=True,
        metrics="0.0.0.0",
        controller="0.0.0.0",
        workers=("head",),
        asks_proof=True,
        redis_url="redis://:pw@r:1/0",
        redis_asks_password=True,
        redis_takes_anybody=True,
        ray="head",
        ray_asks_token=True,
        traces="collector",
    )
    assert not configured(config, {"RAY_AUTH_MODE": "disabled"}).ray_asks_token
    assert not configured(config, {}).ray_asks_token
    certified = ClusterConfig(tls_certificate="/c", tls_key="/k", tls_ca="/a")
    encrypted = configured(Config(cluster=certified, telemetry=TelemetryConfig(otlp_endpoint="c:1", otlp_tls=True)), {})
    assert (encrypted.clients_encrypted, encrypted.members_encrypted, encrypted.traces) == (True, True, "")
    clients = RouterConfig(tls_certificate="/c", tls_key="/k", tls_client_certificates="required", tls_client_ca="/a")
    of_clients = configured(Config(router=clients), {})
    assert (of_clients.clients_encrypted, of_clients.members_encrypted, of_clients.asks_key) == (True, False, True)
    of_a_file = Config(index=IndexConfig(redis_url="redis://r:1/0", redis_password_file="/password"))
    assert configured(of_a_file, {}).redis_asks_password
    assert not configured(Config(index=IndexConfig(redis_url="redis://r:1/0")), {}).redis_asks_password
    assert configured(Config(telemetry=TelemetryConfig(host="0.0.0.0")), {}).metrics == "", "there is no such port"
    assert not any("pw" in check.found + check.fix for check in endpoints.checks(configured(config, {})))


def test_a_running_cluster_says_where_it_listens() -> None:
    status = {
        "routers": [{"grpc": "10.0.0.1:50051", "http": "[fd00::1]:8000"}],
        "workers": [{"address": "10.0.0.3:4000"}, {"address": "[::1"}],
        "controller": {"address": "10.0.0.2:50052"},
        "redis": {"address": "redis://10.0.0.5:6379/0"},
    }
    quiet = configured(Config(), {})
    seen = announced(quiet, status, asks_key=True)
    assert (seen.clients, seen.controller, seen.workers) == (("10.0.0.1", "fd00::1"), "10.0.0.2", ("10.0.0.3", ""))
    assert seen.asks_key
    assert is_open(seen) == {"clients' network", "controller", "workers", "members' network", "redis' network"}
    assert "redis" in is_open(replace(seen, redis_takes_anybody=True))
    assert announced(replace(quiet, redis_url="redis://r:1/0"), status, asks_key=True).redis_url == "redis://r:1/0"
    assert not announced(quiet, status, asks_key=None).asks_key
    alone = announced(quiet, status | {"routers": [], "workers": [], "controller": None}, asks_key=False)
    assert (alone.controller, alone.workers) == ("127.0.0.1", ("127.0.0.1",))


def test_a_password_that_redis_does_not_ask_for_is_none() -> None:
    async def protect(url: str) -> None:
        connection = RedisConnection(url)
        try:
            await connection.call("CONFIG", "SET", "requirepass", "secret")
        finally:
            await connection.close()

    with EmbeddedRedis(port=free_port()) as server:
        url = server.url.replace("redis://", "redis://:secret@")
        assert takes_anybody(url)
        assert takes_anybody(server.url)
        asyncio.run(protect(server.url))
        assert not takes_anybody(url)
        assert not takes_anybody(server.url)
    assert not takes_anybody(url), "nobody answers"
    assert not takes_anybody("redis://:x@[::1")
    assert not takes_anybody("unix:///run/redis.sock")


@pytest.mark.parametrize("part", [DoctorPart.ROUTER, DoctorPart.CONTROLLER])
def test_a_container_names_them_before_it_starts(part: DoctorPart) -> None:
    config = Config(cluster=ClusterConfig(host="0.0.0.0", controller_host="0.0.0.0"))
    states = {check.name: check.state for check in diagnose(config, "", part, environ={})}
    assert (states["endpoint: clients"], states["endpoint: controller"], states["endpoint: redis"]) == (
        "warn",
        "warn",
        "ok",
    )
