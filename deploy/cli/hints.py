"""Hints for the user's next step: addresses, URLs and commands that can be copied."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from baton.addresses import DEFAULT_ADDRESS
from baton.config import Config
from deploy.operator.scrape import NOWHERE

LOOPBACK = "127.0.0.1"


def local_address(settings: Config) -> str:
    """Return the address of the router's gRPC port on this machine, host:port."""
    return f"{_local_host(settings)}:{settings.cluster.grpc_port}"


def page_url(settings: Config) -> str:
    """Return the URL of the router's page for a browser on this machine."""
    scheme = "https" if settings.router.tls_certificate or settings.cluster.tls_certificate else "http"
    return f"{scheme}://{_local_host(settings)}:{settings.cluster.http_port}/"


def try_command(settings: Config, api_key: str = "") -> str:
    """Return a `baton generate` command for this cluster, for another terminal on this machine.

    Args:
        settings: the cluster's settings.
        api_key: the user's API key, which is not shown. If tenants are configured, the command needs a key in any case.
    """
    words = [*_program(), "generate", "Hello"]
    if (address := local_address(settings)) != DEFAULT_ADDRESS:
        words += ["--address", address]
    router, cluster = settings.router, settings.cluster
    if certificate := router.tls_certificate or cluster.tls_certificate:
        words += ["--ca", certificate if router.tls_certificate else cluster.tls_ca]
        if router.tls_client_certificates == "required":
            words += ["--certificate", cluster.tls_certificate, "--key", cluster.tls_key]
    command = shlex.join(words)
    return f"{command} --api-key KEY" if api_key or router.tenants_file else command


def _local_host(settings: Config) -> str:
    host = settings.cluster.host
    return LOOPBACK if host in NOWHERE else host


def _program() -> list[str]:
    """Return the command line of this program: `baton` if it is on the path, otherwise its full path."""
    if shutil.which("baton"):
        return ["baton"]
    installed = Path(sys.executable).with_name("baton")
    if not installed.is_file():
        return [sys.executable, "-P", "-m", "deploy.cli"]
    here = Path.cwd()
    return [str(installed.relative_to(here) if installed.is_relative_to(here) else installed)]
