"""How answers are written: JSON in ASCII, whatever is in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.errors import NotRead
from router.api import delivery
from router.api.anthropic.events import MessageForm
from router.api.delivery import HTTP, ReadAhead
from router.api.exchange import EventStream, JsonAnswer, event
from router.api.responses.writer import ResponseForm


@pytest.mark.parametrize(
    "value",
    [
        {"content": 'Grüße, \u2028 \u2029 \x85 \x1e "quoted" \U0001f600'},
        {"quoted": "half of a pair: \ud83d", "name\udc00": None},
        {"numbers": [0, -1, 2**63, 1e-7, 0.1, -1.5], "empty": {}, "tuple": (True, False)},
    ],
)
def test_any_value_is_one_line_of_ascii(value: dict[str, Any]) -> None:
    written = event(value, "some.name")
    assert written.isascii()
    name, data, *rest = written.decode().splitlines()
    assert (name, rest) == ("event: some.name", [""])
    assert data.startswith("data: ")
    assert json.loads(data.removeprefix("data: ")) == json.loads(json.dumps(value))
    assert event(value) == data.encode() + b"\n\n"
    assert JsonAnswer(value).body == data.removeprefix("data: ").encode()


async def test_the_stream_of_a_client_that_does_not_read_ends_in_an_error_and_not_as_if_it_were_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "LOOK_S", 0.02)
    monkeypatch.setattr(delivery, "CROWDED_STALL_S", 0.05)
    sent: list[bytes] = []
    reads = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        for number in range(100):
            yield b"%d\n" % number

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if message["body"].endswith(b"\n0\n"):
                await reads.wait()
            sent.append(message["body"])

    stream = EventStream(events(), {}, ReadAhead(8, is_crowded=lambda: True), lambda error: str(error).encode())
    await stream.stream_response(send)
    assert sent == [b"the client has not read for 0.05 s while other requests wait for its slot", b""]


def test_an_answer_that_breaks_off_ends_in_the_error_of_its_api() -> None:
    error = NotRead("it has not read")
    message = json.loads(MessageForm("msg_1", "m", "given", 100).broken(error).decode().split("data: ")[1])
    assert (message["type"], message["error"]["message"]) == ("error", "it has not read")
    response = json.loads(ResponseForm({}).broken(error).decode().split("data: ")[1])
    assert (response["type"], response["message"]) == ("error", "it has not read")


@pytest.mark.parametrize("crowded", [True, False])
async def test_comments_fill_up_the_stream_while_others_want_the_place_of_the_answer(crowded: bool) -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes]:
        for number in range(100):
            yield event({"number": number})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    stream = EventStream(events(), {}, ReadAhead(is_crowded=lambda: crowded), lambda error: b"")
    await stream.stream_response(send)
    lines = [line for line in b"".join(sent).splitlines() if not line.startswith(b":")]
    assert b"\n".join([*lines, b""]) == b"".join([event({"number": number}) for number in range(100)])
    assert (sum(map(len, sent)) >= HTTP.num_bytes) == crowded
    assert sum(map(len, sent)) < 2 * HTTP.num_bytes
