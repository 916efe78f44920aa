"""What browsers, probes and proxies expect of HTTP: CORS, OPTIONS, HEAD, compression, and streams that show life."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from baton.api import GenerateChunk, GenerateRequest
from baton.errors import NoWorker, Unauthenticated
from router.admission.tenants import DEFAULT_TENANT, api_key_of
from router.api import answering
from router.api.browsers import Hosts
from router.api.http import create_app
from router.timeline.log import Ingress
from tests.support.models import table_of
from tests.unit.router.api.test_http import Service, app_of
from tests.unit.router.api.test_ignored import CHAT, PLAIN, Answering

SITE = "https://chat.example"
PREFLIGHT = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def closed_app(**settings: Any) -> Any:
    """An application that no key opens."""

    def identify(key: str | None, certificate: Any) -> Any:
        raise Unauthenticated("no")

    service: Any = Answering()
    tenants: Any = SimpleNamespace(is_open=False, identify=identify)
    return create_app(table_of(service, requests=service.requests), tenants, lambda: "", lambda: b"", **settings)


async def ask(app: Any, method: str, path: str, **more: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton.example") as client:
        return await client.request(method, path, **more)


# -- pages of other websites -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origins", "is_allowed"),
    [((), False), ((SITE,), True), (("https://*.example",), True), (("*",), True), (("https://other.example",), False)],
)
async def test_pages_of_the_websites_that_are_listed_may_ask(origins: tuple[str, ...], is_allowed: bool) -> None:
    app = closed_app(cors_origins=origins)
    before = await ask(app, "OPTIONS", CHAT, headers=PREFLIGHT)
    assert before.status_code == 204, "it is answered before authentication"
    answer = await ask(app, "POST", CHAT, json=PLAIN[CHAT], headers={"origin": SITE})
    assert answer.status_code == 401
    for response in (before, answer):
        assert response.headers.get("access-control-allow-origin") == (SITE if is_allowed else None)
    if is_allowed:
        assert before.headers["access-control-allow-headers"] == "authorization,content-type"
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "server-timing", "x-baton-ignored"} <= set(exposed)
        assert answer.headers["vary"] == "Origin"


async def test_pages_of_other_websites_learn_nothing_that_is_for_operators() -> None:
    app = closed_app(cors_origins=("*",))
    for method in ("OPTIONS", "GET"):
        answer = await ask(app, method, "/api/status", headers=PREFLIGHT)
        assert "access-control-allow-origin" not in answer.headers


async def test_the_check_of_the_host_stands_before_it() -> None:
    app = closed_app(cors_origins=("*",), hosts=Hosts(allowed=("other.example",)))
    answer = await ask(app, "OPTIONS", CHAT, headers=PREFLIGHT)
    assert answer.status_code == 421
    assert "access-control-allow-origin" not in answer.headers


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/readyz", "/v1/models", "/version", "/openapi.json"])
async def test_what_is_read_by_get_answers_head_without_a_body(path: str) -> None:
    service = Answering()
    plain = {"accept-encoding": "identity"}
    get = await ask(app_of(service), "GET", path, headers=plain)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in plain.items()]
    scope = {"type": "http", "method": "HEAD", "path": path, "headers": headers, "query_string": b""}
    await app_of(service)(scope, receive, send)
    start, *bodies = sent
    assert (start["status"], b"".join(each["body"] for each in bodies)) == (200, b"")
    assert (b"content-length", str(len(get.content)).encode()) in start["headers"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [(CHAT, "OPTIONS, POST"), ("/v1/models", "GET, HEAD, OPTIONS"), ("/v1/models/m", "GET, HEAD, OPTIONS"),
     ("/health", "GET, HEAD, OPTIONS")],
)  # fmt: skip
async def test_options_names_the_methods_of_a_path(path: str, allowed: str) -> None:
    answer = await ask(closed_app(), "OPTIONS", path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["allow"] == allowed


async def test_every_answer_has_an_id() -> None:
    service = Answering()
    for app, method, path, status in (
        (closed_app(), "GET", "/v1/models", 401),
        (closed_app(), "POST", CHAT, 401),
        (app_of(service), "GET", "/version", 200),
        (app_of(service), "GET", "/nowhere", 404),
        (app_of(service), "POST", "/v1/embeddings", 404),
        (app_of(service), "POST", "/v1/chat/completions/", 307),
        (app_of(service), "POST", CHAT, 200),
    ):
        answer = await ask(app, method, path, json=PLAIN[CHAT] if method == "POST" else None)
        assert (answer.status_code, bool(answer.headers["x-request-id"])) == (status, True)
    mine = await ask(app_of(service), "GET", "/version", headers={"x-request-id": "mine"})
    assert mine.headers["x-request-id"] == "mine"


# -- bodies ------------------------------------------------------------------------------------------------------------


async def test_long_texts_are_compressed_for_those_who_ask() -> None:
    for path in ("/openapi.json", "/metrics"):
        service: Any = Answering()
        tenants: Any = SimpleNamespace(is_open=True, identify=lambda key, certificate: DEFAULT_TENANT)
        app = create_app(table_of(service, requests=service.requests), tenants, lambda: "", lambda: b"a 1\n" * 9)
        codings = {"gzip, deflate": "gzip", "identity": None, "gzip;q=0": None, "br, gzip;q=0.5": "gzip"}
        for asked, coding in codings.items():
            answer = await ask(app, "GET", path, headers={"accept-encoding": asked})
            assert answer.headers.get("content-encoding") == coding
            assert answer.headers["vary"] == "Accept-Encoding"
            assert answer.content.startswith((b"a 1", b"{")), "the client has unpacked it"


async def test_a_body_that_is_encoded_is_refused_as_that() -> None:
    body = gzip.compress(json.dumps(PLAIN[CHAT]).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await ask(app_of(Answering()), "POST", CHAT, content=body, headers=headers)
    assert answer.status_code == 415
    assert "'gzip'" in answer.json()["error"]["message"]
    plain = await ask(app_of(Answering()), "POST", CHAT, json=PLAIN[CHAT], headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_the_key_is_found_where_azures_clients_have_it() -> None:
    assert api_key_of([(b"api-key", b"K")]) == "K"
    assert api_key_of([(b"api-key", b"K"), (b"authorization", b"Bearer L")]) == "L"


# -- streams -----------------------------------------------------------------------------------------------------------


class Failing(Service):
    """Fails once it may."""

    async def generate(
        self, request: GenerateRequest, trace: Any, tenant: Any, ingress: Ingress
    ) -> AsyncGenerator[GenerateChunk]:
        await self.may_answer.wait()
        for _ in range(20):  # not in the same turn of the loop
            await asyncio.sleep(0)
        if self.may_answer.is_set():
            raise NoWorker("none is ready")
        yield GenerateChunk(request_id="r", choice_index=0)


async def streamed(service: Service) -> tuple[int, dict[str, str], list[bytes]]:
    """The status, the headers and the pieces of a stream whose service answers once two comments have come."""
    pieces: list[bytes] = []
    start: dict[str, Any] = {}
    body = json.dumps({**PLAIN[CHAT], "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await service.cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        pieces.append(message["body"])
        if len(pieces) == 2:
            service.may_answer.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    async with asyncio.timeout(5):
        await app_of(service)(scope, receive, send)
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, pieces


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_stream_that_waits_shows_that_it_lives(is_failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PATIENCE_S", 0.01)
    monkeypatch.setattr(answering, "WAIT_S", 0.01)
    status, headers, pieces = await streamed(Failing() if is_failing else Service())
    assert (status, headers["x-accel-buffering"]) == (200, "no")
    assert pieces[:2] == [b": wait\n\n"] * 2
    events = [line for line in b"".join(pieces).splitlines() if line.startswith(b"data: ")]
    if is_failing:
        (error,) = events
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "none is ready"
    else:
        assert json.loads(events[0].removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "word"
        assert events[-1] == b"data: [DONE]"


async def test_a_stream_that_fails_at_once_has_a_status_of_its_own() -> None:
    service = Failing()
    service.may_answer.set()
    status, headers, _ = await streamed(service)
    assert (status, headers["content-type"]) == (503, "application/json")


async def test_a_client_that_leaves_while_its_stream_waits_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PATIENCE_S", 0.01)
    service = Service()
    body, has_begun = json.dumps({**PLAIN[CHAT], "stream": True}).encode(), asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        has_begun.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    async with asyncio.timeout(10):
        await app_of(service)(scope, receive, send)
        await service.cancelled.wait()
