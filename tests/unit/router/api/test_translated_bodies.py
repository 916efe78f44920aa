"""Anthropic's bodies: every field is known at every depth, and means what it says; others are refused by name."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import jsonschema
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from baton.api import Chat, GenerateRequest
from baton.chat import ChatMessage
from baton.structure import StructuredOutputs
from baton.tools import Tool, ToolChoice, ToolUse
from router.api.anthropic.body import AssistantMessage, CountTokensBody, MessageBody, SystemMessage, UserMessage
from router.api.apis import document
from router.api.fields import LEFT_OUT, UNSUPPORTED, Refusal, WithoutEffect
from router.prompt import ChatTemplate
from tests.unit.router.api.test_http import Service, app_of
from tools.api_docs import ROUTES

IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Arguments of the client's that are no fields of a body."""
TEMPLATE = "{{ messages }}{{ tools }}"
REASONING = TEMPLATE + "{{ enable_thinking }}{{ reasoning_effort }}"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "now", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "1"}
USED: list[Any] = [
    {"role": "user", "content": "When?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Well.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "So ", "citations": None},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {"at": "é"}, "caller": {"type": "direct"}},
            {"type": "text", "text": "there."},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, {**TEXT, "text": "2"}]},
            {"type": "tool_result", "tool_use_id": "c1", "content": "broken", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c1"},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "Now?"},
        ],
    },
    {"role": "user", "content": "Say."},
]  # fmt: skip


class Asked(Service):
    """Notes what is asked, of a model whose template reads these variables."""

    def __init__(self, template: str = TEMPLATE) -> None:
        super().__init__()
        self.may_answer.set()
        tokenizer = SimpleNamespace(chat_template=ChatTemplate({"default": template}, {}))
        self.model = SimpleNamespace(
            tokenizer=tokenizer, format=SimpleNamespace(reasoning="thinking" in template or None)
        )
        self.counted: list[Any] = []

    async def tokenize(self, prompt: Any, tenant: Any) -> tuple[int, ...]:
        self.counted.append(prompt)
        return (1, 2, 3)


def sent(service: Asked, path: str = "/v1/messages", **fields: Any) -> httpx2.Response:
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 8}
    body = {"model": "", "messages": [HI], **limit, **fields}

    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app_of(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
            headers = {"x-request-id": "mine", "content-type": "application/json"}
            return await client.post(path, content=json.dumps(body).encode(), headers=headers)

    return asyncio.run(send())


def asked(template: str = TEMPLATE, **fields: Any) -> GenerateRequest:
    service = Asked(template)
    response = sent(service, **fields)
    assert response.status_code == 200, response.text
    (request,) = service.asked
    return request


def chat_of(template: str = TEMPLATE, **fields: Any) -> Chat:
    prompt = asked(template, **fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


# -- fields ------------------------------------------------------------------------------------------------------------


def typed_dicts(hint: Any) -> Iterator[Any]:
    if is_typeddict(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from typed_dicts(inner)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models(inner)


def kinds(hints: dict[str, Any]) -> set[Any]:
    """The values of the field by which a union's members are told apart."""

    def literals(hint: Any) -> Iterator[Any]:
        for inner in typing.get_args(hint):
            yield from [inner] if typing.get_origin(hint) is typing.Literal else literals(inner)

    return {value for name in ("type", "role") for value in literals(hints.get(name))}


SERVED = {
    kind
    for message in (UserMessage, AssistantMessage, SystemMessage)
    for model in models(message.model_fields["content"].annotation)
    for kind in kinds(get_type_hints(model))
}
"""Types of blocks that are served, though not in the messages of every role."""


def is_refused_by_name(annotation: Any, kind: Any) -> bool:
    def problems(value: Any) -> list[str]:
        try:
            TypeAdapter(annotation).validate_python(value, strict=True)
        except ValidationError as error:
            return [each["type"] for each in error.errors()]
        return []

    return any({UNSUPPORTED, LEFT_OUT} & set(problems(value)) for value in ({"type": kind}, [{"type": kind}]))


def unknown_fields(params: Any, model: type[BaseModel], where: str, seen: set[Any]) -> Iterator[str]:
    """The fields of a client's type, at any depth, that are neither served nor declared."""
    if (params, model) in seen:
        return
    seen.add((params, model))
    ours = get_type_hints(model, include_extras=True)
    aliases = {field.alias or name: name for name, field in model.model_fields.items()}
    for name, hint in get_type_hints(params, include_extras=True).items():
        if name in IN_HEADERS and where == "body":
            continue
        path = f"{where}.{name}"
        if name not in aliases:
            yield path
            continue
        annotation = ours[aliases[name]]
        if (
            any(isinstance(each, Refusal | WithoutEffect) for each in typing.get_args(annotation))
            or annotation == dict[str, Any]
        ):
            continue
        for inner in typed_dicts(hint):
            kind = kinds(get_type_hints(inner, include_extras=True))
            fitting = [
                each
                for each in models(annotation)
                if kind & kinds(get_type_hints(each, include_extras=True)) or not kind
            ]
            for each in fitting:
                yield from unknown_fields(inner, each, path, seen)
            is_misplaced = name == "content" and kind <= SERVED
            if not (fitting or is_misplaced or all(is_refused_by_name(annotation, value) for value in kind)):
                yield f"{path}<{kind}>"


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (message_create_params.MessageCreateParamsStreaming, MessageBody),
        (beta_create_params.MessageCreateParamsStreaming, MessageBody),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensBody),
        (beta_count_tokens_params.MessageCountTokensParams, CountTokensBody),
    ],
)
def test_every_field_of_anthropics_client_is_known(params: Any, body: type[BaseModel]) -> None:
    seen: set[Any] = set()
    assert list(unknown_fields(params, body, "body", seen)) == []
    assert len(seen) > 15, "content, tools and choices are looked into"


def declared(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Refusal | WithoutEffect]]:
    for name, field in model.model_fields.items():
        for each in field.metadata:
            if isinstance(each, Refusal | WithoutEffect):
                yield name, each


@pytest.mark.parametrize(("name", "refusal"), [(n, r) for n, r in declared(MessageBody) if isinstance(r, Refusal)])
def test_what_is_refused_is_refused_by_name(name: str, refusal: Refusal) -> None:
    for value in (*refusal.neutral, None):
        assert sent(Asked(), **{name: value}).status_code == 200
    wrong: dict[str, Any] = {name: {"other": 1}}
    response = sent(Asked(), **wrong)
    message = response.json()["error"]["message"]
    assert (response.status_code, message.partition(" ")[0]) == (400, name)
    assert refusal.why in message


def test_the_document_takes_what_is_taken() -> None:
    whole = {"$ref": "#/components/schemas/MessageBody", "components": document(ROUTES)["components"]}
    body = {"model": "", "max_tokens": 1, "messages": USED, "tools": [TOOL], "tool_choice": {"type": "any"}}
    jsonschema.validate({**body, "system": [{"type": "text", "text": "a"}], "service_tier": "auto"}, whole)
    for wrong in (
        {"max_tokens": None},
        {"hot": 1},
        {"service_tier": 5.5, "messages": 1},
        {"messages": "hi"},
        {"system": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**body, **wrong}, whole)


# -- what they mean ----------------------------------------------------------------------------------------------------


def test_a_chat_in_our_words() -> None:
    chat = chat_of(system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}], messages=USED)
    (call,) = chat.messages[2].tool_calls
    assert chat.messages == (
        ChatMessage(role="system", content="Be\nbrief."),
        ChatMessage(role="user", content="When?"),
        ChatMessage(role="assistant", content="So there.", reasoning="Well.", tool_calls=(call,)),
        ChatMessage(role="tool", content="1\n2", tool_call_id="c1"),
        ChatMessage(role="tool", content="Error: broken", tool_call_id="c1"),
        ChatMessage(role="tool", content="", tool_call_id="c1"),
        ChatMessage(role="user", content="And?\nNow?\nSay."),
    )
    assert call == {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"at": "é"}'}}
    assert (chat.add_generation_prompt, chat.continue_final_message, chat.template_kwargs) == (True, False, {})


def test_a_system_message_may_stand_anywhere() -> None:
    chat = chat_of(system="A", messages=[HI, {"role": "system", "content": "B"}, HI])
    assert [(each.role, each.content) for each in chat.messages] == [
        ("system", "A"), ("user", "hi"), ("system", "B"), ("user", "hi"),
    ]  # fmt: skip


def test_the_last_message_of_the_assistant_is_continued() -> None:
    chat = chat_of(messages=[HI, {"role": "assistant", "content": [{"type": "text", "text": "So"}]}])
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    assert chat.messages[-1].content == "So"


@pytest.mark.parametrize(
    ("choice", "ours"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(is_parallel=False)),
        ({"type": "any"}, ToolChoice(use=ToolUse.REQUIRED)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(use=ToolUse.REQUIRED, is_parallel=False)),
        ({"type": "tool", "name": "now"}, ToolChoice(use=ToolUse.REQUIRED, name="now")),
        ({"type": "none"}, ToolChoice(use=ToolUse.NONE)),
    ],
)
def test_tools_and_their_choice(choice: Any, ours: ToolChoice) -> None:
    tools = [
        {**TOOL, "description": "Tells.", "strict": True, "type": "custom", "eager_input_streaming": True},
        {**TOOL, "name": "b"},
    ]
    chat = chat_of(tools=tools, tool_choice=choice)
    assert chat.tools == (
        Tool(name="now", description="Tells.", parameters={"type": "object"}, strict=True),
        Tool(name="b", parameters={"type": "object"}),
    )
    assert chat.tool_choice == ours


@pytest.mark.parametrize(
    ("thinking", "switch", "budget", "is_skipped"),
    [
        (None, None, None, False),
        ({"type": "enabled", "budget_tokens": 7}, True, 7, False),
        ({"type": "enabled", "budget_tokens": 0, "display": "omitted"}, True, 0, True),
        ({"type": "adaptive", "display": "summarized"}, True, None, False),
        ({"type": "adaptive", "display": "omitted"}, True, None, True),
        ({"type": "disabled"}, False, None, True),
    ],
)
def test_thinking(thinking: Any, switch: bool | None, budget: int | None, is_skipped: bool) -> None:
    for template, variable in (
        (REASONING, "enable_thinking"),
        (TEMPLATE + "{{ thinking }}", "thinking"),
        (TEMPLATE, ""),
    ):
        request = asked(template, thinking=thinking)
        assert isinstance(request.prompt, Chat)
        assert request.prompt.template_kwargs == ({} if switch is None or not variable else {variable: switch})
        assert request.sampling.get("thinking_budget") == (budget if variable else None)
        assert request.skip_reasoning is is_skipped


def test_how_the_answer_is_drawn() -> None:
    format_of = {"type": "json_schema", "schema": {"type": "object", "title": "é"}}
    request = asked(
        REASONING,
        model="m",
        max_tokens=9,
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=1,
        top_k=3,
        metadata={"user_id": "u"},
        output_config={"effort": "low", "format": format_of},
        cache_control={"type": "ephemeral"},
    )
    structure = StructuredOutputs(json=json.dumps(format_of["schema"], ensure_ascii=False))
    drawn = {"temperature": 0.5, "top_p": 1, "top_k": 3}
    assert request.sampling == {"max_tokens": 9, "stop": ("a", "b"), **drawn, "structured_outputs": structure}
    assert (request.model, request.request_id, request.continuous_usage) == ("m", "msg_mine", True)
    assert isinstance(request.prompt, Chat)
    assert request.prompt.template_kwargs == {"reasoning_effort": "low"}


def test_the_schema_of_an_answer_has_an_older_name() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert asked(output_format=form).sampling["structured_outputs"] == StructuredOutputs(json='{"type": "object"}')
    refused = sent(Asked(), "/v1/messages", output_format=form, output_config={"format": form})
    assert refused.status_code == 400
    assert "output_format is the older name of output_config.format" in refused.json()["error"]["message"]


def test_an_answer_may_be_shorter_than_what_is_asked() -> None:
    assert asked().shortens_answer


def test_tokens_are_counted_of_the_same_chat() -> None:
    fields: dict[str, Any] = {"system": "A", "messages": USED, "tools": [TOOL], "thinking": {"type": "disabled"}}
    service = Asked(REASONING)
    response = sent(service, "/v1/messages/count_tokens", **fields)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 3})
    assert service.counted == [chat_of(REASONING, **fields)]
    assert sent(Asked(), "/v1/messages/count_tokens", model="another").status_code == 404
    counted = sent(
        Asked(), "/v1/messages/count_tokens", max_tokens=1, temperature=0.5, stop_sequences=["a"], stream=True
    )
    assert (counted.status_code, counted.headers["x-baton-ignored"].count(",")) == (200, 3)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [HI, {"role": role, "content": list(blocks)}]}


DEEP = json.loads('{"a":' * 65 + "1" + "}" * 65)
CALL = {"type": "tool_use", "id": "c1", "name": "now", "input": {}}
REFUSED = [
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": "8"}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 8.0}, "max_tokens: Input should be a valid integer"),
    ({"stream": 1}, "stream: Input should be a valid boolean"),
    ({"hot": 1}, "hot: unknown field"),
    ({"<hot>": 1}, "<hot>: unknown field"),
    ({"n": 2}, "n: unknown field"),
    ({"model": None}, "model: Input should be a valid string"),
    ({"temperature": True}, "temperature: Input should be a valid number"),
    ({"stop_sequences": "a"}, "stop_sequences: Input should be a valid list"),
    ({"messages": "hi"}, "messages: Input should be a valid list"),
    ({"messages": ["hi"]}, "messages[0]: must be an object with a role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: must have a role out of: user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
    ({"messages": [{**HI, "name": "x"}]}, "messages[0].name: unknown field"),
    ({"messages": [{**HI, "content": 7}]}, "messages[0].content: must be a text or a list"),
    ({"messages": [{"role": "system", "content": "a", "clear_at": "now"}]}, "messages[0].clear_at is not"),
    (said("hi"), "messages[1].content[0]: must be an object with a type"),
    (said({"type": "hot"}), "messages[1].content[0]: must have a type out of: text, image, tool_result"),
    (said({"type": "text", "text": 7}), "messages[1].content[0].text: Input should be a valid string"),
    (said({"type": "text", "text": "a", "hot": 1}), "messages[1].content[0].hot: unknown field"),
    (said({"type": "text", "text": "a", "cache_control": "for ever"}),
     "messages[1].content[0].cache_control: Input should be a valid dictionary"),
    (said({"type": "image", "source": {}}), "messages[1].content[0].source: must have a type out of: base64"),
    (said({"type": "image", "source": {"type": "url", "url": "https://cat"}}),
     "messages[1].content[0].source of type url is not supported: the router fetches nothing; send the image itself"),
    (said({"type": "image", "source": {"type": "file", "file_id": "f"}}),
     "messages[1].content[0].source of type file is not supported: the router fetches nothing"),
    (said({"type": "image", "source": {}}, role="assistant"), "messages[1].content[0] of type image is not supported"),
    (said({"type": "document", "source": {}}), "messages[1].content[0] of type document is not supported"),
    (said(CALL), "messages[1].content[0]: must have a type out of: text, image, tool_result"),
    (said({"type": "thinking"}, role="assistant"), "messages[1].content[0].thinking: Field required"),
    (said({**CALL, "input": "{}"}, role="assistant"), "messages[1].content[0].input: Input should be a valid dict"),
    (said({**CALL, "id": ""}, role="assistant"), "messages[1].content[0].id: String should have at least 1"),
    (said({**CALL, "name": "x" * 257}, role="assistant"), "messages[1].content[0].name: String should have at most"),
    (said({**CALL, "input": DEEP}, role="assistant"), "messages[1].content[0].input is nested deeper than 64"),
    (said({**CALL, "caller": {"type": "server"}}, role="assistant"), "messages[1].content[0].caller is not supported"),
    (said(CALL, role="assistant"), "messages[1] calls a tool; a message with the result must follow"),
    (said({"type": "tool_result", "tool_use_id": "c"}), "messages[1].content[0].tool_use_id does not match a tool"),
    ({"messages": [*USED[:2], {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image"}]}]}]},
     "messages[2].content[0].content[0].source: Field required"),
    ({"system": [{"type": "image"}]}, "system[0] of type image is not supported"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema: Field required"),
    ({"tools": [{**TOOL, "hot": 1}]}, "tools[0].hot: unknown field"),
    ({"tool_choice": "any"}, "tool_choice: must be an object with a type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
    ({"tool_choice": {"type": "none", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use: un"),
    ({"thinking": {"type": "on"}}, "thinking: must have a type out of: enabled, adaptive, disabled"),
    ({"thinking": {"type": "between_tools"}}, "thinking of type between_tools is not supported: an "),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: Input should be greater"),
    ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking.budget_tokens must be less than max_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens: unknown field"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: Input should be 'json_schema'"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 1}}}, "output_config.task_budget is not supported"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 2**18}}}}, "output_config.format "),
    ({"metadata": "user"}, "metadata: Input should be a valid dictionary"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    response = sent(Asked(), **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["error"]["message"][: len(sentence)] == sentence
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": body["error"]["message"]},
        "request_id": "mine",
    }
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
