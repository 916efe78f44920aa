"""Answers in Anthropic's form: typed events that are valid, and add up to the whole answer, however it is grouped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic_core import from_json

from baton.api import GenerateChunk
from baton.errors import BatonError, NoWorker
from baton.sampling import FinishReason
from router.api.answering import PartKind
from router.api.anthropic.events import INVALID_JSON, SIGNATURE, STOP_REASONS, MessageForm, input_of
from tests.support.chunks import CUTS, USAGE, Said, answers, chunks_of

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
FORM = MessageForm("msg_1", "m", "given", USAGE.completion_tokens)
BROKEN = ('{"a": }', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]", "[" * 5000)
TEXT = [(PartKind.TEXT, "hi")]


async def given_out(chunks: Sequence[GenerateChunk], error: BatonError | None = None) -> AsyncGenerator[GenerateChunk]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


def whole_of(chunks: Sequence[GenerateChunk]) -> dict[str, Any]:
    return asyncio.run(FORM.whole(chunks[0], given_out(chunks[1:])))


def stream_of(chunks: Sequence[GenerateChunk], error: BatonError | None = None) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data."""

    async def read() -> list[bytes]:
        rest = given_out(chunks, error)
        return [each async for each in FORM.events(await anext(rest), rest)]

    events = []
    for written in asyncio.run(read()):
        head, data, *rest = written.decode().split("\n")
        assert rest == ["", ""]
        events.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def added_up(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What Anthropic's own client has in the end."""
    snapshot, buffers = None, dict[int, bytes]()
    for name, data in events:
        assert name == data["type"]
        parsed = EVENTS.validate_python(data, strict=True)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    assert events[-1][0] == "message_stop"
    return snapshot.to_dict()


@given(said=answers(), data=st.data(), finish=st.sampled_from(list(FinishReason)))
def test_any_grouping_gives_the_same_answer_whole_and_streamed(
    said: list[Said], data: st.DataObject, finish: FinishReason
) -> None:
    chunks = chunks_of(said, data.draw(CUTS), finish)
    whole = whole_of(chunks)
    assert whole == whole_of(chunks_of(said, [], finish))
    Message.model_validate(whole, strict=True)
    assert added_up(stream_of(chunks)) == whole
    kinds = {PartKind.REASONING: "thinking", PartKind.TEXT: "text", PartKind.CALL: "tool_use"}
    assert [block["type"] for block in whole["content"]] == [kinds[kind] for kind, _ in said]
    for block, (kind, text) in zip(whole["content"], said, strict=True):
        match kind:
            case PartKind.REASONING:
                assert (block["thinking"], block["signature"]) == (text, SIGNATURE)
            case PartKind.TEXT:
                assert block["text"] == text
            case PartKind.CALL:
                assert block["input"] == from_json(text, allow_partial=True)
    calls = [(block["id"], block["name"]) for block in whole["content"] if block["type"] == "tool_use"]
    assert calls == [(f"call_{i}", f"t{i}") for i in range(len(calls))]
    assert whole["stop_reason"] == STOP_REASONS[finish]


def test_the_head_and_the_usage_are_anthropics() -> None:
    whole = whole_of(chunks_of(TEXT, []))
    assert whole == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": USAGE.prompt_tokens - USAGE.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": USAGE.cached_tokens,
            "output_tokens": USAGE.completion_tokens,
            "output_tokens_details": {"thinking_tokens": USAGE.reasoning_tokens},
        },
    }
    start = stream_of(chunks_of(TEXT, []))[0][1]["message"]
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (5, 0)
    assert (start["content"], start["stop_reason"]) == ([], None)


@pytest.mark.parametrize(
    ("finish", "stop_reason", "ended"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, 2, ("end_turn", None)),
        (FinishReason.STOP, "\n", ("stop_sequence", "\n")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.TOOL_CALLS, "\n", ("tool_use", None)),
        (FinishReason.CONTENT_FILTER, None, ("refusal", None)),
    ],
)
def test_why_it_ended(finish: FinishReason, stop_reason: str | int | None, ended: tuple[str, str | None]) -> None:
    whole = whole_of(chunks_of(TEXT, [1], finish, stop_reason))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ended


def test_an_answer_that_the_window_cuts_says_so() -> None:
    chunks = chunks_of(TEXT, [1], FinishReason.LENGTH)
    form = replace(FORM, max_tokens=USAGE.completion_tokens + 1)
    assert asyncio.run(form.whole(chunks[0], given_out(chunks[1:])))["stop_reason"] == "model_context_window_exceeded"


def test_every_finish_reason_has_a_word() -> None:
    assert STOP_REASONS.keys() == set(FinishReason)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": [1, {"b": "x"}', {"a": [1, {"b": "x"}]}),
        ('{"a": 1, "b": "cut of', {"a": 1}),
        *((broken, {INVALID_JSON: broken}) for broken in BROKEN),
    ],
)  # fmt: skip
def test_arguments_that_are_no_object_stay_readable(written: str, value: dict[str, Any]) -> None:
    assert input_of(written) == value
    json.dumps(value, allow_nan=False)


def test_an_error_in_a_stream_is_no_end() -> None:
    events = stream_of(chunks_of(TEXT, [1])[:1], NoWorker("gone"))
    assert [name for name, _ in events] == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events[-1][1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
        "request_id": "given",
    }


def test_chunks_are_closed_with_the_stream() -> None:
    async def leave() -> bool:
        is_closed = False

        async def endless() -> AsyncGenerator[GenerateChunk]:
            nonlocal is_closed
            try:
                while True:
                    yield GenerateChunk(request_id="r", choice_index=0, text="a")
            finally:
                is_closed = True

        chunks = endless()
        events = FORM.events(await anext(chunks), chunks)
        for _ in range(4):
            await anext(events)
        await events.aclose()
        return is_closed

    assert asyncio.run(leave())
