"""Records of requests in flight, so that another router can resume them after a router has died.

A record is stored under the tenant, the request id and a digest of everything that determines the tokens, because a
client may give one id to several requests. A record grows in parts, and each part names its writer. If a router that
counts as dead still writes, two routers may record the same request, and a reader uses the parts of only one of them.

    field   writer (8) | choice | start        value   finish reason | 0 | tokens from `start` on

If a sampler has drawn the tokens, a space and the sampler's name follow the finish reason. A router of a release that
does not know the sampler cannot read such a record, and generates the response from the start.
"""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.sampling import FinishReason
from kvstore.index.values import label

DIGEST_BYTES = 16
WRITER_BYTES = 8
_FIELD = struct.Struct(f"<{WRITER_BYTES}sHI")
FIELD_BYTES = _FIELD.size
assert array("I").itemsize == 4


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A client's name for a request. Several requests may share a key; their digests differ."""

    tenant_id: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPart:
    """Tokens of one choice of a request, from token number `start` on. Overlapping parts of one writer agree."""

    choice_index: int
    start: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    """The choice's finish reason, if the choice finishes with the last of these tokens."""
    sampler: str = ""
    """Name of the sampler that has drawn the tokens; empty if nothing was drawn or the name is unknown."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """New tokens of one request."""

    key: RecordKey
    digest: bytes
    """Digest of everything that determines the tokens."""
    writer: bytes
    """Id of the router process that writes the record."""
    parts: Sequence[RecordPart]


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """A request whose record is no longer needed."""

    key: RecordKey
    digest: bytes
    fields: tuple[bytes, ...] | None = None
    """Fields that this router has written; None: all fields of all writers.

    Another router may serve and record the same request by now.
    """


@dataclass(frozen=True, slots=True)
class Noted:
    """Recorded state of one choice."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    sampler: str = ""
    """Name of the sampler that has drawn the tokens; empty if nothing was drawn or the name is unknown."""


class RecordStore(Protocol):
    """Store of records.

    Every method raises `StoreUnavailable` when the store cannot be reached; its effect is then unknown.
    """

    async def write(self, entries: Sequence[RecordEntry], ended: Sequence[RecordEnd]) -> None:
        """Remove the fields that `ended` names, then add `entries`, which extends the lifetime of their records."""

    async def read(self, key: RecordKey, digest: bytes) -> dict[int, Noted]:
        """Return the recorded choices of a request; empty if there is no record.

        Raises:
            ValueError: the record cannot be read.
        """

    async def close(self) -> None:
        """Close the store."""


def field_of(entry: RecordEntry, part: RecordPart) -> bytes:
    """Return the name of the field that stores a part."""
    return _FIELD.pack(entry.writer, part.choice_index, part.start)


def fields_of(entry: RecordEntry) -> dict[bytes, bytes]:
    """Return the fields that store an entry."""
    return {
        field_of(entry, part): _head(part).encode() + b"\0" + array("I", part.token_ids).tobytes()
        for part in entry.parts
    }


def _head(part: RecordPart) -> str:
    reason = part.finish_reason or ""
    return f"{reason} {part.sampler}" if part.sampler else reason


def choices_of(fields: Mapping[bytes, bytes]) -> dict[int, Noted]:
    """Decode fields: for each choice, return the longest run of tokens from the first on that one writer has recorded.

    A part whose predecessor is missing is left out. Raises ValueError if a field cannot be read.
    """
    parts: dict[tuple[int, bytes], list[tuple[int, bytes]]] = defaultdict(list)
    for name, value in fields.items():
        if len(name) == _FIELD.size:
            writer, choice_index, start = _FIELD.unpack(name)
            parts[choice_index, writer].append((start, value))
    choices: dict[int, Noted] = {}
    for (choice_index, _), written in parts.items():
        noted = _joined(sorted(written))
        if len(noted.token_ids) > len(choices.get(choice_index, Noted()).token_ids):
            choices[choice_index] = noted
    return choices


def _joined(written: list[tuple[int, bytes]]) -> Noted:
    tokens = array("I")
    finish_reason = sampler = ""
    for start, value in written:
        head, _, packed = value.partition(b"\0")
        reason, _, drawn_by = head.decode().partition(" ")
        part = array("I", packed)
        if start > len(tokens):
            break
        if start + len(part) >= len(tokens):
            tokens[start:] = part
            finish_reason = reason or finish_reason
            sampler = label(drawn_by)
    return Noted(tuple(tokens), FinishReason(finish_reason) if finish_reason else None, sampler)
