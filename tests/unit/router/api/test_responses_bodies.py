"""What becomes of the fields of a Responses request: they reach the service as a chat, or are refused by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from baton.api import Chat, GenerateChunk, GenerateRequest
from baton.chat import ChatMessage
from baton.errors import InvalidRequest, WorkerFailed
from baton.registered_adapters import NO_ADAPTERS
from baton.structure import StructuredOutputs
from baton.tools import Tool, ToolChoice, ToolUse
from router.admission.tenants import DEFAULT_TENANT
from router.api.http import create_app
from router.api.responses import body as items
from router.api.responses import tools as our_tools
from router.api.responses.body import REFUSED
from router.prompt import ChatTemplate
from router.timeline.log import Ingress, RequestLog
from tests.support.chunks import chunks_of
from tests.support.models import table_of

COUNT = "/v1/responses/input_tokens"


class Service:
    """A router's service that answers with nothing, or refuses."""

    facts = SimpleNamespace(id="m", vocab_size=100, max_model_len=10)
    adapters = NO_ADAPTERS
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=ChatTemplate({"default": "{{ reasoning_effort }}{{ a }}"}, {}))
    )

    def __init__(self, refusal: InvalidRequest | None = None) -> None:
        self.asked: list[GenerateRequest] = []
        self.requests = RequestLog()
        self._refusal = refusal

    is_crowded = False

    def name_of(self, model: str) -> str:
        return "m"

    async def tokenize(self, prompt: Any, tenant: Any) -> tuple[int, ...]:
        self.asked.append(GenerateRequest(prompt=prompt))
        if self._refusal is not None:
            raise self._refusal
        return (1, 2, 3)

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        self.asked.append(request)
        if self._refusal is not None:
            raise self._refusal
        for chunk in chunks_of([], []):
            yield chunk


class Standing:
    """The service of an app that is made once, which takes long: it is whichever is to be asked next."""

    def __init__(self) -> None:
        self.service = Service()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@functools.cache
def made_once() -> tuple[Any, Standing]:
    tenants: Any = SimpleNamespace(is_open=False, identify=lambda key, certificate: DEFAULT_TENANT)
    standing = Standing()
    stand_in: Any = standing
    return create_app(table_of(stand_in, requests=stand_in.requests), tenants, lambda: "", lambda: b""), standing


def app_of(service: Service) -> httpx2.ASGITransport:
    app, standing = made_once()
    standing.service = service
    return httpx2.ASGITransport(app)


async def post(
    service: Service, body: Mapping[str, Any], path: str = "/v1/responses", **headers: str
) -> httpx2.Response:
    async with httpx2.AsyncClient(transport=app_of(service), base_url="http://baton") as client:
        return await client.post(path, json=body, headers=headers)


async def asked(**body: Any) -> GenerateRequest:
    service = Service()
    response = await post(service, {"input": "hi", **body})
    assert response.status_code == 200, response.text
    return service.asked[0]


async def chat_asked(**body: Any) -> Chat:
    prompt = (await asked(**body)).prompt
    assert isinstance(prompt, Chat)
    return prompt


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_refused_by_name(name: str) -> None:
    for value in (*REFUSED[name].neutral, None):
        await asked(**{name: value})
    response = await post(Service(), {"input": "hi", name: {"other": 1}})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("refused", "around", "param"),
    [
        (items.REFUSED_ITEMS, lambda odd: {"input": [odd]}, "input[0]"),
        (items.REFUSED_PARTS, lambda odd: {"input": [{"role": "user", "content": [odd]}]}, "input[0].content[0]"),
        (our_tools.REFUSED_CHOICES, lambda odd: {"tool_choice": odd}, "tool_choice"),
    ],
    ids=["items", "parts", "choices"],
)
async def test_kinds_that_are_refused_are_refused_with_the_reason(
    refused: Mapping[str, str], around: Callable[[Any], dict[str, Any]], param: str
) -> None:
    for kind, why in refused.items():
        response = await post(Service(), {"input": "hi", **around({"type": kind})})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert error["message"] == f"{param} of type {kind} is not supported: {why}; leave it out"


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f"}
ODD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"type": "hologram"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "i"}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].image_url",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "words", "text": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": "x", "hot": 1}]}, "input[0].hot"),
    ({"input": [{"role": "user", "content": "x", "phase": 1}]}, "input[0].phase"),
    ({"input": [{"role": "user", "content": "x"}, {**CALL, "arguments": {}}]}, "input[1].arguments"),
    ({"input": [{**CALL, "name": "x" * 300}]}, "input[0].name"),
    ({"input": [{**CALL, "call_id": "x" * 300}]}, "input[0].call_id"),
    ({"input": [{**CALL, "async": True}]}, "input[0].async"),
    ({"input": [{"type": "function_call_output", "call_id": None, "output": "x"}]}, "input[0].call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_output_tokens": 5.0}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": "0.5"}, "temperature"),
    ({"instructions": ["x"]}, "instructions"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function", "function": {"title": "f"}}]}, "tools[0].name"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}}, "tool_choice.tools"),
    ({"hot": 1}, "hot"),
    ({"request_id": "\n"}, "request_id"),
]


@pytest.mark.parametrize(("body", "param"), ODD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(ODD)])
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    service = Service()
    response = await post(service, {"input": "hi", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert service.asked == []


async def test_the_tokens_of_an_input_are_counted() -> None:
    service = Service()
    response = await post(service, {"input": [USER], "instructions": "i", "tools": [TOOL], "truncation": None}, COUNT)
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 3}
    prompt = service.asked[0].prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (ChatMessage(role="system", content="i"), USER_IN_CHAT)
    assert [tool.name for tool in prompt.tools] == ["f"]
    for odd, param in (
        ({"personality": "pragmatic"}, "personality"),
        ({"model": "other"}, "model"),
        ({"input": []}, "input"),
    ):
        response = await post(Service(), {"input": "hi", **odd}, COUNT)
        assert (response.status_code // 100, response.json()["error"]["param"]) == (4, param)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("max_tokens", "max_output_tokens"), ("messages", "input"), ("structured_outputs", "text.format"),
     ("top_p", "top_p"), (None, None)],
)  # fmt: skip
async def test_the_services_refusals_name_fields_of_this_api(ours: str | None, theirs: str | None) -> None:
    for path in ("/v1/responses", COUNT):
        response = await post(Service(InvalidRequest("no", ours)), {"input": "hi"}, path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, theirs)


async def test_what_is_served_reaches_the_service() -> None:
    request = await asked(
        instructions="be brief", max_output_tokens=5, temperature=0, top_p=0.5, seed=3, stop=["x"], top_k=4, priority=2,
        slo={"ttft_ms": 9}, request_id="mine", include_reasoning=False, chat_template_kwargs={"a": 1, "b": 2},
        reasoning={"effort": "low"}, model="m", parse_special=True, stream=True,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )  # fmt: skip
    assert request == GenerateRequest(
        prompt=Chat(
            messages=(ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi")),
            template_kwargs={"a": 1, "reasoning_effort": "low"},
            parse_special=True,
        ),
        request_id="mine",
        model="m",
        sampling={
            "max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": ("x",), "top_k": 4,
            "structured_outputs": StructuredOutputs(json='{"type": "object"}'),
        },
        priority=2,
        ttft_ms=9,
        skip_reasoning=True,
    )  # fmt: skip
    assert (await asked(text={"format": {"type": "json_object"}})).sampling == {
        "structured_outputs": StructuredOutputs(json_object=True)
    }
    assert (await asked(text={"format": {"type": "text"}})).sampling == {}


async def test_ids_are_those_of_a_response() -> None:
    assert (await asked()).request_id.startswith("resp_")
    service = Service()
    response = await post(service, {"input": "hi"}, **{"x-request-id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert response.json()["id"] == service.asked[0].request_id == "resp_abc"


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TEXT = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "9"}]}
USER = {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]}
IN_CHAT = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def assistant(content: str = "", reasoning: str | None = None, calls: int = 0) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=(IN_CHAT,) * calls)


RESULT_IN_CHAT = ChatMessage(role="tool", content="9", tool_call_id="c")
USER_IN_CHAT = ChatMessage(role="user", content="x\ny")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([USER], [USER_IN_CHAT]),
        ([{"role": "developer", "content": "d"}], [ChatMessage(role="developer", content="d")]),
        ([USER, THOUGHT, SAID, CALL, CALL, RESULT], [USER_IN_CHAT, assistant("a", "hm", 2), RESULT_IN_CHAT]),
        ([CALL, RESULT, CALL, RESULT, SAID], [assistant(calls=1), RESULT_IN_CHAT] * 2 + [assistant("a")]),
        ([SAID, CALL, SAID], [assistant("aa", calls=1)]),
        ([SAID, SAID], [assistant("a")] * 2),
        ([SAID, THOUGHT, SAID], [assistant("a"), assistant("a", "hm")]),
        ([CALL, THOUGHT, CALL], [assistant(calls=1), assistant(reasoning="hm", calls=1)]),
        ([THOUGHT, THOUGHT, USER], [assistant(reasoning="hm\nhm"), USER_IN_CHAT]),
        ([{"type": "reasoning", "id": "r", "summary": []}, SAID], [assistant("a")]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, SAID],
            [assistant("a", "s")],
        ),
    ],
)
async def test_items_become_the_messages_of_a_chat(given: list[Any], expected: list[ChatMessage]) -> None:
    assert list((await chat_asked(input=given)).messages) == expected


async def test_tools_are_strict_unless_they_say_otherwise() -> None:
    schema = {"type": "object"}
    three = [TOOL, {**TOOL, "name": "g", "parameters": schema, "strict": False}, {**TOOL, "name": "h", "strict": None}]
    chat = await chat_asked(tools=three)
    assert chat.tools == (
        Tool(name="f", strict=True), Tool(name="g", parameters=schema, strict=False), Tool(name="h", strict=True),
    )  # fmt: skip
    assert chat.tool_choice == ToolChoice()


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("none", "fg", ToolChoice(use=ToolUse.NONE)),
        ("required", "fg", ToolChoice(use=ToolUse.REQUIRED)),
        ({"type": "function", "name": "g"}, "fg", ToolChoice(use=ToolUse.REQUIRED, name="g")),
        ({"type": "allowed_tools", "mode": "required", "tools": [TOOL]}, "f", ToolChoice(use=ToolUse.REQUIRED)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}, "f", ToolChoice()),
    ],
    ids=str,
)
async def test_choices_become_those_of_a_chat(choice: Any, names: str, expected: ToolChoice) -> None:
    for parallel in (None, True, False):
        chat = await chat_asked(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice, parallel_tool_calls=parallel)
        assert "".join(tool.name for tool in chat.tools) == names
        assert chat.tool_choice == dataclasses.replace(expected, is_parallel=parallel is not False)


class Breaking(Service):
    """A router's service whose answers break off."""

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        yield GenerateChunk(request_id="r", choice_index=0, text="word")
        raise WorkerFailed("it died")


async def test_openais_client_raises_what_breaks_off() -> None:
    async with (
        httpx2.AsyncClient(transport=app_of(Breaking())) as http_client,
        openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http_client) as client,
    ):
        stream = await client.responses.create(model="m", input="hi", stream=True)
        kinds = [(await anext(stream)).type for _ in range(6)]
        assert kinds[-2:] == ["response.output_text.delta", "response.failed"]
        with pytest.raises(openai.APIError, match="it died"):
            await anext(stream)
        with pytest.raises(openai.InternalServerError, match="it died"):
            await client.with_options(max_retries=0).responses.create(model="m", input="hi")
