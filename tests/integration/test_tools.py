"""Tools over both endpoints: forced calls are valid, streams are the wholes, and an agent's loop goes round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import inference_pb2
from tests.chaos.fleet import running_fleet
from tests.integration.cluster import Served

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
STRICT: list[Any] = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
SAID: list[Any] = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        yield fleet.fill(*Role)


@pytest.fixture(scope="module")
def client(cluster: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def answers(client: openai.OpenAI, messages: list[Any] = SAID, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer whole, and as a stream: content, calls without their ids' randomness, and the finish reason."""
    body: dict[str, Any] = {"model": "", "messages": messages, "tools": TOOLS, "max_tokens": 200, "seed": 3}
    body |= {"extra_body": {"request_id": "same"}, **asked}
    whole = client.chat.completions.create(**body).choices[0]
    calls = [
        (call.id, call.type, call.function.name, call.function.arguments) for call in whole.message.tool_calls or []
    ]
    streamed: dict[int, list[str]] = {}
    content, finish_reason = "", None
    with client.chat.completions.create(**body, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    if call.id:
                        streamed[call.index] = [call.id, str(call.type), str(call.function.name), ""]
                    streamed[call.index][3] += call.function.arguments or ""
    assert whole.message.content or calls
    return (
        {"content": whole.message.content or "", "calls": calls, "finish_reason": whole.finish_reason},
        {"content": content, "calls": list(map(tuple, streamed.values())), "finish_reason": finish_reason},
    )


def valid(calls: list[tuple[str, str, str, str]]) -> None:
    for _, kind, name, arguments in calls:
        assert kind == "function"
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("choice", ["required", named("weather"), named("now")], ids=str)
def test_forced_calls_are_valid(client: openai.OpenAI, choice: Any) -> None:
    whole, streamed = answers(client, tool_choice=choice)
    assert whole == streamed
    assert whole["content"] == ""
    assert whole["finish_reason"] in ("tool_calls", "length")
    assert whole["calls"]
    if whole["finish_reason"] == "tool_calls":
        valid(whole["calls"])
    if choice != "required":
        assert [name for _, _, name, _ in whole["calls"]] == [choice["function"]["name"]]
        assert whole["finish_reason"] == "tool_calls"


def test_one_call_at_most(client: openai.OpenAI) -> None:
    whole, streamed = answers(client, tool_choice="required", parallel_tool_calls=False)
    assert whole == streamed
    assert len(whole["calls"]) == 1
    valid(whole["calls"])


def test_the_model_may_answer_without_a_call(client: openai.OpenAI) -> None:
    for asked in ({}, {"tools": STRICT}, {"parallel_tool_calls": False}, {"tool_choice": "none"}):
        whole, streamed = answers(client, **asked, max_tokens=20)
        assert whole == streamed
        assert whole["calls"] == []
        assert whole["finish_reason"] == "length"


def test_strict_tools_are_called_as_they_are_declared(client: openai.OpenAI) -> None:
    """The model is pushed into a call: the begin of one is all that its answer may begin with."""
    pushed = [*SAID, {"role": "assistant", "content": '<tool_call>\n{"name": "'}]
    for tools in (STRICT, TOOLS):
        body = {"messages": pushed, "tools": tools, "continue_final_message": True, "max_tokens": 40}
        assert httpx2.post(f"{client.base_url}chat/completions", json={"model": "", **body}).status_code == 200
    content = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    whole, streamed = answers(client, tools=STRICT, response_format=content)
    assert whole == streamed
    if whole["calls"]:
        valid(whole["calls"])
    else:
        jsonschema.validate(json.loads(whole["content"]), CITY)


def test_an_agent_goes_round_five_times(client: openai.OpenAI) -> None:
    messages = [*SAID]
    for turn in range(5):
        answer = client.chat.completions.create(
            model="", messages=messages, tools=TOOLS, tool_choice=named("weather"), max_tokens=120, temperature=1
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITY)  # type: ignore[union-attr]
        messages.append(message.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{turn} degrees"})
    final = client.chat.completions.create(model="", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert final.choices[0].message.tool_calls is None


class Weather(BaseModel):
    """Tells the weather."""

    city: str
    days: int


def test_openais_client_parses_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="",
        messages=SAID,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice=named("Weather"),
        max_tokens=200,
        extra_body={"structured_outputs": None, "seed": 9},
    )
    assert answer.choices[0].message.tool_calls is not None
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Weather)


def test_grpc_has_the_same_calls(cluster: Served, client: openai.OpenAI) -> None:
    whole, _ = answers(client, tool_choice=named("weather"))
    tools = [
        inference_pb2.Tool(name=name, description=f"Tells the {name}.", parameters_json=json.dumps(schema))
        for name, schema in SCHEMAS.items()
    ]
    said = inference_pb2.ChatMessage(role="user", content="What is the weather?")
    chat = inference_pb2.ChatInput(messages=[said], tools=tools, tool_choice_name="weather")
    request = inference_pb2.GenerateRequest(
        chat=chat, request_id="same", sampling=inference_pb2.SamplingParams(seed=3, max_tokens=200)
    )
    parts = list(cluster.inference.Generate(request, timeout=60))
    deltas = [call for part in parts for call in part.tool_calls]
    assert [(call.id, call.name) for call in deltas if call.id] == [(whole["calls"][0][0], "weather")]
    assert "".join(call.arguments_json for call in deltas) == whole["calls"][0][3]
    assert parts[-1].finish_reason == "tool_calls"
    assert parts[0].usage.prompt_tokens == 0


DEEP = json.loads('{"a":' * 65 + "1" + "}" * 65)
REFUSED = [
    ({"tool_choice": "required", "tools": []}, "there are no tools"),
    ({"tool_choice": named("nothing")}, "none of the tools"),
    ({"tool_choice": "perhaps"}, "must be none, auto, required"),
    ({"tool_choice": {**named("now"), "more": 1}}, "must be none, auto, required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "1 to 128 of the characters"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "1 to 128 of the characters"),
    ({"tools": [TOOLS[0], {**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "x"}}]},
     "two tools have the name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "how": 1}}]}, "how"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "has a wrong type"),
    ({"tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(129)]}, "at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 2**18}}]}, "shorten them"),
    ({"tools": [7]}, "must be an object"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, "deeper than 64 levels"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 7}}}]}, "be an object"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": [7]}}}]}, "a list of names"),
    ({"structured_outputs": {"regex": "a"}}, "not with another structure"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "a", "strict": True, "parameters": {"not": {"type": "string"}}}}]},
     "tools[0].function.parameters: not cannot be enforced"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, asked: dict[str, Any], sentence: str) -> None:
    body = {"model": "", "messages": SAID, "tools": TOOLS, "max_tokens": 5, **asked}
    response = httpx2.post(f"{client.base_url}chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]


@pytest.mark.parametrize("max_tokens", [1, 3, 6, 9, 12, 15])
def test_a_forced_call_that_is_cut_off_is_no_content_at_any_endpoint(client: openai.OpenAI, max_tokens: int) -> None:
    """Nor is one of a tool that is not strict, of whose schema something cannot be enforced."""
    schema = {**CITY, "properties": {**CITY["properties"], "tags": {"type": "array", "uniqueItems": True}}}  # type: ignore[dict-item]
    function = {"name": "weather", "parameters": schema}
    body: dict[str, Any] = {
        "model": "",
        "messages": SAID,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "max_tokens": max_tokens,
    }
    choice = httpx2.post(f"{client.base_url}chat/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    with client.chat.completions.create(**body, stream=True) as stream:
        assert "".join(each.delta.content or "" for chunk in stream for each in chunk.choices) == ""
    response = httpx2.post(
        f"{client.base_url}responses",
        json={
            "input": "What is the weather?",
            "tools": [{"type": "function", **function, "strict": False}],
            "tool_choice": "required",
            "max_output_tokens": max_tokens,
        },
    ).json()
    assert {item["type"] for item in response["output"]} <= {"function_call"}, response
    message = httpx2.post(
        f"{client.base_url}messages",
        json={
            "model": "",
            "messages": SAID,
            "tools": [{"name": "weather", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "max_tokens": max_tokens,
        },
    ).json()
    assert {block["type"] for block in message["content"]} <= {"tool_use"}, message
