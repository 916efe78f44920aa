"""Parses JSON bodies without blocking the event loop for long, or again and again.

Python's parser cannot be interrupted, and its result takes up to twenty times the bytes of the body. So the parts of a
body are counted while it comes in. Bodies that are long or have many parts are parsed one at a time and in slices, with
pauses in which other requests are served; tenants take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

from baton.errors import InvalidRequest
from baton.turns import Turns

T = TypeVar("T")
MAX_NODES = 12_288
"""Maximum number of objects and lists in a body: more than the longest chat with the most tools has."""
MAX_TEXTS = 2**16
"""Maximum number of texts in a body, names of fields included."""
MAX_NAMES = 2048
"""Maximum number of fields of one object."""
MAX_VALUES = 2**20
"""Maximum number of values in a body: the token ids of the longest prompt that any model takes."""
SHORT_BYTES, SHORT_NODES, SHORT_VALUES = 256 * 2**10, 256, 2048
"""Limits of a body that is parsed at once, in a few milliseconds."""
MAX_WAITING_BYTES = 48 * 2**20
SLICE_S = 0.005
"""Time for which a body is parsed before other requests are served."""
SLICED_LEVELS = 6
"""Levels of objects and lists whose values are parsed one by one."""
MIN_RUN, MAX_RUN = 2, 4096
"""Number of consecutive values of a list, none of them a text, object or list, that are parsed together."""
PAUSE = 3.0
"""Pause after a piece of work, as a multiple of the time that it took."""


class PartCount:
    """Counter of the parts of a body, fed with its pieces as they come in."""

    def __init__(self) -> None:
        self._num_bytes = self._num_nodes = self._num_commas = self._num_quotes = 0
        self._escape = b""
        """A backslash at the end of the last piece, which escapes the first byte of the next one."""

    def add(self, piece: bytes) -> None:
        """Add the next bytes. Raises InvalidRequest if the body has more parts than the limits allow."""
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
        """True if the body may be parsed at once."""
        is_short = self._num_bytes <= SHORT_BYTES and self._num_nodes <= SHORT_NODES
        return is_short and self._num_commas + self._num_quotes // 2 <= SHORT_VALUES


class BodyParser:
    """Parser of JSON bodies of one HTTP server."""

    def __init__(self) -> None:
        self._long = PacedWork(MAX_WAITING_BYTES)

    async def parse(self, body: bytes, parts: PartCount, tenant_id: str, validate: Callable[[Any], T]) -> T:
        """Parse a body, and return the result of `validate` for its value.

        Args:
            parts: counts of the whole body.
            validate: converts the parsed value.

        Raises:
            InvalidRequest: an object has too many fields.
            Overloaded: too many long bodies wait.
            ValueError, RecursionError: the body is not JSON.
            Exception: any error of `validate`.
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
    """Parse for one slice of time, and return the value in a tuple if it is complete."""
    until_s = time.monotonic() + SLICE_S
    try:
        next(reading)
        while time.monotonic() < until_s:
            next(reading)
    except StopIteration as ended:
        return (ended.value,)
    return None


def sliced(text: str) -> Generator[None, None, Any]:
    """Parse a JSON text as `json.loads` does, and yield often, so that the caller can do something else in between.

    Raises:
        ValueError, RecursionError: the text is not JSON.
    """
    value, end = yield from _sliced_value(text, _skip(text, 0), SLICED_LEVELS)
    if (end := _skip(text, end)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _sliced_value(text: str, begin: int, levels: int) -> Generator[None, None, tuple[Any, int]]:
    """Parse the value that starts at `begin`, and return it with its end."""
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
    """Check for the character at `at`, and return the position of the next character behind it that is not space."""
    if not text.startswith(character, at):
        raise json.JSONDecodeError(f"Expecting {character!r} delimiter", text, at)
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise InvalidRequest(f"an object of the body has more than {MAX_NAMES} fields; send fewer")
    return dict(pairs)


def _text(body: bytes) -> str:
    """Decode a body as UTF-8 (RFC 8259), and nothing else.

    Python would accept other encodings, in which the parts cannot be counted by their bytes.
    """
    return body.decode("utf-8-sig", "surrogatepass")


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SPACE = re.compile(r"[ \t\n\r]*")
_RUN = re.compile(rf'(?:[^\[\]{{}}",]*,){{{MIN_RUN},{MAX_RUN}}}')


class PacedWork:
    """Queue of jobs that run one at a time, in pieces with a pause after each; the owners of jobs take turns.

        async with work.turn(tenant, size):
            async with work.piece():
                text = write(report)

    Args:
        max_waiting: maximum total size of the waiting jobs; one owner may have half of it.
    """

    def __init__(self, max_waiting: int) -> None:
        self.turn = Turns(1, max_waiting).turn
        self._next_s = 0.0
        """Earliest start of the next piece, on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def piece(self) -> AsyncGenerator[None]:
        """Context manager: waits until the pause after the previous piece is over."""
        await asyncio.sleep(self._next_s - time.monotonic())
        began_s = time.monotonic()
        try:
            yield
        finally:
            now_s = time.monotonic()
            self._next_s = now_s + PAUSE * (now_s - began_s)
