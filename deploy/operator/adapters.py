"""Commands that list, add and remove LoRA adapters of a running cluster."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest
from deploy.operator.client import Client
from deploy.operator.tables import new_table
from deploy.say import say
from deploy.terminal import Terminal

DIGEST_SHOWN = 12
"""Digits of a digest in the table."""


def manage(client: Client, action: str, name: str, path: str, as_json: bool) -> None:
    """Run `baton adapters`.

    Args:
        action: add, remove or list.
        name: the adapter's name; empty: none is given.
        path: its folder, for add; a relative one is taken from the current folder.
        as_json: print the result as one JSON document.

    Raises:
        InvalidRequest: an argument is missing or unexpected, or the cluster refuses the order.
    """
    needed = {"add": 2, "remove": 1, "list": 0}[action]
    if (bool(name) + bool(path)) != needed:
        usage = {"add": "add NAME PATH", "remove": "remove NAME", "list": "list"}[action]
        raise InvalidRequest(f"the arguments are not complete, or too many: `baton adapters {usage}`")
    match action:
        case "add":
            folder = str(Path(path).expanduser().absolute())
            adapter, is_replaced = client.add_adapter(name, folder)
            done = "replaced" if is_replaced else "added"
            sentence = f"{name} is {done}: rank {adapter['rank']}, {_size(adapter)}, {folder}"
            say(json.dumps({**adapter, "is_replaced": is_replaced}) if as_json else sentence)
        case "remove":
            client.remove_adapter(name)
            say(json.dumps({"name": name}) if as_json else f"{name} is removed; its running requests complete")
        case _:
            _list(client.adapters(), as_json)


def _list(adapters: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        say(json.dumps(adapters, indent=2))
        return
    if not adapters:
        say("no adapters are registered; `baton adapters add NAME PATH` adds one")
        return
    has_several = len({each.get("model", "") for each in adapters}) > 1
    table = new_table("adapter", *(["model"] if has_several else []), "rank", "size", "digest", "since (UTC)", "path")
    for each in adapters:
        since = datetime.fromtimestamp(each["since_s"], UTC).strftime("%Y-%m-%d %H:%M")
        shown = str(each["rank"]), _size(each), each["digest"][:DIGEST_SHOWN], since, each["path"]
        table.add_row(each["name"], *([each["model"]] if has_several else []), *shown)
    Terminal(soft_wrap=True).print(table)


def _size(adapter: dict[str, Any]) -> str:
    return f"{adapter['num_bytes'] / 2**20:.1f} MiB"
