"""Schemas, regular expressions and grammars, after the kinds of the JSON Schema Test Suite."""

from __future__ import annotations

from typing import Any

TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(red|green|blue)+$", "maxLength": 20},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "hostname"},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 200},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 5},
    {"enum": ["a", "b", 3, None, True, 1.5]},
    {"enum": ["größer", "日本", "😀", '"quoted"', "back\\slash"]},
    {"const": {"a": [1, 2]}},
    {"const": "only this"},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"anyOf": [_object(a={"type": "integer"}), _object(b={"type": "boolean"})]},
    {"oneOf": [{"type": "boolean"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "a"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    _object(),
    _object(name={"type": "string", "maxLength": 8}, age={"type": "integer", "minimum": 0, "maximum": 150}),
    _object(["a"], a={"type": "boolean"}, b={"type": "null"}, c={"enum": [1, 2]}),
    _object([], a={"type": "boolean"}, b={"type": "boolean"}),
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    _object(inner=_object(deep=_object(deepest={"type": "boolean"}))),
    _object(list={"type": "array", "items": _object(a={"const": 1}), "minItems": 1, "maxItems": 2}),
    _object(None, **{"with space": {"type": "null"}, "größe": {"type": "null"}, '"': {"type": "null"}}),
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "minimum": 1, "maximum": 3}}},
    _object(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"type": "boolean"}}},
    {"type": "array", "items": {"$ref": "#/definitions/x"}, "maxItems": 2, "definitions": {"x": {"type": "null"}}},
    TREE,
    {"type": "array", "items": TREE["$defs"]["node"] | {"properties": {"value": {"type": "integer"}}}, "maxItems": 1},
    _object(when={"type": "string", "format": "date"}, kind={"enum": ["a", "b"]}, note={"type": ["string", "null"]}),
    {"anyOf": [_object(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
               _object(kind={"const": "dog"}, good={"type": "boolean"})]},
    _object(number={"type": "number", "exclusiveMinimum": 0, "maximum": 10}),
    _object(text={"type": "string", "minLength": 1, "maxLength": 12, "pattern": "^[a-z ]+$"}),
]  # fmt: skip
REGEXES = [
    "[0-9]{3}-[0-9]{4}",
    "(yes|no)( please)?",
    "[A-Za-zäöü]{1,8}",
    "(ab|ba)*c",
    r"\\d{1,3}(\\.\\d{1,3}){3}",
    "😀{1,3}",
    "a{0,3}b?",
    "[^a-z\\n]{2}",
]
GRAMMARS = [
    'start: "a" start "b" | "c"',
    'start: expr\nexpr: term ("+" term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]{1,2}/',
    'root ::= "yes" | "no" ws\nws ::= " "?',
    'root ::= item (", " item)*\nitem ::= [a-c] [0-9]',
]
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "object", "x-guidance": {"lenient": True}, "propertyNames": {"maxLength": 2}}, "propertyNames"),
    ({"$ref": "http://localhost/of-another-place"}, "localhost"),
    ({"type": "string", "pattern": "(?=a)a"}, "look-around"),
    ({"type": "of our own"}, "of our own"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
]
"""Schemas that are refused, and a word of the sentence."""
