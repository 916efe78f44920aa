"""The three ways to patch an object, besides server-side apply. Each returns a new value, and changes none."""

from __future__ import annotations

import copy
from typing import Any

from tests.fakekube.schema import Schema
from tests.fakekube.store import Object


class BadPatch(Exception):
    """It does not fit the object."""


def merge(value: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(value) if isinstance(value, dict) else {}
    for name, part in patch.items():
        if part is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), part)
    return copy.deepcopy(merged)


def json_patch(value: Object, operations: list[Object]) -> Object:
    """RFC 6902. Raises BadPatch."""
    document = {"": copy.deepcopy(value)}
    for operation in operations:
        try:
            _operate(document, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise BadPatch(
                f"{operation.get('op')} operation does not apply: {operation.get('path')}: {error}"
            ) from None
    return document[""]


def _operate(document: Object, operation: Object) -> None:
    kind, path = operation["op"], _pointer(operation["path"])
    if kind in ("move", "copy"):
        source = _pointer(operation["from"])
        moved = copy.deepcopy(_found(document, source))
        if kind == "move":
            _remove(document, source)
        _add(document, path, moved)
    elif kind == "add":
        _add(document, path, copy.deepcopy(operation["value"]))
    elif kind == "remove":
        _remove(document, path)
    elif kind == "replace":
        _found(document, path)
        parent = _found(document, path[:-1])
        parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = copy.deepcopy(operation["value"])
    elif kind == "test":
        if _found(document, path) != operation["value"]:
            raise ValueError("testing value failed")
    else:
        raise ValueError(f"unexpected kind {kind!r}")


def _pointer(path: str) -> list[str]:
    """Its first part is the empty name of the whole document."""
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _found(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value[int(part) if isinstance(value, list) else part]
    return value


def _add(document: Object, path: list[str], new: Any) -> None:
    parent = _found(document, path[:-1])
    if isinstance(parent, list):
        parent.insert(len(parent) if path[-1] == "-" else int(path[-1]), new)
    else:
        parent[path[-1]] = new


def _remove(document: Object, path: list[str]) -> None:
    parent = _found(document, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]


def strategic(value: Object, patch: Object, schema: Schema) -> Object:
    """A strategic merge patch: lists are merged by the keys which the schema names.

    https://github.com/kubernetes/community/blob/master/contributors/devel/sig-api-machinery/strategic-merge-patch.md

    Raises:
        BadPatch.
    """
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    if directive == "replace":
        return copy.deepcopy({name: part for name, part in patch.items() if name != "$patch"})
    merged = copy.deepcopy(value)
    if "$retainKeys" in patch:
        merged = {name: part for name, part in merged.items() if name in patch["$retainKeys"]}
    for name, part in patch.items():
        if name.startswith("$"):
            continue
        if part is None:
            merged.pop(name, None)
        elif isinstance(part, dict):
            old = merged.get(name)
            merged[name] = strategic(old if isinstance(old, dict) else {}, part, schema.field(name))
        elif isinstance(part, list):
            merged[name] = _merged_list(merged.get(name) or [], part, schema.field(name))
        else:
            merged[name] = part
    for name, part in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            merged[field] = [item for item in merged.get(field, ()) if item not in part]
    for name, part in patch.items():
        if name.startswith("$setElementOrder/"):
            field = name.partition("/")[2]
            if field in merged:
                merged[field] = _ordered(merged[field], part, schema.field(field).patch_key)
    return merged


def _merged_list(value: list[Any], patch: list[Any], schema: Schema) -> list[Any]:
    key = schema.patch_key
    if "merge" not in schema.patch_strategy:
        return copy.deepcopy(patch)
    if not key:
        return value + [item for item in patch if item not in value]
    if any(item.get("$patch") == "replace" for item in patch):
        return copy.deepcopy([item for item in patch if item.get("$patch") != "replace"])
    merged = list(value)
    for item in patch:
        if key not in item:
            raise BadPatch(f"map: {item} does not contain declared merge key: {key}")
        at = next((index for index, old in enumerate(merged) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            merged = [old for old in merged if old.get(key) != item[key]]
        elif at is None:
            merged.append(strategic({}, item, schema.item()))
        else:
            merged[at] = strategic(merged[at], item, schema.item())
    return merged


def _ordered(value: list[Any], order: list[Any], key: str) -> list[Any]:
    """Those that `order` does not name come last."""
    wanted = [item[key] if key else item for item in order]

    def place(item: Any) -> int:
        name = item.get(key) if key else item
        return wanted.index(name) if name in wanted else len(wanted)

    return sorted(value, key=place)
