"""Bodies are bounded by what is made of them, and long ones leave the event loop to others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from router.api import parsing
from router.api.parsing import (
    MAX_NAMES,
    MAX_NODES,
    MAX_TEXTS,
    MAX_VALUES,
    SHORT_BYTES,
    SHORT_NODES,
    SHORT_VALUES,
    BodyParser,
    PartCount,
    sliced,
)


def body_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def same(value: Any) -> Any:
    return value


def count(body: bytes, piece_bytes: int = 2**16) -> PartCount:
    parts = PartCount()
    for begin in range(0, len(body), piece_bytes):
        parts.add(body[begin : begin + piece_bytes])
    return parts


async def parsed(body: bytes, parser: BodyParser | None = None) -> Any:
    return await (parser or BodyParser()).parse(body, count(body), "t", same)


@pytest.mark.parametrize(
    "body",
    [
        b"[%b]" % b",".join([b"{}"] * MAX_NODES),
        b'{"a":"\\\\","b":[%b]}' % b",".join([b"[]"] * MAX_NODES),
        b"[" * 2_000_000,
    ],
    ids=["objects", "behind an escape", "depth"],
)
@pytest.mark.parametrize("piece_bytes", [pytest.param(1, marks=pytest.mark.slow), 7, 2**16])
def test_too_many_objects_and_lists_are_refused(body: bytes, piece_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NODES} objects and lists"):
        count(body, piece_bytes)


def test_too_many_values_are_refused() -> None:
    values = b",".join([b"5"] * MAX_VALUES)
    count(b'{"prompt":[%b]}' % values, 2**16)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        count(b'{"prompt":[%b,5]}' % values, 2**16)
    count(body_of({"prompt": "," * 2 * MAX_VALUES}), 2**16)


@pytest.mark.parametrize("piece_bytes", [pytest.param(1, marks=pytest.mark.slow), 7, 2**16])
def test_too_many_texts_are_refused_and_names_are_some(piece_bytes: int) -> None:
    for most in (["\\"] * MAX_TEXTS, dict.fromkeys(map(str, range(MAX_TEXTS)), 5)):
        count(body_of(most), piece_bytes)
        with pytest.raises(InvalidRequest, match=f"more than {MAX_TEXTS} texts and names"):
            count(body_of([most, "a"]), piece_bytes)


def test_the_most_objects_and_lists_are_taken() -> None:
    count(b"[%b]" % b",".join([b'{"a":"\\\\"}'] * (MAX_NODES - 1)), 10)


@pytest.mark.parametrize("text", ["{[" * MAX_NODES, '"[' * MAX_NODES, "\\[" * MAX_NODES, '\\"{' * MAX_NODES])
@pytest.mark.parametrize("piece_bytes", [5, 2**16])
def test_those_in_a_text_are_none(text: str, piece_bytes: int) -> None:
    count(body_of({"messages": [{"role": "user", "content": text}] * 8}), piece_bytes)


@pytest.mark.parametrize("filling", [0, SHORT_BYTES], ids=["short", "long"])
@pytest.mark.parametrize("where", ["{%s}", '{"a":[{"b":{%s}}]}', '{"a":[{"b":[[{%s}]]}]}'])
async def test_an_object_of_too_many_fields_is_refused(filling: int, where: str) -> None:
    fields = ",".join(f'"{number}":1' for number in range(MAX_NAMES))
    assert await parsed((where % fields + " " * filling).encode())
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NAMES} fields"):
        await parsed((where % f'{fields},"a":1' + " " * filling).encode())


async def test_a_long_body_is_the_value_that_it_has() -> None:
    value = {"prompt": "[{" * SHORT_BYTES}
    parser = BodyParser()
    assert await parsed(body_of(value), parser) == value
    with pytest.raises(ValueError, match="Expecting"):
        await parsed(b" " * SHORT_BYTES + b"{", parser)
    assert await parsed(body_of(value), parser) == value


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(), max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def outcome(read: Any) -> tuple[Any, str]:
    try:
        return read(), ""
    except ValueError as error:
        return None, type(error).__name__


def read_in_slices(text: str) -> Any:
    reading = sliced(text)
    while True:
        try:
            next(reading)
        except StopIteration as ended:
            return ended.value


CUTS = st.none() | st.tuples(st.integers(0, 200), st.integers(0, 3))
ADDED = st.sampled_from(["", ",", "]", "}", "[", '"', ":", "0", " ", "1,"])


@given(value=VALUES, indent=st.sampled_from([None, 0, 1]), cut=CUTS, added=ADDED)
def test_what_is_read_in_slices_is_what_is_read_at_once(
    value: Any, indent: int | None, cut: tuple[int, int] | None, added: str
) -> None:
    """Valid or not: a text with something cut out or added is read, or refused, in the same way."""
    text = json.dumps(value, indent=indent)
    if cut is not None:
        text = text[: cut[0]] + added + text[cut[0] + cut[1] :]
    assert outcome(lambda: read_in_slices(text)) == outcome(lambda: json.loads(text))


@pytest.mark.parametrize(
    "text",
    ["", " ", "[1,,2]", "[1,2,]", "[1,2", "[1,2 3,4]", "[01,2]", "[1,2],", '{"a" 1}', '{"a":1,}', "{1:2}", "[nul,1]"],
)
def test_a_refusal_names_the_same_place(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as found:
        read_in_slices(text)
    assert found.value.pos == expected.value.pos


@pytest.mark.parametrize(
    ("value", "least"),
    [
        (list(range(MAX_VALUES)), 256),
        ({"prompt": [[5] * 8192] * 128}, 256),
        ({"messages": [{"role": "user", "content": "a"}] * 1000}, 1000),
    ],
    ids=["numbers", "lists of numbers", "messages"],
)
def test_a_long_body_is_read_in_many_slices(value: Any, least: int) -> None:
    """So no slice is longer than what is made of a few thousand values."""
    reading, num_slices = sliced(json.dumps(value)), 0
    for _ in reading:
        num_slices += 1
    assert num_slices >= least


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
async def test_what_is_not_utf_8_is_refused(encoding: str) -> None:
    """One byte of the character is that of a quotation mark: nothing behind it would be counted."""
    body = ('["\u2222",' + "[]," * MAX_NODES + "[]]").encode(encoding)
    for each in (body, body[:100]):
        with pytest.raises(ValueError, match=r"decode|Expecting|char 0"):
            await BodyParser().parse(each, PartCount(), "t", same)


async def test_a_mark_of_utf_8_is_passed_over() -> None:
    assert await parsed(b"\xef\xbb\xbf" + body_of(["\ud800", "ä"])) == ["\ud800", "ä"]


@pytest.mark.parametrize(
    "body",
    [body_of("x" * SHORT_BYTES), body_of([[]] * SHORT_NODES), body_of([5] * SHORT_VALUES + [["a"]])],
    ids=["many bytes", "many lists", "many values"],
)
async def test_between_long_bodies_there_is_a_pause_and_short_ones_go_by(body: bytes) -> None:
    parser, took_s = BodyParser(), 0.05

    def slowly(value: Any) -> float:
        time.sleep(took_s)
        return time.monotonic()

    async def made(body: bytes) -> float:
        return await parser.parse(body, count(body), "t", slowly)

    first = asyncio.create_task(made(body))
    second = asyncio.create_task(made(body))
    ended_s = await first
    short_s = await made(b"[]")
    assert not second.done()
    assert short_s < await second
    assert await second - ended_s >= (parsing.PAUSE + 1) * took_s


async def test_others_are_served_while_a_long_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "SLICE_S", 0.0)
    num_turns, reading = 0, asyncio.create_task(parsed(body_of([[5]] * 1000)))
    while not reading.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns > 1000
    assert reading.result() == [[5]] * 1000
