"""Commands that show what is there: settings and where they come from, and what the parts of a cluster log."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from baton import config as baton_config
from baton.errors import InvalidRequest, NoWorker
from deploy.cli.options import AsJson, ClientOptions, ConfigFile, options_from_fields
from deploy.operator.client import Access


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
        print(json.dumps([dataclasses.asdict(each) for each in shown], indent=2, ensure_ascii=False))  # noqa: T201
        return
    rows = [(each.name, _value(each.value), each.origin) for each in shown]
    name_width, value_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:<{name_width}}  {value:<{min(value_width, 40)}}  {origin}")  # noqa: T201


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
    from deploy.local.log_files import follow as follow_file
    from deploy.local.log_files import last_lines, log_files
    from deploy.models import cache_dir
    from deploy.operator import worker_log

    files = log_files(cache_dir(baton_config.load(config).cluster))
    access = Access(target.api_key, target.read())
    with contextlib.closing(target.client()) as client:
        if not part:
            workers = client.status()["workers"]
            _list_logs(workers, files, target.as_json)
            return
        more: Iterator[str]
        if part in files:
            lines, size = last_lines(files[part], num_lines)
            more = follow_file(files[part], size)
        else:
            doors = worker_log.doors(client, target.address, access)
            every = worker_log.read(doors, part)
            lines, more = every[len(every) - min(num_lines, len(every)) :], worker_log.follow(doors, part, every)
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            _print_lines(itertools.chain(lines, more) if follow else lines, part, target.as_json)


def _print_lines(lines: Iterable[str], part: str, as_json: bool) -> None:
    for line in lines:
        print(json.dumps({"part": part, "line": line}, ensure_ascii=False) if as_json else line, flush=True)  # noqa: T201


def _list_logs(workers: list[dict[str, Any]], files: dict[str, Path], as_json: bool) -> None:
    if as_json:
        found = {"workers": [w["id"] for w in workers], "files": {name: str(path) for name, path in files.items()}}
        print(json.dumps(found))  # noqa: T201
        return
    if not workers and not files:
        raise NoWorker("no worker is known, and no `baton up` of this machine has left a log")
    for worker in workers:
        print(f"{worker['id']}: a {worker['role']} worker")  # noqa: T201
    for name, path in files.items():
        print(f"{name}: {path}")  # noqa: T201


def _is_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted.removesuffix('.')}.")


def _value(value: object) -> str:
    """A value as the environment would have it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
