"""Dead ends of JSON schemas: keywords that a grammar compiler accepts but that block the output or allow wrong values.

The router finds them before it serves a request. It rejects the keyword by name, or leaves it out of the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from baton.json_schema import Path, SchemaFault, part_alone, reached_parts, referred

MANY = 64
"""Number of optional members above which the compiler is asked whether an object can start.

It counts the members of an object, or of all objects of a union. The length of a parser row is limited.
"""
EXACT = 2**53
"""Compilers read numbers as 64-bit floats, which cannot represent every integer beyond this one."""


Refer = Callable[[str], Any]
"""Returns the part to which a reference refers; None: there is none."""


class Compiler(NamedTuple):
    """Queries to the grammar compiler."""

    has_key: Callable[[Mapping[str, Any]], bool]
    """Returns whether an object may have a member, by a schema without references."""
    begins: Callable[[Mapping[str, Any]], bool]
    """Returns whether the parser can start an object of a schema: its row of possible continuations is limited."""


def dead_end_of(schema: Mapping[str, Any], compiler: Compiler) -> SchemaFault | None:
    """Return a keyword that the compiler accepts but that blocks or falsifies an output; None: there is none.

    It is one of: a `$ref` to itself; `patternProperties` that match only names in `properties`, with no others allowed
    (the compiler then allows a comma that nothing can follow); an object with more optional members than fit into a
    parser row; a `const` or `enum` with an integer that a 64-bit float cannot represent.
    """
    reached = dict(reached_parts(schema))
    refer = functools.cache(functools.partial(referred, schema))
    finite = _finite(reached, refer)
    for path, part in reversed(list(reached.items())):  # a referenced part is checked before the parts that refer to it
        if not isinstance(part, Mapping):
            continue
        if "$ref" in part and id(part) not in finite:
            return SchemaFault(path, "$ref", "it refers to itself")
        for keyword in ("const", "enum"):
            if keyword in part and _is_inexact(part[keyword]):
                return SchemaFault(path, keyword, "it has an integer that a 64-bit float cannot represent")
        merged = list(_merged(part, refer, set()))
        patterns = [each for each in merged if isinstance(each.get("patternProperties"), Mapping)]
        if patterns and not compiler.has_key({"allOf": [*map(_keys_of, merged), {"properties": _named_by(merged)}]}):
            return SchemaFault(path, "patternProperties", "its patterns match only names in properties or required")
        if _num_optional(part, refer) > MANY and not compiler.begins(part_alone(schema, path)):
            keyword = next((key for key in ("anyOf", "oneOf", "allOf") if key in part), "properties")
            return SchemaFault(path, keyword, "it has too many optional properties")
    return None


def _finite(reached: Mapping[Path, Any], refer: Refer) -> set[int]:
    """Return the ids of the parts that have a finite derivation (the least fixed point)."""
    parts = [part for part in reversed(list(reached.values())) if isinstance(part, Mapping)]
    known = set(map(id, parts))
    finite: set[int] = set()

    def is_finite(part: Any) -> bool:
        return not isinstance(part, Mapping) or id(part) in finite or id(part) not in known

    def derives(part: Mapping[str, Any]) -> bool:
        reference, every = part.get("$ref"), part.get("allOf")
        unions = [each for key in ("anyOf", "oneOf") if isinstance(each := part.get(key), list) and each]
        return (
            (not isinstance(reference, str) or is_finite(refer(reference)))
            and (not isinstance(every, list) or all(map(is_finite, every)))
            and all(any(map(is_finite, union)) for union in unions)
        )

    while found := {id(part) for part in parts if id(part) not in finite and derives(part)}:
        finite |= found
    return finite


def _is_inexact(value: Any) -> bool:
    match value:
        case bool():
            return False
        case int():
            return abs(value) > EXACT and int(float(value)) != value if abs(value) < 10**300 else True
        case list():
            return any(map(_is_inexact, value))
        case dict():
            return any(map(_is_inexact, value.values()))
    return False


def _num_optional(part: Mapping[str, Any], refer: Refer) -> int:
    """Return the number of optional members of an object, or of all objects of a union; 0 for a mere reference."""
    if not part.keys() & {"properties", "allOf", "anyOf", "oneOf"}:
        return 0
    found, waiting, seen = 0, [part], set[int]()
    while waiting:
        for each in _merged(waiting.pop(), refer, set()):
            if id(each) in seen:
                continue
            seen.add(id(each))
            found += len(set(_names(each.get("properties"))) - set(_names(each.get("required"))))
            unions = [union for key in ("anyOf", "oneOf") if isinstance(union := each.get(key), list)]
            waiting += [branch for union in unions for branch in union if isinstance(branch, Mapping)]
    return found


def _merged(part: Any, refer: Refer, seen: set[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that all apply to the same value: the part, its reference and its `allOf` branches."""
    if not isinstance(part, Mapping):
        return
    yield part
    reference = part.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _merged(refer(reference), refer, seen)
    branches = part.get("allOf")
    for branch in branches if isinstance(branches, list) else ():
        yield from _merged(branch, refer, seen)


def _keys_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the same keys, with any values."""
    keys: dict[str, Any] = {"type": "object"}
    for name in ("properties", "patternProperties"):
        if isinstance(value := part.get(name), Mapping):
            keys[name] = {key: child is not False for key, child in value.items()}
    if part.get("additionalProperties") is False:
        keys["additionalProperties"] = False
    return keys


def _named_by(merged: Collection[Mapping[str, Any]]) -> dict[str, bool]:
    """Return a schema of members that forbids the named ones: in `properties`, or in `required` alone."""
    names = [name for part in merged for key in ("properties", "required") for name in _names(part.get(key))]
    return dict.fromkeys(names, False)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, (Mapping, list)) else []
