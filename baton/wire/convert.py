"""Shared code of all contracts: conversions field by field, one of several kinds, and the bounds of messages.

Protobuf messages and dataclasses here have the same field names, so one loop serves all of them. The contracts convert
the messages of each request and each token by explicit code, which is five times cheaper than this loop.

The fields of a client's message are counted before protobuf reads it, because an inner message of two bytes takes more
than a hundred in memory. The encoding is protobuf's (protobuf.dev/programming-guides/encoding).

Protobuf keeps unknown fields and raises nothing. An unknown field of a client is rejected by its number, and never
silently dropped. A router's field is not sent to a worker that does not know it: each worker lists in its lease the
fields of a router's messages that it knows. A field is written "SequenceSpec.9".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.messages import ROUTERS_SAMPLING
from baton.sampling import FinishReason, SamplingParams
from baton.v1 import inference_pb2, worker_pb2

T = TypeVar("T")
MAX_CONTROL_BYTES = 64 * 1024
"""Longest ticket, message between workers, and start of a call without its tokens: many times the real sizes.

Reading a message takes a hundred times its bytes in memory, so a longer one is rejected unread.
"""
_Fields = tuple[tuple[str, bool, "_Fields"], ...]
"""Fields of a message that contain messages: name, whether the field is repeated, and the same for their fields."""
SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
"""Fields of the contract's `SamplingParams` that this release has."""
MAX_ITEMS = 4096
"""Maximum items of a repeated field: the limit of the longest one."""
MAX_NUMBERS = 2**20
"""Maximum numbers in one field: the number of token ids of the longest prompt of any model."""
MAX_FIELDS = 32_768
"""Maximum fields in a message, at all depths: many times those of the longest chat with the most tools."""
SHORT_BYTES = 64 * 2**10
"""Longest message that is read without a count."""
_VARINT, _LENGTH = 0, 2
_NUM_BYTES = {1: 8, 5: 4}
"""Size of a value by its wire type. A group's start and end have no size; other types are malformed."""
_MAX_VARINT_BYTES = 10
_ENDS_NO_NUMBER = bytes(range(0x80, 0x100))
_Inner: TypeAlias = Mapping[int, "_Inner | None"]
"""Fields of a message that contain messages, by number, each with the same mapping for its messages.

None: the field packs many numbers in one value.
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for bytes that are not a message, which gRPC passes on until they are rejected."""

    reason: str


def readable(parse: Callable[[bytes], Message]) -> Callable[[bytes], Message | Unreadable]:
    """Return the parser wrapped so that it does not raise.

    On an error, gRPC would end the call as after a defect of the server, and log a traceback.
    """

    def read(raw: bytes) -> Message | Unreadable:
        try:
            return parse(raw)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def check_known(message: Message) -> None:
    """Check a client's message.

    Raises:
        InvalidRequest: a field has more messages than allowed.
        Unsupported: it has a field, at any depth, that this release does not know.
    """
    if path := unknown_field(message):
        raise Unsupported(
            f"{message.DESCRIPTOR.name} has a field {path} that this release does not know, or not in this form; "
            "leave it unset, or ask a release that knows it",
            path,
        )


def unknown_field(message: Message) -> str:
    """Return the path of an unknown field at any depth, such as "sampling.99"; empty: there is none.

    Raises:
        InvalidRequest: a field has more messages than allowed.
    """
    return _unknown_field(message, _message_fields(message.DESCRIPTOR))


def _unknown_field(message: Message, fields: _Fields) -> str:
    if unknown := UnknownFieldSet(message):
        return str(unknown[0].field_number)
    for name, is_repeated, inner in fields:
        if is_repeated:
            items = getattr(message, name)
            check_items(name, len(items))
            for index in range(len(items)):  # for an empty list, its iterator costs more than all the rest
                if path := _unknown_field(items[index], inner):
                    return f"{name}[{index}].{path}"
        elif message.HasField(name) and (path := _unknown_field(getattr(message, name), inner)):
            return f"{name}.{path}"
    return ""


@functools.cache
def _message_fields(descriptor: Descriptor) -> _Fields:
    """Return the fields of a message that contain messages.

    No map holds messages here, and a map entry with unknown fields is an unknown field of the map's owner.
    """
    return tuple(
        (field.name, field.is_repeated, _message_fields(field.message_type))
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )


def fields_in(message: Message) -> set[str]:
    """Return the set fields of a message and of its inner messages, each as "SequenceSpec.9"."""
    found = {f"{message.DESCRIPTOR.name}.{field.number}" for field, _ in message.ListFields()}
    for name, is_repeated, _ in _message_fields(message.DESCRIPTOR):
        if is_repeated or message.HasField(name):
            inner = getattr(message, name)
            found.update(*(fields_in(item) for item in (inner if is_repeated else (inner,))))
    return found


@functools.lru_cache(maxsize=64)
def fields_unknown_to(known_fields: str) -> frozenset[str]:
    """Return the fields of a router's messages that this release knows and a worker does not.

    Args:
        known_fields: `WorkerInfo.known_fields`; unreadable or missing entries name no field.
    """
    return frozenset(_numbered(KNOWN_FIELDS) - _numbered(known_fields))


def named(fields: Iterable[str]) -> str:
    """Return the names of fields of a router's messages for people: "SamplingParams.min_p (5)"."""
    descriptors = _reachable(worker_pb2.Command.DESCRIPTOR)
    words = []
    for message, _, number in (field.partition(".") for field in sorted(fields)):
        words.append(f"{message}.{descriptors[message].fields_by_number[int(number)].name} ({number})")
    return ", ".join(words)


def _numbered(known_fields: str) -> set[str]:
    parts = (part.partition(":") for part in known_fields.split())
    return {f"{message}.{number}" for message, _, numbers in parts for number in numbers.split(",") if number}


def _reachable(descriptor: Descriptor) -> dict[str, Descriptor]:
    found = {descriptor.name: descriptor}
    for name, _, _ in _message_fields(descriptor):
        inner = descriptor.fields_by_name[name].message_type
        assert inner is not None
        found |= _reachable(inner)
    return found


def _known_numbers(descriptor: Descriptor) -> str:
    """Return the numbers of the fields that a worker supports; this release rejects some sampling fields."""
    is_sampling = descriptor.name == inference_pb2.SamplingParams.DESCRIPTOR.name
    heeded = SAMPLING_NAMES - ROUTERS_SAMPLING
    return ",".join(str(f.number) for f in descriptor.fields if not is_sampling or f.name in heeded)


KNOWN_FIELDS = " ".join(
    f"{name}:{_known_numbers(descriptor)}"
    for name, descriptor in sorted(_reachable(worker_pb2.Command.DESCRIPTOR).items())
)
"""Fields of a router's messages that this release knows, as a worker lists them in its lease.

For example "Command:1,2 SequenceSpec:1,2,3".
"""
PERMIT_FIELD = f"PrefixSource.{worker_pb2.PrefixSource.PERMIT_FIELD_NUMBER}"
"""The one field of a router's messages that is left out for a worker that does not know it."""


def check_items(name: str, num_items: int) -> None:
    """Raise InvalidRequest for more items than any field may have, except for the token ids of a prompt."""
    if num_items > MAX_ITEMS:
        raise InvalidRequest(f"{name} has {num_items} items; send at most {MAX_ITEMS}", name)


def check_num_fields(raw: bytes, descriptor: Descriptor) -> None:
    """Check a client's raw message. Malformed messages may pass, since protobuf rejects them.

    Raises:
        InvalidRequest: it has more than MAX_FIELDS fields, at all depths, or one of more than MAX_NUMBERS numbers.
    """
    if len(raw) > SHORT_BYTES:
        with contextlib.suppress(IndexError):
            _count(raw, 0, len(raw), _inner(descriptor), 0)


def _count(raw: bytes, at: int, end: int, inner: _Inner, num_fields: int) -> int:
    """Return the number of fields so far, including those of the message from `at` to `end`."""
    while at < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise InvalidRequest(
                f"the message has more than {MAX_FIELDS} fields, including nested ones; send fewer entries, such as "
                "chat messages or tools, and encode repeated numbers as packed fields"
            )
        tag, at = (raw[at], at + 1) if raw[at] < 0x80 else _varint(raw, at)
        kind = tag & 7
        if kind == _LENGTH:
            length, at = (raw[at], at + 1) if raw[at] < 0x80 else _varint(raw, at)
            if (number := tag >> 3) in inner:
                if (held := inner[number]) is not None:
                    num_fields = _count(raw, at, at + length, held, num_fields)
                elif length > MAX_NUMBERS and len(raw[at : at + length].translate(None, _ENDS_NO_NUMBER)) > MAX_NUMBERS:
                    raise InvalidRequest(f"the message has a field of more than {MAX_NUMBERS} numbers; send fewer")
            at += length
        elif kind == _VARINT:
            _, at = _varint(raw, at)
        else:
            at += _NUM_BYTES.get(kind, 0)
    return num_fields


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number and its end position. Raises IndexError if the message ends before."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = raw[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    return value, at + index + 1


@functools.cache
def _inner(descriptor: Descriptor) -> _Inner:
    return {
        field.number: None if field.message_type is None else _inner(field.message_type)
        for field in descriptor.fields
        if field.message_type is not None or field.is_packed
    }
