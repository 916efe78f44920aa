"""Images through a cluster of arithmetic workers: placed, cached, and computed again when a worker is lost."""

from __future__ import annotations

import base64
import hashlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.timelines import RequestTimeline
from baton.v1 import inference_pb2, worker_pb2
from engine.testing import expected_tokens
from tests.chaos import fleet as fleet_module
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.eyes import PLACEHOLDER, data_url, model_with_eyes, picture
from tests.support.operator import OPERATOR_ENTRY, OPERATOR_KEY
from tests.support.waiting import wait_until

KEYS = {"acme": "a-key-of-acme", "other": "a-key-of-another"}
CAT, DOG = picture("cat"), picture("dog")
BLOCK = 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Fleet]:
    """A router; each test brings workers of its own."""
    model_path = model_with_eyes(tmp_path_factory.mktemp("model"), model_dir)
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    entries = [f"{name}: {{key_sha256: [{hashlib.sha256(key.encode()).hexdigest()}]}}\n" for name, key in KEYS.items()]
    tenants.write_text(OPERATOR_ENTRY + "".join(entries))
    router = RouterConfig(mode="disaggregated", tenants_file=str(tenants), worker_wait_s=10.0)
    with running_fleet(TransferConfig(), router, model_path=model_path, step_ms=2) as running:
        yield running


@pytest.fixture
def workers(fleet: Fleet) -> Iterator[Fleet]:
    fleet.fill(Role.PREFILL, Role.PREFILL, Role.DECODE)
    yield fleet
    fleet.clear()


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[Fleet]:
    fleet.fill(*Role)
    yield fleet
    fleet.clear()


def client_of(fleet: Fleet, tenant: str = "acme") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{fleet.routers[0].http}/v1", api_key=KEYS[tenant], max_retries=0)


@dataclass(frozen=True)
class Answer:
    """An answer over HTTP, whose tokens are those of its prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    num_cached: int
    timeline: RequestTimeline
    """What operators see of it."""

    @property
    def events(self) -> str:
        return "\n".join(event.text for event in self.timeline.events)


def said(*parts: str | bytes) -> list[Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image_url", "image_url": {"url": data_url(part), "detail": "high"}}
        for part in parts
    ]  # fmt: skip
    return [{"role": "user", "content": content}]


def asked(fleet: Fleet, *parts: str | bytes, tenant: str = "acme", num_tokens: int = 8) -> Answer:
    """What a client gets, which is what the model computes of the prompt's tokens."""
    found: Any = client_of(fleet, tenant).chat.completions.create(
        model="",
        messages=said(*parts),
        max_tokens=num_tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = found.choices[0]
    assert choice.token_ids == expected_tokens(found.prompt_token_ids, num_tokens)
    assert found.usage.prompt_tokens == len(found.prompt_token_ids)
    (timeline,) = fleet.client.timelines(found.id)
    cached: Any = found.usage.prompt_tokens_details
    return Answer(found.prompt_token_ids, choice.token_ids, cached.cached_tokens, timeline)


def test_the_same_image_is_cached_and_another_one_of_its_size_is_not(pair: Fleet) -> None:
    question = "What is this? " * 4
    first = asked(pair, question, CAT, "Well?")
    place = first.prompt_ids.index(PLACEHOLDER)
    num_tokens = len(first.prompt_ids)
    assert first.prompt_ids[place : place + 63] == [PLACEHOLDER] * 63
    assert place // BLOCK >= 1
    assert first.num_cached == 0
    wait_until(lambda: asked(pair, question, CAT, "Well?").num_cached == (num_tokens - 1) // BLOCK * BLOCK)
    other = asked(pair, question, DOG, "Well?")
    assert other.prompt_ids[: place + 63] == first.prompt_ids[: place + 63]
    assert other.num_cached == place // BLOCK * BLOCK
    assert asked(pair, question, CAT, "Well?", tenant="other").num_cached == 0


def test_several_images_stand_where_they_were_sent(workers: Fleet) -> None:
    found = asked(workers, "A", CAT, "B", DOG, "C", CAT, "D").prompt_ids
    ends = [i for i, token in enumerate(found) if token == PLACEHOLDER and found[i + 1] != PLACEHOLDER]
    assert len(ends) == 3
    assert found[ends[0] + 1] == found[ends[2] + 1] != found[ends[1] + 1]


def test_a_text_that_spells_the_placeholder_is_a_text(workers: Fleet) -> None:
    found = asked(workers, "<filename>", CAT, "<file", "name>").prompt_ids
    assert found.count(PLACEHOLDER) == 63


def test_a_worker_that_lost_an_image_gets_its_bytes_again(pair: Fleet) -> None:
    """The stores of the arithmetic engine hold a mebibyte."""
    image = picture("lost", 512)
    asked(pair, image, "1")
    for number in range(20):
        asked(pair, picture(f"filling {number}", 8_000), "x", num_tokens=1)
    again = asked(pair, "another text, so that no block is cached", image, "1")
    assert again.events.count("no longer holds the images") == again.events.count("placed: ") - 1 == 1
    assert "no longer" not in asked(pair, "a third text", image).events


def test_an_image_outlives_the_worker_that_has_looked_at_it(workers: Fleet) -> None:
    image = picture("outlives", 200)
    asked(workers, image, "1")
    first, second = workers.started_as(Role.PREFILL)
    for gone in (first, second):
        workers.remove(gone, signal.SIGKILL)
        workers.wait_for(workers.add(Role.PREFILL)) if gone == second else None
        asked(workers, "2", image, gone)


def test_an_answer_goes_on_where_its_decode_worker_drains(workers: Fleet) -> None:
    """Its next worker has no pixels, and needs none."""
    (drained,) = workers.started_as(Role.DECODE)
    stream = client_of(workers).chat.completions.create(
        model="",
        messages=said("Go on", CAT),
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    token_ids: list[int] = []
    prompt_ids: list[int] = []
    has_drained = False
    for chunk in stream:
        each: Any = chunk
        prompt_ids = getattr(each, "prompt_token_ids", None) or prompt_ids
        for choice in each.choices:
            token_ids += getattr(choice, "token_ids", None) or []
        if len(token_ids) > 20 and not has_drained:
            has_drained = True
            workers.wait_for(workers.add(Role.DECODE))
            with workers.control(drained) as control:
                assert control.Drain(worker_pb2.DrainRequest(timeout_s=30)).num_left == 0
            assert len(token_ids) < 380
    assert token_ids == expected_tokens(prompt_ids, 400)


def test_a_broken_stream_is_resumed_with_its_images(workers: Fleet) -> None:
    def message(image: bytes, **more: Any) -> inference_pb2.GenerateRequest:
        parts = [inference_pb2.ContentPart(text="Look"), inference_pb2.ContentPart(image=image)]
        return inference_pb2.GenerateRequest(
            request_id="resumed",
            chat=inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", parts=parts)]),
            sampling=inference_pb2.SamplingParams(temperature=1, max_tokens=120, ignore_eos=True),
            **more,
        )

    key = (("authorization", f"Bearer {KEYS['acme']}"),)
    stub = workers.inference
    whole = [t for m in stub.Generate(message(CAT), metadata=key, timeout=60) for t in m.token_ids]
    call = stub.Generate(message(CAT), metadata=key, timeout=60)
    got: list[int] = []
    for each in call:
        got += each.token_ids
        if len(got) >= 30:
            break
    call.cancel()
    rest = [
        t for m in stub.Generate(message(CAT, resume_from={0: len(got)}), metadata=key, timeout=60) for t in m.token_ids
    ]
    assert got + rest == whole


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (said("x", picture("b", ending=b"broken")), "an image cannot be decoded: it is broken"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://cat.example/"}}]}],
         "the router fetches no URL"),
        (said(*[picture(str(number)) for number in range(17)]), "the request has 17 images; send at most 16"),
        (said(picture("long", 10_000)), "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_refused_with_a_sentence(workers: Fleet, content: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        client_of(workers).chat.completions.create(model="", messages=content, max_tokens=4)
    asked(workers, CAT)


def test_a_prompt_with_images_is_not_truncated(workers: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be combined with images"):
        client_of(workers).chat.completions.create(
            model="", messages=said(CAT), max_tokens=4, extra_body={"truncate_prompt_tokens": 9}
        )


def test_a_body_that_is_too_long_is_refused_with_a_sentence(workers: Fleet) -> None:
    with pytest.raises(openai.APIStatusError, match="or send smaller images") as refusal:
        client_of(workers).chat.completions.create(model="", messages=said(picture("huge", 900_000)), max_tokens=4)
    assert refusal.value.status_code == 413


def test_anthropics_client_sends_images(workers: Fleet) -> None:
    client = anthropic.Anthropic(base_url=f"http://{workers.routers[0].http}", api_key=KEYS["acme"], max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    image = {"type": "image", "source": source}
    calls = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "see"}, image]}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, image]},
        {"role": "assistant", "content": [calls]},
        {"role": "user", "content": [result]},
    ]
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    counted = client.messages.count_tokens(model="", messages=messages, tools=tools).input_tokens
    assert counted > 128
    answer = client.messages.create(
        model="", messages=messages, tools=tools, max_tokens=8, extra_body={"temperature": 0}
    )
    usage: Any = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_the_responses_api_takes_images(workers: Fleet) -> None:
    client = client_of(workers)
    parts: Any = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
    ]
    given: Any = [{"role": "user", "content": parts}]
    answer = client.responses.create(model="", input=given, max_output_tokens=8, temperature=0)
    assert answer.usage is not None
    chat = asked(workers, "What?", CAT)
    assert answer.usage.input_tokens == len(chat.prompt_ids)


def test_a_worker_without_eyes_gets_no_images(fleet: Fleet, model_dir: Path) -> None:
    """All workers of a cluster have one model; some may compute it without its images."""
    try:
        ids = [fleet.add(role, prepare=_blind) for role in (Role.PREFILL, Role.DECODE)]
        fleet.wait_for(*ids)
        with pytest.raises(openai.BadRequestError, match="this model takes no images"):
            client_of(fleet).chat.completions.create(model="", messages=said(CAT), max_tokens=4)
        parts = [inference_pb2.ContentPart(image=CAT)]
        chat = inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", parts=parts)])
        key = (("authorization", f"Bearer {OPERATOR_KEY}"),)
        with pytest.raises(grpc.RpcError) as refusal:
            list(fleet.inference.Generate(inference_pb2.GenerateRequest(chat=chat), metadata=key, timeout=30))
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        asked(fleet, "a text")
    finally:
        fleet.clear()


def _blind() -> None:
    """Has a worker's process find no placeholder in the model's folder."""
    setattr(fleet_module, "image_placeholder_of", lambda folder: None)  # noqa: B010 - mypy knows no such name of it


def test_the_router_loads_no_decoder_of_images(workers: Fleet) -> None:
    asked(workers, CAT)
    maps = Path(f"/proc/{workers.routers[0].process.pid}/maps").read_text()
    assert "_imaging" not in maps
    assert "libtorch" not in maps
