"""The 64 bytes before every message on a transport: they identify the message and announce a later one.

    0      4        5      6       10      14           18           26              30    34     36         38
    | magic | version | flags | epoch | place | next bytes | generation | transfer hash | seq | part | layer_lo | ...
    38         40        44        48              52         60           64
    | layer_hi | unit_lo | unit_hi | payload bytes | checksum | header sum |                    little endian

`place` counts the messages of a transport. `next_bytes` is the payload of the message that follows LOOKAHEAD messages
later, so that a receiver always knows what to post. A message without payload is a signal: it announces a later
message, or keeps the transport alive.

The header contains length, sender, reservation and position in the plan, because no transport reports them: a shorter
message completes a receive, and a late one looks like the next.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import xxhash

from baton.errors import TransferCorrupted

if TYPE_CHECKING:
    from kvstore.transfer.protocol.plan import Chunk

HEADER_BYTES = 64
PROTOCOL_VERSION = 6
LOOKAHEAD = 2
"""Number of messages that are posted ahead on every transport; part of the protocol."""
MAGIC = b"BTKV"

CHECKED = 1
"""Flag: `checksum` holds the payload's checksum."""
VOID = 2
"""Flag: the payload was announced for a transfer that has been abandoned since, and is undefined."""

_FORMAT = struct.Struct("<4sBBIIIQ4sIHHHIIIQ")
_SUM = struct.Struct("<I")
_NUM_BYTES, _CHECKSUM_BYTES = struct.Struct("<I"), 8
assert _FORMAT.size + _SUM.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """Decoded header; the fields of a chunk are 0 in a signal."""

    flags: int
    epoch: int
    place: int
    next_bytes: int
    generation: int = 0
    transfer: bytes = bytes(4)
    seq: int = 0
    part: int = 0
    layer_lo: int = 0
    layer_hi: int = 0
    unit_lo: int = 0
    unit_hi: int = 0
    num_bytes: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        """Encode the header as HEADER_BYTES."""
        body = _FORMAT.pack(MAGIC, PROTOCOL_VERSION, *_fields(self))
        return body + _SUM.pack(xxhash.xxh32_intdigest(body))


_fields = attrgetter(*Header.__slots__)


def transfer_hash(transfer_id: str) -> bytes:
    """Return the 4 bytes that identify a transfer in headers."""
    return hashlib.blake2b(transfer_id.encode(), digest_size=4).digest()


def payload_bytes(data: bytes) -> int:
    """Return the payload size of a header's message, before any other part of the header is checked."""
    (num_bytes,) = _NUM_BYTES.unpack_from(data, _FORMAT.size - _CHECKSUM_BYTES - _NUM_BYTES.size)
    return int(num_bytes)


def unpack(data: bytes, epoch: int, place: int, num_bytes: int, slot_bytes: int) -> Header:
    """Decode the header of a message, and check that it is the one expected at this place of the transport.

    Raises:
        TransferCorrupted: it is not. Then no later message on the transport can be trusted either.
    """
    body, total = data[: _FORMAT.size], data[_FORMAT.size : HEADER_BYTES]
    magic, version, *fields = _FORMAT.unpack(body)
    if total != _SUM.pack(xxhash.xxh32_intdigest(body)) or (magic, version) != (MAGIC, PROTOCOL_VERSION):
        raise TransferCorrupted(f"message {place} of the transport is not what was sent: its header does not add up")
    header = Header(*fields)
    if (header.epoch, header.place, header.num_bytes) != (epoch, place, num_bytes) or header.next_bytes > slot_bytes:
        raise TransferCorrupted(
            f"message {place} of the transport, epoch {epoch}, {num_bytes} bytes, was expected; "
            f"message {header.place}, epoch {header.epoch}, {header.num_bytes} bytes, arrived"
        )
    return header


def verify(header: Header, chunk: Chunk, transfer: bytes, checked: bool) -> None:
    """Compare a chunk's header with the plan.

    Raises:
        TransferCorrupted: names the first difference.
    """
    span = (chunk.part, chunk.layer_lo, chunk.layer_hi, chunk.unit_lo, chunk.unit_hi, chunk.num_bytes)
    got = (header.part, header.layer_lo, header.layer_hi, header.unit_lo, header.unit_hi, header.num_bytes)
    _require(header, "transfer", header.transfer, transfer)
    _require(header, "place in the plan", got, span)
    _require(header, "flags", header.flags, CHECKED if checked else 0)


def verify_checksum(header: Header, checksum: int) -> None:
    """Compare a chunk's checksum with the one computed over the received payload.

    Raises:
        TransferCorrupted: they differ.
    """
    _require(header, "checksum", header.checksum, checksum)


def _require(header: Header, name: str, have: object, want: object) -> None:
    if have != want:
        raise TransferCorrupted(
            f"chunk {header.seq} of generation {header.generation}: its {name} is {have!r}, expected {want!r}"
        )
