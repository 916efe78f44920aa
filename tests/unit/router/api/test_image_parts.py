"""Images in the bodies of each API: they arrive as bytes, in their order, and what is no image is refused by name."""

from __future__ import annotations

import base64
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from baton.api import Chat
from baton.chat import ChatMessage
from tests.support.eyes import data_url, picture
from tests.unit.router.api.test_http import Service, app_of

CAT, DOG = picture("cat", 8), picture("dog", 8)
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": "{}"}}


def answering() -> Service:
    service = Service()
    service.may_answer.set()
    return service


async def sent(path: str, body: dict[str, Any]) -> tuple[Chat, httpx2.Response]:
    """What the service gets of a body."""
    service = answering()
    transport = httpx2.ASGITransport(app_of(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    prompt = service.asked[0].prompt
    assert isinstance(prompt, Chat)
    return prompt, response


async def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
    service = answering()
    transport = httpx2.ASGITransport(app_of(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert not service.asked
    error: dict[str, Any] = response.json()["error"]
    return error


def of_chat(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": list(parts), **more}]}


def url(image: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image), **more}}


TEXT = {"type": "text", "text": "see"}


async def test_openais_chats_hold_texts_and_images_in_order() -> None:
    chat, response = await sent("/v1/chat/completions", of_chat(url(CAT), TEXT, url(DOG, detail="low"), TEXT))
    assert chat.messages == (ChatMessage(role="user", content="see\nsee", parts=(CAT, "see", DOG, "see")),)
    assert chat.images == (CAT, DOG)
    assert response.headers["x-baton-ignored"] == "detail"
    chat, response = await sent("/v1/chat/completions", of_chat(TEXT, TEXT))
    assert (chat.messages[0].parts, chat.images) == ((), ())
    assert "x-baton-ignored" not in response.headers


async def test_a_tools_message_may_hold_images() -> None:
    body = of_chat(TEXT)
    body["messages"] += [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [TEXT, url(CAT)]},
    ]
    chat, _ = await sent("/v1/chat/completions", body)
    assert chat.messages[2].parts == ("see", CAT)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_url(CAT)},
        {"type": "input_image", "image_url": data_url(CAT)},
        {"type": "input_image", "image_url": data_url(CAT), "detail": "high"},
    ],
)
async def test_other_forms_of_a_chats_images_are_understood(part: Any) -> None:
    chat, _ = await sent("/v1/chat/completions", of_chat(part))
    assert chat.images == (CAT,)


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        (of_chat({"type": "image_url", "image_url": {"url": "https://cat.example/c.png"}}),
         "messages[0].content[0].image_url.url", "the router fetches no URL"),
        (of_chat(TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
         "messages[0].content[1].image_url.url", "base64"),
        (of_chat({"type": "image_url"}), "messages[0].content[0].image_url", "must be an object"),
        (of_chat({"type": "image_url", "image_url": {"url": 7}}), "messages[0].content[0].image_url.url", "string"),
        (of_chat(url(CAT, mood=1)), "messages[0].content[0].image_url.mood", "not supported"),
        (of_chat({**url(CAT), "mood": 1}), "messages[0].content[0].mood", "not supported"),
        (of_chat(url(CAT), role="assistant"), "messages[0]", "only users and tools send images"),
        (of_chat(url(CAT), role="system"), "messages[0]", "only users and tools send images"),
        (of_chat({"type": "input_audio", "input_audio": {}}), "messages[0].content[0]", "a part of text or an image"),
        (of_chat({"type": "video_url", "video_url": {}}), "messages[0].content[0]", "a part of text or an image"),
    ],
)  # fmt: skip
async def test_what_is_no_image_in_a_chat_is_refused(body: dict[str, Any], param: str, sentence: str) -> None:
    error = await refused("/v1/chat/completions", body)
    assert error["param"] == param
    assert sentence in error["message"]


def of_items(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


def input_image(image: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(image), **more}


INPUT = {"type": "input_text", "text": "see"}


async def test_the_responses_api_takes_images_in_messages_and_in_outputs() -> None:
    body = of_items(INPUT, input_image(CAT, detail="auto"), INPUT)
    body["input"] += [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [INPUT, input_image(DOG)]},
    ]
    chat, response = await sent("/v1/responses", body)
    user, _, tool = chat.messages
    assert (user.content, user.parts) == ("see\nsee", ("see", CAT, "see"))
    assert (tool.role, tool.parts) == ("tool", ("see", DOG))
    assert response.headers["x-baton-ignored"] == "detail"


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        (of_items({"type": "input_image", "image_url": "http:"}), "input[0].content[0].image_url", "fetches no URL"),
        (of_items({"type": "input_image"}), "input[0].content[0].image_url", "must be a string"),
        (of_items({"type": "input_image", "file_id": "f"}), "input[0].content[0].file_id", "files are not stored"),
        (of_items(input_image(CAT), role="assistant"), "input[0]", "only users and tools send images"),
        (of_items(input_image(CAT), role="system"), "input[0]", "only users and tools send images"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [input_image(b"BM")]}]},
         "input[0].output[0].image_url", "is not a PNG"),
    ],
)  # fmt: skip
async def test_what_is_no_image_in_items_is_refused(body: dict[str, Any], param: str, sentence: str) -> None:
    error = await refused("/v1/responses", body)
    assert sentence in error["message"]
    assert error["param"] == param


def source(image: bytes, media_type: str = "image/png") -> dict[str, Any]:
    data = base64.b64encode(image).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def of_messages(*blocks: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": list(blocks)}]}


async def test_anthropics_messages_hold_images_in_order_and_in_tool_results() -> None:
    body = of_messages(TEXT, source(CAT), TEXT)
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, source(DOG)], "is_error": True}
    body["messages"] += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result, source(CAT)]}]
    body["tools"] = [{"name": "look", "input_schema": {"type": "object"}}]
    chat, _ = await sent("/v1/messages", body)
    first, _, tool, last = chat.messages
    assert (first.content, first.parts) == ("see\nsee", ("see", CAT, "see"))
    assert (tool.role, tool.content, tool.parts) == ("tool", "Error: see", ("Error: ", "see", DOG))
    assert (last.role, last.parts) == ("user", (CAT,))
    assert chat.images == (CAT, DOG, CAT)


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (source(CAT, "image/tiff"), "messages[0].content[0].source must have a media type out of image/png"),
        (source(b"%PDF"), "messages[0].content[0].source is not a PNG, JPEG, WebP or GIF image"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}, "not valid base64"),
        ({"type": "image", "source": {"type": "url", "url": "https://cat"}}, "the router fetches nothing"),
        ({**source(CAT), "transformations": {"rotate": 1}}, "messages[0].content[0].transformations is not supported"),
    ],
)  # fmt: skip
async def test_what_is_no_image_in_blocks_is_refused(block: Any, sentence: str) -> None:
    assert sentence in (await refused("/v1/messages", of_messages(block)))["message"]


async def test_the_packages_send_images_unmodified() -> None:
    service = answering()
    transport = httpx2.ASGITransport(app_of(service))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        theirs = openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http_client)
        await theirs.chat.completions.create(model="m", messages=of_chat(TEXT, url(CAT, detail="auto"))["messages"])
        other = anthropic.AsyncAnthropic(base_url="http://baton", api_key="none", http_client=http_client)
        await other.messages.create(**of_messages(TEXT, source(CAT)))
    for each in service.asked:
        assert isinstance(each.prompt, Chat)
        assert each.prompt.messages[0].parts == ("see", CAT)


async def test_what_is_refused_quotes_no_image() -> None:
    """Neither the answer, nor what operators see of it."""
    long = data_url(CAT)[:-1] + "!"
    error = await refused("/v1/chat/completions", of_chat({"type": "image_url", "image_url": {"url": long}}))
    assert long[-40:] not in json.dumps(error)
