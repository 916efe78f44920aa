"""Which endpoints of a cluster are open to others, and what to do about each.

    configuration, or status of a running cluster ──> Endpoints: where each listens, what it asks for ──> a check for
    each

SECURITY.md lists the endpoints with what is promised about each. An endpoint that only this machine reaches counts as
shut: its users are trusted. Nothing is tried out here.
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
"""What RAY_AUTH_MODE is where Ray asks for a token."""
OWN_NETWORK = "keep it on a network that only the cluster shares (the chart's networkPolicy)"
ENCRYPTED_NETWORK = "or use a network that encrypts, such as WireGuard of the CNI"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a cluster's processes listen, and what they ask of those who come."""

    clients: tuple[str, ...]
    """Hosts of the routers' ports."""
    asks_key: bool
    """Whether a client needs a tenant's key."""
    clients_encrypted: bool = False
    metrics: str = ""
    """Host of a port for the metrics alone; empty: there is none."""
    controller: str = LOCAL
    workers: tuple[str, ...] = (LOCAL,)
    """Hosts of the workers' ports, of which KV is read."""
    asks_proof: bool = False
    """Whether members of the cluster prove who they are."""
    members_encrypted: bool = False
    redis_url: str = ""
    """The URL of Redis; empty: `baton up` starts one that only its own user reaches."""
    redis_asks_password: bool = False
    redis_takes_anybody: bool = False
    """Whether Redis took us without a password, as far as it was tried."""
    ray: str = ""
    """The host of a Ray cluster that is joined; empty: `baton up` starts one on loopback, with a token."""
    ray_asks_token: bool = False
    traces: str = ""
    """The host that gets the traces in plain text; empty: none does."""


def configured(config: Config, environ: Mapping[str, str], redis_takes_anybody: bool = False) -> Endpoints:
    """The endpoints of a cluster with this configuration."""
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
    """The endpoints where a running cluster has them.

    Args:
        endpoints: as configured here.
        asks_key: whether a router asked us for a key; None: none was tried.
    """
    controller = status.get("controller")
    if not endpoints.redis_url:  # whether that Redis asks for a password was tried, and is not configured here
        endpoints = replace(endpoints, redis_url=status["redis"]["address"], redis_asks_password=True)
    return replace(
        endpoints,
        clients=tuple(_host(router[kind]) for router in status["routers"] for kind in ("grpc", "http")),
        asks_key=endpoints.asks_key if asks_key is None else asks_key,
        controller=_host(controller["address"]) if controller else endpoints.controller,
        workers=tuple(_host(worker["address"]) for worker in status["workers"]) or endpoints.workers,
    )


def checks(endpoints: Endpoints) -> Iterator[Check]:
    """A check for each endpoint. None fails: a network may stand before it, which cannot be seen from here."""
    yield from _clients(endpoints)
    yield from _members(endpoints)
    yield from _redis(endpoints)
    if endpoints.ray:
        yield _endpoint(
            "ray",
            [] if endpoints.ray_asks_token else _others([endpoints.ray]),
            "asks for a token, or is this machine's",
            "runs code of anybody who reaches it",
            "start every Ray node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN",
        )
    if endpoints.traces:
        yield _endpoint(
            "traces",
            _others([endpoints.traces]),
            "stay on this machine",
            "gets traces in plain text: ids of requests, names of workers",
            f"set telemetry.otlp_tls, {ENCRYPTED_NETWORK}",
        )


def _clients(endpoints: Endpoints) -> Iterator[Check]:
    others = _others(endpoints.clients)
    yield _endpoint(
        "clients",
        [] if endpoints.asks_key else others,
        "a tenant's key is asked for" if others else "only this machine reaches the routers",
        "serves anybody who reaches it, and takes orders (scale, drain, role) from them",
        f"name tenants (router.tenants_file), or {OWN_NETWORK}",
    )
    if others:
        yield _endpoint(
            "clients' network",
            [] if endpoints.clients_encrypted else others,
            "is encrypted",
            "takes keys and prompts, and gives answers, in plain text",
            "set router.tls_certificate and tls_key, or let a proxy or an Ingress end TLS before it",
        )

    if at := _others([*(() if endpoints.asks_key else endpoints.clients), endpoints.metrics]):
        yield _endpoint(
            "metrics",
            at,
            "",
            "shows /metrics to anybody who reaches it: how much is asked, and by which tenants",
            f"let Prometheus alone reach them (telemetry.port), or {OWN_NETWORK}",
        )


def _members(endpoints: Endpoints) -> Iterator[Check]:
    prove = "set cluster.secret to a file that every member has"
    yield _endpoint(
        "controller",
        [] if endpoints.asks_proof else _others([endpoints.controller]),
        "members prove who they are" if endpoints.asks_proof else "only this machine reaches it",
        "scales, drains and changes roles for anybody who reaches it",
        f"{prove}, or {OWN_NETWORK}",
    )
    others = _others(endpoints.workers)
    yield _endpoint(
        "workers",
        [] if endpoints.asks_proof else others,
        "members prove who they are" if endpoints.asks_proof else "only this machine reaches them",
        "gives KV, and so prompts, to anybody who reaches it",
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
    gives = (
        "delete what the cluster knows of itself" if endpoints.asks_proof else "write leases, and so become a worker"
    )
    yield _endpoint(
        "redis",
        others if endpoints.redis_takes_anybody or not endpoints.redis_asks_password else [],
        "asks for a password" if others else "only this machine reaches it",
        f"lets anybody who reaches it {gives}",
        f"give it a password (index.redis_password_file), or {OWN_NETWORK}",
    )
    if others and not endpoints.redis_url.startswith("rediss:"):
        fix = f"use rediss://, {ENCRYPTED_NETWORK}"
        yield _endpoint("redis' network", others, "", "takes its password, and shows leases, in plain text", fix)


def _endpoint(name: str, open_at: list[str], shut: str, gives: str, fix: str) -> Check:
    """The check of one endpoint.

    Args:
        name: of the endpoint.
        open_at: hosts at which it is open to others.
        shut: why it is not, where there are none.
        gives: what an open one does for those who reach it.
        fix: how to shut it.
    """
    if open_at:
        return Check(f"endpoint: {name}", "warn", f"{names(open_at)} {gives}", fix)
    return Check(f"endpoint: {name}", "ok", shut)


def _others(hosts: list[str] | tuple[str, ...]) -> list[str]:
    """The hosts that other machines reach."""
    return sorted({host for host in hosts if host and not is_loopback(host)})


def _host(address: str) -> str:
    """The host of host:port or of a URL, without brackets; empty for no address, or none that can be read."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""
