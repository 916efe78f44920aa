"""JSON schemas of responses, derived from the types behind them: dataclasses and protobuf messages."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

Schemas = dict[str, Any]
"""A JSON schema, or schemas by their names."""
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


def of_dataclass(kind: type) -> Schemas:
    """Return the schema of `dataclasses.asdict` of a dataclass."""
    hints = typing.get_type_hints(kind)
    return described({each.name: _of_type(hints[each.name]) for each in dataclasses.fields(kind)})


def _of_type(annotation: Any) -> Schemas:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return of_dataclass(annotation)
    if isinstance(annotation, types.UnionType):
        return {"anyOf": [_of_type(each) for each in typing.get_args(annotation)]}
    if typing.get_origin(annotation) is tuple:
        return many(_of_type(typing.get_args(annotation)[0]))
    return _PLAIN[annotation]


def of_message(message: Descriptor) -> Schemas:
    """Return the schema of a protobuf message whose JSON includes zeros, and writes 64-bit numbers as numbers."""
    fields = {field.name: _of_field(field) for field in message.fields}
    return described(fields, {field.name for field in message.fields if field.has_presence})


def _of_field(field: FieldDescriptor) -> Schemas:
    if field.message_type is None:
        schema = _OF_PROTOBUF[field.cpp_type]
    elif field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _of_field(field.message_type.fields_by_name["value"])}
    else:
        schema = of_message(field.message_type)
    return many(schema) if field.is_repeated else schema
