"""The HTTP API: bodies that are no request are refused by name, and a client that leaves cancels its request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from baton.api import (
    Chat,
    GenerateChunk,
    GenerateRequest,
    ModelCard,
    Text,
    Timing,
    TokenIds,
    Truncation,
    TruncationSide,
    Usage,
)
from baton.chat import ChatMessage
from baton.errors import InvalidRequest
from baton.registered_adapters import NO_ADAPTERS
from baton.sampling import FinishReason
from baton.structure import StructuredOutputs
from baton.telemetry.request_metrics import RequestMetrics
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.answer import PLAIN
from router.api.http import create_app
from router.prompt import ChatTemplate
from router.timeline.log import Ingress, RequestLog
from tests.support.models import table_of

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": %s}'


class Service:
    """A router's service that answers with one word, once it may."""

    facts = SimpleNamespace(id="m", vocab_size=100, max_model_len=10)
    adapters = NO_ADAPTERS
    card = ModelCard(id="m", path="/models/m", max_model_len=9, created=0, weights="", kv_dtype="")
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=ChatTemplate({"default": "{{ reasoning_effort }}"}, {})), format=PLAIN
    )

    def __init__(self) -> None:
        self.metrics = RequestMetrics()
        self.requests = RequestLog(instruments=self.metrics)
        self.asked: list[GenerateRequest] = []
        self.may_answer = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.refusal: InvalidRequest | None = None

    is_crowded = False

    def name_of(self, model: str) -> str:
        return "m"

    def card_of(self, name: str) -> ModelCard:
        return self.card

    def cards(self) -> list[ModelCard]:
        return [self.card]

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield GenerateChunk(
            request_id="r",
            choice_index=0,
            text="word",
            token_ids=(1,),
            finish_reason=FinishReason.STOP,
            usage=Usage(1, 1, 0),
            timing=Timing(ttft_s=0.25, total_s=1.5, queue_s=0.05, prefill_s=0.2, decode_s=1.25),
        )


def app_of(service: Service, unready: str = "", tenant: Tenant = DEFAULT_TENANT, **settings: Any) -> Any:
    tenants: Any = SimpleNamespace(is_open=False, identify=lambda key, certificate: tenant)
    stand_in: Any = service
    return create_app(table_of(stand_in, requests=service.requests), tenants, lambda: unready, lambda: b"", **settings)


async def post(
    service: Service,
    body: bytes,
    content_type: str | None = "application/json",
    path: str = "/v1/chat/completions",
) -> httpx2.Response:
    headers = {"content-type": content_type} if content_type else {}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(service)), base_url="http://baton") as client:
        return await client.post(path, content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "content_type", "message", "param"),
    [
        (b"", "application/json", "the body: Field required", None),
        (b"null", "application/json", "the body must be a JSON object", None),
        (b"[]", "application/json", "the body must be a JSON object", None),
        (b"{", "application/json", "the body is not valid JSON, at character 1: Expecting property name", None),
        (b"\xff{", "application/json", "the body is not valid JSON in UTF-8, or nested too deeply", None),
        (b"[" * 10_000, "application/json", "the body is not valid JSON in UTF-8, or nested too deeply", None),
        (b"{}", "application/json", "messages: Field required", "messages"),
        (b'{"messages": [{}], "\\ud800": 1}', "application/json", "the body: Input should be a valid string", None),
        (CHAT % b'"x"', "application/json", "max_tokens: Input should be a valid integer", "max_tokens"),
    ],
)
async def test_what_is_no_request_is_refused_by_name(
    body: bytes, content_type: str | None, message: str, param: str | None
) -> None:
    service = Service()
    service.may_answer.set()
    response = await post(service, body, content_type)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"][: len(message)], error["type"], error["param"]) == (
        message,
        "invalid_request_error",
        param,
    )


@pytest.mark.parametrize(("unready", "status"), [("", 200), ("no worker is ready", 503)])
async def test_health_says_what_readyz_says(unready: str, status: int) -> None:
    transport = httpx2.ASGITransport(app_of(Service(), unready))
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
        answers = [await client.get(path) for path in ("/health", "/readyz")]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(status, {"status": unready or "ok"})] * 2


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
async def test_json_is_read_under_all_its_names(content_type: str) -> None:
    service = Service()
    service.may_answer.set()
    response = await post(service, CHAT % b"4", content_type)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "word"
    (asked,) = service.asked
    assert (type(asked.prompt), asked.sampling) == (Chat, {"max_tokens": 4})


async def test_a_whole_answer_says_in_a_header_where_the_time_went() -> None:
    """A stage that took none is left out."""
    service = Service()
    service.may_answer.set()
    response = await post(service, CHAT % b"4")
    expected = "total;dur=1500.0, first_token;dur=250.0, queue;dur=50.0, prefill;dur=200.0, decode;dur=1250.0"
    assert response.headers["server-timing"] == expected


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields}


def said(*parts: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A chat of one message."""
    content = list(parts) or "hi"
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content, **fields}]}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "hi", **fields}


TEXT = {"type": "text", "text": "hi"}
UNSUPPORTED = [
    (completion(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    (chat(do_sample=False), "do_sample"),
    (chat(repeat_penalty=1.3), "repeat_penalty"),
    (chat(chat_template="x"), "chat_template"),
    (said(tool_calls=[{"id": "1", "type": "custom", "custom": {}}]), "messages[0].tool_calls[0].type"),
    (
        said(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "", "x": 1}}]),
        "messages[0].tool_calls[0].function.x",
    ),
    (said(mood=0), "messages[0].mood"),
    (said(TEXT, {**TEXT, "mood": 1}), "messages[0].content[1].mood"),
    (said(TEXT, {"type": "image_url", "image_url": {"url": "https://cat"}}), "messages[0].content[1].image_url.url"),
    (said(TEXT, {"type": "input_audio", "input_audio": {}}), "messages[0].content[1]"),
    (said(7), "messages[0].content[0]"),
]
UNKNOWN: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(temprature=1), "temprature"),
    (chat(temprature=0), "temprature"),
    (chat(stream_options={"include_usage": True, "include_cost": True}), "stream_options.include_cost"),
    (chat(slo={"ttft": 5}), "slo.ttft"),
    (chat(response_format={"type": "text", "strict": True}), "response_format.strict"),
    (chat(structured_outputs={"structural_tag": "{}"}), "structured_outputs.structural_tag"),
    (("/tokenize", {"prompt": "a", "add_special": True}), "add_special"),
]
CONTRADICTIONS: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(response_format={"type": "grammar"}), "response_format.type"),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format.json_schema.schema"),
    (chat(response_format={"type": "json_schema"}), "response_format"),
    (chat(response_format={"type": "json_object", "json_schema": {"schema": {}}}), "response_format"),
    (chat(structured_outputs={}), "structured_outputs"),
    (chat(structured_outputs={"json": {}, "regex": "a"}), "structured_outputs"),
    (chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), "structured_outputs"),
]
OF_ANOTHER_TYPE = [
    (chat(temperature="0.5"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(n=True), "n"),
    (chat(n=1.0), "n"),
    (chat(max_tokens=4.0), "max_tokens"),
    (chat(max_completion_tokens="4"), "max_completion_tokens"),
    (chat(seed="1"), "seed"),
    (chat(stream="no"), "stream"),
    (chat(stream=0), "stream"),
    (chat(ignore_eos="true"), "ignore_eos"),
    (chat(stop=5), "stop"),
    (chat(stop=["a", 5]), "stop[1]"),
    (chat(stop_token_ids=[1, True]), "stop_token_ids[1]"),
    (chat(model=1), "model"),
    (chat(user=5), "user"),
    (chat(metadata="x"), "metadata"),
    (chat(store=1), "store"),
    (chat(structured_outputs={"regex": 1}), "structured_outputs.regex"),
    (chat(structured_outputs={"choice": "a"}), "structured_outputs.choice"),
    (chat(reasoning_end_ids=["</think>"]), "reasoning_end_ids[0]"),
    (chat(thinking_budget="5"), "thinking_budget"),
    (chat(use_beam_search=1), "use_beam_search"),
    (chat(early_stopping="soon"), "early_stopping"),
    (chat(early_stopping=1), "early_stopping"),
    (chat(priority="1"), "priority"),
    (chat(slo={"ttft_ms": "5"}), "slo.ttft_ms"),
    (chat(stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(documents=["hi"]), "documents[0]"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (chat(reasoning_effort=1), "reasoning_effort"),
    (chat(add_generation_prompt=1), "add_generation_prompt"),
    (chat(continue_final_message="x"), "continue_final_message"),
    (chat(parse_special=1), "parse_special"),
    (chat(truncate_prompt_tokens="5"), "truncate_prompt_tokens"),
    (chat(truncate_prompt_tokens=5, truncation_side="up"), "truncation_side"),
    (completion(add_special_tokens=1), "add_special_tokens"),
    (said(tool_calls={}), "messages[0].tool_calls"),
    (said(tool_calls=["f"]), "messages[0].tool_calls[0]"),
    (said(tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
    (said(tool_calls=[{"id": 1, "function": {"name": "f", "arguments": ""}}]), "messages[0].tool_calls[0]"),
    (said(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": 7}}]), "messages[0].tool_calls[0]"),
    (said(tool_calls=[{"id": "1", "function": {"name": "", "arguments": ""}}]), "messages[0].tool_calls[0]"),
    (said(reasoning=1), "messages[0].reasoning"),
    (said(tool_call_id=1), "messages[0].tool_call_id"),
    (chat(messages=["hi"]), "messages[0]"),
    (said(role=1), "messages[0].role"),
    (said(content=1), "messages[0].content"),
    (said(name=0), "messages[0].name"),
    (said({"type": "text", "text": 1}), "messages[0].content[0].text"),
    (completion(prompt=1), "prompt"),
    (completion(prompt=[True]), "prompt"),
    (completion(prompt=[1.0]), "prompt"),
    (("/tokenize", {"prompt": 5}), "prompt"),
    (("/detokenize", {"tokens": ["5"]}), "tokens[0]"),
    (("/detokenize", {"tokens": [True]}), "tokens[0]"),
]


@pytest.mark.parametrize(
    ("code", "asked", "param"),
    [
        *(("unsupported_parameter", *case) for case in UNSUPPORTED),
        *(("unknown_parameter", *case) for case in UNKNOWN),
        *(("invalid_value", *case) for case in CONTRADICTIONS + OF_ANOTHER_TYPE),
    ],
    ids=repr,
)
async def test_what_is_not_done_as_it_is_asked_is_refused_by_name(
    code: str, asked: tuple[str, dict[str, Any]], param: str
) -> None:
    service = Service()
    service.may_answer.set()
    path, body = asked
    response = await post(service, json.dumps(body).encode(), path=path)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert param in error["message"]
    assert not service.asked


@pytest.mark.parametrize(
    "asked",
    [
        chat(
            **dict.fromkeys(("n", "stop", "stream", "stream_options", "slo", "priority", "user", "tools", "logprobs"))
        ),
        chat(temperature=1, top_p=1, seed=2**40, n=1, stream=False, stop="x"),
        chat(stop=""),
        chat(tools=[], tool_choice="auto", presence_penalty=0.0, response_format={"type": "text"}, logprobs=False),
        chat(user="me", metadata={"a": "b"}, store=False, safety_identifier="x", prompt_cache_key="y"),
        chat(
            max_tokens=4,
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        ),
        said(TEXT, TEXT, name="ada"),
        said(name=None, refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None),
        said(role="assistant", reasoning_content=None, tool_calls=[]),
        completion(repetition_penalty=1.0, logprobs=None, best_of=1, suffix="", echo=False),
        # As guidellm, aiperf and vLLM's benchmark ask.
        chat(
            model="m",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_completion_tokens=9,
            stop=None,
            ignore_eos=True,
        ),
        chat(model="m", stream=True, max_completion_tokens=9, stream_options={"include_usage": True}),
        completion(
            model="m",
            temperature=0.0,
            repetition_penalty=1.0,
            max_tokens=9,
            logprobs=None,
            stream=True,
            stream_options={"include_usage": True},
            ignore_eos=True,
        ),
        completion(prompt=[5, 6]),
        completion(prompt=["a"]),
    ],
    ids=repr,
)
async def test_what_asks_for_nothing_else_is_served(asked: tuple[str, dict[str, Any]]) -> None:
    service = Service()
    service.may_answer.set()
    path, body = asked
    response = await post(service, json.dumps(body).encode(), path=path)
    assert response.status_code == 200, response.text
    assert len(service.asked) == 1


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        (completion(), Text("hi")),
        (completion(parse_special=True, add_special_tokens=False), Text("hi", True, False)),
        (chat(), {}),
        (chat(continue_final_message=True), {"add_generation_prompt": False, "continue_final_message": True}),
        (chat(add_generation_prompt=False), {"add_generation_prompt": False}),
        (chat(reasoning_effort="low"), {"template_kwargs": {"reasoning_effort": "low"}}),
        (
            chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low", "a": [1]}),
            {"template_kwargs": {"reasoning_effort": "low"}},
        ),
        (chat(documents=[{"text": "x"}], parse_special=True), {"documents": ({"text": "x"},), "parse_special": True}),
        (
            chat(messages=[{"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}]),
            {"messages": (ChatMessage(role="assistant", content="", tool_calls=(CALL,), reasoning="hm"),)},
        ),
        (
            chat(messages=[{"role": "tool", "content": "42", "tool_call_id": "1"}]),
            {"messages": (ChatMessage(role="tool", content="42", tool_call_id="1"),)},
        ),
    ],
    ids=repr,
)
async def test_a_prompt_is_asked_as_the_body_has_it(
    asked: tuple[str, dict[str, Any]], prompt: Text | dict[str, Any]
) -> None:
    service = Service()
    service.may_answer.set()
    path, body = asked
    assert (await post(service, json.dumps(body).encode(), path=path)).status_code == 200
    hello = {"messages": (ChatMessage(role="user", content="hi"),)}
    assert service.asked[0].prompt == (prompt if isinstance(prompt, Text) else Chat(**{**hello, **prompt}))


@pytest.mark.parametrize(
    ("fields", "truncation"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": 5}, Truncation(5, TruncationSide.LEFT)),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, Truncation(-1, TruncationSide.RIGHT)),
    ],
)
async def test_a_truncation_is_asked_as_the_body_has_it(fields: dict[str, Any], truncation: Truncation | None) -> None:
    service = Service()
    service.may_answer.set()
    path, body = completion(**fields)
    assert (await post(service, json.dumps(body).encode(), path=path)).status_code == 200
    assert service.asked[0].truncation == truncation


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
        (chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}), "reasoning_effort"),
        (completion(truncation_side="left"), "truncation_side"),
        (completion(truncate_prompt_tokens=5, echo=True), "echo"),
        (chat(max_tokens=4, max_completion_tokens=5), "max_tokens"),
        (completion(prompt=["a"] * 129), "prompt"),
        (said(reasoning="a", reasoning_content="b", role="assistant"), "messages[0].reasoning"),
        (("/tokenize", {"prompt": "a", "documents": []}), "documents"),
        (("/tokenize", {"messages": [], "add_special_tokens": True}), "add_special_tokens"),
        (("/tokenize", {}), "prompt"),
    ],
    ids=repr,
)
async def test_contradictions_are_refused(asked: tuple[str, dict[str, Any]], param: str) -> None:
    service = Service()
    service.may_answer.set()
    path, body = asked
    response = await post(service, json.dumps(body).encode(), path=path)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not service.asked


async def test_several_prompts_are_asked_one_by_one() -> None:
    service = Service()
    service.may_answer.set()
    path, body = completion(prompt=[[5], [6, 7]], request_id="mine", n=1, echo=False)
    response = await post(service, json.dumps(body).encode(), path=path)
    assert response.status_code == 200, response.text
    assert [(each.request_id, each.prompt) for each in service.asked] == [
        ("mine-0", TokenIds((5,))),
        ("mine-1", TokenIds((6, 7))),
    ]
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert (answer["id"], answer["usage"]["total_tokens"]) == ("mine", 4)


SCHEMA = {"type": "object", "properties": {"größe": {"type": "number"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutputs(json=json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=json.dumps(SCHEMA, ensure_ascii=False))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": True}}, StructuredOutputs(json="true")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            StructuredOutputs(regex="a"),
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("of", [chat, completion])
async def test_a_structure_is_asked_for_in_openais_words_and_in_vllms(
    of: Callable[..., tuple[str, dict[str, Any]]], fields: dict[str, Any], expected: StructuredOutputs | None
) -> None:
    service = Service()
    service.may_answer.set()
    path, body = of(**fields)
    response = await post(service, json.dumps(body).encode(), path=path)
    assert response.status_code == 200, response.text
    (asked,) = service.asked
    assert asked.sampling.get("structured_outputs") == expected


async def test_half_a_character_in_a_schema_is_refused() -> None:
    service = Service()
    path, _ = chat()
    body = (
        b'{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "\\ud800"}}}}'
    )
    response = await post(service, body, path=path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_the_openai_package_asks_once_for_what_is_not_supported() -> None:
    attempts: list[httpx2.Request] = []

    async def count(request: httpx2.Request) -> None:
        attempts.append(request)

    transport = httpx2.ASGITransport(app_of(Service()))
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    messages: Any = [{"role": "user", "content": [sound]}]
    async with (
        httpx2.AsyncClient(transport=transport, event_hooks={"request": [count]}) as http_client,
        openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http_client) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="others are not supported yet") as refusal:
            await client.chat.completions.create(model="m", messages=messages)
    assert refusal.value.code == "unsupported_parameter"
    assert len(attempts) == 1


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(stream: bytes) -> None:
    service, leaving = Service(), asyncio.Event()
    messages = [{"type": "http.request", "body": CHAT % b'4, "stream": %s' % stream, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    async with asyncio.timeout(10):
        serving = asyncio.create_task(app_of(service)(scope, receive, send))
        await asyncio.sleep(0.05)
        assert not service.cancelled.is_set()
        leaving.set()
        await service.cancelled.wait()
        await serving


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_must_say_that_it_is_json(content_type: str | None) -> None:
    """A page of another origin can send these to a router on its reader's machine."""
    response = await post(service := Service(), CHAT % b"4", content_type)
    assert (response.status_code, service.asked) == (415, [])
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "ours", "theirs"),
    [
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs", "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs", "structured_outputs"),
    ],
)
async def test_a_refusal_names_the_field_that_the_client_wrote(asked: dict[str, Any], ours: str, theirs: str) -> None:
    service = Service()
    service.refusal = InvalidRequest(f"{ours} is too much", ours)
    path, body = chat(**asked)
    response = await post(service, json.dumps(body).encode(), "application/json", path)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, theirs, f"{theirs} is too much")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_requests_id_in_a_header(stream: bool) -> None:
    service = Service()
    service.may_answer.set()

    async def answered(given: str | None, **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
        headers = {"x-request-id": given} if given is not None else {}
        transport = httpx2.ASGITransport(app_of(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    assert (await answered("abc")).headers["x-request-id"] == "abc"
    assert service.asked[-1].request_id == "chatcmpl-abc"
    own = await answered(None)
    assert own.headers["x-request-id"] == service.asked[-1].request_id
    assert service.asked[-1].request_id.startswith("chatcmpl-")
    assert (await answered("gateway's", request_id="mine")).headers["x-request-id"] == "gateway's"
    assert service.asked[-1].request_id == "mine", "with which the client resumes"
    for too_long, echoed in (("x" * 128, "x" * 128), ("x" * 129, "req-")):
        assert (await answered(too_long)).headers["x-request-id"].startswith(echoed)
        assert len(service.asked[-1].request_id) < 60
    num_asked = len(service.asked)
    for given, fields in (("abc", {"temperature": "hot"}), ("abc", {"request_id": "a\nb"})):
        refused = await answered(given, **fields)
        assert refused.status_code == 400
        assert refused.headers["x-request-id"] == given
    assert (await answered(None, request_id="a\nb")).headers["x-request-id"].startswith("req-")
    assert len(service.asked) == num_asked
