from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.errors import TransferCorrupted
from kvstore.transfer.header import CHECKED, GIVEN_UP, HEADER_BYTES, Header, gives_up, header_for, verify
from kvstore.transfer.plan import Chunk

EXPECTED = header_for(Chunk(1, 2, 4, 5, 9, 4096), 3, 7, "transfer", 11, CHECKED, 0x1234567890ABCDEF)


def test_a_header_is_64_bytes_and_matches_itself() -> None:
    assert len(EXPECTED.pack()) == HEADER_BYTES
    verify(EXPECTED.pack(), EXPECTED)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Header)])
def test_a_differing_field_is_named(field: str) -> None:
    value = getattr(EXPECTED, field)
    other: dict[str, Any] = {field: bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value ^ 1}
    with pytest.raises(TransferCorrupted, match=rf"chunk 3 of generation 11: {field} is"):
        verify(dataclasses.replace(EXPECTED, **other).pack(), EXPECTED)


def test_every_flipped_bit_is_detected() -> None:
    for bit in range(HEADER_BYTES * 8):
        data = bytearray(EXPECTED.pack())
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferCorrupted):
            verify(bytes(data), EXPECTED)
        assert not gives_up(bytes(data)), "only an intact header ends a transfer"


def test_giving_up_is_seen_and_is_no_chunk() -> None:
    data = dataclasses.replace(EXPECTED, flags=GIVEN_UP, checksum=0).pack()
    assert gives_up(data)
    assert not gives_up(EXPECTED.pack())
    with pytest.raises(TransferCorrupted, match="flags"):
        verify(data, EXPECTED)
