from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferCorrupted
from kvstore.transfer.protocol.chunk_header import (
    CHECKED,
    HEADER_BYTES,
    VOID,
    Header,
    transfer_hash,
    unpack,
    verify,
    verify_checksum,
)
from kvstore.transfer.protocol.plan import Chunk

EPOCH, PLACE, SLOT_BYTES = 7, 21, 1 << 20
CHUNK = Chunk(part=1, layer_lo=2, layer_hi=4, unit_lo=5, unit_hi=9, num_bytes=4096)
HASH = transfer_hash("transfer")
HEADER = Header(CHECKED, EPOCH, PLACE, 8192, 11, HASH, 3, 1, 2, 4, 5, 9, 4096, 0x1234567890ABCDEF)
NAMES = [field.name for field in dataclasses.fields(Header)]
BITS = {"flags": 8, "part": 16, "layer_lo": 16, "layer_hi": 16, "generation": 64, "checksum": 64}


def altered(header: Header, name: str) -> Header:
    value = getattr(header, name)
    other: dict[str, Any] = {name: bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value ^ 1}
    return dataclasses.replace(header, **other)


def unpacked(data: bytes) -> Header:
    return unpack(data, EPOCH, PLACE, HEADER.num_bytes, SLOT_BYTES)


def test_a_header_is_64_bytes_and_comes_back_as_it_was() -> None:
    data = HEADER.pack()
    assert len(data) == HEADER_BYTES
    assert unpacked(data) == HEADER
    assert unpacked(data + b"payload") == HEADER, "what follows is not the header's"
    verify(HEADER, CHUNK, HASH, True)
    verify_checksum(HEADER, HEADER.checksum)


@given(
    st.builds(
        Header,
        **{name: st.integers(0, 2 ** BITS.get(name, 32) - 1) for name in NAMES if name != "transfer"},
        transfer=st.binary(min_size=4, max_size=4),
    )
)
def test_every_value_of_every_field_travels(header: Header) -> None:
    assert unpack(header.pack(), header.epoch, header.place, header.num_bytes, header.next_bytes) == header


@pytest.mark.parametrize("name", NAMES)
def test_no_two_fields_share_a_byte(name: str) -> None:
    body = [sum(a != b for a, b in zip(HEADER.pack()[:-4], altered(HEADER, n).pack()[:-4], strict=True)) for n in NAMES]
    assert body == [1] * len(NAMES)
    assert altered(HEADER, name).pack() != HEADER.pack()


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(HEADER_BYTES * 8):
        data = bytearray(HEADER.pack())
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferCorrupted, match="does not add up"):
            unpacked(bytes(data))


def test_a_header_of_another_protocol_version_is_refused() -> None:
    body = bytearray(HEADER.pack()[:-4])
    body[4] += 1
    with pytest.raises(TransferCorrupted, match="does not add up"):
        unpacked(bytes(body) + xxhash.xxh32_intdigest(bytes(body)).to_bytes(4, "little"))


@pytest.mark.parametrize("name", NAMES)
def test_a_header_of_another_message_is_noticed_whichever_field_differs(name: str) -> None:
    """Each field is either fixed by the message's place on the link or by the plan, but for what only announces."""
    other = altered(HEADER, name)
    if name in ("epoch", "place", "num_bytes"):
        with pytest.raises(TransferCorrupted, match="was expected"):
            unpacked(other.pack())
        return
    assert unpacked(other.pack()) == other
    if name in ("next_bytes", "generation", "seq"):
        verify(other, CHUNK, HASH, True)  # they choose what the header is compared with
        verify_checksum(other, HEADER.checksum)
    else:
        with pytest.raises(TransferCorrupted, match="chunk 3 of generation 11"):
            verify_checksum(other, HEADER.checksum) if name == "checksum" else verify(other, CHUNK, HASH, True)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Chunk)])
def test_a_chunk_elsewhere_in_the_plan_is_not_this_one(name: str) -> None:
    chunk = dataclasses.replace(CHUNK, **{name: getattr(CHUNK, name) + 1})
    with pytest.raises(TransferCorrupted, match="its place in the plan"):
        verify(HEADER, chunk, HASH, True)


def test_an_announcement_larger_than_a_slot_is_refused() -> None:
    assert unpack(HEADER.pack(), EPOCH, PLACE, 4096, 8192).next_bytes == 8192
    with pytest.raises(TransferCorrupted):
        unpack(HEADER.pack(), EPOCH, PLACE, 4096, 8191)


def test_both_sides_must_agree_on_whether_there_is_a_checksum() -> None:
    unchecked = dataclasses.replace(HEADER, flags=0, checksum=0)
    verify(unchecked, CHUNK, HASH, False)
    with pytest.raises(TransferCorrupted, match="flags"):
        verify(unchecked, CHUNK, HASH, True)
    with pytest.raises(TransferCorrupted, match="flags"):
        verify(HEADER, CHUNK, HASH, False)


def test_a_void_chunk_is_no_chunk_of_the_plan() -> None:
    void = Header(VOID, EPOCH, PLACE, 0, num_bytes=4096)
    assert unpacked(void.pack()).flags & VOID
    with pytest.raises(TransferCorrupted):
        verify(void, CHUNK, HASH, True)


def test_transfers_have_different_hashes() -> None:
    assert len({transfer_hash(f"request-{i}") for i in range(1000)}) == 1000
