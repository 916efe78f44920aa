"""Who owns which field (`metadata.managedFields`), and server-side apply, which asks it.

A set of fields is a set of paths, their steps written as Kubernetes writes them: `f:spec`, `k:{"name":"main"}`,
`v:"x"`. https://github.com/kubernetes-sigs/structured-merge-diff
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakekube.schema import KEY_DEFAULTS, Schema
from tests.fakekube.store import Object, now

Path = tuple[str, ...]
Paths = frozenset[Path]
IDENTITY = ("name", "generateName", "namespace", "uid", "selfLink")
HISTORY = ("creationTimestamp", "generation", "resourceVersion", "managedFields")
SYSTEM = (*IDENTITY, *HISTORY, "deletionTimestamp", "deletionGracePeriodSeconds")
"""Parts of the metadata that nobody owns."""


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes, and how."""

    name: str
    operation: str
    """Apply or Update."""
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        """As conflicts name it."""
        through = f' with subresource "{self.subresource}"' if self.subresource else ""
        return f'"{self.name}"{through} using {self.api_version}'


@dataclass(frozen=True, slots=True)
class Owned:
    paths: Paths
    time: str = field(default_factory=now, compare=False)


class Conflicts(Exception):
    """Fields that other managers own and that would change."""

    def __init__(self, fields: dict[Manager, list[str]]) -> None:
        self.fields = fields
        count = sum(map(len, fields.values()))
        plural = "s" * (count > 1)
        said = [_conflict(manager, paths) for manager, paths in fields.items()]
        super().__init__(f"Apply failed with {count} conflict{plural}: " + "\n".join(said))


def applied(live: Object, wanted: Object, manager: Manager, schema: Schema, force: bool) -> Object:
    """Server-side apply: `wanted` holds what the manager has an opinion on, and nothing else.

    What it had an opinion on before and no longer has is removed, unless somebody else owns it too.

    Raises:
        Conflicts: another manager owns a field and says otherwise, and `force` is off.
    """
    opinion = owned_paths(wanted, schema)
    owners = owners_of(live)
    before = owners.pop(manager, Owned(frozenset())).paths
    fought = {
        other: sorted(path for path in owned.paths & opinion if _differs(live, wanted, path))
        for other, owned in owners.items()
    }
    fought = {other: paths for other, paths in fought.items() if paths}
    if fought and not force:
        raise Conflicts({other: [_written(path) for path in paths] for other, paths in fought.items()})
    owners = {
        other: Owned(owned.paths - frozenset(fought.get(other, ())), owned.time) for other, owned in owners.items()
    }
    others = frozenset[Path]().union(*(owned.paths for owned in owners.values()))
    merged = _merged(live, wanted, schema)
    for path in sorted(before - opinion - others, key=len):  # an item of a list goes before its parts
        if not any(other[: len(path)] == path for other in others) and not _is_key(path):
            _remove(merged, _unowned(path, opinion | others))
    return with_owners(merged, owners | {manager: Owned(opinion)}, live)


def updated(old: Object, new: Object, manager: Manager, schema: Schema) -> Object:
    """`new` with its managedFields: what differs from `old` belongs to the manager from now on."""
    before, after = owned_paths(old, schema), owned_paths(new, schema)
    changed = frozenset(path for path in after if path not in before or _differs(old, new, path))
    given = new.get("metadata", {}).get("managedFields")
    owners = {
        other: Owned(owned.paths - changed, owned.time)
        for other, owned in owners_of(old if given is None else new).items()
    }
    mine = owners_of(old if given is None else new).get(manager, Owned(frozenset())).paths | changed
    return with_owners(copy.deepcopy(new), owners | {manager: Owned(mine)}, old)


def owners_of(value: Object) -> dict[Manager, Owned]:
    entries = value.get("metadata", {}).get("managedFields") or ()
    return {
        Manager(e["manager"], e["operation"], e["apiVersion"], e.get("subresource", "")): Owned(
            frozenset(_decoded(e.get("fieldsV1", {}))), e.get("time", now())
        )
        for e in entries
        if e
    }


def with_owners(value: Object, owners: dict[Manager, Owned], before: Object) -> Object:
    """Writes them into the object. Owners of nothing that exists drop out; who owns what it owned keeps its time."""
    entries = []
    known = owners_of(before)
    for manager, owned in sorted(owners.items(), key=lambda item: str(item[0])):
        there = frozenset(path for path in owned.paths if _at(value, path) is not MISSING)
        if not there:
            continue
        if manager in known and known[manager].paths == there:
            owned = replace(owned, time=known[manager].time)
        entry: Object = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.api_version,
            "time": owned.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _encoded(there),
        }
        if manager.subresource:
            entry["subresource"] = manager.subresource
        entries.append(entry)
    value.setdefault("metadata", {}).pop("managedFields", None)
    if entries:
        value["metadata"]["managedFields"] = entries
    return value


def owned_paths(value: Object, schema: Schema) -> Paths:
    """Every field of an object that somebody can own."""
    metadata = {name: part for name, part in value.get("metadata", {}).items() if name not in SYSTEM}
    rest = {name: part for name, part in value.items() if name not in ("apiVersion", "kind", "metadata")}
    whole = rest | ({"metadata": metadata} if metadata else {})
    return frozenset(_paths(whole, schema, ())) - {()}


def _paths(value: Any, schema: Schema, path: Path) -> Iterator[Path]:
    if isinstance(value, dict) and value and not schema.atomic:
        for name, part in value.items():
            yield from _paths(part, schema.field(name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and schema.list_keys:
        for item in value:
            step = _key(item, schema.list_keys)
            yield (*path, step)
            yield from _paths(item, schema.item(), (*path, step))
    elif isinstance(value, list) and value and schema.is_set:
        yield from ((*path, f"v:{json.dumps(item)}") for item in value)
    else:
        yield path


def _key(item: Object, names: tuple[str, ...]) -> str:
    parts = {name: item.get(name, KEY_DEFAULTS.get(name)) for name in sorted(names)}
    return "k:" + json.dumps({name: part for name, part in parts.items() if part is not None}, separators=(",", ":"))


MISSING = object()


def _at(value: Any, path: Path) -> Any:
    """MISSING when there is none."""
    for step in path:
        found = _position(value, step)
        if found is None:
            return MISSING
        value = value[found]
    return value


def _differs(one: Object, other: Object, path: Path) -> bool:
    """Of an item in a list only whether it is there counts: what is in it has paths of its own."""
    here, there = _at(one, path), _at(other, path)
    return (here is MISSING) != (there is MISSING) if path[-1].startswith("k:") else bool(here != there)


def _position(value: Any, step: str) -> Any:
    """The name or the index that a step means. None: there is no such part."""
    kind, _, text = step.partition(":")
    if kind == "f":
        return text if isinstance(value, dict) and text in value else None
    if not isinstance(value, list):
        return None
    wanted = json.loads(text)
    if kind == "v":
        return value.index(wanted) if wanted in value else None
    matching = (
        index
        for index, item in enumerate(value)
        if all(item.get(name, KEY_DEFAULTS.get(name)) == part for name, part in wanted.items())
    )
    return next(matching, None)


def _is_key(path: Path) -> bool:
    """Of the item it stands in: it goes with that."""
    kind, _, name = path[-1].partition(":")
    item = path[-2] if len(path) > 1 else ""
    return kind == "f" and item.startswith("k:") and name in json.loads(item[2:])


def _remove(value: Object, path: Path) -> None:
    """And the parents it leaves empty."""
    parent = _at(value, path[:-1])
    if parent is MISSING or (found := _position(parent, path[-1])) is None:
        return
    del parent[found]
    if not parent and len(path) > 1:
        _remove(value, path[:-1])


def _unowned(path: Path, owned: Paths) -> Path:
    """The outermost field around `path` of which nobody owns a part: it goes with its defaults, which nobody owns
    (`Set.EnsureNamedFieldsAreMembers`). A probe of gRPC would otherwise keep its service where its port is gone.
    """
    while len(path) > 1 and path[-2].startswith("f:") and not any(o[: len(path) - 1] == path[:-1] for o in owned):
        path = path[:-1]
    return path


def _merged(live: Any, wanted: Any, schema: Schema) -> Any:
    if isinstance(wanted, dict) and isinstance(live, dict) and not schema.atomic:
        parts = {
            name: _merged(live[name], part, schema.field(name)) if name in live else part
            for name, part in wanted.items()
        }
        return copy.deepcopy(live | parts)
    if isinstance(wanted, list) and isinstance(live, list) and schema.list_keys:
        merged = copy.deepcopy(live)
        for item in wanted:
            found = _position(merged, _key(item, schema.list_keys))
            if found is None:
                merged.append(copy.deepcopy(item))
            else:
                merged[found] = _merged(merged[found], item, schema.item())
        return merged
    if isinstance(wanted, list) and isinstance(live, list) and schema.is_set:
        return live + [item for item in wanted if item not in live]
    return copy.deepcopy(wanted)


def _encoded(paths: Paths) -> Object:
    """As FieldsV1: a part that is owned itself and has owned parts holds a dot."""
    root: Object = {}
    for path in sorted(paths, key=len):
        node = root
        for step in path:
            node = node.setdefault(step, {})
        node["."] = {}
    return _without_lone_dots(root)


def _without_lone_dots(node: Object) -> Object:
    if list(node) == ["."]:
        return {}
    return {step: part if step == "." else _without_lone_dots(part) for step, part in sorted(node.items())}


def _decoded(node: Object, path: Path = ()) -> Iterator[Path]:
    for step, part in node.items():
        if step == ".":
            yield path
        elif part:
            yield from _decoded(part, (*path, step))
        else:
            yield (*path, step)


def _written(path: Path) -> str:
    """For people: .spec.containers[name="main"].image"""
    text = ""
    for step in path:
        kind, _, part = step.partition(":")
        if kind == "f":
            text += f".{part}"
        elif kind == "v":
            text += f"[={part}]"
        else:
            text += "[" + ",".join(f"{name}={json.dumps(value)}" for name, value in json.loads(part).items()) + "]"
    return text


def _conflict(manager: Manager, fields: list[str]) -> str:
    if len(fields) == 1:
        return f"conflict with {manager}: {fields[0]}"
    return f"conflicts with {manager}:\n" + "\n".join(f"- {name}" for name in fields)
