"""JSON schemas of responses, derived from the types behind them: dataclasses and protobuf messages.

`of_dataclass` and `of_message` add the schemas of a type and of all types in it to `into`, by name, and return a
reference.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

REF = "#/components/schemas/{model}"
Schemas = dict[str, Any]
"""Schemas by their names."""
_PLAIN: dict[type, Schemas] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": ["number", "null"]},  # JSON has no infinity, so null stands for an objective that is not set
    types.NoneType: {"type": "null"},
}
_NUMBER: Schemas = {"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"]}]}
"""Schema of a double as protobuf's JSON writes it."""
_OF_PROTOBUF: dict[int, Schemas] = {
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_DOUBLE: _NUMBER,
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "integer"},
}


def described(properties: Schemas, optional: typing.Collection[str] = ()) -> Schemas:
    """Return the schema of an object with these properties; all but the optional ones are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def many(schema: Schemas) -> Schemas:
    """Return the schema of a list."""
    return {"type": "array", "items": schema}


def of_dataclass(kind: type, into: Schemas) -> Schemas:
    """Return the schema of `dataclasses.asdict` of a dataclass."""
    if kind.__name__ not in into:
        into[kind.__name__] = {}  # a type may hold itself
        hints = typing.get_type_hints(kind)
        into[kind.__name__] = described(
            {each.name: _of_type(hints[each.name], into) for each in dataclasses.fields(kind)}
        )
    return {"$ref": REF.format(model=kind.__name__)}


def _of_type(annotation: Any, into: Schemas) -> Schemas:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return of_dataclass(annotation, into)
    if isinstance(annotation, types.UnionType):
        return {"anyOf": [_of_type(each, into) for each in typing.get_args(annotation)]}
    if typing.get_origin(annotation) is tuple:
        return many(_of_type(typing.get_args(annotation)[0], into))
    return _PLAIN[annotation]


def of_message(message: Descriptor, into: Schemas) -> Schemas:
    """Return the schema of a protobuf message whose JSON includes zeros, and writes 64-bit numbers as numbers."""
    if message.name not in into:
        into[message.name] = {}
        fields = {field.name: _of_field(field, into) for field in message.fields}
        into[message.name] = described(fields, {field.name for field in message.fields if field.has_presence})
    return {"$ref": REF.format(model=message.name)}


def _of_field(field: FieldDescriptor, into: Schemas) -> Schemas:
    if field.message_type is None:
        schema = _OF_PROTOBUF[field.cpp_type]
    elif field.message_type.GetOptions().map_entry:
        value = _of_field(field.message_type.fields_by_name["value"], into)
        return {"type": "object", "additionalProperties": value}
    else:
        schema = of_message(field.message_type, into)
    return many(schema) if field.is_repeated else schema
