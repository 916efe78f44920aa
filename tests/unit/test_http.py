"""The HTTP door: bodies that are no request are refused by name, and a client that leaves cancels its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from baton.api import Chat, GenerateChunk, GenerateRequest, Usage
from baton.sampling import FinishReason
from router.http import create_app
from router.service import Door
from router.tenants import DEFAULT_TENANT

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": %s}'


class Service:
    """A router's service that answers with one word, once it may."""

    facts = SimpleNamespace(id="m", vocab_size=100, max_model_len=10)

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.may_answer = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, door: Door
    ) -> AsyncGenerator[GenerateChunk]:
        self.asked.append(request)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield GenerateChunk("r", 0, "word", (1,), FinishReason.STOP, Usage(1, 1, 0))


def app_of(service: Service, unready: str = "") -> Any:
    tenants: Any = SimpleNamespace(identify=lambda key: DEFAULT_TENANT)
    stand_in: Any = service
    return create_app(stand_in, tenants, lambda: unready, lambda: b"")


async def post(service: Service, body: bytes, content_type: str | None = "application/json") -> httpx2.Response:
    headers = {"content-type": content_type} if content_type else {}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(service)), base_url="http://baton") as client:
        return await client.post("/v1/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "content_type", "message", "param"),
    [
        (b"", "application/json", "the body: Field required", None),
        (b"null", "application/json", "the body: Input should be a valid dictionary or object to extract", None),
        (b"[]", "application/json", "the body: Input should be a valid dictionary or object to extract", None),
        (b"{", "application/json", "1: JSON decode error", "1"),
        (b"\xff{", "application/json", "There was an error parsing the body", None),
        (b"[" * 100_000, "application/json", "There was an error parsing the body", None),
        (b"{}", "application/json", "messages: Field required", "messages"),
        (CHAT % b'"x"', "application/json", "max_tokens: Input should be a valid integer", "max_tokens"),
        (CHAT % b"4", "text/plain", "the body: Input should be a valid dictionary or object to extract", None),
        (CHAT % b"4", None, "the body: Input should be a valid dictionary or object to extract", None),
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
