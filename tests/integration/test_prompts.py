"""What a prompt may be, over both endpoints: history with tools, continued messages, truncation, several prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import openai
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import inference_pb2
from engine.testing import expected_tokens
from tests.chaos.fleet import running_fleet
from tests.integration.cluster import Answer, Served, request
from tests.support.asking import prompt_of, sampling

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL], "reasoning_content": "Simple.", "refusal": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        yield fleet.fill(*Role)


def client_of(cluster: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)


def tokens_of(cluster: Served, **body: Any) -> list[int]:
    response = httpx2.post(f"http://{cluster.http}/tokenize", json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


def test_several_prompts_are_answered_as_each_alone(cluster: Served) -> None:
    client = client_of(cluster)
    prompts = [prompt_of(seed, 40 + seed) for seed in range(20)]
    asked: dict[str, Any] = {"model": "", "max_tokens": 5, "n": 2, "extra_body": {"ignore_eos": True}}
    asked |= {"temperature": 0, "logprobs": 1}
    together = client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in together.choices] == list(range(40))
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    assert together.usage.completion_tokens == 20 * 2 * 5
    for place in (0, 7, 19):
        alone = client.completions.create(prompt=prompts[place], **asked)
        mine = together.choices[2 * place : 2 * place + 2]
        assert [(c.text, c.finish_reason, c.logprobs) for c in mine] == [
            (c.text, c.finish_reason, c.logprobs) for c in alone.choices
        ]
    texts = dict.fromkeys(range(40), "")
    usage = None
    with client.completions.create(
        prompt=prompts, **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in together.choices]
    assert usage is not None
    assert usage.completion_tokens == together.usage.completion_tokens


def test_one_prompt_that_cannot_be_served_fails_all(cluster: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client_of(cluster).completions.create(model="", prompt=[[1, 2], [10**6]], max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="at most 128"):
        client_of(cluster).completions.create(model="", prompt=["x"] * 129, max_tokens=2)


def test_a_history_with_calls_and_reasoning_is_served_over_both_endpoints(cluster: Served) -> None:
    ids = tokens_of(cluster, messages=HISTORY)
    messages: Any = HISTORY
    answer = client_of(cluster).chat.completions.create(model="", messages=messages, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    call = inference_pb2.ToolCall(id="call_1", name="add", arguments_json='{"a": 1}')
    said = inference_pb2.ChatMessage
    chat = inference_pb2.ChatInput(
        messages=[
            said(role="developer", content="Be brief."),
            said(role="user", content="What is\n1 + 1?"),
            said(role="assistant", content="I add.", tool_calls=[call], reasoning="Simple."),
            said(role="tool", content="2", tool_call_id="call_1"),
        ]
    )
    assert list(cluster.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat)).token_ids) == ids
    over_grpc = Answer(list(cluster.inference.Generate(request(chat=chat, sampling=sampling(3)), timeout=60)))
    assert over_grpc.token_ids == expected_tokens(ids, 3)


def test_the_last_message_is_continued(cluster: Served) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "One, two"},
    ]
    whole = tokens_of(cluster, messages=messages, add_generation_prompt=False)
    continued = tokens_of(cluster, messages=messages, continue_final_message=True)
    assert continued == whole[: len(continued)]
    assert 0 < len(whole) - len(continued) <= 3, "the end of the message alone is missing"
    chat = inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages],
        continue_final_message=True,
    )
    answer = Answer(list(cluster.inference.Generate(request(chat=chat, sampling=sampling(4)), timeout=60)))
    assert answer.token_ids == expected_tokens(continued, 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_is_cut_where_the_client_says(cluster: Served, side: str) -> None:
    ids = prompt_of(3, 9000)
    kept = ids[-50:] if side == "left" else ids[:50]
    message = request(token_ids=ids, sampling=sampling(4))
    message.truncate_prompt_tokens, message.truncation_side = 50, side
    answer = Answer(list(cluster.inference.Generate(message, timeout=60)))
    assert answer.token_ids == expected_tokens(kept, 4)
    assert answer.usage.prompt_tokens == 50
    body: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": side, "ignore_eos": True}
    room = client_of(cluster).completions.create(model="", prompt=ids, max_tokens=6, extra_body=body)
    assert room.usage is not None
    card = client_of(cluster).models.list().data[0].model_dump()
    assert room.usage.prompt_tokens + 6 == int(card["max_model_len"])
    assert card["weights"] == "exact"
    assert card["kv_dtype"] == "auto"
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens must be 1 to"):
        client_of(cluster).completions.create(model="", prompt=ids, extra_body={"truncate_prompt_tokens": 0})


def test_special_tokens_in_a_text_are_text_unless_asked_otherwise(cluster: Served) -> None:
    forged = "<|im_end|>"
    (special,) = tokens_of(cluster, prompt=forged, parse_special=True)
    assert special not in tokens_of(cluster, prompt=forged)
    chat: list[dict[str, Any]] = [{"role": "user", "content": forged}]
    honest = tokens_of(cluster, messages=[{"role": "user", "content": "x"}]).count(special)
    assert tokens_of(cluster, messages=chat).count(special) == honest
    assert tokens_of(cluster, messages=chat, parse_special=True).count(special) == honest + 1
    for parse in (False, True):
        message = request(text=f"a {forged}", sampling=sampling(4))
        message.parse_special = parse
        answer = Answer(list(cluster.inference.Generate(message, timeout=60)))
        ids = tokens_of(cluster, prompt=f"a {forged}", parse_special=parse)
        assert answer.token_ids == expected_tokens(ids, 4)
        assert (special in ids) is parse
    strings = httpx2.post(f"http://{cluster.http}/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert len(strings["token_strs"]) == strings["count"]


def test_what_the_template_does_not_read_is_refused(cluster: Served) -> None:
    chat = inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role="user", content="x")],
        template_kwargs_json='{"enable_thinking": false}',
    )
    with pytest.raises(grpc.RpcError) as raised:
        list(cluster.inference.Generate(request(chat=chat, sampling=sampling(1)), timeout=60))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "does not read 'enable_thinking'" in (raised.value.details() or "")
    messages: Any = HISTORY[:2]
    answer = client_of(cluster).chat.completions.with_raw_response.create(
        model="", messages=messages, reasoning_effort="low", max_tokens=1
    )
    assert answer.headers["x-baton-ignored"] == "reasoning_effort"
