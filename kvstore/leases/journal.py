"""What a router notes of the requests in flight, so that another one can go on when it dies.

A record lies under tenant and request id. It grows by parts, and each part names whose it is: while a router that is
thought dead still writes, two of them may note the same request, and what is read back is of one of them alone.

    field   digest (16) | writer (8) | choice | start        value   finish reason | 0 | tokens from `start` on
"""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.sampling import FinishReason

DIGEST_BYTES = 16
WRITER_BYTES = 8
_FIELD = struct.Struct(f"<{DIGEST_BYTES}s{WRITER_BYTES}sHI")
assert array("I").itemsize == 4


@dataclass(frozen=True, slots=True)
class RecordKey:
    tenant_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one choice of a request, from its token `start` on. Parts of one writer agree where they overlap."""

    choice_index: int
    start: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    """Of the choice, if it ends with the last of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is new of one request."""

    key: RecordKey
    digest: bytes
    """Of all that determines the tokens."""
    writer: bytes
    """One per router process."""
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request of which nothing has to be known any more."""

    key: RecordKey
    fields: tuple[bytes, ...] | None = None
    """Of its record, those that this router has written; None: all of it, whoever has. Another router may serve the
    same id by now, and note what it does."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What is known of one choice."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


class RecordStore(Protocol):
    """Every method raises `StoreUnavailable` when the store cannot be reached; what it did until then is unknown."""

    async def write(self, entries: Sequence[Entry], ended: Sequence[Ended]) -> None:
        """Forgets what `ended` names, then adds `entries`. A record written to lives on."""

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        """The choices of a request; empty if nothing is known of it, or only of another one under the same key.

        Raises:
            ValueError: what lies there cannot be read.
        """

    async def close(self) -> None: ...


def field_of(entry: Entry, part: Part) -> bytes:
    """The name under which the store keeps it."""
    return _FIELD.pack(entry.digest, entry.writer, part.choice_index, part.start)


def fields_of(entry: Entry) -> dict[bytes, bytes]:
    """What the store keeps of it."""
    return {
        field_of(entry, part): (part.finish_reason or "").encode() + b"\0" + array("I", part.token_ids).tobytes()
        for part in entry.parts
    }


def choices_of(fields: Mapping[bytes, bytes], digest: bytes) -> dict[int, Noted]:
    """The reverse: the longest run from the first token on that one writer has noted of each choice.

    A part whose predecessor is lost is left out. ValueError if one cannot be read.
    """
    parts: dict[tuple[int, bytes], list[tuple[int, bytes]]] = defaultdict(list)
    for name, value in fields.items():
        if len(name) == _FIELD.size and name.startswith(digest):
            _, writer, choice_index, start = _FIELD.unpack(name)
            parts[choice_index, writer].append((start, value))
    choices: dict[int, Noted] = {}
    for (choice_index, _), written in parts.items():
        noted = _joined(sorted(written))
        if len(noted.token_ids) > len(choices.get(choice_index, Noted()).token_ids):
            choices[choice_index] = noted
    return choices


def _joined(written: list[tuple[int, bytes]]) -> Noted:
    tokens = array("I")
    finish_reason = ""
    for start, value in written:
        reason, _, packed = value.partition(b"\0")
        part = array("I", packed)
        if start > len(tokens):
            break
        if start + len(part) >= len(tokens):
            tokens[start:] = part
            finish_reason = reason.decode() or finish_reason
    return Noted(tuple(tokens), FinishReason(finish_reason) if finish_reason else None)
