"""A response is what its events add up to, and OpenAI's own types accept both."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.api import GenerateChunk
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerFailed
from baton.sampling import FinishReason
from router.api.answering import PartKind
from router.api.responses.body import ResponsesBody, head_of
from router.api.responses.writer import ResponseForm, ResponseWriter
from tests.support.chunks import CUTS, USAGE, Said, answers, chunks_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: dict[str, Any] = {
    "input": "hi",
    "instructions": "be brief",
    "max_output_tokens": 9,
    "temperature": 0.5,
    "tools": [{"type": "function", "name": "t0", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "t0"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "user": "me",
}
HEAD = head_of(ResponsesBody.model_validate(ASKED), response_id="resp_1", created_at=5, model="m")
ANSWER = [(PartKind.REASONING, "hm"), (PartKind.TEXT, "ab"), (PartKind.CALL, '{"a": 1}'), (PartKind.TEXT, "c")]
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])


def events_of(chunks: Sequence[GenerateChunk]) -> list[dict[str, Any]]:
    writer = ResponseWriter(HEAD)
    written = [*writer.begin(), *(event for chunk in chunks for event in writer.write(chunk)), *writer.end(7)]
    assert [event["sequence_number"] for event in written] == list(range(len(written)))
    assert written[0]["response"]["output"] == written[1]["response"]["output"] == []
    return written


def added_up(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a response, by the deltas of its events alone. Each event fits those before it."""
    items: list[dict[str, Any]] = []
    for event in events:
        if "output_index" in event:
            assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert not items or items[-1]["status"] != "in_progress"
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                assert items[-1]["content"] == []
                items[-1]["content"].append(dict(event["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                assert event["delta"]
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "output_item.done":
                assert event["item"] == {**items[-1], "status": event["item"]["status"]}
                items[-1]["status"] = event["item"]["status"]
    return items


@given(said=answers(), finish=FINISHES, data=st.data())
def test_any_grouping_gives_the_same_response(said: list[Said], finish: FinishReason, data: st.DataObject) -> None:
    events = events_of(chunks_of(said, data.draw(CUTS), finish))
    whole = events[-1]["response"]
    assert whole == events_of(chunks_of(said, [], finish))[-1]["response"]
    assert whole["output"] == added_up(events)
    texts = {"reasoning": PartKind.REASONING, "message": PartKind.TEXT, "function_call": PartKind.CALL}
    assert said == [
        (texts[item["type"]], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in whole["output"]
    ]
    assert len({item["id"] for item in whole["output"]}) == len(said)
    statuses = [item["status"] for item in whole["output"]]
    cut_off = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}
    if finish in cut_off:
        assert (events[-1]["type"], whole["status"]) == ("response.incomplete", "incomplete")
        assert whole["incomplete_details"] == {"reason": cut_off[finish]}
        assert (statuses[-1:], whole["completed_at"]) == (["incomplete"] if said else [], None)
        assert set(statuses[:-1]) <= {"completed"}
    else:
        assert (events[-1]["type"], whole["status"]) == ("response.completed", "completed")
        assert (whole["incomplete_details"], whole["completed_at"]) == (None, 7)
        assert set(statuses) <= {"completed"}


@given(said=answers(), data=st.data())
def test_openais_types_accept_every_event(said: list[Said], data: st.DataObject) -> None:
    events = events_of(chunks_of(said, data.draw(CUTS)))
    for event in events:
        assert EVENT.validate_python(event, strict=True).type == event["type"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = Response.model_validate(events[-1]["response"], strict=True)
    assert response.output_text == "".join(text for kind, text in said if kind is PartKind.TEXT)


def test_a_response_says_what_was_asked_and_used() -> None:
    response = Response.model_validate(events_of(chunks_of(ANSWER, [1, 4]))[-1]["response"], strict=True)
    assert (response.id, response.model, response.created_at, response.error) == ("resp_1", "m", 5, None)
    assert (response.instructions, response.max_output_tokens, response.temperature) == ("be brief", 9, 0.5)
    assert (response.metadata, response.user, response.top_p) == ({"a": "b"}, "me", None)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.to_dict() == ASKED["text"]["format"]
    assert [tool.to_dict(exclude_none=True) for tool in response.tools] == ASKED["tools"]
    assert not isinstance(response.tool_choice, str)
    assert response.tool_choice.to_dict() == ASKED["tool_choice"]
    assert response.usage is not None
    assert response.usage.to_dict() == {
        "input_tokens": USAGE.prompt_tokens,
        "input_tokens_details": {"cached_tokens": USAGE.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": USAGE.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": USAGE.reasoning_tokens},
        "total_tokens": USAGE.prompt_tokens + USAGE.completion_tokens,
    }
    call = response.output[2]
    assert call.type == "function_call"
    assert (call.call_id, call.name) == ("call_0", "t0")


def test_what_is_not_set_stands_at_its_default() -> None:
    head = head_of(ResponsesBody(input="hi"), response_id="resp_1", created_at=5, model="m")
    *_, last = ResponseWriter(head).end(7)
    response = Response.model_validate(last["response"], strict=True)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
    assert last["response"]["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (last["response"]["store"], response.truncation, response.background) == (False, "disabled", False)


async def streamed(chunks: Sequence[GenerateChunk], error: BatonError | None = None) -> list[tuple[str, Any]]:
    async def come() -> AsyncGenerator[GenerateChunk]:
        for chunk in chunks:
            yield chunk
        if error is not None:
            raise error

    coming = come()
    found = []
    async for written in ResponseForm(HEAD).events(await anext(coming), coming):
        name, data = written.decode().removesuffix("\n\n").split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_stream_is_the_whole() -> None:
    async def come() -> AsyncGenerator[GenerateChunk]:
        for chunk in chunks_of(ANSWER, []):
            yield chunk

    coming = come()
    whole = await ResponseForm(HEAD).whole(await anext(coming), coming)
    events = await streamed(chunks_of(ANSWER, [2, 3, 9]))
    assert all(name == data["type"] for name, data in events)
    last = events[-1][1]["response"]
    assert {**last, "completed_at": None} == {**whole, "completed_at": None}
    assert whole["completed_at"] > HEAD["created_at"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerFailed("it died"), "server_error"),
        (Overloaded("later"), "rate_limit_exceeded"),
        (InvalidRequest("too far"), "invalid_prompt"),
    ],
)
async def test_a_break_is_no_end(error: BatonError, code: str) -> None:
    chunks = chunks_of(ANSWER, [3])[:1]
    events = await streamed(chunks, error)
    assert [name for name, _ in events[-2:]] == ["response.failed", "error"]
    assert not {"response.completed", "response.incomplete"} & {name for name, _ in events}
    failed, last = (EVENT.validate_python(data) for _, data in events[-2:])
    assert (failed.response.status, failed.response.error.code) == ("failed", code)
    assert failed.response.error.message == last.message == str(error)
    assert failed.response.usage is None
    assert [item.status for item in failed.response.output] == ["completed", "incomplete"]
    assert failed.response.output_text == "a"
    assert events[-1][1]["error"]["message"] == str(error), "OpenAI's client raises what has this key"
