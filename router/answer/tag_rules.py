"""Grammar rules for arguments that are written as tags, one after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any

import regex

from baton.errors import InvalidRequest
from baton.json_schema import KEYWORDS, shown
from baton.structure import json_rule, refused_structure

SPACE = r"\s\x1c-\x1f"
"""Python's white space, for use inside a character class of an llguidance regular expression."""


def rules_of_tags(end_of_calls: str) -> list[str]:
    """Return the rules of any text in a tag: it must not contain what ends the tag or the call.

    Args:
        end_of_calls: the closing mark of a call.
    """
    mark = end_of_calls.replace("/", r"\/")
    return [rf'ENDS: "</parameter>" | /<\/function>[{SPACE}]*{mark}/', "IN_TAG: ANY & ~(ANY ENDS ANY)"]


_OBJECT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
     "default", "examples", "maxProperties")
)  # fmt: skip
"""Keywords of the arguments' schema that are enforced, or ask for nothing."""
_ANNOTATIONS = frozenset(
    ("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated",
     "description", "examples", "readOnly", "title", "writeOnly")
)  # fmt: skip
_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_KEY = regex.compile(r"[^>\n]+")
_END = "\n</parameter>\n"
_TEXT_KEYS = _ANNOTATIONS | {"type", "minLength", "maxLength"}
"""Allowed keywords in the schema of a text in a tag."""
_WHY = "this model writes arguments as tags"


def tag_rules(prefix: str, schema: Mapping[str, Any], place: str, *, is_loose: bool) -> tuple[str, list[str]]:
    """Return the rule of arguments that are written as tags, and the rules that it needs.

    Args:
        prefix: prefix of the names of these rules.
        place: path of the schema in the request.
        is_loose: whether parts of the schema that cannot be enforced are ignored.

    Raises:
        InvalidRequest: a part of the schema cannot be enforced; the message names it.
    """
    properties, required = schema.get("properties") or {}, frozenset(schema.get("required") or ())
    if not is_loose:
        _check(schema, properties, required, place)
    if not properties and schema.get("additionalProperties") is False:
        return "", []
    if not properties:
        any_tag = r'"<parameter=" /[^>\n]{1,64}/ ">\n" ' + f"{prefix}_text"
        return f"{prefix}_any*", [f"{prefix}_any: {any_tag}", _text_rule(f"{prefix}_text")]
    if odd := [key for key in properties if not _KEY.fullmatch(key)]:
        raise InvalidRequest(f"{_WHY}, so the name of an argument cannot be {odd[0][:64]!a}; rename it", "tools")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    names, rules = [], []
    for index, (key, value) in enumerate(properties.items()):
        name = f"{prefix}_{index}"
        names.append(name if key in required else f"{name}?")
        begin = _quoted(f"<parameter={key}>\n")
        at = f"{place}{shown(('properties', key))}"
        fault = _fault_of(value)
        if fault and not is_loose:
            raise refused_structure(f"{at}: {fault} cannot be enforced ({_WHY})")
        if fault or (value["type"] == "string" and "enum" not in value):
            rules += [f"{name}: {begin} {name}_text", _text_rule(f"{name}_text", _lengths_of(value))]
        elif value["type"] == "string":
            of_value = "(" + " | ".join(map(_quoted, value["enum"])) + ")"
            rules.append(f"{name}: {begin} {of_value} {_quoted(_END)}")
        else:
            full = {**shared, **value} if '"$ref"' in json.dumps(value) else value
            rules.append(f"{name}: {begin} {json_rule(full, at, is_loose=is_loose)} {_quoted(_END)}")
    return " ".join(names), rules


def _check(schema: Mapping[str, Any], properties: Mapping[str, Any], required: frozenset[str], place: str) -> None:
    """Raise InvalidRequest for a keyword of the arguments that the rules do not enforce."""
    if lost := next((key for key in schema if key not in _OBJECT_KEYS | _ANNOTATIONS and key in KEYWORDS), None):
        raise refused_structure(f"{place}: {lost} cannot be enforced ({_WHY})")
    if properties and not required <= properties.keys():
        raise refused_structure(f"{place}: required cannot be enforced ({_WHY}, and only those in properties)")
    least = schema.get("maxProperties", len(properties))
    if not isinstance(least, int) or least < len(properties):
        raise refused_structure(f"{place}: maxProperties cannot be enforced ({_WHY})")


def _fault_of(schema: Any) -> str:
    """Return the keyword of an argument's schema that cannot be enforced; empty: all can.

    The argument must be read back as the type that was written. A text of an enum must not look like the end of the
    tag.
    """
    if not isinstance(schema, Mapping):
        return "a schema without type"
    kind = schema.get("type")
    if kind not in _TYPES:
        return next((key for key in ("anyOf", "oneOf", "allOf", "$ref", "enum", "const") if key in schema), "type")
    if kind != "string":
        return ""
    if "enum" in schema:
        texts = schema["enum"]
        is_kept = isinstance(texts, list) and texts and all(isinstance(each, str) and "<" not in each for each in texts)
        if not is_kept:
            return "enum"
    known = _TEXT_KEYS | {"enum"}
    if odd := [str(key) for key in schema if key not in known and key in KEYWORDS]:
        return odd[0]
    if "enum" in schema and schema.keys() & {"minLength", "maxLength"}:
        return next(key for key in ("minLength", "maxLength") if key in schema)
    return "minLength" if _has_odd_length(schema) else ""


def _has_odd_length(schema: Mapping[str, Any]) -> bool:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    is_whole = type(least) is int and type(most) in (int, NoneType)
    return not is_whole or not 0 <= least <= (least if most is None else most)


def _lengths_of(schema: Any) -> Mapping[str, Any]:
    """Return the schema if its limits on a text's length can be enforced, else an empty schema."""
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return schema if is_text and not _has_odd_length(schema) else {}


def _text_rule(name: str, schema: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the rule of a text up to the end of its tag."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return f"{name}[lazy]: IN_TAG {_quoted(_END)}"
    # No "<": the end of the tag would count as text.
    return f"{name}: /[^<]{{{least},{'' if most is None else most}}}\\n<\\/parameter>\\n/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
