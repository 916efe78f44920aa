"""Commands that start and end parts of a cluster: up, run, leave."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import ApiKey, ConfigFile, console, options_from_fields

if TYPE_CHECKING:
    from baton.config import Config


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
    from deploy.cli.serving import serve
    from deploy.cli.settings import loaded

    serve(options.applied(loaded(config)), ask, api_key)


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
    from deploy.cli.settings import loaded
    from deploy.local.part import part_named
    from deploy.local.parts import run as run_part

    run_part(part_named(part), loaded(config), console(), weights=weights)


def leave(
    config: ConfigFile = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Longest wait, in seconds.", show_default="time for a drain and a start"),
    ] = None,
) -> None:
    """Drain all workers of this machine; replacements start elsewhere first. Use it as a pod's preStop hook.

    Ends with status 1 if some of them are still there in the end.
    """
    from deploy.cli.leaving import leave_machine

    leave_machine(config, timeout_s)
