"""Count of the fields of a client's message before protobuf reads it.

An inner message of two bytes takes more than a hundred in memory. The encoding is protobuf's
(protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor

from baton.errors import InvalidRequest

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
