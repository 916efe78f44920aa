"""Commands that show what is there: settings and where they come from, and what the parts of a cluster log."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from baton.errors import InvalidRequest
from deploy.cli.options import AsJson, ClientOptions, ConfigFile, options_from_fields
from deploy.say import say


def show_config(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SETTING]...", help="Sections or settings, such as cluster.")
    ] = None,
    config: ConfigFile = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting, its value, and where that comes from: default, file, or environment variable.

    Secrets are hidden. A setting of the file is section.field; in the environment it is BATON_SECTION_FIELD.
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
    target: ClientOptions,
    part: Annotated[
        str, typer.Argument(help="A worker's id; or a part that `baton up` runs here, such as router or controller.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show new lines until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The most lines of before.")] = 100,
    config: ConfigFile = None,
) -> None:
    """Show what a worker or another part of the cluster has logged; without a name, list those that have a log.

    A worker's lines come through the router. Those of other parts are files of this machine; in containers
    `docker compose logs` and `kubectl logs` have them.
    """
    from deploy.cli.part_logs import show

    show(target, part, num_lines, is_followed=follow, config=config)


def _is_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted.removesuffix('.')}.")


def _value(value: object) -> str:
    """A value as the environment would have it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
