"""Commands that start and stop parts of a cluster: up, run, leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
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
        tuple[str, ...],
        typer.Option(
            help="Model: a hub id, a local folder, smollm2-135m-instruct (the default) or gemma-3-270m. If repeated, "
            "the cluster serves several models, each with its own pools."
        ),
    ] = ()

    def applied(self, settings: Config) -> Config:
        """Return the settings of the first model with these options."""
        given = {name: value for name in _CLUSTER if (value := getattr(self, name)) is not None}
        cluster = dataclasses.replace(settings.cluster, **given)
        model = dataclasses.replace(settings.model, id=self.model[0]) if self.model else settings.model
        return dataclasses.replace(settings, cluster=cluster, model=model)

    def of_each_model(self, settings: Config, files: Sequence[Path]) -> list[Config]:
        """Return the settings of each model.

        Args:
            settings: settings of the cluster and of its first model, from the first file and the environment.
            files: files of further models.

        Raises:
            ConfigError: a file cannot be read, or has a setting that a further model may not have.
        """
        from baton.config import read_file
        from deploy.local.models import another_model

        first = self.applied(settings)
        others = [another_model(first, read_file(path), str(path)) for path in files]
        return [first, *others, *(another_model(first, {"model": {"id": each}}, "--model") for each in self.model[1:])]


_CLUSTER = ("prefill", "decode", "routers", "ray_address")


@options_from_fields
def up(
    options: UpOptions,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML file with settings. If repeated, each further file has the settings of one more model."
        ),
    ] = None,
    ask: Annotated[str | None, typer.Option(help="Prompt to send when the cluster is ready.")] = None,
    api_key: ApiKey = "",
) -> None:
    """Serve models on this machine: Redis, Ray, the pools and the routers. Ctrl-C stops everything.

    Several models share the machine's memory and GPUs, and one address: clients
    name the model that they request. --prefill and --decode set the pools of each
    model.

    Prints `BATON READY grpc=HOST:PORT http=HOST:PORT` when it accepts requests. BATON_GRPC_PORT and BATON_HTTP_PORT set
    the ports.
    """
    from deploy.cli.serving import serve
    from deploy.cli.settings import loaded

    files = config or []
    serve(options.of_each_model(loaded(files[0] if files else None), files[1:]), ask, api_key)


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
