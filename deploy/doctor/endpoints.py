"""Checks for endpoints that a configuration opens to others without a key, a token or encryption.

SECURITY.md lists every endpoint. Those of members are not checked here: without `cluster.secret` a process refuses to
start at an address that others can reach. An endpoint that only this machine can reach counts as closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from baton.config import Config
from deploy.doctor.checks import Check
from deploy.doctor.reach import is_loopback, takes_anybody

TOKEN = "token"
"""Value of RAY_AUTH_MODE if Ray requires a token."""
OWN_NETWORK = "keep it on a network that only the cluster uses (the chart's networkPolicy)"
ENCRYPTED_NETWORK = "or use a network that encrypts, such as WireGuard of the CNI"


def checks(config: Config, environ: Mapping[str, str], redis_url: str = "") -> Iterator[Check]:
    """Check each endpoint. No check fails: the network may restrict access, which cannot be seen from here.

    Args:
        redis_url: of the running cluster, if the configuration has none.
    """
    found = [
        Check(f"endpoint: {name}", "warn", f"{host} {gives}", fix)
        for name, host, gives, fix in _open(config, environ, config.index.redis_url or redis_url)
        if host and not is_loopback(host)
    ]
    yield from found or [Check("endpoints", "ok", "none is open to others")]


def _open(config: Config, environ: Mapping[str, str], redis_url: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, host, what it gives, and how to close it, of each endpoint that is closed only if it is local."""
    cluster, router = config.cluster, config.router
    redis, ray = host_of(redis_url), host_of(cluster.ray_address)
    if not router.tenants_file and router.tls_client_certificates != "required":
        gives = "serves any client that can reach it, and accepts its commands (scale, drain, role)"
        yield "clients", cluster.host, gives, f"configure tenants (router.tenants_file), or {OWN_NETWORK}"
    if not router.tls_certificate and not cluster.tls_certificate:
        fix = "set router.tls_certificate and tls_key, or put a proxy or an Ingress with TLS in front of it"
        yield "clients' network", cluster.host, "transmits keys, prompts and responses in plain text", fix
    if not cluster.tls_certificate:
        fix = f"set cluster.tls_certificate, tls_key and tls_ca, {ENCRYPTED_NETWORK}"
        yield "members' network", ray, "carries prompts and KV in plain text", fix  # workers listen at their Ray node
    if redis and not is_loopback(redis) and takes_anybody(redis_url):
        gives = "lets any client that can reach it delete the cluster's state"
        yield "redis", redis, gives, f"give it a password (index.redis_password_file), or {OWN_NETWORK}"
    if not redis_url.startswith("rediss:"):
        fix = f"use rediss://, {ENCRYPTED_NETWORK}"
        yield "redis' network", redis, "transmits its password and the leases in plain text", fix
    if environ.get("RAY_AUTH_MODE") != TOKEN:
        fix = "start every Ray node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN"
        yield "ray", ray, "runs code of any client that can reach it", fix
    if not config.telemetry.otlp_tls:
        gives = "receives traces in plain text: ids of requests, names of workers"
        yield "traces", host_of(config.telemetry.otlp_endpoint), gives, f"set telemetry.otlp_tls, {ENCRYPTED_NETWORK}"


def host_of(address: str) -> str:
    """Return the host of host:port or of a URL, without brackets; empty for no address, or an invalid one."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""
