"""JSON schemas of a structure: neutral keywords are left out, and a keyword that cannot be enforced is found.

The compiler of grammars is asked about ever smaller parts of a schema, so this module has no list of its features.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

Path = tuple[str | int, ...]
"""Keys and indices from a schema to a part of it."""
ProblemOf = Callable[[Mapping[str, Any]], str]
"""Compiles a schema, and returns its problem; empty: none."""

OF_GRAMMAR = ("x-place", "x-loose", "x-guidance")
"""Keywords by which a grammar says how an embedded schema is served; a client's own have no effect."""
KNOWN_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Enforced values of `format`. In JSON Schema `format` is an annotation, so other values have no effect."""
KNOWN_DIALECTS = re.compile(r"https?://json-schema\.org/draft(-0[467]|/20(19-09|20-12))/schema#?")
MAX_EDITS = 32
"""Maximum number of keywords of a schema that are left out one by one; beyond it, the whole schema is left out."""
SEARCH_S = 0.5
"""Processor seconds for the search for a keyword that cannot be enforced."""
_ONE = frozenset(
    ("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
     "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
"""Keywords whose value is a schema."""
_LISTED = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
"""Keywords whose value is a list of schemas."""
_NAMED = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose value is an object of schemas."""
_INTEGERS = frozenset(
    ("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties")
)
KEYWORDS = (
    _ONE | _LISTED | _NAMED | _INTEGERS | {
        "$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "format", "maximum", "minimum", "multipleOf", "pattern", "required", "type", "uniqueItems",
    }
)  # fmt: skip
"""Keywords that may restrict values."""
_ALLOWS_ALL: tuple[Any, ...] = (True, {})
NEVER_ENFORCED = frozenset(
    ("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
     "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames",
     "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems")
)  # fmt: skip
"""Keywords that no compiler supports: they are left out of a schema that is enforced as far as possible."""
_LAST = ("type", "properties", "items")
"""Keywords without which a part allows much more: others are blamed first."""
_OVERLAP = "a value may be of two of its schemas"
_UNSATISFIABLE = "Unsatisfiable schema"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": _ALLOWS_ALL,
    "unevaluatedItems": _ALLOWS_ALL,
    "unevaluatedProperties": _ALLOWS_ALL,
    "uniqueItems": (False,),
}
"""Keywords that compilers reject -> values with which they have no effect."""


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """A keyword that cannot be enforced."""

    path: Path
    """Path of the part that has it."""
    keyword: str
    """The keyword; empty: the part allows no value at all."""
    why: str = ""
    """The compiler's message, if it says more than that the keyword is unknown."""

    def sentence(self, where: str) -> str:
        """Return the error message.

        Args:
            where: the schema's position in the request.
        """
        why = _OVERLAP if self.why.startswith("oneOf ") else " ".join(self.why.split())[:300]
        told = f"{self.keyword[:64] or 'this schema'} cannot be enforced"
        return f"{where[:200]}{shown(self.path)}: {told}{f' ({why})' if why else ''}"


def shown(path: Path) -> str:
    """Return a path as a text that can be appended to its start."""
    steps = (f"[{step}]" if isinstance(step, int) else _named(step) for step in path)
    return "".join(steps)[:400]


def _named(step: str) -> str:
    return f".{step}" if re.fullmatch(r"[\w$-]{1,64}", step, re.ASCII) else f"[{json.dumps(step[:64])}]"


def plain(schema: Any, left_out: Collection[str] = ()) -> Any:
    """Return a schema without keywords that have no effect.

    Left out are a null value, an unknown `format`, `uniqueItems: false`, definitions without a reference, and the
    schema's own name. Numbers of items or characters become integers, and `additionalItems` next to `prefixItems`
    becomes `items`, which is its intended meaning.

    Args:
        left_out: further keywords to leave out.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    parts = [(path, part) for path, part in reached_parts(found) if isinstance(part, Mapping)]
    if all(str(part.get("$ref", "#")).startswith("#") for _, part in parts):
        reached = {path[:2] for path, _ in parts}
        for key in ("$defs", "definitions"):
            if isinstance(defined := found.get(key), Mapping):
                found[key] = {name: part for name, part in defined.items() if (key, name) in reached}
        found.pop("$id", None)
    return _plain(found, left_out)


def _plain(schema: Any, left_out: Collection[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    if "prefixItems" in schema and "additionalItems" in schema:
        schema = {"items": schema["additionalItems"], **schema}
        left_out = {*left_out, "additionalItems"}
    for key, value in schema.items():
        if key in left_out or _asks_for_nothing(key, value, schema):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _plain(child, left_out) for name, child in value.items()}
        elif key in _LISTED and isinstance(value, list):
            found[key] = [_plain(child, left_out) for child in value]
        elif key in _ONE:
            found[key] = _plain(value, left_out)
        else:
            is_whole = key in _INTEGERS and isinstance(value, float) and value.is_integer()
            found[key] = int(value) if is_whole else value
    return found


def _asks_for_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None:
        return key not in ("const", "default")
    if key == "format":
        return not (isinstance(value, str) and value in KNOWN_FORMATS)
    if key == "$schema":
        return not (isinstance(value, str) and KNOWN_DIALECTS.fullmatch(value))
    if key in ("minContains", "maxContains"):
        return schema.get("contains") is None
    if key in ("then", "else"):
        return schema.get("if") is None
    return any(value == each and type(value) is type(each) for each in _NEUTRAL.get(key, ()))


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas that are parts of a schema, with their paths in it."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (((key, name), child) for name, child in value.items() if isinstance(child, (Mapping, bool)))
        elif key in _LISTED and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in _ONE and isinstance(value, (Mapping, bool)):
            yield (key,), value


def at(schema: Any, path: Path) -> Any:
    """Return a part of a schema."""
    for step in path:
        schema = schema[step]
    return schema


def without(schema: Any, path: Path) -> Any:
    """Return a schema without a keyword.

    Args:
        path: of the keyword; empty: the schema is reduced to one that describes any object.
    """
    if not path:
        return {name: value for name, value in schema.items() if name.startswith("x-")} | {"type": "object"}
    step, *others = path
    copied = list(schema) if isinstance(schema, list) else dict(schema)
    if isinstance(copied, dict) and step not in copied:
        return copied  # it was removed together with another one
    if others:
        copied[step] = without(copied[step], tuple(others))  # type: ignore[index]
    elif isinstance(copied, list):
        copied[step] = {}  # type: ignore[index]
    else:
        del copied[str(step)]
    return copied


def fault_of(schema: Mapping[str, Any], problem_of: ProblemOf) -> SchemaFault | None:
    """Return the keyword because of which a schema cannot be compiled; None: it can be compiled.

    The search descends to the smallest part with which the compiler finds the same problem, and there leaves out one
    keyword after the other. After SEARCH_S it returns the result so far.
    """
    said = problem_of(schema)
    if not said:
        return None
    if lost := _lost_reference(schema, said):
        return SchemaFault(lost, "$ref", said)
    until = time.process_time() + SEARCH_S
    document = full = _apart(schema)
    path: Path = ()

    def problem_at(place: Path) -> str:
        return problem_of(_part_of(document, place))

    def is_cause(place: Path) -> bool:
        found = "" if isinstance(at(schema, place), bool) or time.process_time() > until else problem_at(place)
        return bool(found) and (found == said or (found.startswith(_UNSATISFIABLE) and said.startswith(_UNSATISFIABLE)))

    while deeper := next((part for place, _ in children(at(schema, path)) if is_cause(part := (*path, *place))), None):
        path, said = deeper, problem_at(deeper)
    part = at(full, path)
    if unknown := _unknown_keys(said):
        return SchemaFault(path, next((key for key in part if key in unknown), unknown[0]))
    for key in sorted(part, key=lambda key: (key in _LAST, key not in said)):
        if key.startswith("x-") or time.process_time() > until:
            continue
        document = without(full, (*path, key))
        if problem_at(path) != said:
            return SchemaFault(path, key, said)
    return SchemaFault(path, next((key for key in part if key in said), ""), said)


def _lost_reference(schema: Mapping[str, Any], said: str) -> Path | None:
    """Return the part with a reference to a missing target, if that is the problem."""
    if not said.startswith(("Anchor ", "Pointer ", "Resource ")):
        return None
    parts = ((path, part.get("$ref")) for path, part in all_parts(schema) if isinstance(part, Mapping))
    return next((path for path, ref in parts if isinstance(ref, str) and unquote(ref.removeprefix("#")) in said), None)


def _unknown_keys(said: str) -> list[str]:
    found = re.match(r"Unimplemented keys: (\[.*?\])", said)
    return [str(key) for key in json.loads(found[1])] if found else []


def _apart(node: Any) -> Any:
    """Return a schema whose references are valid at the position `#/$defs/root`."""
    if isinstance(node, Mapping):
        return {
            key: f"#/$defs/root{value[1:]}"
            if key == "$ref" and isinstance(value, str) and re.match("#(/|$)", value)
            else _apart(value)
            for key, value in node.items()
            if not (key in ("$id", "id") and isinstance(value, str))
        }
    return [_apart(each) for each in node] if isinstance(node, list) else node


def part_alone(schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a part of a schema as a schema, including everything that it refers to."""
    return _part_of(_apart(schema), path)


def _part_of(document: Any, path: Path) -> dict[str, Any]:
    """Return a part of a schema whose references are valid at the position `#/$defs/root`."""
    return {"$defs": {"root": document}, "$ref": _reference(("$defs", "root", *path))}


def _reference(path: Path) -> str:
    return "#" + "".join("/" + quote(str(step).replace("~", "~0").replace("/", "~1")) for step in path)


def all_parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        waiting += [((*path, *place), child) for place, child in children(part)]


def reached_parts(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of a schema that apply to its values, each once; unreferenced definitions are not among them."""
    places: dict[int, Path] = {}
    anchors: dict[str, Any] = {}
    for path, part in all_parts(schema):
        places[id(part)] = path
        if isinstance(part, Mapping) and isinstance(anchor := part.get("$anchor"), str):
            anchors.setdefault(f"#{anchor}", part)
    waiting: list[Any] = [schema]
    seen: set[int | str] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or id(part) not in places:
            continue
        seen.add(id(part))
        yield places[id(part)], part
        waiting += [child for place, child in children(part) if place[0] not in ("$defs", "definitions")]
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            is_pointer = reference.startswith("#/") or reference == "#"
            waiting.append(referred(schema, reference) if is_pointer else anchors.get(reference))


def referred(schema: Mapping[str, Any], reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    if not reference.startswith("#/"):
        named = reference.removeprefix("#")
        return next((p for _, p in all_parts(schema) if isinstance(p, Mapping) and p.get("$anchor") == named), None) \
            if named else schema  # fmt: skip
    found: Any = schema
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
