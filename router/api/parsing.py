"""Reads bodies: no reading is to hold the event loop for long, or again and again.

Python's parser cannot be interrupted, and what it makes of a body takes up to twenty times the bytes of that. So its
parts are counted while it comes in, and bodies that are long or have many parts are read one at a time and in slices,
with pauses in which others are served; tenants take turns.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from baton.errors import InvalidRequest
from router.api.paced import PacedWork

T = TypeVar("T")
MAX_NODES = 12_288
"""Objects and lists in a body: more than the longest chat with the most tools has."""
MAX_TEXTS = 2**16
"""Texts in a body, names of fields among them."""
MAX_NAMES = 2048
"""Fields of one object."""
MAX_VALUES = 2**20
"""Numbers and texts in a body: as many as the token ids of the longest prompt that any model takes."""
SHORT_BYTES, SHORT_NODES, SHORT_VALUES = 256 * 2**10, 256, 2048
"""What a body has at most that is read at once, in a few milliseconds."""
MAX_WAITING_BYTES = 48 * 2**20
SLICE_S = 0.005
"""Time for which a body is read before others are served."""
SLICED_LEVELS = 6
"""Levels of objects and lists whose values are read one after the other."""
MIN_RUN, MAX_RUN = 2, 4096
"""Values in a row of a list, none of them text, object or list, that are read together."""


class PartCount:
    """Counts the parts of a body whose pieces are added as they come in."""

    def __init__(self) -> None:
        self._num_bytes = self._num_nodes = self._num_commas = self._num_quotes = 0
        self._escape = b""
        """A backslash at the end of the last piece, which escapes the first byte of the next one."""

    def add(self, piece: bytes) -> None:
        """Adds the next bytes. Raises InvalidRequest when the body has more parts so far than any may have."""
        self._num_bytes += len(piece)
        piece = (self._escape + piece).replace(rb"\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._num_quotes % 2 :: 2])
        self._num_quotes += len(parts) - 1
        self._num_nodes += outside.count(b"{") + outside.count(b"[")
        self._num_commas += outside.count(b",")
        if self._num_commas >= MAX_VALUES:
            raise InvalidRequest(f"the body has more than {MAX_VALUES} values; shorten the prompt")
        if self._num_quotes > 2 * MAX_TEXTS:
            raise InvalidRequest(f"the body has more than {MAX_TEXTS} texts and names; send fewer")
        if self._num_nodes > MAX_NODES:
            raise InvalidRequest(f"the body has more than {MAX_NODES} objects and lists; send fewer")

    @property
    def are_few(self) -> bool:
        """Whether the body may be read at once."""
        is_short = self._num_bytes <= SHORT_BYTES and self._num_nodes <= SHORT_NODES
        return is_short and self._num_commas + self._num_quotes // 2 <= SHORT_VALUES


class BodyParser:
    """The reader of JSON bodies of one HTTP server."""

    def __init__(self) -> None:
        self._long = PacedWork(MAX_WAITING_BYTES)

    async def parse(self, body: bytes, parts: PartCount, tenant_id: str, validate: Callable[[Any], T]) -> T:
        """Returns what is made of the value that a body has.

        Args:
            parts: those of the whole body.
            validate: makes something of the value.

        Raises:
            InvalidRequest: an object has too many fields.
            Overloaded: many long ones wait.
            ValueError, RecursionError: it is no JSON.
            Exception: whatever `validate` raises.
        """
        if parts.are_few:
            return validate(_DECODER.decode(_text(body)))
        async with self._long.turn(tenant_id, len(body)):
            reading, read = sliced(_text(body)), None
            del body  # the text is as long
            while read is None:
                async with self._long.piece():
                    read = _read_on(reading)
            async with self._long.piece():
                return validate(*read)


def _read_on(reading: Generator[None, None, Any]) -> tuple[Any] | None:
    """Reads for a slice of time, and returns the value, in a tuple, if that is its end."""
    until_s = time.monotonic() + SLICE_S
    try:
        next(reading)
        while time.monotonic() < until_s:
            next(reading)
    except StopIteration as ended:
        return (ended.value,)
    return None


def sliced(text: str) -> Generator[None, None, Any]:
    """Reads a JSON text as `json.loads` does, and yields again and again, so that the reader can do something else.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    value, end = yield from _sliced_value(text, _skip(text, 0), SLICED_LEVELS)
    if (end := _skip(text, end)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _sliced_value(text: str, begin: int, levels: int) -> Generator[None, None, tuple[Any, int]]:
    """Reads the value that begins there, and returns where it ends, too."""
    if levels and text.startswith("[", begin):
        return (yield from _sliced_list(text, begin + 1, levels - 1))
    if levels and text.startswith("{", begin):
        return (yield from _sliced_object(text, begin + 1, levels - 1))
    yield
    return _DECODER.raw_decode(text, begin)


def _sliced_list(text: str, begin: int, levels: int) -> Generator[None, None, tuple[list[Any], int]]:
    values: list[Any] = []
    at = _skip(text, begin)
    if text.startswith("]", at):
        return values, at + 1
    while True:
        if run := _RUN.match(text, at):
            try:
                values += json.loads(f"[{run[0]}0]")[:-1]
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos - len("[")) from None
            at = _skip(text, run.end())
            yield
        value, at = yield from _sliced_value(text, at, levels)
        values.append(value)
        at = _skip(text, at)
        if text.startswith("]", at):
            return values, at + 1
        at = _expect(",", text, at)


def _sliced_object(text: str, begin: int, levels: int) -> Generator[None, None, tuple[dict[str, Any], int]]:
    pairs: list[tuple[str, Any]] = []
    at = _skip(text, begin)
    if text.startswith("}", at):
        return {}, at + 1
    while True:
        if not text.startswith('"', at):
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _DECODER.raw_decode(text, at)
        at = _expect(":", text, _skip(text, at))
        value, at = yield from _sliced_value(text, at, levels)
        pairs.append((name, value))
        at = _skip(text, at)
        if text.startswith("}", at):
            return _object(pairs), at + 1
        at = _expect(",", text, at)


def _expect(character: str, text: str, at: int) -> int:
    """Returns where what follows the character begins."""
    if not text.startswith(character, at):
        raise json.JSONDecodeError(f"Expecting {character!r} delimiter", text, at)
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """Returns where what follows white space begins."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise InvalidRequest(f"an object of the body has more than {MAX_NAMES} fields; send fewer")
    return dict(pairs)


def _text(body: bytes) -> str:
    """The text of a body. UTF-8 alone is read (RFC 8259): Python would read other encodings, in which the parts cannot
    be counted by their bytes.
    """
    return body.decode("utf-8-sig", "surrogatepass")


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SPACE = re.compile(r"[ \t\n\r]*")
_RUN = re.compile(rf'(?:[^\[\]{{}}",]*,){{{MIN_RUN},{MAX_RUN}}}')
