"""What JSON Schema can say: a schema for each feature, a value that it allows and one that it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NOTHING = object()
"""In place of a value: there is none."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of JSON Schema."""

    name: str
    schema: Any
    """The schema of a property `x`."""
    good: Any
    """A value that it allows."""
    bad: Any = NOTHING
    """A value that it does not allow, and that no answer has if the feature is enforced."""
    refused: str = ""
    """The keyword that cannot be enforced; empty: it is enforced, or asks for nothing."""
    where: str = "properties.x"
    """The part that has the keyword."""


_TREE = {
    "$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
                    "required": ["v"], "additionalProperties": False}},
}  # fmt: skip
_A_THEN_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
_CLOSED = {**_A_THEN_B, "additionalProperties": False}

FEATURES = (
    Feature("type string", {"type": "string"}, "a", 1),
    Feature("type integer", {"type": "integer"}, -7, 1.5),
    Feature("type number", {"type": "number"}, 1.5, "1"),
    Feature("type boolean", {"type": "boolean"}, True, 1),
    Feature("type null", {"type": "null"}, None, 0),
    Feature("several types", {"type": ["string", "null"]}, None, 1),
    Feature("no type", {}, {"a": [1]}),
    Feature("schema true", True, [1, "a"]),
    Feature("schema false", {"type": "object", "properties": {"a": False}}, {}, {"a": 1}),
    Feature("enum of texts", {"type": "string", "enum": ["a", "b"]}, "b", "c"),
    Feature("enum of any", {"enum": [1, "a", None, True, {"b": [1]}]}, {"b": [1]}, {"b": [2]}),
    Feature("const", {"const": "a"}, "a", "b"),
    Feature("const null", {"const": None}, None, 1),
    Feature("minimum and maximum", {"type": "integer", "minimum": 1, "maximum": 9}, 9, 10),
    Feature("bounds of numbers", {"type": "number", "minimum": 0.5, "maximum": 1.5}, 1.25, 1.6),
    Feature("exclusive bounds", {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3}, 2, 3),
    Feature("exclusive bounds of draft 4", {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, 2, 1),
    Feature("multipleOf", {"type": "integer", "multipleOf": 5}, 15, 16),
    Feature("multipleOf a fraction", {"type": "number", "multipleOf": 0.01}, 1.25, 1.255),
    Feature("bounds of 64 bits", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, 5,
            refused="minimum"),
    Feature("a contradiction", {"type": "integer", "minimum": 3, "maximum": 2}, 2, refused="minimum"),
    Feature("minLength and maxLength", {"type": "string", "minLength": 2, "maxLength": 3}, "ab", "a"),
    Feature("lengths as 2.0", {"type": "string", "minLength": 2.0}, "ab", "a"),
    Feature("pattern", {"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, "ab-12", "ab12"),
    Feature("pattern that is not anchored", {"type": "string", "pattern": "b"}, "abc", "ac"),
    Feature("pattern and length", {"type": "string", "pattern": "^a+$", "maxLength": 3}, "aa", "aaaa"),
    Feature("pattern with a look-ahead", {"type": "string", "pattern": "^(?!a)b"}, "b", refused="pattern"),
    Feature("pattern with a back-reference", {"type": "string", "pattern": "(a)\\1"}, "aa", refused="pattern"),
    Feature("pattern with a word's end", {"type": "string", "pattern": "\\ba\\b"}, "a", refused="pattern"),
    Feature("format date", {"type": "string", "format": "date"}, "2026-01-31", "2026-1-31"),
    Feature("format uuid", {"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "123e"),
    Feature("format email", {"type": "string", "format": "email"}, "a@b.org", "a"),
    Feature("format that is not known", {"type": "string", "format": "path"}, "/a"),
    Feature("format of another type", {"type": "integer", "format": "int32"}, 7, "7"),
    Feature("contentEncoding", {"type": "string", "contentEncoding": "base64", "contentMediaType": "a/b"}, "YQ=="),
    Feature("items", {"type": "array", "items": {"type": "integer"}}, [1, 2], ["a"]),
    Feature("minItems and maxItems", {"type": "array", "minItems": 1, "maxItems": 2}, [1], [1, 2, 3]),
    Feature("prefixItems beside additionalItems", {"type": "array", "prefixItems": [{"type": "string"}],
            "additionalItems": False}, ["a"], ["a", 1]),
    Feature("prefixItems", {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}],
                            "items": False, "minItems": 2}, ["a", 1], [1, "a"]),
    Feature("items as a list", {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
            ["a"], ["a", 1]),
    Feature("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1],
            refused="uniqueItems"),
    Feature("uniqueItems false", {"type": "array", "uniqueItems": False}, [1, 1]),
    Feature("contains", {"type": "array", "contains": {"const": 1}}, [1], refused="contains"),
    Feature("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}, [1, 1],
            refused="contains"),
    Feature("unevaluatedItems", {"type": "array", "unevaluatedItems": False}, [], refused="unevaluatedItems"),
    Feature("properties and required", {**_CLOSED, "required": ["a"]}, {"a": 1}, {"b": 1}),
    Feature("additionalProperties false", _CLOSED, {"a": 1}, {"c": 1}),
    Feature("additionalProperties as a schema", {"type": "object", "additionalProperties": {"type": "integer"}},
            {"c": 1}, {"c": "a"}),
    Feature("patternProperties", {"type": "object", "patternProperties": {"^a": {"type": "integer"}},
                                  "additionalProperties": False}, {"ab": 1}, {"b": 1}),
    Feature("patternProperties of a property", {**_CLOSED, "patternProperties": {"^a$": {"type": "integer"}}},
            {"a": 1}, refused="patternProperties"),
    Feature("patternProperties that overlap", {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
            {"ab": 1}, refused="patternProperties"),
    Feature("minProperties", {"type": "object", "minProperties": 1}, {"a": 1}, {}),
    Feature("maxProperties", {"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    Feature("minProperties of properties", {**_A_THEN_B, "minProperties": 1}, {"a": 1}, refused="minProperties"),
    Feature("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, {"a": 1},
            refused="propertyNames"),
    Feature("dependentRequired", {**_A_THEN_B, "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2},
            refused="dependentRequired"),
    Feature("dependentSchemas", {**_A_THEN_B, "dependentSchemas": {"a": {"required": ["b"]}}}, {"b": 2},
            refused="dependentSchemas"),
    Feature("dependencies", {**_A_THEN_B, "dependencies": {"a": ["b"]}}, {"b": 2}, refused="dependencies"),
    Feature("unevaluatedProperties", {**_A_THEN_B, "unevaluatedProperties": False}, {"b": 2},
            refused="unevaluatedProperties"),
    Feature("anyOf", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1, None),
    Feature("anyOf beside properties", {**_CLOSED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, {}),
    Feature("oneOf of different types", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, 1, None),
    Feature("oneOf that overlaps", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5, refused="oneOf"),
    Feature("oneOf with a constant that tells them apart",
            {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
            {"k": "b"}, {"k": "c"}),
    Feature("allOf", {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}, "ab", "bb"),
    Feature("not", {"type": "string", "not": {"const": "a"}}, "b", refused="not"),
    Feature("if, then, else", {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, 4, refused="if"),
    Feature("$ref to $defs", {"$ref": "#/$defs/s", "$defs": {}}, "a", 1),
    Feature("$ref to definitions", {"$ref": "#/definitions/s"}, "a", 1),
    Feature("$ref that recurs", {"$ref": "#/$defs/n"}, {"v": 1, "next": {"v": 2}}, {"next": {"v": 2}}),
    Feature("$ref to nothing", {"$ref": "#/$defs/nothing"}, "a", refused="$ref"),
    Feature("$ref to itself", {"$ref": "#/$defs/loop"}, "a", refused="$ref", where="$defs.loop"),
    Feature("$ref to elsewhere", {"$ref": "https://example.org/schema.json"}, "a", refused="$ref"),
    Feature("$dynamicRef", {"$dynamicRef": "#s"}, "a", refused="$dynamicRef"),
    Feature("default, title, description, examples",
            {"type": "integer", "default": None, "title": "t", "description": "d", "examples": [1]}, 1, "a"),
    Feature("$schema, $id, $comment", {"type": "integer", "$comment": "c", "$id": "https://example.org/x"}, 1, "a"),
    Feature("a dialect that is not known", {"type": "integer", "$schema": "https://example.org/schema"}, 1, "a"),
    Feature("nullable of OpenAPI", {"type": "string", "nullable": True}, "a", 1),
    Feature("deprecated, readOnly, discriminator",
            {"type": "integer", "deprecated": True, "readOnly": True, "discriminator": {"propertyName": "k"}}, 1, "a"),
    Feature("a word of the client's own", {"type": "integer", "x-order": 1, "foo": "bar"}, 1, "a"),
    Feature("null in place of keywords",
            {"type": "object", "properties": None, "required": None, "pattern": None, "enum": None}, {"a": 1}, 1),
    Feature("a type that there is not", {"type": "file"}, "a", refused="type"),
)  # fmt: skip

WHOLE = {
    "type": "object",
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"s": {"type": "string"}, **_TREE["$defs"]},
    "definitions": {"s": {"type": "string"}},
}


def whole_schema(feature: Feature) -> dict[str, Any]:
    """The schema of an object whose `x` is of a feature's schema."""
    loop = {"loop": {"$ref": "#/$defs/loop"}} if "loop" in str(feature.schema) else {}
    return {**WHOLE, "properties": {"x": feature.schema}, "$defs": {**WHOLE["$defs"], **loop}}  # type: ignore[dict-item]
