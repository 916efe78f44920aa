"""Values inside objects, by path."""

from __future__ import annotations

import re
from typing import Any

from tests.fakekube.store import Object

STEP = re.compile(
    r"\.?(?P<name>(?:[\w/-]|\\\.)+)|\[(?P<index>\d+)\]|\['(?P<quoted>[^']+)'\]|\[\?\((?P<filter>[^)]*)\)\]"
)
FILTER = re.compile(r"""@\.(?P<path>[\w.]+)\s*==\s*["'](?P<value>[^"']*)["']""")


def at(value: Any, path: str) -> Any:
    """What a JSONPath of a printer column names: names, indices and filters `[?(@.type=="Ready")]`.

    None when there is none. Of several, the first.

    Raises:
        ValueError: a path in a form that is not known here.
    """
    path = path.removeprefix("{").removesuffix("}")
    while path:
        step = STEP.match(path)
        if step is None:
            raise ValueError(f"no such JSONPath here: {path}")
        path = path[step.end() :]
        value = _step(value, step)
    return value


def put(value: Object, path: str, new: Any) -> None:
    """Sets what a dotted path names. Objects on the way are made."""
    *parents, last = path.lstrip(".").split(".")
    for name in parents:
        value = value.setdefault(name, {})
    value[last] = new


def _step(value: Any, step: re.Match[str]) -> Any:
    if step["filter"] is not None:
        wanted = FILTER.fullmatch(step["filter"].strip())
        if wanted is None:
            raise ValueError(f"no such filter here: {step['filter']}")
        items = value if isinstance(value, list) else []
        return next((item for item in items if str(at(item, wanted["path"])) == wanted["value"]), None)
    if step["index"] is not None:
        index = int(step["index"])
        return value[index] if isinstance(value, list) and index < len(value) else None
    name = step["quoted"] or step["name"].replace("\\.", ".")
    return value.get(name) if isinstance(value, dict) else None
