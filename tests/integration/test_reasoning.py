"""A model that reasons, over both endpoints: reasoning and content apart, whole and streamed, with budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.v1 import inference_pb2
from tests.chaos.fleet import running_fleet
from tests.integration.cluster import Served
from tests.support.reasoning import reasoning_model

MARKED = {"regex": "<think>\\n[a-z]{6}\\n</think>\\n\\n[A-Z]{6}"}
"""Answers of a model that begins its reasoning itself."""
WORDS = {"choice": ["yes, please", "not now"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Served]:
    model_path = reasoning_model(tmp_path_factory.mktemp("reasoning"), model_dir)
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated"), model_path=model_path) as fleet:
        yield fleet.fill(*Role)


@dataclass(slots=True, kw_only=True)
class Heard:
    """An answer, as a client has it in the end."""

    text: str
    reasoning: str
    finish_reason: str | None
    num_tokens: int
    num_reasoning: int


def asked(cluster: Served, **body: Any) -> tuple[Heard, Heard]:
    """Asks for an answer whole, and as a stream."""
    client = openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)
    extra = {name: body.pop(name) for name in [*body] if name not in ("max_tokens", "seed", "stop", "n", "messages")}
    body = {"model": "", "messages": [{"role": "user", "content": "Now?"}], "seed": 5, **body, "extra_body": extra}
    whole = client.chat.completions.create(**body)
    message: Any = whole.choices[0].message
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    text, reasoning, usage, finish_reason = "", "", None, None
    with client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta: Any = choice.delta
                text += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", "")
                finish_reason = choice.finish_reason or finish_reason
    return (
        heard(message.content, getattr(message, "reasoning_content", ""), whole.choices[0].finish_reason, whole.usage),
        heard(text, reasoning, finish_reason, usage),
    )


def heard(text: str, reasoning: str, finish_reason: str | None, usage: Any) -> Heard:
    return Heard(
        text=text,
        reasoning=reasoning,
        finish_reason=finish_reason,
        num_tokens=usage.completion_tokens,
        num_reasoning=usage.completion_tokens_details.reasoning_tokens,
    )


def test_reasoning_and_content_come_apart(cluster: Served) -> None:
    whole, streamed = asked(cluster, max_tokens=60, structured_outputs=MARKED)
    assert whole == streamed
    assert (len(whole.reasoning), whole.reasoning.islower()) == (6, True)
    assert (len(whole.text), whole.text.isupper()) == (6, True)
    assert whole.finish_reason == "stop"
    assert 0 < whole.num_reasoning < whole.num_tokens


def test_the_prompt_may_have_begun_the_reasoning(cluster: Served) -> None:
    opens: dict[str, Any] = {"chat_template_kwargs": {"opens": True}, "max_tokens": 40}
    whole, streamed = asked(cluster, **opens, structured_outputs=WORDS, thinking_budget=4)
    assert whole == streamed
    assert whole.reasoning
    assert whole.text in WORDS["choice"]
    short, without = asked(cluster, **opens, structured_outputs=WORDS, thinking_budget=4, include_reasoning=False)
    assert short == without
    assert (short.text, short.reasoning, short.num_reasoning) == (whole.text, "", whole.num_reasoning)
    endless, _ = asked(cluster, **opens, ignore_eos=True)
    assert (endless.text, endless.num_reasoning, endless.finish_reason) == ("", 40, "length")
    closed, _ = asked(cluster, chat_template_kwargs={"opens": False}, max_tokens=60, structured_outputs=MARKED)
    assert (closed.reasoning, closed.num_reasoning) == ("", 0)
    assert "</think>" in closed.text, "no reasoning can begin behind one"


def test_a_continued_message_may_stand_inside_of_a_reasoning(cluster: Served) -> None:
    said = [{"role": "user", "content": "Now?"}, {"role": "assistant", "content": "<think>Let me"}]
    whole, streamed = asked(
        cluster, messages=said, continue_final_message=True, max_tokens=40, thinking_budget=3, structured_outputs=WORDS
    )
    assert whole == streamed
    assert whole.reasoning
    assert whole.text in WORDS["choice"]


def test_a_budget_needs_a_reasoning_that_is_known_to_end(cluster: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="thinking_budget needs a reasoning"):
        asked(cluster, thinking_budget=4)


def test_grpc_has_the_same_channels(cluster: Served) -> None:
    chat = inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role="user", content="Now?")], template_kwargs_json='{"opens": true}'
    )
    structure = inference_pb2.StructuredOutputs(choice=WORDS["choice"])
    sampling = inference_pb2.SamplingParams(seed=5, max_tokens=40, thinking_budget=4, structured_outputs=structure)
    whole, _ = asked(
        cluster,
        chat_template_kwargs={"opens": True},
        max_tokens=40,
        structured_outputs=WORDS,
        thinking_budget=4,
    )
    for skips in (False, True):
        options = inference_pb2.StreamOptions(skip_reasoning=skips)
        request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling, stream_options=options)
        parts = list(cluster.inference.Generate(request, timeout=60))
        assert "".join(part.text for part in parts) == whole.text
        assert "".join(part.reasoning for part in parts) == ("" if skips else whole.reasoning)
        assert parts[-1].usage.reasoning_tokens == whole.num_reasoning


def test_the_best_of_several_bring_their_reasoning(cluster: Served) -> None:
    client = openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Now?"}],
        max_tokens=60,
        n=2,
        extra_body={"best_of": 3, "structured_outputs": MARKED},
    )
    for choice in answer.choices:
        message: Any = choice.message
        assert message.reasoning_content.islower()
        assert message.content.isupper()


def test_a_response_has_the_reasoning_as_its_first_item(cluster: Served) -> None:
    schema = {"enum": ["yes, please", "not now"]}
    opens: dict[str, Any] = {"chat_template_kwargs": {"opens": True}, "thinking_budget": 4, "seed": 5}
    chat_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    whole, _ = asked(cluster, **opens, max_tokens=40, response_format=chat_format)
    body: dict[str, Any] = {"model": "", "input": [{"role": "user", "content": "Now?"}], "max_output_tokens": 40}
    body |= {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}, "extra_body": opens}
    with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(**body)
        reasoning, message = response.output
        assert (reasoning.type, message.type, response.status) == ("reasoning", "message", "completed")
        assert [part.text for part in reasoning.content or []] == [whole.reasoning]
        assert response.output_text == whole.text
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == whole.num_reasoning
        with client.responses.create(**body, stream=True) as stream:
            deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == whole.reasoning
        body["input"] += [*response.output, {"role": "user", "content": "And now?"}]
        assert len(client.responses.create(**body).output) == 2
        body["extra_body"] = {**opens, "include_reasoning": False}
        assert [item.type for item in client.responses.create(**body).output] == ["message"]
