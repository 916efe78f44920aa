"""Errors have the form of the API on whose path they come, and types that its clients know."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from anthropic.types import ErrorResponse
from anthropic.types.shared.error_type import ErrorType

from baton.api import GenerateChunk
from baton.errors import (
    BatonError,
    Conflict,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    Overloaded,
    TransferTimeout,
    Unauthenticated,
    Unsupported,
)
from router.admission.tenants import Tenant
from router.api.anthropic.events import ERROR_SCHEMA, KINDS
from router.api.apis import error_body
from router.api.http import create_app
from tests.support.models import table_of
from tests.unit.router.api.test_translated_bodies import HI, Asked


class Refusing(Asked):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    async def generate(self, *asked: Any) -> AsyncGenerator[GenerateChunk]:
        if self._error is not None:
            raise self._error
        yield GenerateChunk(request_id="r", choice_index=0)


async def answer(error: Exception, path: str = "/v1/messages", body: bytes | None = None) -> httpx2.Response:
    service: Any = Refusing(error)
    is_stranger = isinstance(error, Unauthenticated)

    def identify(key: str | None, certificate: Any) -> Any:
        if is_stranger:
            raise error
        return Tenant(id="t")

    tenants: Any = SimpleNamespace(is_open=False, identify=identify)
    app = create_app(table_of(service, requests=service.requests), tenants, lambda: "", lambda: b"")
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    asked = {"model": "", "max_tokens": 3, "messages": [HI]}
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as client:
        if body is not None:
            return await client.post(path, content=body, headers={"content-type": "application/json"})
        return await client.post(path, json=asked, headers={"x-request-id": "mine"})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("no", "stop"), 400, "invalid_request_error"),
        (Unsupported("no"), 400, "invalid_request_error"),
        (Unauthenticated("no"), 401, "authentication_error"),
        (Forbidden("no"), 403, "permission_error"),
        (ModelNotFound("no"), 404, "not_found_error"),
        (Overloaded("no", 2.5), 429, "rate_limit_error"),
        (NoWorker("no"), 503, "overloaded_error"),
        (Conflict("no"), 503, "overloaded_error"),
        (TransferTimeout("no"), 503, "overloaded_error"),
        (BatonError("no"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropics_types(error: BatonError, status: int, kind: str) -> None:
    response = await answer(error)
    assert response.status_code == status
    body = response.json()
    ErrorResponse.model_validate(body, strict=True)
    message = "stop_sequences: no" if isinstance(error, InvalidRequest) and error.param else "no"
    assert body == {"type": "error", "error": {"type": kind, "message": message}, "request_id": "mine"}
    assert response.headers["request-id"] == "mine"
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    theirs = (await answer(error, "/v1/chat/completions")).json()
    assert theirs["error"].keys() == {"message", "type", "param", "code"}


async def test_a_defect_is_an_error_of_the_server() -> None:
    response = await answer(RuntimeError("secret"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (b"{", 400, "invalid_request_error", "the body is not valid JSON, at character 1"),
        (b"[" * 10_000, 400, "invalid_request_error", "the body is not valid JSON in UTF-8"),
        (b"", 400, "invalid_request_error", "the body: Field required"),
        (b" " * (8 * 2**20 + 1), 413, "request_too_large", "the body is longer than"),
    ],
)
async def test_what_is_no_body_is_refused(body: bytes, status: int, kind: str, message: str) -> None:
    response = await answer(NoWorker("no"), body=body)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["request_id"] == response.headers["request-id"] != ""


def test_all_types_are_in_the_document() -> None:
    types = ERROR_SCHEMA["properties"]["error"]["properties"]["type"]["enum"]
    assert {*KINDS.values(), "api_error", "invalid_request_error"} == set(types)
    assert set(types) - {"request_too_large"} <= set(ErrorType.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "tools[1].function.parameters"),
        ("/v1/messages", "tools[1].input_schema"),
        ("/v1/messages/count_tokens", "tools[1].input_schema"),
        ("/v1/responses", "tools[1].parameters"),
    ],
)
def test_the_place_of_a_schema_is_that_of_the_api(path: str, field: str) -> None:
    problem = "tools[1].function.parameters.properties.x: not cannot be enforced"
    refused = InvalidRequest(problem, "tools[1].function.parameters.properties.x")
    told = error_body(path, refused, "r")["error"]
    assert told["message"] == f"{field}.properties.x: not cannot be enforced"
    assert told.get("param", f"{field}.properties.x") == f"{field}.properties.x"
