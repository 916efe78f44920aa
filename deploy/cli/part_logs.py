"""`baton logs`: log lines of a worker, from the router, or of another part, from its file on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from baton import config as baton_config
from baton.errors import BatonError, NoWorker
from deploy.cli.options import ModelOptions, console
from deploy.local.log_files import follow, last_lines, log_files
from deploy.models import cache_dir
from deploy.operator import worker_log
from deploy.operator.client import Access, Client
from deploy.operator.tables import has_several_releases
from deploy.say import say


def show(target: ModelOptions, part: str, num_lines: int, *, is_followed: bool, config: Path | None) -> None:
    """Print the last lines of a part's log, or the names of the parts that have one.

    Args:
        target: access to the cluster, and the output format.
        part: worker id, or name of another part; empty: print the names.
        num_lines: maximum number of past lines.
        is_followed: print new lines until Ctrl-C.
        config: settings file, which may set the cache folder of the log files.
    """
    access = Access(target.api_key, target.read())
    with contextlib.closing(target.client()) as client:
        routers = _routers(client)
        files = log_files(cache_dir(baton_config.load(config).cluster), routers)
        if not part:
            _list_logs(client.status()["workers"], files, target.as_json)
            return
        more: Iterator[str]
        if part in files:
            if not routers:
                found = f"no router answers at {target.address}; showing the log of the latest start: {files[part]}"
                console().print(found, style="dim", soft_wrap=True)
            lines, size = last_lines(files[part], num_lines)
            more = follow(files[part], size)
        else:
            endpoints = worker_log.endpoints(client, target.address, access)
            every = worker_log.read(endpoints, part, target.model)
            lines = every[len(every) - min(num_lines, len(every)) :]
            more = worker_log.follow(endpoints, part, every, target.model)
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            _print_lines(itertools.chain(lines, more) if is_followed else lines, part, target.as_json)


def _routers(client: Client) -> list[int]:
    """Return the process ids of the cluster's routers; an empty list if no router answers.

    That is no error: log files can be read without a router.
    """
    try:
        return [router["pid"] for router in client.status()["routers"]]
    except BatonError:
        return []


def _print_lines(lines: Iterable[str], part: str, as_json: bool) -> None:
    for line in lines:
        say(json.dumps({"part": part, "line": line}, ensure_ascii=False) if as_json else line)


def _list_logs(workers: list[dict[str, Any]], files: dict[str, Path], as_json: bool) -> None:
    if as_json:
        found = {"workers": [w["id"] for w in workers], "files": {name: str(path) for name, path in files.items()}}
        say(json.dumps(found))
        return
    if not workers and not files:
        raise NoWorker("no worker is known, and no `baton up` on this machine has left a log")
    for worker in workers:
        of_release = f" of {worker['release']}" if has_several_releases(workers) else ""
        say(f"{worker['id']}: a {worker['role']} worker{of_release}")
    for name, path in files.items():
        say(f"{name}: {path}")
