"""What is not served is refused by name, in the form of the API whose client asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from starlette.routing import Match, Route

from router.api.apis import document
from router.api.unserved import ANTHROPICS, OPENAIS, why_unserved
from tests.unit.router.api.test_http import Service, app_of
from tools.api_docs import ROUTES

SERVED = set(document(ROUTES)["paths"])
PATHS = re.compile(r'"((?:/v1)?/[a-z_]+(?:/[a-z_/]*(?:\{[a-z_]+\}[a-z_/]*)*)?)(?:\?beta=true)?"')
"""Paths in the sources of a client."""


def paths_of(client: Path, prefix: str) -> set[str]:
    found: set[str] = set()
    for file in client.glob("resources/**/*.py"):
        paths = PATHS.findall(file.read_text())
        found |= {prefix + path for path in paths if not (prefix and path.startswith(prefix))}
    return found


@pytest.mark.parametrize(("client", "prefix"), [(openai, "/v1"), (anthropic, "")], ids=["openai", "anthropic"])
def test_every_endpoint_of_the_clients_is_known(client: object, prefix: str) -> None:
    paths = paths_of(Path(str(client.__file__)).parent, prefix)  # type: ignore[attr-defined]
    assert len(paths) > 40
    assert {path for path in paths if path not in SERVED and why_unserved(path) is None} == set()


def test_what_is_not_served_is_not_served() -> None:
    routes = [route for route in app_of(Service()).routes if isinstance(route, Route)]
    for path in {**OPENAIS, **ANTHROPICS}:
        for method in ("GET", "POST"):
            scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": []}
            is_served = any(route.matches(scope)[0] is Match.FULL for route in routes)
            assert not is_served or path in SERVED


CASES = [
    ("POST", "/v1/embeddings", "embeddings"),
    ("GET", "/v1/files/file-1/content", "nothing is stored"),
    ("GET", "/v1/chat/completions", "answers are not stored"),
    ("DELETE", "/v1/chat/completions/chatcmpl-1", "answers are not stored"),
    ("DELETE", "/v1/models/m", "the operator manages the model"),
    ("GET", "/v1/responses/resp_1", "answers are not stored"),
    ("POST", "/v1/messages/batches", "no batch API"),
    ("GET", "/v1/messages", "answers are not stored"),
    ("POST", "/v1/complete", "superseded by /v1/messages"),
    ("POST", "/openai/deployments/m/chat/completions", "a base URL that ends in /v1"),
    ("POST", "/chat/completions", "must end in /v1"),
    ("POST", "/v1/v1/chat/completions", "remove one of them"),
    ("POST", "/api/chat", "Baton has no Ollama API"),
]


@pytest.mark.parametrize(("method", "path", "why"), CASES)
async def test_it_is_refused_with_the_reason(method: str, path: str, why: str) -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(Service())), base_url="http://baton") as client:
        response = await client.request(method, path, headers={"x-request-id": "mine"})
    assert response.status_code == 404
    body = response.json()
    endpoints = sorted({**OPENAIS, **ANTHROPICS}, reverse=True)
    endpoint = next(each for each in endpoints if f"{path}/".startswith(f"{each}/"))
    assert body["error"]["message"].startswith(f"{method} {endpoint} is not served: ")
    assert why in body["error"]["message"]
    if endpoint in ANTHROPICS:
        assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "not_found_error", "mine")
        assert response.headers["request-id"] == "mine"
    else:
        assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", None)


def test_a_path_of_a_million_parts_holds_nobody_up() -> None:
    found = why_unserved("/v1/files" + "/a" * 10**6)
    assert found is not None
    assert found[0] == "/v1/files"
    assert why_unserved("/" * 10**6) is None


async def test_other_paths_are_not_found() -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(Service())), base_url="http://baton") as client:
        for path in ("/v1/embeddingsx", "/hot", "/v1"):
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found")


async def test_another_method_is_refused_with_those_that_there_are() -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(Service())), base_url="http://baton") as client:
        response = await client.request("PUT", "/tokenize")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
