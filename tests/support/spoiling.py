"""Requests that are as they should be but for some of their parts: what a careless or hostile client sends.

The same dice make the same request, so that what has failed can be repeated.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# -- protobuf --------------------------------------------------------------------------------------------------------

EXTREMES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_BYTES: (b"", b"\0", b"seed", b"x" * 17, b"\xff" * 100_000),
    FieldDescriptor.TYPE_DOUBLE: (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.TYPE_FLOAT: (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.TYPE_INT32: (0, 1, -1, -(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, -(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_STRING: (
        *("", "x", "\0", "shm", "tcp", "int8", "float32", "no:such:place:0", "y" * 100_000),
        *("{}", '{"": {"": null}}', "[" * 3000, "auto", "required", "\U0001f408\u200d\u2b1b\u2028"),
    ),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 3, 15, 17, 64, 999, 1023, 1024, 4096, 2**16, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**53, 2**63, 2**64 - 1),
}
LENGTHS = (0, 1, 2, 50, 2_000, 50_000)
MAX_SPOILED, MAX_TEXTS = 5 * 2**20, 2**20
"""Bytes of a list of messages, and of a list of texts: more than any worker takes. The sender's own memory is measured,
too, and the same message may be sent many times at once."""


def fields_in(message: Message) -> list[tuple[Message, Any]]:
    """Every field of it and of what it holds, with the message that it is in."""
    found: list[tuple[Message, Any]] = []
    for each in message.DESCRIPTOR.fields:
        found.append((message, each))
        if each.message_type is None or each.message_type.GetOptions().map_entry:
            continue
        if each.is_repeated:
            found += [pair for inner in list(getattr(message, each.name))[:3] for pair in fields_in(inner)]
        elif message.HasField(each.name):
            found += fields_in(getattr(message, each.name))
    return found


def spoiled(message: Message, dice: random.Random) -> None:
    """Changes up to three fields, at any depth."""
    for _ in range(dice.randint(1, 3)):
        inner, changing = dice.choice(fields_in(message))
        if changing.is_repeated:
            _spoil_list(getattr(inner, changing.name), changing, dice)
        elif changing.message_type is not None:
            inner.ClearField(changing.name)
        else:
            setattr(inner, changing.name, dice.choice(EXTREMES[changing.type]))


def _spoil_list(values: Any, changing: Any, dice: random.Random) -> None:
    length = dice.choice(LENGTHS)
    if changing.message_type is None:
        drawn = [dice.choice([*EXTREMES[changing.type], *values[:3]]) for _ in range(min(length, 2_000))]
        longest = max((len(value) for value in drawn if isinstance(value, str | bytes)), default=0)
        values[:] = drawn[: MAX_TEXTS // longest] if longest else drawn
    elif changing.message_type.GetOptions().map_entry:
        key, value = (changing.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(min(length, 50)):
            values[dice.choice(EXTREMES[key.type])] = dice.choice(EXTREMES[value.type])
    else:
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        del values[:]
        empty = message_factory.GetMessageClass(changing.message_type)()
        length = min(length, MAX_SPOILED // max((each.ByteSize() + 2 for each in kept), default=1))
        values.extend([dice.choice([empty, *kept]) for _ in range(length)])


# -- JSON ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raw:
    """Stands in a value for text that is written as it is."""

    text: str


NUMBERS = (0, -1, 1, 2, 7, 16, 17, 1024, 0.5, -0.0, 1.0, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, -(2**63) - 1)
TEXTS = (
    *("", " ", "x", "0", "1.5", "true", "null", "{}", "auto", "none", "user", "assistant", "system", "tool"),
    *("\0", "\ud800", "\udc00\ud800", "\u2028\u2029", "\ufeff", "e\u0301" * 500, "\U0001f408\u200d\u2b1b", "ﷺ" * 200),
    *("<|im_end|>", "<tool_call>", "</think>", "[" * 3000, "x" * 100_000, "%s%n{0}", "../../etc/passwd"),
)
NAMES = ("", " ", "x", "\0", "\ud800", "type", "model", "messages", "__proto__", "__class__", "$ref", "k" * 10_000)
ODD: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"": None}, {"\ud800": "\ud800"}, {"$ref": "#"}),
    *(_Raw("NaN"), _Raw("Infinity"), _Raw("-Infinity"), _Raw("1e999"), _Raw("-0"), _Raw("9" * 400), _Raw("9" * 5000)),
    *(_Raw("[" * depth + "]" * depth) for depth in (20, 150, 900, 20_000)),
    *(_Raw('{"a":' * depth + "1" + "}" * depth) for depth in (20, 150, 900, 20_000)),
)
COPIES = (1, 2, 3, 130, 1100)
_Place = tuple[Any, Any]
"""Where a value is: in a list or an object, and under which index or name."""


def odd(dice: random.Random) -> Any:
    """Returns a value that a field seldom has. The caller may change it: no other one has it."""
    return copy.deepcopy(dice.choice(dice.choice((NUMBERS, TEXTS, ODD))))


def spoiled_json(body: Any, dice: random.Random) -> bytes:
    """Returns an object as JSON after up to three changes, any of which may leave it well-formed or not."""
    changed = [json.loads(json.dumps(body))]
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        if changed:
            inner, key = dice.choice(_places(changed))
            dice.choice(_CHANGES)(inner, key, dice)
    raw = written(changed[0] if changed else _Raw("")).encode("utf-8", "surrogatepass")
    return _spoiled_bytes(raw, dice) if dice.random() < 0.06 else raw


def written(value: Any) -> str:
    """Returns a value as JSON."""
    match value:
        case _Raw(text):
            return text
        case dict():
            return "{" + ",".join(f"{json.dumps(name)}:{written(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def _places(value: Any) -> list[_Place]:
    """Every place in a value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)) and value[key]:
            found += _places(value[key])
    return found


def _replace(inner: Any, key: Any, dice: random.Random) -> None:
    inner[key] = odd(dice)


def _remove(inner: Any, key: Any, dice: random.Random) -> None:
    del inner[key]


def _add(inner: Any, key: Any, dice: random.Random) -> None:
    if isinstance(inner[key], dict):
        inner[key][dice.choice(NAMES)] = odd(dice)
    elif isinstance(inner[key], list):
        inner[key].insert(dice.randint(0, len(inner[key])), odd(dice))
    else:
        inner[key] = dice.choice(([inner[key]], {dice.choice(NAMES): inner[key]}, [[inner[key]]]))


def _rename(inner: Any, key: Any, dice: random.Random) -> None:
    if isinstance(inner, dict):
        inner[dice.choice((*NAMES, key.upper(), key + " ", key[:-1]))] = inner.pop(key)


def _say_twice(inner: Any, key: Any, dice: random.Random) -> None:
    """The same name twice in an object; many copies in a list."""
    if isinstance(inner, dict):
        inner[key] = _Raw(f"{written(inner[key])},{json.dumps(key)}:{written(odd(dice))}")
    else:
        inner += [inner[key]] * dice.choice(COPIES)


def _turn(inner: Any, key: Any, dice: random.Random) -> None:
    """Another type for the same thing."""
    match inner[key]:
        case bool(value):
            inner[key] = dice.choice((int(value), str(value).lower(), not value))
        case int(value) | float(value):
            inner[key] = dice.choice((str(value), -value, float(value), value + 0.5, value * 1000, bool(value)))
        case str(value):
            inner[key] = dice.choice((list(value), value * 50, value.swapcase(), {"text": value}, value[:1]))
        case list(value):
            inner[key] = dice.choice((value[:1], value[::-1], {str(i): each for i, each in enumerate(value)}))
        case dict(value):
            inner[key] = dice.choice((list(value), list(value.values()), written(value)))


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    *(_replace, _replace, _replace, _remove, _add, _add, _rename, _say_twice, _turn, _turn),
)


def _spoiled_bytes(raw: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(raw))
    noise = dice.choice((b"\0", b"\xff", b'"', b"}", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 100_000))
    return dice.choice((raw[:at], raw[at:], raw[:at] + noise + raw[at:], noise + raw, raw + raw, raw + noise, b""))


def spoiled_wire(raw: bytes, dice: random.Random) -> bytes:
    """Returns the bytes of a message of protobuf after one change, which may leave it well-formed or not."""
    at = dice.randint(0, len(raw))
    field = bytes([dice.randrange(128)])
    noise = dice.choice(
        (field + b"\x01", field + b"\x02\xff\xff", field + b"\xff" * 12, b"\x98\x06\x01", dice.randbytes(9))
    )
    nested = b""
    for _ in range(dice.choice((1, 90, 200))):
        nested = b"\x22" + varint(len(nested)) + nested
    flipped = bytearray(raw or b"\0")
    flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
    return dice.choice(
        (raw[:at], raw[:at] + noise + raw[at:], raw + noise, bytes(flipped), raw + nested, dice.randbytes(40))
    )


def varint(number: int) -> bytes:
    """Returns a number as protobuf writes it."""
    low = bytes([number & 127])
    return low if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)
