"""What a body may be made of, over all APIs: nothing that a client sends holds the loop or the memory for long."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from router.admission.tenants import DEFAULT_TENANT
from router.api.apis import LONGEST_TOLD
from router.api.exchange import MAX_BODY_BYTES
from router.api.http import create_app
from router.api.openai.chat import DetokenizeBody
from tests.support.models import table_of
from tests.support.waiting import until
from tests.unit.router.api.test_http import Service, app_of
from tools.api_docs import BODIES

LONG_LISTS = {"/detokenize": ["tokens"]}
"""Path -> its lists that may be as long as the longest prompt. In a prompt of /v1/completions any value may stand."""
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
MANY = 4097


def unbounded(schema: Any, where: str = "") -> Iterator[str]:
    """Where a JSON schema has lists of any length."""
    if isinstance(schema, dict):
        if schema.get("type") == "array" and schema.get("maxItems", MANY) >= MANY:
            yield where
        for name, inner in schema.items():
            yield from unbounded(inner, name if name not in ("anyOf", "items", "properties", "$defs") else where)
    if isinstance(schema, list):
        for inner in schema:
            yield from unbounded(inner, where)


@pytest.mark.parametrize("path", BODIES)
def test_no_list_of_a_body_may_have_any_length(path: str) -> None:
    assert list(unbounded(BODIES[path].model_json_schema())) == LONG_LISTS.get(path, [])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_of_a_long_list_the_first_wrong_value_alone_is_named(path: str) -> None:
    """What is said of thousands would cost more than all else of the request."""
    body = {"prompt": "a", "messages": CHAT["messages"], "stop_token_ids": ["x"] * 4000}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    with pytest.raises(ValidationError) as refusal:
        BODIES[path].model_validate(body)
    assert [error["loc"] for error in refusal.value.errors()] == [("stop_token_ids", 0)]


class Client:
    """Sends a body to the application, in one piece, and counts what the application asks for."""

    def __init__(self, path: str, body: bytes, method: str = "POST", **headers: str) -> None:
        self.num_received = 0
        self.status, self.answer = 0, b""
        self._body: bytes | None = body
        named = {"content-type": "application/json", **headers}.items()
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "state": {},
            "headers": [(name.encode(), value.encode()) for name, value in named], "client": ("10.0.0.9", 1),
            "server": ("10.0.0.1", 80),
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        self.num_received += 1
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.answer += message.get("body", b"")


async def asked(path: str, body: bytes, **headers: str) -> Client:
    service = Service()
    service.may_answer.set()
    client = Client(path, body, **headers)
    await app_of(service)(client.scope, client.receive, client.send)
    return client


def with_list(of: dict[str, Any], *names: str) -> bytes:
    """A body in which 4,097 wrong values stand where the names lead."""
    holder = of = json.loads(json.dumps(of))
    for name in names[:-1]:
        holder = holder[int(name) if isinstance(holder, list) else name]
    holder[names[-1]] = [5.5] * MANY
    return json.dumps(of).encode()


@pytest.mark.parametrize(
    ("path", "of", "names", "param"),
    [
        ("/v1/chat/completions", CHAT, ["messages"], "messages"),
        ("/v1/chat/completions", CHAT, ["tools"], "tools"),
        ("/v1/chat/completions", CHAT, ["documents"], "documents"),
        ("/v1/chat/completions", CHAT, ["stop"], "stop"),
        ("/v1/chat/completions", CHAT, ["bad_word_ids"], "bad_word_ids"),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {}}, ["structured_outputs", "choice"],
         "structured_outputs.choice"),
        ("/v1/completions", {"prompt": "hi"}, ["allowed_token_ids"], "allowed_token_ids"),
        ("/tokenize", {}, ["messages"], "messages"),
        ("/v1/responses", {}, ["input"], "input"),
        ("/v1/responses", {"input": [{"role": "user"}]}, ["input", "0", "content"], "input[0].content"),
        ("/v1/responses", {"input": [{"type": "reasoning"}]}, ["input", "0", "summary"], "input[0].summary"),
        ("/v1/responses", {"input": "hi"}, ["tools"], "tools"),
        ("/v1/responses/input_tokens", {}, ["input"], "input"),
    ],
    ids=lambda each: ".".join(each) if isinstance(each, list) else "",
)  # fmt: skip
async def test_a_long_list_is_refused_before_its_values_are_looked_at(
    path: str, of: dict[str, Any], names: list[str], param: str
) -> None:
    client = await asked(path, with_list(of, *names))
    assert client.status == 400
    told = json.loads(client.answer)["error"]
    assert (told["param"], told["message"]) == (
        param,
        f"{param}: List should have at most 4096 items after validation, not {MANY}",
    )


@pytest.mark.parametrize("names", [["messages"], ["messages", "0", "content"], ["system"], ["tools"]], ids=".".join)
async def test_a_long_list_of_anthropics_api_is_refused_before_its_values_are_looked_at(names: list[str]) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        of = {name: value for name, value in MESSAGE.items() if name != "max_tokens" or path == "/v1/messages"}
        client = await asked(path, with_list(of, *names))
        assert client.status == 400
        assert "at most 4096 items" in json.loads(client.answer)["error"]["message"]


def test_of_many_wrong_tokens_one_is_found() -> None:
    """What is made of an error is as large as some hundred tokens."""
    with pytest.raises(ValidationError) as found:
        DetokenizeBody.model_validate({"tokens": [5.5] * 10_000})
    assert found.value.error_count() == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "x" * 1_000_000: 5}),
        ("/v1/chat/completions", {"messages": [{"role": "x" * 1_000_000, "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi", "x" * 1_000_000: 5}]}),
        ("/v1/chat/completions", {**CHAT, "slo": {"ä" * 1_000_000: 5}}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "x" * 10**6: 5}}]}),
        ("/tokenize", {"model": "x" * 1_000_000, "prompt": "a"}),
        ("/v1/messages", {**MESSAGE, "x" * 1_000_000: 5}),
    ],
    ids=["field", "role", "field of a message", "field of a field", "field of a tool", "model", "Anthropic's"],
)
async def test_of_what_is_wrong_little_is_quoted(path: str, body: dict[str, Any]) -> None:
    client = await asked(path, json.dumps(body).encode())
    assert client.status in (400, 404)
    assert len(client.answer) <= 2 * 6 * LONGEST_TOLD + 200


async def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes() -> None:
    client = await asked("/v1/chat/completions", b"", **{"content-length": str(MAX_BODY_BYTES + 1)})
    assert client.status == 413
    assert client.num_received == 0


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("path", "of"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"}),
     ("/v1/messages", MESSAGE)],
    ids=["chat", "completions", "responses", "messages"],
)  # fmt: skip
async def test_what_came_is_given_back_before_its_answer_is_there(
    path: str, of: dict[str, Any], is_streamed: bool
) -> None:
    """A request may run for minutes, and there may be hundreds."""
    service = Service()
    template: Any = SimpleNamespace(reads=lambda name, has_tools: False)
    service.model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
    body = json.dumps({**of, "stream": is_streamed}).encode() + b" " * 1_000_000
    num_before = sys.getrefcount(body)
    client = Client(path, body)
    answering = asyncio.create_task(app_of(service)(client.scope, client.receive, client.send))
    await until(lambda: bool(service.asked))
    assert sys.getrefcount(body) == num_before
    assert [each for each in gc.get_objects() if issubclass(type(each), BODIES[path])] == []
    service.may_answer.set()
    await answering
    assert client.status == 200


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key", "metadata"])
async def test_what_every_event_says_again_is_short(name: str) -> None:
    for value in ("x" * 1025, {"a": "x" * 1025}, {str(number): "a" for number in range(65)}):
        if isinstance(value, dict) == (name == "metadata"):
            client = await asked("/v1/responses", json.dumps({"input": "hi", name: value}).encode())
            assert client.status == 400
            assert "at most" in json.loads(client.answer)["error"]["message"]


async def test_what_anybody_may_ask_for_is_not_written_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_written = 0

    def metrics() -> bytes:
        nonlocal num_written
        num_written += 1
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass
        return b"figures"

    def refuse(apis: Any) -> Any:
        raise AssertionError("the document is written again")

    tenants: Any = SimpleNamespace(is_open=True, identify=lambda key, certificate: DEFAULT_TENANT)
    service: Any = Service()
    app = create_app(table_of(service, requests=service.requests), tenants, lambda: "", metrics)
    documents = []
    for _ in range(10):
        for path in ("/metrics", "/api/metrics", "/openapi.json"):
            client = Client(path, b"", "GET")
            await app(client.scope, client.receive, client.send)
            assert client.status == 200
            documents.append(client.answer)
        monkeypatch.setattr("router.api.apis.document", refuse)
    assert num_written < 10
    assert len(set(documents)) == 2


async def test_the_metrics_are_written_anew_once_time_has_passed() -> None:
    figures = iter(b"%d" % number for number in range(100))
    tenants: Any = SimpleNamespace(is_open=True, identify=lambda key, certificate: DEFAULT_TENANT)
    service: Any = Service()
    app = create_app(table_of(service, requests=service.requests), tenants, lambda: "", lambda: next(figures))
    told: set[bytes] = set()
    for _ in range(3):
        client = Client("/metrics", b"", "GET")
        await app(client.scope, client.receive, client.send)
        told.add(client.answer)
        await asyncio.sleep(0.1)
    assert len(told) == 3
