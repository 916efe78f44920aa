"""Commands that start and stop parts of a cluster: up, run, leave."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import ApiKey, ConfigFile, console, options_from_fields

if TYPE_CHECKING:
    from baton.config import Config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Settings of the cluster that have a command line option; None: as configured."""

    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.", show_default="1")] = None
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.", show_default="1")] = None
    routers: Annotated[
        int | None, typer.Option(min=1, help="Number of router processes behind one address.", show_default="1")
    ] = None
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of an existing Ray cluster in which to run the workers.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Model: a hub id, a local folder, smollm2-135m-instruct (the default) or gemma-3-270m."),
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
    ask: Annotated[str | None, typer.Option(help="Prompt to send when the cluster is ready.")] = None,
    api_key: ApiKey = "",
) -> None:
    """Serve a model on this machine: Redis, Ray, both pools and the routers. Ctrl-C stops everything.

    Prints `BATON READY grpc=HOST:PORT http=HOST:PORT` when it accepts requests. BATON_GRPC_PORT and BATON_HTTP_PORT set
    the ports.
    """
    from deploy.cli.serving import serve
    from deploy.cli.settings import loaded

    serve(options.applied(loaded(config)), ask, api_key)


def run(
    part: Annotated[
        str,
        typer.Argument(
            metavar="PART", help="model: download the model into the cache, and exit. router, controller: serve."
        ),
    ],
    config: ConfigFile = None,
    weights: Annotated[
        bool, typer.Option(help="For the part model: get the weights, too. Routers and the controller need none.")
    ] = True,
) -> None:
    """Run one part of a cluster in the foreground, as containers do. Parts find each other through Redis and Ray.

    Workers run on any Ray node with room: ray start --address=HEAD:6379 --resources='{"baton_worker": 1}'

    To reserve a node for one pool: --labels baton.dev/pool=decode

    Ray runs such workers at the lowest CPU priority unless the node has RAY_worker_niceness=0 in its environment. They
    end with their raylet unless a node process runs Ray: python -P -m deploy.ray_pools.node --help
    """
    from deploy.cli.settings import loaded
    from deploy.local.part import part_named
    from deploy.local.parts import run as run_part

    run_part(part_named(part), loaded(config), console(), weights=weights)


def leave(
    config: ConfigFile = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Seconds to wait.", show_default="time for a drain and a start"),
    ] = None,
) -> None:
    """Drain all workers of this machine once replacements run elsewhere. Use it as a pod's preStop hook.

    Exit status 1: some workers are still running after the timeout.
    """
    from deploy.cli.leaving import leave_machine

    leave_machine(config, timeout_s)
