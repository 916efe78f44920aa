"""Which endpoints `baton doctor` names as open to others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.config import ClusterConfig, Config, IndexConfig, RouterConfig, TelemetryConfig
from deploy.doctor import Check, DoctorPart, diagnose, endpoints
from deploy.doctor.reach import takes_anybody
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection
from tests.integration.cluster import free_port

TOKEN = {"RAY_AUTH_MODE": "token"}
WIDE = Config(
    cluster=ClusterConfig(host="0.0.0.0", ray_address="head:6379"),
    index=IndexConfig(redis_url="redis://:pw@redis:6379/0"),
    telemetry=TelemetryConfig(otlp_endpoint="collector:4317"),
)
"""All is open to others, but Redis, which asks for its password."""
GUARDED = Config(
    cluster=replace(WIDE.cluster, tls_certificate="/c", tls_key="/k", tls_ca="/a"),
    index=IndexConfig(redis_url="rediss://:pw@redis:6379/0"),
    router=RouterConfig(tenants_file="/tenants"),
    telemetry=TelemetryConfig(otlp_endpoint="collector:4317", otlp_tls=True),
)


def found(config: Config, environ: dict[str, str] | None = None, redis_url: str = "") -> dict[str, Check]:
    seen = endpoints.checks(config, TOKEN if environ is None else environ, redis_url)
    return {check.name.removeprefix("endpoint: "): check for check in seen}


@pytest.fixture(autouse=True)
def _redis_asks_unless_it_is_named_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "takes_anybody", lambda url: "open" in url)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            cluster=ClusterConfig(host="::1", ray_address="127.0.0.1:6379"),
            index=IndexConfig(redis_url="redis://127.0.0.1:6379/open"),
            telemetry=TelemetryConfig(otlp_endpoint="http://localhost:4317"),
        ),
        Config(index=IndexConfig(redis_url="unix:///run/open.sock")),
    ],
)
def test_one_machine_has_no_open_endpoint(config: Config) -> None:
    """`baton up` without a setting, and with everything else on this machine."""
    assert found(config, {}) == {"endpoints": Check("endpoints", "ok", "none is open to others")}


def test_every_endpoint_that_is_open_to_others_is_named_with_what_it_gives_and_what_to_do() -> None:
    checks = found(replace(WIDE, index=IndexConfig(redis_url="redis://open:6379/0")), {})
    assert checks.keys() == {
        *("clients", "clients' network", "members' network", "redis", "redis' network", "ray", "traces"),
    }
    assert all(check.state == "warn" and check.fix for check in checks.values()), "a network may stand before it"
    assert "router.tenants_file" in checks["clients"].fix
    assert checks["members' network"].found == "head carries prompts and KV in plain text"
    assert not any("pw" in check.found + check.fix for check in found(WIDE, {}).values())


def test_what_is_guarded_is_shut() -> None:
    assert found(GUARDED).keys() == {"endpoints"}


@pytest.mark.parametrize(
    ("changed", "environ", "opened"),
    [
        ({"router": RouterConfig()}, TOKEN, {"clients"}),
        ({"cluster": WIDE.cluster}, TOKEN, {"clients' network", "members' network"}),
        ({"index": IndexConfig(redis_url="rediss://open:6379/0")}, TOKEN, {"redis"}),
        ({"index": WIDE.index}, TOKEN, {"redis' network"}),
        ({"telemetry": WIDE.telemetry}, TOKEN, {"traces"}),
        ({}, {}, {"ray"}),
        ({}, {"RAY_AUTH_MODE": "disabled"}, {"ray"}),
    ],
)
def test_each_guard_shuts_an_endpoint_of_its_own(
    changed: dict[str, Any], environ: dict[str, str], opened: set[str]
) -> None:
    assert found(replace(GUARDED, **changed), environ).keys() == opened


def test_certificates_of_clients_are_a_guard_and_a_router_may_have_its_own() -> None:
    clients = RouterConfig(tls_certificate="/c", tls_key="/k", tls_client_certificates="required", tls_client_ca="/a")
    assert found(replace(GUARDED, router=clients, cluster=WIDE.cluster)).keys() == {"members' network"}


def test_the_redis_of_a_running_cluster_is_checked_unless_the_settings_name_one() -> None:
    assert found(Config(), redis_url="redis://open:1/0").keys() == {"redis", "redis' network"}
    assert found(GUARDED, redis_url="redis://open:1/0").keys() == {"endpoints"}
    assert found(Config(), redis_url="redis://[::1").keys() == {"endpoints"}, "it is no URL"


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
    config = Config(cluster=ClusterConfig(host="0.0.0.0"))
    states = {check.name: check.state for check in diagnose(config, "", part, environ={})}
    assert states["endpoint: clients"] == "warn"
