"""Checks for endpoints of a cluster that are open to others.

    configuration, or status of a running cluster ──> Endpoints: addresses and credentials ──> a check for each

SECURITY.md lists the endpoints with the guarantees of each. An endpoint that only this machine can reach counts as
closed, because its users are trusted. The checks open no connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from baton.config import Config, password_of
from deploy.doctor.checks import Check, names
from deploy.doctor.reach import is_loopback
from deploy.operator.client import StatusJson

LOCAL = "127.0.0.1"
TOKEN = "token"
"""Value of RAY_AUTH_MODE if Ray requires a token."""
OWN_NETWORK = "keep it on a network that only the cluster uses (the chart's networkPolicy)"
ENCRYPTED_NETWORK = "or use a network that encrypts, such as WireGuard of the CNI"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses at which a cluster's processes listen, and the credentials that they require."""

    clients: tuple[str, ...]
    """Hosts of the routers' ports."""
    asks_key: bool
    """A client needs a tenant's key."""
    clients_encrypted: bool = False
    metrics: str = ""
    """Host of a separate metrics port; empty: none."""
    controller: str = LOCAL
    workers: tuple[str, ...] = (LOCAL,)
    """Hosts of the workers' ports, from which KV can be read."""
    asks_proof: bool = False
    """Members of the cluster must authenticate."""
    members_encrypted: bool = False
    redis_url: str = ""
    """URL of Redis; empty: `baton up` starts one that only its own user can reach."""
    redis_asks_password: bool = False
    redis_takes_anybody: bool = False
    """Redis accepted a connection without a password, if that was tried."""
    ray: str = ""
    """Host of the joined Ray cluster; empty: `baton up` starts Ray on loopback, with a token."""
    ray_asks_token: bool = False
    traces: str = ""
    """Host that receives the traces in plain text; empty: none."""


def configured(config: Config, environ: Mapping[str, str], redis_takes_anybody: bool = False) -> Endpoints:
    """Return the endpoints of a cluster with this configuration."""
    cluster = config.cluster
    ray = _host(cluster.ray_address)
    ray_asks_token = environ.get("RAY_AUTH_MODE") == TOKEN
    return Endpoints(
        clients=(cluster.host,),
        asks_key=bool(config.router.tenants_file) or config.router.tls_client_certificates == "required",
        clients_encrypted=bool(config.router.tls_certificate or cluster.tls_certificate),
        controller=cluster.controller_host,
        workers=(ray or LOCAL,),  # they listen at the address of their Ray node
        asks_proof=bool(cluster.secret),
        members_encrypted=bool(cluster.tls_certificate),
        metrics=config.telemetry.host if config.telemetry.port else "",
        redis_url=config.index.redis_url,
        redis_asks_password=bool(config.index.redis_password_file or password_of(config.index.redis_url)),
        redis_takes_anybody=redis_takes_anybody,
        ray=ray,
        ray_asks_token=ray_asks_token,
        traces="" if config.telemetry.otlp_tls else _host(config.telemetry.otlp_endpoint),
    )


def announced(endpoints: Endpoints, status: StatusJson, asks_key: bool | None) -> Endpoints:
    """Return the endpoints of a running cluster.

    Args:
        endpoints: the endpoints by the local configuration.
        asks_key: whether a router required a key; None: not tried.
    """
    controller = status.get("controller")
    if not endpoints.redis_url:  # not configured here; whether it requires a password was tried
        endpoints = replace(endpoints, redis_url=status["redis"]["address"], redis_asks_password=True)
    return replace(
        endpoints,
        clients=tuple(_host(router[kind]) for router in status["routers"] for kind in ("grpc", "http")),
        asks_key=endpoints.asks_key if asks_key is None else asks_key,
        controller=_host(controller["address"]) if controller else endpoints.controller,
        workers=tuple(_host(worker["address"]) for worker in status["workers"]) or endpoints.workers,
    )


def checks(endpoints: Endpoints) -> Iterator[Check]:
    """Check each endpoint. No check fails: the network may restrict access, which cannot be seen from here."""
    yield from _clients(endpoints)
    yield from _members(endpoints)
    yield from _redis(endpoints)
    if endpoints.ray:
        yield _endpoint(
            "ray",
            [] if endpoints.ray_asks_token else _others([endpoints.ray]),
            "requires a token, or is on this machine",
            "runs code of any client that can reach it",
            "start every Ray node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN",
        )
    if endpoints.traces:
        yield _endpoint(
            "traces",
            _others([endpoints.traces]),
            "stay on this machine",
            "receives traces in plain text: ids of requests, names of workers",
            f"set telemetry.otlp_tls, {ENCRYPTED_NETWORK}",
        )


def _clients(endpoints: Endpoints) -> Iterator[Check]:
    others = _others(endpoints.clients)
    yield _endpoint(
        "clients",
        [] if endpoints.asks_key else others,
        "a tenant's key is required" if others else "only this machine can reach the routers",
        "serves any client that can reach it, and accepts its commands (scale, drain, role)",
        f"configure tenants (router.tenants_file), or {OWN_NETWORK}",
    )
    if others:
        yield _endpoint(
            "clients' network",
            [] if endpoints.clients_encrypted else others,
            "is encrypted",
            "transmits keys, prompts and responses in plain text",
            "set router.tls_certificate and tls_key, or put a proxy or an Ingress with TLS in front of it",
        )

    if at := _others([*(() if endpoints.asks_key else endpoints.clients), endpoints.metrics]):
        yield _endpoint(
            "metrics",
            at,
            "",
            "shows /metrics to any client that can reach it: the load, and the names of the tenants",
            f"let only Prometheus reach them (telemetry.port), or {OWN_NETWORK}",
        )


def _members(endpoints: Endpoints) -> Iterator[Check]:
    prove = "set cluster.secret to a file that every member has"
    yield _endpoint(
        "controller",
        [] if endpoints.asks_proof else _others([endpoints.controller]),
        "members authenticate" if endpoints.asks_proof else "only this machine can reach it",
        "scales, drains and changes roles for any client that can reach it",
        f"{prove}, or {OWN_NETWORK}",
    )
    others = _others(endpoints.workers)
    yield _endpoint(
        "workers",
        [] if endpoints.asks_proof else others,
        "members authenticate" if endpoints.asks_proof else "only this machine can reach them",
        "gives KV, and thereby prompts, to any client that can reach it",
        f"{prove}, or {OWN_NETWORK}",
    )
    if others:
        yield _endpoint(
            "members' network",
            [] if endpoints.members_encrypted else others,
            "is encrypted",
            "carries prompts and KV in plain text",
            f"set cluster.tls_certificate, tls_key and tls_ca, {ENCRYPTED_NETWORK}",
        )


def _redis(endpoints: Endpoints) -> Iterator[Check]:
    host = _host(endpoints.redis_url)
    others = _others([host]) if host else []
    gives = "delete the cluster's state" if endpoints.asks_proof else "write leases, and thereby become a worker"
    yield _endpoint(
        "redis",
        others if endpoints.redis_takes_anybody or not endpoints.redis_asks_password else [],
        "requires a password" if others else "only this machine can reach it",
        f"lets any client that can reach it {gives}",
        f"give it a password (index.redis_password_file), or {OWN_NETWORK}",
    )
    if others and not endpoints.redis_url.startswith("rediss:"):
        fix = f"use rediss://, {ENCRYPTED_NETWORK}"
        yield _endpoint("redis' network", others, "", "transmits its password and the leases in plain text", fix)


def _endpoint(name: str, open_at: list[str], shut: str, gives: str, fix: str) -> Check:
    """Return the check of one endpoint.

    Args:
        name: of the endpoint.
        open_at: hosts at which it is open to others.
        shut: the reason that it is closed, if there are none.
        gives: what an open endpoint gives to any client.
        fix: how to close it.
    """
    if open_at:
        return Check(f"endpoint: {name}", "warn", f"{names(open_at)} {gives}", fix)
    return Check(f"endpoint: {name}", "ok", shut)


def _others(hosts: list[str] | tuple[str, ...]) -> list[str]:
    """Return the hosts that other machines can reach."""
    return sorted({host for host in hosts if host and not is_loopback(host)})


def _host(address: str) -> str:
    """Return the host of host:port or of a URL, without brackets; empty for no address, or an invalid one."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""
