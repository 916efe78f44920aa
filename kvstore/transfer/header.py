"""The 64 bytes before every chunk's payload, with which a chunk proves whose it is.

    0      4         6       8       12           20              28    32     34         36         38
    | magic | version | flags | epoch | generation | transfer hash | seq | part | layer_lo | layer_hi | ...
    38        42        46              50         58    60           64
    | unit_lo | unit_hi | payload bytes | checksum | pad | header sum |       little endian

Length, sender, reservation and place in the plan are all in it, because gloo reports none of them: a shorter message
completes a receive, and a late one looks like the next.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import xxhash

from baton.errors import TransferCorrupted

if TYPE_CHECKING:
    from kvstore.transfer.plan import Chunk

HEADER_BYTES = 64
PROTOCOL_VERSION = 1
MAGIC = b"BTKV"

CHECKED = 1
"""Flag: `checksum` holds the payload's checksum."""
GIVEN_UP = 2
"""Flag: the sender gave this transfer up. The payload means nothing, and only what is posted already follows."""

_FORMAT = struct.Struct("<4sHHIQ8sIHHHIIIQ2x")
_SUM = struct.Struct("<I")
assert _FORMAT.size + _SUM.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    magic: bytes
    version: int
    flags: int
    epoch: int
    generation: int
    transfer: bytes
    seq: int
    part: int
    layer_lo: int
    layer_hi: int
    unit_lo: int
    unit_hi: int
    num_bytes: int
    checksum: int

    def pack(self) -> bytes:
        body = _FORMAT.pack(*astuple(self))
        return body + _SUM.pack(xxhash.xxh32_intdigest(body))


def header_for(
    chunk: Chunk, seq: int, epoch: int, transfer_id: str, generation: int, flags: int, checksum: int
) -> Header:
    transfer = hashlib.blake2b(transfer_id.encode(), digest_size=8).digest()
    span = (chunk.layer_lo, chunk.layer_hi, chunk.unit_lo, chunk.unit_hi, chunk.num_bytes)
    return Header(MAGIC, PROTOCOL_VERSION, flags, epoch, generation, transfer, seq, chunk.part, *span, checksum)


def verify(data: bytes, expected: Header) -> None:
    """Compares a received header with the one that the plan says must come next.

    `expected.flags` and `expected.checksum` take part too: the receiver computes the checksum of what arrived.

    Raises:
        TransferCorrupted: naming the first field that differs.
    """
    body, total = data[: _FORMAT.size], data[_FORMAT.size : HEADER_BYTES]
    got = Header(*_FORMAT.unpack(body))
    for field in fields(Header):
        have, want = getattr(got, field.name), getattr(expected, field.name)
        if have != want:
            raise TransferCorrupted(
                f"chunk {expected.seq} of generation {expected.generation}: {field.name} is {have!r}, expected {want!r}"
            )
    if total != _SUM.pack(xxhash.xxh32_intdigest(body)):
        raise TransferCorrupted(
            f"chunk {expected.seq} of generation {expected.generation}: header sum does not match its content"
        )


def gives_up(data: bytes) -> bool:
    """Whether this is an intact header by which a sender ends a transfer early."""
    body, total = data[: _FORMAT.size], data[_FORMAT.size : HEADER_BYTES]
    intact = total == _SUM.pack(xxhash.xxh32_intdigest(body)) and body.startswith(MAGIC)
    return intact and bool(Header(*_FORMAT.unpack(body)).flags & GIVEN_UP)
