"""What clients and agents ask for beside the plain request: each gets what it knows how to read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import ModelInfo

from baton.api import Chat, GenerateChunk, GenerateRequest, PromptScores, Usage
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.structure import StructuredOutputs
from baton.tools import ToolCallDelta, ToolUse
from router.admission.tenants import DEFAULT_TENANT
from router.timeline.log import Ingress
from tests.unit.router.api.test_http import app_of
from tests.unit.router.api.test_ignored import CHAT, FUNCTION, HI, MESSAGES, RESPONSES, Answering, post

FORM = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {**FUNCTION, "name": "g"}}
SHELL = {"type": "function", **FUNCTION, "strict": False}
SPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [SHELL, {**SHELL, "name": "only"}]}


def chat_of(service: Answering) -> Chat:
    prompt = service.asked[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


# -- tools -------------------------------------------------------------------------------------------------------------


async def test_a_chat_may_allow_some_of_its_tools() -> None:
    service = Answering()
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}}
    assert (await post(CHAT, {"tools": [FORM, OTHER], "tool_choice": choice}, service)).status_code == 200
    assert [tool.name for tool in chat_of(service).tools] == ["g"]
    assert chat_of(service).tool_choice.use is ToolUse.REQUIRED
    for wrong in (
        {},
        {"mode": "none", "tools": [OTHER]},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": [7]},
    ):
        refused = await post(
            CHAT, {"tools": [FORM, OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    unknown = await post(CHAT, {"tools": [FORM], "tool_choice": choice})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tool_choice")


class Calling(Answering):
    """Calls a tool."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        self.asked.append(request)
        yield GenerateChunk(
            request_id="r",
            choice_index=0,
            tool_calls=(ToolCallDelta(index=0, call_id="c", name=self._name, arguments="{}"),),
            finish_reason=FinishReason.TOOL_CALLS,
        )


@pytest.mark.parametrize(("in_prompt", "own"), [("only", "only"), ("mcp__f", "f"), ("f", None)])
async def test_functions_of_a_namespace_are_called_by_name(in_prompt: str, own: str | None) -> None:
    service = Calling(in_prompt)
    past = {"type": "function_call", "call_id": "c", "name": own or "f", "arguments": "{}"}
    if own is not None:
        past["namespace"] = "mcp"
    given = [HI, past, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    answer = await post(RESPONSES, {"tools": [SPACE, SHELL], "input": given}, service)
    assert answer.status_code == 200, answer.text
    assert {tool.name for tool in chat_of(service).tools} == {"f", "only", "mcp__f"}
    assert chat_of(service).messages[1].tool_calls[0]["function"]["name"] == in_prompt
    (call,) = answer.json()["output"]
    assert (call["name"], call.get("namespace")) == (own or "f", None if own is None else "mcp")
    assert answer.json()["tools"][0]["type"] == "namespace"


async def test_a_name_of_a_tool_may_be_as_long_as_anthropics() -> None:
    service = Answering()
    tool = {"name": "x" * 128, "input_schema": {"type": "object"}}
    assert (await post(MESSAGES, {"tools": [tool]}, service)).status_code == 200


async def test_anthropics_loop_for_tools_goes_on_without_a_thread() -> None:
    response = await post(MESSAGES, {"thread": {"type": "create"}})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error["type"] == "invalid_request_error"


async def test_a_refusal_in_the_history_is_what_the_assistant_has_said() -> None:
    service = Answering()
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert (await post(CHAT, {"messages": [HI, said, HI]}, service)).status_code == 200
    assert chat_of(service).messages[1].content == "No."


# -- structure and scores ----------------------------------------------------------------------------------------------


async def test_a_json_object_may_have_a_schema() -> None:
    service = Answering()
    form = {"type": "json_object", "schema": {"type": "object"}}
    assert (await post(CHAT, {"response_format": form}, service)).status_code == 200
    assert service.asked[0].sampling["structured_outputs"] == StructuredOutputs(json='{"type": "object"}')
    wrong = await post(CHAT, {"response_format": {"type": "text", "schema": {"type": "object"}}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "response_format")


class Scoring(Answering):
    """Answers with one token, and the scores of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.model.tokenizer.token_bytes = lambda token: b"<%d>" % token
        self.tokenized = (4, 5, 6)

    async def tokenize(self, prompt: Any, tenant: Any, truncation: Any = None) -> tuple[int, ...]:
        return self.tokenized

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        self.asked.append(request)
        scored = PromptScores((4, 5), TokenScores((-1.0,))) if "prompt_logprobs" in request.sampling else None
        scores = TokenScores((-2.0,)) if "logprobs" in request.sampling else TokenScores()
        yield GenerateChunk(
            request_id="r",
            choice_index=0,
            text="word",
            token_ids=(9,),
            scores=scores,
            finish_reason=FinishReason.STOP,
            usage=Usage(2, 1, 0),
            prompt_scores=scored,
        )


async def completions(body: dict[str, Any], service: Scoring) -> dict[str, Any]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(service)), base_url="http://baton") as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_prompt_is_scored_without_an_answer() -> None:
    service = Scoring()
    answer = await completions({"prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 0}, service)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a b", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert service.asked[0].sampling["max_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_as_they_were_drawn(stream: bool) -> None:
    transport = httpx2.ASGITransport(app_of(Scoring()))
    more = {"return_token_ids": True}
    async with (
        httpx2.AsyncClient(transport=transport) as http_client,
        openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http_client) as client,
    ):
        message: Any = HI
        if not stream:
            whole: Any = await client.chat.completions.create(model="m", messages=[message], extra_body=more)
            assert (whole.prompt_token_ids, whole.choices[0].token_ids) == ([4, 5, 6], [9])
            text: Any = await client.completions.create(model="m", prompt=[1, 2], extra_body=more)
            assert (text.choices[0].prompt_token_ids, text.choices[0].token_ids) == ([1, 2], [9])
            return
        events: Any = await client.chat.completions.create(model="m", messages=[message], stream=True, extra_body=more)
        found = [event async for event in events]
        assert found[0].prompt_token_ids == [4, 5, 6]
        assert [token for event in found for token in event.choices[0].token_ids] == [9]


# -- models ------------------------------------------------------------------------------------------------------------


async def test_a_model_is_described_to_clients_of_either_api() -> None:
    service = Answering()
    transport = httpx2.ASGITransport(app_of(service, tenant=DEFAULT_TENANT))
    async with (
        httpx2.AsyncClient(transport=transport) as http_client,
        anthropic.AsyncAnthropic(base_url="http://baton", api_key="none", http_client=http_client) as client,
        openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http_client) as other,
    ):
        page = await client.models.list()
        assert (page.data[0].type, page.data[0].display_name, page.has_more) == ("model", "m", False)
        ModelInfo.model_validate(page.data[0].to_dict())
        assert page.data[0].max_input_tokens == 9
        assert (await client.models.retrieve("m")).created_at.year == 1970
        assert (await other.models.retrieve("m")).object == "model"
