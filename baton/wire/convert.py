"""Conversions that all contracts share: field by field, one of several kinds, and the limit on message sizes.

Protobuf messages and dataclasses here have the same field names, so one loop serves all of them. The contracts convert
the messages of each request and each token by explicit code, which is five times cheaper than this loop.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message

from baton.errors import BatonError
from baton.sampling import FinishReason

T = TypeVar("T")
MAX_CONTROL_BYTES = 64 * 1024
"""Longest ticket, message between workers, and start of a call without its tokens: many times the real sizes.

Reading a message takes a hundred times its bytes in memory, so a longer one is rejected unread.
"""


def to_pb(value: Any, pb_class: type[T]) -> T:
    """Convert a dataclass to the protobuf class with the same field names."""
    fields: dict[str, Any] = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if "finish_reason" in fields:
        fields["finish_reason"] = fields["finish_reason"] or ""
    for name, (_, pb) in _fields_of(type(value), pb_class).nested.items():
        inner = fields[name]
        fields[name] = [to_pb(item, pb) for item in inner] if isinstance(inner, tuple) else to_pb(inner, pb)
    return pb_class(**fields)


def from_pb(message: Any, cls: type[T]) -> T:
    """Convert a protobuf message to the dataclass with the same field names."""
    values: dict[str, Any] = {}
    shape = _fields_of(cls, type(message))
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if name == "finish_reason":
            value = FinishReason(value) if value else None
        elif name in shape.nested:
            inner = shape.nested[name][0]
            is_one = isinstance(value, Message)
            value = from_pb(value, inner) if is_one else tuple(from_pb(item, inner) for item in value)
        elif not isinstance(value, (str, bytes, int, float)):
            value = tuple(value)
        elif name in shape.optional and not message.HasField(name):
            value = None
        values[name] = value
    return cls(**values)


class Oneof:
    """Kinds of message that a protobuf `oneof` carries, each a field of the holder and a dataclass here.

    Args:
        holder: protobuf class that has the oneof.
        name: name of the oneof.
        kinds: dataclass of each field that is converted field by field.
    """

    def __init__(self, holder: type[Message], name: str, **kinds: type[Any]) -> None:
        self._name = name
        self._classes = kinds
        descriptors: Any = holder.DESCRIPTOR.fields_by_name
        self._fields: dict[type[Any], tuple[str, type[Any]]] = {
            cls: (field, message_factory.GetMessageClass(descriptors[field].message_type))
            for field, cls in kinds.items()
        }

    def to_field(self, value: Any) -> dict[str, Any]:
        """Return the holder's keyword argument that carries `value`."""
        field, pb_class = self._fields[type(value)]
        return {field: to_pb(value, pb_class)}

    def value_of(self, holder: Message) -> Any:
        """Return the value that a message carries; None: a kind that this version does not know."""
        field = holder.WhichOneof(self._name)
        return from_pb(getattr(holder, field), self._classes[field]) if field else None


def require_short(message: Message, max_bytes: float, error: type[BatonError]) -> None:
    """Raise `error` for a message that is too long."""
    if (num_bytes := message.ByteSize()) > max_bytes:
        raise error(f"a {message.DESCRIPTOR.name} of {num_bytes} bytes is not read here; the limit is {max_bytes}")


@dataclasses.dataclass(frozen=True, slots=True)
class _MessageFields:
    nested: dict[str, tuple[Any, Any]]
    """Fields that are messages themselves, or tuples of them: their dataclass and their protobuf class."""
    optional: frozenset[str]
    """Plain fields that may be absent."""


_FIELDS: dict[tuple[Any, Any], _MessageFields] = {}


def _fields_of(cls: Any, pb_class: Any) -> _MessageFields:
    if (known := _FIELDS.get((cls, pb_class))) is not None:
        return known
    nested: dict[str, tuple[Any, Any]] = {}
    optional: set[str] = set()
    for name, hint in typing.get_type_hints(cls).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        descriptor = pb_class.DESCRIPTOR.fields_by_name[name]
        if dataclasses.is_dataclass(inner):
            nested[name] = (inner, message_factory.GetMessageClass(descriptor.message_type))
        elif descriptor.has_presence:
            optional.add(name)
    return _FIELDS.setdefault((cls, pb_class), _MessageFields(nested, frozenset(optional)))
