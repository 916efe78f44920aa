"""`baton run PART`: one part of a cluster in the foreground, as a container runs it. `baton up` runs all of them.

    model        downloads the model into the cache folder, and exits
    router       gRPC and HTTP; it needs the model's configuration and tokenizer, but no weights
    controller   maintains the workers in the Ray cluster at `cluster.ray_address`; it needs no weights

Workers are not among them: Ray starts workers on any node with room (`ray start --resources '{"baton_worker": 1}'`)
that is not reserved for the other pool (`--labels baton.dev/pool=decode`).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import NoReturn

from rich.console import Console

from baton.config import Config, child_environment
from baton.errors import ConfigError
from deploy.extras import lacking
from deploy.local.part import ClusterPart
from deploy.models import ProgressDisplay, with_models, with_places
from deploy.processes import module_command

RETRY_S = 0.5


def run(part: ClusterPart, config: Config, console: Console, *, weights: bool = True) -> None:
    """Replace this process by the part's process; return only for the part `model`.

    Args:
        part: part to run.
        config: configuration of the cluster.
        console: shows the progress.
        weights: the part `model` gets the weights, too.

    Raises:
        ConfigError: a package or a setting that the parts must share is missing, or Ray does not listen in time.
        ModelLoadError: the model cannot be obtained.
    """
    if part is ClusterPart.CONTROLLER:
        pools = ("lightkube",) if config.kubernetes.namespace else ()
        if missing := lacking("ray", *pools):
            raise ConfigError(f"the controller cannot run here: {missing}")
        with ProgressDisplay(console) as progress:
            config = with_places(config, progress.update)
    elif part is ClusterPart.MODEL or config.router.own_model:
        config = with_model(config, console, weights=weights and part is ClusterPart.MODEL)
    if part is ClusterPart.ROUTER:
        _require(config.index.redis_url, "index.redis_url", "the Redis that all parts share")
        _require(config.router.cache_secret, "router.cache_secret", "the same for every router")
        _become("router", (), config)
    if part is ClusterPart.CONTROLLER:
        cluster = config.cluster
        _require(config.index.redis_url, "index.redis_url", "the Redis that all parts share")
        _require(cluster.name, "cluster.name", "the same whenever the controller starts")
        _require(cluster.state_file, "cluster.state_file", "a file that outlives the controller's process")
        _require(
            cluster.ray_address,
            "cluster.ray_address",
            "host:port of the Ray cluster; this machine must be one of its nodes",
        )
        await_port(cluster.ray_address, cluster.start_timeout_s)
        arguments = ("--cluster", cluster.name, "--state-file", cluster.state_file)
        _become("deploy.controller", arguments, config.for_controller())


def with_model(config: Config, console: Console, *, weights: bool = True) -> Config:
    """Return the configuration with the model's folder, name and revision; with weights also the draft model's folder.

    Raises:
        ModelLoadError: a model cannot be obtained.
    """
    with ProgressDisplay(console) as progress:
        config = with_models(config, progress.update, weights=weights)
    console.print(f"==> Model {config.model.served_name} in {config.model.path}", style="dim", soft_wrap=True)
    return config


def await_port(address: str, timeout_s: float) -> None:
    """Wait until a process listens at the address. Raises ConfigError if none does within the timeout."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=RETRY_S):
                return
        except ValueError:
            raise ConfigError(f"{address!r} is not host:port") from None
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(f"nothing listens at {address} after {timeout_s:g} s: {error}") from error
            time.sleep(RETRY_S)


def _require(value: str, name: str, what: str) -> None:
    if not value:
        variable = "BATON_" + name.replace(".", "_").upper()
        raise ConfigError(f"set {name} (in the file, or {variable}): {what}")


def _become(module: str, arguments: tuple[str, ...], config: Config) -> NoReturn:
    """Replace this process by the module's process, which then gets the signals and sets the exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**child_environment(os.environ), "BATON_CONFIG_JSON": config.to_json()}
    os.execve(sys.executable, module_command(module, *arguments), environment)
