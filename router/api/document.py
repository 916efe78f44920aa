"""The OpenAPI document of the HTTP port: what FastAPI derives from the endpoints, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.openapi.constants import REF_PREFIX
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from router.api.anthropic import errors as anthropic
from router.api.openai import errors as openai
from router.api.origins import FOR_OPERATORS
from router.api.unserved import is_anthropics

REFUSALS = {
    "400": "The request is invalid; the error says what to change.",
    "401": "The API key is missing or unknown.",
    "403": "The tenant lacks permission for this.",
    "404": "The cluster serves another model.",
    "409": "Another call has taken this request over to continue it.",
    "413": "The body is too long, or the prompt does not fit in a worker's memory.",
    "415": "The content type of the body is not JSON, or the body is compressed.",
    "421": "The request names a host that is not this router's.",
    "429": "The tenant or the router is at its limit of requests; Retry-After says when to try again.",
    "503": "The cluster cannot serve the request now; Retry-After says when to try again.",
}
OPENAPI_PATH = "/openapi.json"
_KEYS: list[dict[str, Any]] = [{"key": []}, {"x_api_key": []}]


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of an application with these routes."""
    found = get_openapi(title="Baton", version="1", routes=routes)
    schemas: dict[str, Any] = found["components"]["schemas"]
    del schemas["HTTPValidationError"], schemas["ValidationError"]  # FastAPI's own errors, which no client gets
    schemas |= {each.ERROR_NAME: each.ERROR_SCHEMA for each in (anthropic, openai)}
    for path, item in found["paths"].items():
        error = {"$ref": REF_PREFIX + (anthropic if is_anthropics(path) else openai).ERROR_NAME}
        content = {"application/json": {"schema": error}}
        for operation in item.values():
            operation["summary"] = operation.pop("description", operation["summary"])
            if "requestBody" in operation and path.startswith(FOR_OPERATORS):
                operation["security"] = _KEYS  # an order needs an operator's key, even if no other call needs one
            responses = operation["responses"]
            responses.pop("422", None)
            for each in responses["200"]["content"].values():
                each["schema"] = each["schema"] or {"type": "object"}
            responses |= {status: {"description": why, "content": content} for status, why in REFUSALS.items()}
    found["security"] = [*_KEYS, {}]
    found["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return found
