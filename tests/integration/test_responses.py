"""OpenAI's own client asks /v1/responses of the real model: whole answers, streams, tools, parsed ones, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.integration.cluster import Cluster

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now", "description": "Tells the time.", "parameters": {"type": "object"}},
]
WEATHER: Any = {"type": "function", "name": "weather"}
ASKED = "Name three colours."
UNLIKE: Any = {
    "created_at": True, "completed_at": True, "timing": True, "usage": {"input_tokens_details": {"cached_tokens"}},
}  # fmt: skip
"""What differs between two answers to the same request."""


@pytest.fixture(scope="module")
def client(split_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{split_cluster.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_content(client: openai.OpenAI, messages: list[Any], max_tokens: int) -> str | None:
    answer = client.chat.completions.create(model="", messages=messages, max_tokens=max_tokens, temperature=0)
    return answer.choices[0].message.content


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({}, "incomplete"),
        ({"tools": TOOLS, "tool_choice": WEATHER, "max_output_tokens": 60}, "completed"),
        ({"tools": TOOLS, "tool_choice": WEATHER, "max_output_tokens": 4}, "incomplete"),
    ],
    ids=["text", "call", "call cut off"],
)
def test_a_stream_is_the_whole(client: openai.OpenAI, asked: dict[str, Any], status: str) -> None:
    body: dict[str, Any] = {"model": "", "input": ASKED, "temperature": 0, "max_output_tokens": 8, "store": False}
    body |= {"extra_body": {"request_id": "resp_same"}, **asked}
    whole = client.responses.create(**body)
    assert whole.status == status
    texts = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
    with client.responses.create(**body, stream=True) as stream:
        for event in stream:
            if event.type in texts:
                texts[event.type] += event.delta
    assert event.type == f"response.{status}"
    assert event.response.model_dump(exclude=UNLIKE) == whole.model_dump(exclude=UNLIKE)
    arguments = "".join(item.arguments for item in whole.output if item.type == "function_call")
    assert whole.output or "tool_choice" in asked, "a call that is cut off before it begins is nothing"
    assert list(texts.values()) == [whole.output_text, arguments]


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    earlier = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    system, user = {"role": "system", "content": "Answer in French."}, {"role": "user", "content": ASKED}
    for asked, messages in (
        ({"input": ASKED}, [user]),
        ({"input": [*earlier, user], "instructions": system["content"]}, [system, *earlier, user]),
    ):
        response = client.responses.create(model="", max_output_tokens=6, temperature=0, **asked)
        assert response.output_text == chat_content(client, messages, 6)
        assert response.incomplete_details is not None
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage is not None
        assert response.usage.output_tokens == 6
        count = client.responses.input_tokens.count(model="", **asked)
        assert count.input_tokens == response.usage.input_tokens


def test_an_agent_goes_round_twice(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    for turn in range(2):
        response = client.responses.create(
            model="", input=said, tools=TOOLS, tool_choice=WEATHER, max_output_tokens=60, extra_body={"seed": turn}
        )
        call: Any
        (call,) = response.output
        assert (response.status, call.type, call.name) == ("completed", "function_call", "weather")
        jsonschema.validate(json.loads(call.arguments), CITY)
        said += response.output
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{turn} degrees"})
    last = client.responses.create(model="", input=said, tools=TOOLS, tool_choice="none", max_output_tokens=4)
    assert [item.type for item in last.output] == ["message"]


class Stay(BaseModel):
    """How long, and where."""

    days: Literal[1, 2]
    where: Literal["near", "far"]


def test_openais_client_parses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "input": "Where, and how long?", "temperature": 0, "max_output_tokens": 80}
    answer = client.responses.parse(**asked, text_format=Stay)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Stay)
    with client.responses.stream(**asked, text_format=Stay) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    more = {"input": [*answer.output, {"role": "user", "content": "And then?"}], "max_output_tokens": 2}
    assert client.responses.create(**{**asked, **more}).output_text
    tool: Any = openai.pydantic_function_tool(Stay)["function"] | {"type": "function"}
    called = client.responses.parse(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.output
    assert call.type == "function_call"
    assert Stay.model_validate(call.parsed_arguments)


def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI) -> None:
    asked: Any = {"model": "", "input": ASKED}
    for more, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x " * 20_000}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.responses.create(**{**asked, **more})
        assert (refusal.value.param, refusal.value.type) == (param, "invalid_request_error"), refusal.value.message
    accepted: list[tuple[dict[str, Any], str]] = [
        ({"store": True}, "store"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
    ]
    for fields, ignored in accepted:
        answer = client.responses.with_raw_response.create(**{**asked, **fields}, max_output_tokens=1)
        assert answer.headers["x-baton-ignored"] == ignored
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="another", input=ASKED)
