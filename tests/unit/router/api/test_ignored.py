"""Fields that change no answer are accepted in all APIs, at any depth, and named; what is refused is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from baton.api import Chat
from baton.errors import InvalidRequest
from baton.timelines import RequestTimeline
from baton.tools import Tool
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.answer import PLAIN as PLAIN_FORMAT
from router.api.fields import IGNORED_HEADER, MAX_NAME, MAX_NAMED, Ignored
from router.prompt import ChatTemplate
from router.timeline.log import RefusedBody, RequestFilter
from tests.unit.router.api.test_http import Service, app_of

HI = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": "", "max_tokens": 4, "messages": [HI]},
}
NO_EFFORT = "{{ messages }}{{ tools }}"
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}


class Answering(Service):
    """Answers at once, for a model whose template reads no effort."""

    def __init__(self, template: str = NO_EFFORT) -> None:
        super().__init__()
        tokenizer = SimpleNamespace(chat_template=ChatTemplate({"default": template}, {}))
        self.model = SimpleNamespace(tokenizer=tokenizer, format=PLAIN_FORMAT)
        self.may_answer.set()


async def post(
    path: str, body: dict[str, Any], service: Service | None = None, tenant: Tenant = DEFAULT_TENANT, **settings: Any
) -> httpx2.Response:
    transport = httpx2.ASGITransport(app_of(service or Answering(), tenant=tenant, **settings))
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
        return await client.post(path, json={**PLAIN[path], **body})


def named(response: httpx2.Response) -> list[str]:
    return response.headers[IGNORED_HEADER].split(", ")


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize("empty", [None, False, "", [], {}], ids=repr)
async def test_what_asks_for_nothing_is_accepted_whatever_its_name(path: str, empty: Any) -> None:
    response = await post(path, {"hot": empty})
    assert (response.status_code, named(response)) == (200, ["hot"])
    for value in (0, True, "x", [0], {"a": 1}):
        assert (await post(path, {"hot": value})).status_code == 400


TEXT = {"type": "text", "text": "hi"}
CACHED = {"type": "ephemeral", "scope": "global"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
AT_DEPTH: list[tuple[str, dict[str, Any], set[str]]] = [
    (CHAT, {"messages": [{**HI, "id": 1, "opts": {"visible": True}}]}, {"id", "opts"}),
    (CHAT, {"messages": [{"role": "user", "content": [{**TEXT, "cache_control": CACHED}]}]}, {"cache_control"}),
    (CHAT, {"messages": [{**HI, "thinking_blocks": None, "reasoning_details": []}]},
     {"thinking_blocks", "reasoning_details"}),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": None, "provider_specific_fields": {"a": 1}}, HI]},
     {"provider_specific_fields"}),
    (CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": [{**CALL, "cache_control": CACHED}]}]},
     {"cache_control"}),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION, "cache_control": CACHED}]}, {"cache_control"}),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"required": None}}}]}, {"required"}),
    (CHAT, {"chat_id": "1", "cache_prompt": True, "provider": {"order": ["x"]}},
     {"chat_id", "cache_prompt", "provider"}),
    (CHAT, {"reasoning_effort": "medium"}, {"reasoning_effort"}),
    (CHAT, {"service_tier": "flex", "store": True, "verbosity": "low", "prediction": {"type": "content"}},
     {"service_tier", "store", "verbosity", "prediction"}),
    (CHAT, {"stream_options": None, "response_format": {"type": "text", "strict": False}}, {"strict"}),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "store": False}, {"include"}),
    (RESPONSES, {"client_metadata": {"a": "b"}}, {"client_metadata"}),
    (RESPONSES, {"reasoning": {"effort": "medium", "summary": "detailed"}}, {"reasoning.effort", "summary"}),
    (RESPONSES, {"input": [{**HI, "metadata": {"turn": 1}}]}, {"metadata"}),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}, HI]}, {"encrypted_content"}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear"}]}}, {"context_management"}),
    (MESSAGES, {"output_config": {"effort": "high"}}, {"output_config.effort"}),
    (MESSAGES, {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 8}}, {"thinking"}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{**TEXT, "cache_control": CACHED, "id": "x"}]}]},
     {"cache_control", "id"}),
    (MESSAGES, {"system": [{**TEXT, "cache_control": CACHED}]}, {"cache_control"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), AT_DEPTH, ids=range(len(AT_DEPTH)))
async def test_marks_change_nothing_at_any_depth(path: str, body: dict[str, Any], expected: set[str]) -> None:
    response = await post(path, body)
    assert response.status_code == 200, response.text
    assert set(named(response)) == expected


@pytest.mark.parametrize(
    ("router", "tenant", "is_refused"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
async def test_the_router_or_the_tenant_may_be_strict(router: bool, tenant: bool | None, is_refused: bool) -> None:
    """What an API declares to have no effect is none of this rule's business."""
    for path, body, param in (
        (CHAT, {"hot": None}, "hot"),
        (CHAT, {"messages": [{**HI, "id": 1}]}, "messages[0].id"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (RESPONSES, {"hot": None}, "hot"),
    ):
        response = await post(path, body, tenant=Tenant(id="t", strict=tenant), is_strict=router)
        assert response.status_code == (400 if is_refused else 200), response.text
        if is_refused:
            assert response.json()["error"]["param"] == param
    assert (await post(CHAT, {"user": "me"}, is_strict=True)).status_code == 200


HOSTED: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch"},
]


@pytest.mark.parametrize(
    ("path", "function"),
    [
        (CHAT, {"type": "function", "function": FUNCTION}),
        (RESPONSES, {"type": "function", **FUNCTION, "strict": False}),
        (MESSAGES, {"name": "f", "input_schema": {"type": "object"}}),
    ],
)
async def test_tools_that_nothing_can_run_are_left_out(path: str, function: dict[str, Any]) -> None:
    hosted = [{"type": "web_search_20250305", "name": "web_search"}] if path == MESSAGES else HOSTED
    service = Answering()
    response = await post(path, {"tools": [hosted[0], function, *hosted[1:]]}, service)
    assert response.status_code == 200, response.text
    assert set(named(response)) == {tool["type"] for tool in hosted}
    alone = await post(path, {"tools": hosted}, service)
    assert alone.status_code == 200, alone.text
    prompts = [asked.prompt for asked in service.asked]
    assert [prompt.tools for prompt in prompts if isinstance(prompt, Chat)] == [
        (Tool(name="f", parameters={"type": "object"}),),
        (),
    ]


async def test_an_effort_of_none_turns_the_reasoning_off_where_that_can_be() -> None:
    for template, variables in (
        (NO_EFFORT + "{{ enable_thinking }}", {"enable_thinking": False}),
        (NO_EFFORT + "{{ reasoning_effort }}", {"reasoning_effort": "none"}),
        (NO_EFFORT, {}),
    ):
        service = Answering(template)
        assert (await post(CHAT, {"reasoning_effort": "none"}, service)).status_code == 200
        prompt = service.asked[0].prompt
        assert isinstance(prompt, Chat)
        assert prompt.template_kwargs == variables


def test_the_header_is_short_and_printable() -> None:
    ignored = Ignored()
    for name in ("a\r\nset-cookie: x", "é" * 500, "b,c", *(f"_{number}" for number in range(100))):
        assert ignored.takes(name, None)
    (value,) = ignored.headers().values()
    assert value.isascii()
    assert value.isprintable()
    names = value.split(", ")
    assert len(names) == MAX_NAMED
    assert max(map(len, names)) <= MAX_NAME
    assert names[:3] == ["a??set-cookie:?x", "?" * MAX_NAME, "b?c"]


@pytest.mark.parametrize(
    ("path", "body", "param", "label"),
    [
        (CHAT, {"hot": 1}, "hot", "other"),
        (CHAT, {"chat_template": "x"}, "chat_template", "chat_template"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text", "text"),
        (CHAT, {"temperature": "9"}, "temperature", "temperature"),
        (RESPONSES, {"previous_response_id": "x"}, "previous_response_id", "previous_response_id"),
        (MESSAGES, {"hot": 1}, None, "other"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_counted_and_listed(
    path: str, body: dict[str, Any], param: str | None, label: str
) -> None:
    service = Answering()
    response = await post(path, body, service)
    assert response.status_code == 400
    assert response.json()["error"].get("param") == param
    assert service.metrics.refused_fields.totals("field") == {(label,): 1}
    assert service.metrics.requests.totals("model", "outcome") == {("m", "invalid"): 1}
    (listed,) = service.requests.listed(RequestFilter()).requests
    assert (listed.request_id, listed.outcome) == (response.headers["x-request-id"], "invalid")
    assert listed.error.endswith(f": {label}")
    (timeline,) = service.requests.explain(listed.request_id)
    assert isinstance(timeline, RequestTimeline)
    assert not service.asked


async def test_a_request_is_found_by_the_id_that_its_answer_had() -> None:
    """A client may have sent it in a header: then the request's own id begins with the API's word for it."""
    service = Answering()
    for request_id in ("chatcmpl-mine", "resp_mine", "other-mine"):
        refused = RefusedBody(
            request_id=request_id,
            tenant="t",
            model="m",
            operation="chat",
            arrived_s=0.0,
            error=InvalidRequest("no"),
            field="",
        )
        service.requests.refused(refused)
    found = {each.summary.request_id for each in service.requests.explain("mine")}
    assert found == {"chatcmpl-mine", "resp_mine"}


async def test_what_is_ignored_is_counted_by_names_that_are_known() -> None:
    service = Answering()
    for body in ({"cache_prompt": True, "user": "me"}, {"made_up_by_a_client_id": 1}, {"so_id": 1, "other_id": 1}):
        assert (await post(CHAT, body, service)).status_code == 200
    assert service.metrics.ignored_fields.totals("field") == {("cache_prompt",): 1, ("user",): 1, ("other",): 3}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_options_of_a_stream_change_no_whole_answer(path: str) -> None:
    options: dict[str, Any] = {"stream_options": {}}
    assert named(await post(path, options)) == ["stream_options"]
    assert (await post(path, options, tenant=Tenant(id="s", strict=True))).status_code == 400
    padded = await post(path, {"stream": True, "stream_options": {"include_obfuscation": True}})
    assert (padded.status_code, named(padded)) == (200, ["include_obfuscation"])
