"""Messages, tools, choices and thoughts in the forms of several services are served as if they had OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest
import regex

from baton.api import Chat, GenerateRequest
from router.admission.tenants import Tenant
from router.answer import AnswerFormat, Mark, Reasoning
from tests.unit.router.api.test_ignored import CHAT, FUNCTION, HI, MESSAGES, RESPONSES, Answering, named, post

MARK = Mark(regex.compile("</?think>"))
THINKS = "{{ messages }}{{ tools }}{% if enable_thinking %}{% endif %}{{ reasoning_effort }}"
PLAIN_CALL = {"name": "f", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "function": FUNCTION}


async def asked(body: dict[str, Any], path: str = CHAT, template: str = THINKS, **settings: Any) -> GenerateRequest:
    service = Answering(template)
    response = await post(path, body, service, **settings)
    assert response.status_code == 200, response.text
    (request,) = service.asked
    return request


async def chat_asked(body: dict[str, Any], path: str = CHAT) -> Chat:
    prompt = (await asked(body, path)).prompt
    assert isinstance(prompt, Chat)
    return prompt


def with_call(call_id: str) -> list[dict[str, Any]]:
    return [
        HI,
        {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": PLAIN_CALL}]},
        {"role": "tool", "tool_call_id": call_id, "content": "x"},
    ]


ASSISTANT = {"role": "assistant", "content": "a"}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"messages": [HI, {"role": "assistant", "content": None, "function_call": PLAIN_CALL},
                      {"role": "function", "tool_call_id": "", "content": "x"}]},
        {"messages": with_call("call00100")},
    ),
    (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"type": None, "function": PLAIN_CALL}]},
                      {"role": "tool", "content": "x"}]},
        {"messages": with_call("call00100")},
    ),
    (
        {"messages": [HI, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "output_text", "text": "a"}]}]},
        {"messages": [HI, {**ASSISTANT, "reasoning_content": "hm"}]},
    ),
    (
        {"messages": [HI, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}, "a"]}]},
        {"messages": [HI, {**ASSISTANT, "reasoning_content": "hm"}]},
    ),
    ({"messages": [HI, {"role": "assistant", "content": None, "refusal": "a"}]}, {"messages": [HI, ASSISTANT]}),
    ({"messages": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, {"messages": [HI]}),
    ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, {"messages": [HI]}),
    ({"tools": [{"type": "function", **FUNCTION}]}, {"tools": [TOOL]}),
    ({"tools": [{"function": FUNCTION}]}, {"tools": [TOOL]}),
    ({"tools": [TOOL, TOOL]}, {"tools": [TOOL]}),
    *(
        ({"tools": [TOOL], "tool_choice": choice}, {"tools": [TOOL], "tool_choice": same})
        for choice, same in (
            ("any", "required"),
            ({"type": "any"}, "required"),
            ({"type": "auto"}, "auto"),
            ({"type": "none"}, "none"),
            ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
            ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
            ({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
            (
                {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
                {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                    {"type": "function", "function": {"name": "f"}}]}},
            ),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "same"), SAME)
async def test_a_form_of_another_service_is_served_as_openais(form: dict[str, Any], same: dict[str, Any]) -> None:
    assert await chat_asked(form) == await chat_asked(same)


STRICT = Tenant(id="s", strict=True)


@pytest.mark.parametrize("form", [form for form, _ in SAME if "refusal" not in str(form)])
async def test_strict_routers_take_openais_form_alone(form: dict[str, Any]) -> None:
    response = await post(CHAT, form, Answering(THINKS), tenant=STRICT)
    assert response.status_code == 400 or form == {"tools": [TOOL, TOOL]}, response.text


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": [7]}]}]},
        {"messages": [HI, {"role": "assistant", "function_call": 7}]},
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": 7}]}]},
        {"messages": [HI, {"role": "assistant", "tool_calls": {"id": "c"}}]},
        {"messages": [HI, {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        {"tools": [{"name": 7}]},
        {"tools": [TOOL], "tool_choice": {"type": "any", "more": 1}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": 7}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [7]}},
    ],
    ids=repr,
)
async def test_what_has_no_form_at_all_is_refused(odd: dict[str, Any]) -> None:
    assert (await post(CHAT, odd, Answering(THINKS))).status_code == 400


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, {"enable_thinking": True}),
        ({"thinking": False}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"think": True}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False, "custom": 1}}, {"enable_thinking": False}),
    ],
    ids=repr,
)
async def test_reasoning_is_asked_for_in_many_words(body: dict[str, Any], variables: dict[str, Any]) -> None:
    request = await asked(body)
    assert isinstance(request.prompt, Chat)
    assert request.prompt.template_kwargs == variables
    assert "thinking_budget" not in request.sampling, "the model has no reasoning that could be limited"


@pytest.mark.parametrize(
    "body", [{"thinking": {"type": "enabled", "budget_tokens": 3}}, {"reasoning": {"max_tokens": 3}}], ids=repr
)
async def test_a_reasoning_may_have_a_budget(body: dict[str, Any]) -> None:
    service = Answering(THINKS)
    service.model.format = AnswerFormat(reasoning=Reasoning(opens=MARK, closes=MARK))
    assert (await post(CHAT, body, service)).status_code == 200
    assert service.asked[0].sampling["thinking_budget"] == 3


@pytest.mark.parametrize(
    "body",
    [
        {"enable_thinking": False}, {"thinking": {"type": "enabled"}}, {"reasoning": {"effort": "high"}},
        {"think": True}, {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=repr,
)  # fmt: skip
async def test_a_model_without_reasoning_ignores_it(body: dict[str, Any]) -> None:
    response = await post(CHAT, body)
    assert (response.status_code, len(named(response))) == (200, 1)


@pytest.mark.parametrize(
    "body",
    [
        {"enable_thinking": False, "thinking": {"type": "enabled"}},
        {"reasoning": {"effort": "high"}, "reasoning_effort": "low"},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "perhaps"}},
        {"reasoning": 7},
    ],
    ids=repr,
)
async def test_what_contradicts_itself_is_refused(body: dict[str, Any]) -> None:
    assert (await post(CHAT, body, Answering(THINKS))).status_code == 400


async def test_a_reasoning_stays_here_if_the_client_wants_that() -> None:
    assert (await asked({"reasoning": {"exclude": True}})).skip_reasoning
    assert not (await asked({"reasoning": {"effort": "low"}})).skip_reasoning


async def test_samplers_of_other_servers_are_taken_while_they_are_off() -> None:
    off = {"mirostat": 0, "mirostat_tau": 5.0, "repeat_penalty": 1.0, "n_probs": 0, "top_a": 0, "do_sample": True}
    assert (await post(CHAT, off)).status_code == 200
    for on in ({"mirostat": 2}, {"repeat_penalty": 1.1}, {"top_a": 0.5}, {"do_sample": False}, {"n_probs": True}):
        assert (await post(CHAT, on)).status_code == 400, on


async def test_conversations_that_began_elsewhere_go_on() -> None:
    items = [
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "output_text", "text": "done"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "end_turn": True},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    chat = await chat_asked({"input": items}, RESPONSES)
    assert [(each.role, each.content) for each in chat.messages] == [
        ("assistant", ""), ("tool", "done"), ("assistant", "no"), ("user", "hi"),
    ]  # fmt: skip
    assert chat.messages[0].tool_calls[0]["function"] == {"name": "patch", "arguments": '{"input": "+ a"}'}
    assert (await post(RESPONSES, {"input": items}, tenant=STRICT)).status_code == 400


async def test_responses_take_the_tools_of_a_chat() -> None:
    nested, flat = {"tools": [TOOL]}, {"tools": [{"type": "function", **FUNCTION, "strict": None}]}
    assert await chat_asked(nested, RESPONSES) == await chat_asked(flat, RESPONSES)
    for odd in ({"name": 7}, {"name": "f", "hot": 1}):
        assert (await post(RESPONSES, {"tools": [{"type": "function", "function": odd}]})).status_code == 400


async def test_thoughts_need_no_signature() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    said = [HI, {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}, HI]
    chat = await chat_asked({"messages": said}, MESSAGES)
    assert (chat.messages[1].reasoning, chat.messages[1].content) == ("hm", "a")
