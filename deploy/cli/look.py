"""Commands that show the settings with their sources, and the logs of the parts of a cluster."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from baton.errors import InvalidRequest
from deploy.cli.options import AsJson, ConfigFile, ModelOptions, options_from_fields
from deploy.say import say


def show_config(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING]...", help="Sections or settings to show, such as cluster or cluster.host."),
    ] = None,
    config: ConfigFile = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from the default.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting with its value and its source: default, file, or environment variable.

    Secrets are hidden. A setting is section.field in the file, and BATON_SECTION_FIELD in the environment.
    """
    from baton import config as baton_config

    settings = baton_config.origins(config)
    wanted = names or []
    for name in wanted:
        if not any(_is_of(each.name, name) for each in settings):
            raise InvalidRequest(f"there is no setting {name!r}; `baton config` lists them all")
    shown = [
        each
        for each in settings
        if (not wanted or any(_is_of(each.name, name) for name in wanted))
        and not (changed and each.origin == baton_config.DEFAULT)
    ]
    if as_json:
        say(json.dumps([dataclasses.asdict(each) for each in shown], indent=2, ensure_ascii=False))
        return
    rows = [(each.name, _value(each.value), each.origin) for each in shown]
    name_width, value_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for name, value, origin in rows:
        say(f"{name:<{name_width}}  {value:<{min(value_width, 40)}}  {origin}")


@options_from_fields
def logs(
    target: ModelOptions,
    part: Annotated[
        str,
        typer.Argument(
            help="A worker id, or a part that `baton up` runs on this machine, such as router-0 or controller."
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of past lines to show.")] = 100,
    config: ConfigFile = None,
) -> None:
    """Show the log of a worker or of another part of the cluster. Without a name, list the available logs.

    The router serves the logs of workers. The logs of other parts are files on this machine; for containers, use
    `docker compose logs` or `kubectl logs`.
    """
    from deploy.cli.part_logs import show

    show(target, part, num_lines, is_followed=follow, config=config)


def _is_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted.removesuffix('.')}.")


def _value(value: object) -> str:
    """Return a value as an environment variable would contain it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
