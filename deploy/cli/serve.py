"""Commands that start and end parts of a cluster, and give them their keys: up, run, leave, keys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from baton import config as baton_config
from baton.api import GenerateRequest, Text
from baton.config import Config
from baton.errors import BatonError, Conflict
from baton.telemetry import logs
from baton.tls import own_door_tls
from baton.trust import Principal
from deploy.cli.generate import print_answer
from deploy.cli.hints import local_address, page_url, try_command
from deploy.cli.options import ApiKey, ConfigFile, console, options_from_fields, print_error
from deploy.local.part import part_named
from deploy.operator.client import Client


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Settings of the cluster that have an option of their own; None: as configured."""

    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.", show_default="1")] = None
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.", show_default="1")] = None
    routers: Annotated[
        int | None, typer.Option(min=1, help="Number of router processes behind one address.", show_default="1")
    ] = None
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a Ray cluster to run the workers in, instead of a new one.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="A hub id, a local folder, or smollm2-135m-instruct (the default).")
    ] = None

    def applied(self, settings: Config) -> Config:
        given = {name: value for name in _CLUSTER if (value := getattr(self, name)) is not None}
        cluster = dataclasses.replace(settings.cluster, **given)
        model = settings.model if self.model is None else dataclasses.replace(settings.model, id=self.model)
        return dataclasses.replace(settings, cluster=cluster, model=model)


_CLUSTER = ("prefill", "decode", "routers", "ray_address")


@options_from_fields
def up(
    options: UpOptions,
    config: ConfigFile = None,
    ask: Annotated[str | None, typer.Option(help="A prompt to answer once the cluster is ready.")] = None,
    api_key: ApiKey = "",
) -> None:
    """Serve a model on this machine: Redis, Ray, both pools and the routers. Ctrl-C ends all of it.

    Prints `BATON READY grpc=HOST:PORT http=HOST:PORT` when it takes requests. Ports: BATON_GRPC_PORT, BATON_HTTP_PORT.
    """
    from deploy.local.up import up as run_up

    settings = options.applied(_loaded(config))
    asyncio.run(run_up(settings, console, lambda ready: _on_ready(ready, ask, api_key)))


def run(
    part: Annotated[
        str,
        typer.Argument(metavar="PART", help="model: get the model into the cache, and end. router, controller: serve."),
    ],
    config: ConfigFile = None,
    weights: Annotated[
        bool, typer.Option(help="Of the part model: with its weights. A router and the controller need none.")
    ] = True,
) -> None:
    """Run one part of a cluster in the foreground, as containers do. The parts find each other through Redis and Ray.

    Workers run on any Ray node with room: ray start --address=HEAD:6379 --resources='{"baton_worker": 1}'

    A node takes workers of one pool only if it says so: --labels baton.dev/pool=decode

    Ray runs them at the lowest priority unless the node has RAY_worker_niceness=0 in its environment.
    """
    from deploy.local.parts import run as run_part

    run_part(part_named(part), _loaded(config), console, weights=weights)


def leave(
    config: ConfigFile = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Longest wait, in seconds.", show_default="time for a drain and a start"),
    ] = None,
) -> None:
    """Have the workers of this machine leave the cluster; others take their place first. A pod's preStop hook.

    Ends with status 1 if some of them are still there in the end.
    """
    from deploy.local.leave import leave as leave_cluster
    from deploy.local.leave import own_hosts
    from deploy.local.parts import with_model

    settings = _loaded(config)
    if timeout_s is None:
        timeout_s = settings.cluster.drain_timeout_s + settings.cluster.start_timeout_s
    left = asyncio.run(leave_cluster(with_model(settings, console, weights=False), own_hosts(), timeout_s))
    if left:
        raise Conflict(f"these workers are still on this machine after {timeout_s:g} s: {', '.join(left)}")


def keys(
    role: Annotated[Principal, typer.Option(help="The member whose keys to write.")],
    secret: Annotated[Path, typer.Option(help="File with the cluster's secret; several lines: several are valid.")],
    out: Annotated[Path, typer.Option(help="File to write, for cluster.secret of that member's processes.")],
    follow: Annotated[bool, typer.Option(help="Stay, and write it again whenever the secret changes.")] = False,
) -> None:
    """Write the keys that one member of a cluster needs, so that its processes never see the cluster's secret.

    A new secret: python -c 'import secrets; print(secrets.token_hex(32))'
    """
    from deploy.local.keys import follow_secret, write_keys

    (follow_secret if follow else write_keys)(secret, out, role)


def _loaded(config: Path | None) -> Config:
    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    return settings


def _on_ready(settings: Config, ask: str | None, api_key: str) -> None:
    cluster = settings.cluster
    address = f"{cluster.host}:{cluster.grpc_port}"
    print(f"BATON READY grpc={address} http={cluster.host}:{cluster.http_port}", flush=True)  # noqa: T201
    if ask is not None:
        _answer(settings, ask, api_key)
    console.print(f"==> Page: {page_url(settings)}   Ctrl-C ends it all. In another terminal:", style="dim")
    console.print(f"    {try_command(settings, api_key)}", style="dim", markup=False)


def _answer(settings: Config, ask: str, api_key: str) -> None:
    console.print("==> A sample request, of 24 tokens:", style="dim")
    console.print(ask, end="", style="bold", markup=False)
    try:
        sample = GenerateRequest(prompt=Text(ask), sampling={"max_tokens": 24, "temperature": 0.0})
        with contextlib.closing(Client(local_address(settings), api_key, own_door_tls(settings))) as client:
            print_answer(sample, client, as_json=False)
    except BatonError as error:
        print_error(error)
