"""Counts what a client's message holds before protobuf reads it: one message of two bytes takes a hundred and more in
memory.

The encoding is protobuf's (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor

from baton.errors import InvalidRequest

MAX_NUMBERS = 2**20
"""Numbers in one field: as many as the token ids of the longest prompt that any model takes."""
MAX_FIELDS = 32_768
"""Fields in a message, at all depths: many times those of the longest chat with the most tools."""
SHORT_BYTES = 64 * 2**10
"""Longest message that is read without a count."""
_VARINT, _LENGTH = 0, 2
_NUM_BYTES = {1: 8, 5: 4}
"""Bytes of a value by its wire type. Of others, a group's begin and end have none, and the rest are malformed."""
_MAX_VARINT_BYTES = 10
_ENDS_NO_NUMBER = bytes(range(0x80, 0x100))
_Inner: TypeAlias = Mapping[int, "_Inner | None"]
"""The fields of a message that hold messages, by their numbers, and the same of what they hold; None: it holds many
numbers in one value.
"""


def check_num_fields(raw: bytes, descriptor: Descriptor) -> None:
    """Checks a client's message as it came. What is not in protobuf's form may pass: protobuf refuses it.

    Raises:
        InvalidRequest: it has more than MAX_FIELDS fields, at all depths, or one of more than MAX_NUMBERS numbers.
    """
    if len(raw) > SHORT_BYTES:
        with contextlib.suppress(IndexError):
            _count(raw, 0, len(raw), _inner(descriptor), 0)


def _count(raw: bytes, at: int, end: int, inner: _Inner, num_fields: int) -> int:
    """Returns the number of fields so far, with those of a message that lies from `at` to `end`."""
    while at < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields; send fewer parts, numbers packed")
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
    """Returns a number and where it ends. Raises IndexError where the message ends before."""
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
