"""Anthropic's own client against a cluster: streams are the wholes, tools, thoughts, counts, errors, and leaving."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import RouterProcess, running_fleet
from tests.integration.cluster import is_idle
from tests.support.operator import OPERATOR_ENTRY
from tests.support.reasoning import TEMPLATE, reasoning_model
from tests.support.waiting import wait_until

KEY = "a-key-of-a-tenant"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SAID: list[Any] = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RouterProcess]:
    """Slow enough that a client can leave before the end of a long answer."""
    folder = tmp_path_factory.mktemp("model")
    model_path = reasoning_model(folder, model_dir, TEMPLATE.replace("opens", "enable_thinking"))
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    tenants.write_text(f"{OPERATOR_ENTRY}acme:\n  key_sha256: [{hashlib.sha256(KEY.encode()).hexdigest()}]\n")
    router = RouterConfig(mode="disaggregated", tenants_file=str(tenants))
    with running_fleet(TransferConfig(), router, model_path=model_path, step_ms=2) as fleet:
        yield fleet.fill(*Role)


@pytest.fixture(scope="module")
def client(cluster: RouterProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://{cluster.http}", api_key=KEY, max_retries=0)


def answers(client: anthropic.Anthropic, **fields: Any) -> Any:
    """An answer, which is the same whole and as a stream, and whose prompt has the tokens that were counted."""
    asked: dict[str, Any] = {"model": "", "messages": SAID, "max_tokens": 60, **fields}
    counted = {
        name: asked[name] for name in asked.keys() & {"model", "messages", "system", "tools", "tool_choice", "thinking"}
    }
    body = {**asked, "extra_body": {"temperature": 0}, "extra_headers": {"x-request-id": "same"}}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    ours, theirs = whole.to_dict(), streamed.to_dict()
    for each in (ours, theirs):
        used: Any = each["usage"]
        each["prompt"] = used.pop("input_tokens") + used.pop("cache_read_input_tokens")
    assert theirs == ours
    assert whole.id == "msg_same"
    assert whole._request_id == "same"
    assert client.messages.count_tokens(**counted).input_tokens == ours["prompt"]
    return whole


def test_a_text(client: anthropic.Anthropic) -> None:
    whole = answers(client, system="Be brief.")
    (block,) = whole.content
    assert (block.type, whole.stop_reason, whole.stop_sequence) == ("text", "max_tokens", None)
    assert block.text
    stop = block.text[10:12]
    cut = answers(client, system="Be brief.", stop_sequences=["\0", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == block.text[: block.text.index(stop)]
    assert cut.usage.cache_read_input_tokens > 0
    assert cut.usage.output_tokens < whole.usage.output_tokens


def test_the_assistants_begin_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*SAID, {"role": "assistant", "content": "It is"}]
    assert answers(client, messages=begun).content != answers(client).content


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=str)
def test_forced_calls_are_valid(client: anthropic.Anthropic, choice: Any) -> None:
    whole = answers(client, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=200)
    (call,) = whole.content
    assert (call.type, whole.stop_reason) == ("tool_use", "tool_use")
    assert call.name == choice.get("name", call.name)
    schema = next(tool["input_schema"] for tool in TOOLS if tool["name"] == call.name)
    jsonschema.validate(call.input, schema)


def test_an_agent_goes_round_five_times(client: anthropic.Anthropic) -> None:
    messages = [*SAID]
    for turn in range(5):
        answer: Any = client.messages.create(
            model="",
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": "tool", "name": "weather"},
            max_tokens=120,
            extra_body={"temperature": 1},
        )
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        jsonschema.validate(call.input, CITY)
        messages.append({"role": "assistant", "content": answer.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{turn} degrees", "is_error": turn == 3}
        messages.append({"role": "user", "content": [result]})
    final = answers(client, messages=messages, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=5)
    assert {block.type for block in final.content} == {"text"}


def test_thoughts_come_before_the_text(client: anthropic.Anthropic) -> None:
    whole = answers(client, thinking={"type": "enabled", "budget_tokens": 8})
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking
    assert whole.usage.output_tokens_details.thinking_tokens >= 8
    messages = [*SAID, {"role": "assistant", "content": whole.content}, *SAID]
    silent = answers(client, messages=messages, thinking={"type": "disabled"})
    assert [block.type for block in silent.content] == ["text"]
    assert silent.usage.output_tokens_details.thinking_tokens == 0
    hidden = answers(client, thinking={"type": "enabled", "budget_tokens": 8, "display": "omitted"})
    assert hidden.content == [text]


def test_a_structure_is_that_of_the_text(client: anthropic.Anthropic) -> None:
    output = {"format": {"type": "json_schema", "schema": CITY}}
    whole = answers(client, output_config=output, thinking={"type": "enabled", "budget_tokens": 4}, max_tokens=200)
    jsonschema.validate(httpx2.Response(200, text=whole.content[-1].text).json(), CITY)


def test_errors_are_the_clients_own(cluster: RouterProcess, client: anthropic.Anthropic) -> None:
    stranger = anthropic.Anthropic(base_url=f"http://{cluster.http}", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "", "messages": SAID, "max_tokens": 4}
    for caller, fields, kind, name in (
        (stranger, {}, anthropic.AuthenticationError, "authentication_error"),
        (client, {"model": "another"}, anthropic.NotFoundError, "not_found_error"),
        (client, {"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        (client, {"stop_sequences": [""]}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        for is_streamed in (False, True):
            with pytest.raises(kind) as raised:
                caller.messages.create(**{**asked, **fields}, stream=is_streamed)
            assert raised.value.type == name
            field = next(iter(fields), "")
            assert field in raised.value.message
    with pytest.raises(anthropic.NotFoundError, match="not served: there is no batch API"):
        client.messages.batches.list()


def test_who_leaves_ends_the_answer(cluster: RouterProcess, client: anthropic.Anthropic) -> None:
    def num_cancelled() -> float:
        counted = [
            n for name, n in cluster.metrics() if name.startswith("baton_requests_total{") and "cancelled" in name
        ]
        return sum(counted)

    before = num_cancelled()
    asked: dict[str, Any] = {"model": "", "messages": SAID, "max_tokens": 6000, "extra_body": {"temperature": 0}}
    with client.messages.create(**asked, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
    with pytest.raises(anthropic.APITimeoutError):
        client.messages.create(**asked, timeout=1)
    wait_until(lambda: num_cancelled() == before + 2, 60)
    cluster.wait_for(lambda status: all(map(is_idle, status["workers"])))
