"""Bodies are bounded by what is made of them, and long ones leave the event loop to others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.api import parsing
from router.api.parsing import MAX_NODES, MAX_VALUES, BodyParser, PartCount


def body_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def count(body: bytes, piece_bytes: int) -> None:
    parts = PartCount()
    for begin in range(0, len(body), piece_bytes):
        parts.add(body[begin : begin + piece_bytes])


@pytest.mark.parametrize(
    "body",
    [
        b"[%b]" % b",".join([b"{}"] * MAX_NODES),
        b'{"a":"\\\\","b":[%b]}' % b",".join([b"[]"] * MAX_NODES),
        b"[" * 2_000_000,
    ],
    ids=["objects", "behind an escape", "depth"],
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 2**16])
def test_too_many_objects_and_lists_are_refused(body: bytes, piece_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NODES} objects and lists"):
        count(body, piece_bytes)


def test_too_many_values_are_refused() -> None:
    values = b",".join([b"5"] * MAX_VALUES)
    count(b'{"prompt":[%b]}' % values, 2**16)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        count(b'{"prompt":[%b,5]}' % values, 2**16)
    count(body_of({"prompt": "," * 2 * MAX_VALUES}), 2**16)


def test_the_most_objects_and_lists_are_taken() -> None:
    count(b"[%b]" % b",".join([b'{"a":"\\\\"}'] * (MAX_NODES - 1)), 10)


@pytest.mark.parametrize("text", ["{[" * MAX_NODES, '"[' * MAX_NODES, "\\[" * MAX_NODES, '\\"{' * MAX_NODES])
@pytest.mark.parametrize("piece_bytes", [5, 2**16])
def test_those_in_a_text_are_none(text: str, piece_bytes: int) -> None:
    count(body_of({"messages": [{"role": "user", "content": text}] * 8}), piece_bytes)


async def test_a_long_body_is_the_value_that_it_has() -> None:
    value = {"prompt": "[{" * parsing.LONG_BYTES}
    parser = BodyParser()
    assert await parser.parse(body_of(value), "t") == value
    with pytest.raises(ValueError, match="Expecting"):
        await parser.parse(b" " * parsing.LONG_BYTES + b"{", "t")
    assert await parser.parse(body_of(value), "t") == value


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
async def test_what_is_not_utf_8_is_refused(encoding: str) -> None:
    """One byte of the character is that of a quotation mark: nothing behind it would be counted."""
    body = ('["\u2222",' + "[]," * MAX_NODES + "[]]").encode(encoding)
    for each in (body, body[:100]):
        with pytest.raises(ValueError, match=r"decode|Expecting|char 0"):
            await BodyParser().parse(each, "t")


async def test_a_mark_of_utf_8_is_passed_over() -> None:
    assert await BodyParser().parse(b"\xef\xbb\xbf" + body_of(["\ud800", "ä"]), "t") == ["\ud800", "ä"]


async def test_between_long_bodies_there_is_a_pause_and_short_ones_go_by() -> None:
    parser, took_s = BodyParser(), 0.05
    long = body_of(["x" * parsing.LONG_BYTES])

    def slowly(body: bytes) -> Any:
        time.sleep(took_s)

    async def begun(body: bytes) -> float:
        await parser.parse(body, "t")
        return time.monotonic()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json, "loads", slowly)
        first = asyncio.create_task(begun(long))
        second = asyncio.create_task(begun(long))
        ended_s = await first
        short_s = await begun(b"[]")
        assert not second.done()
    assert short_s < await second
    assert await second - ended_s >= parsing.PAUSE * took_s
