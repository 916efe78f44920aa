"""All APIs of the HTTP port: their endpoints, their OpenAPI document, and the format of their errors."""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.constants import REF_PREFIX
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from baton.errors import BatonError, InvalidRequest, UnknownField, Unsupported
from router.api import anthropic, openai, responses
from router.api.anthropic import events as anthropics
from router.api.browsers import FOR_OPERATORS
from router.api.exchange import ascii_json
from router.api.fields import MARKS, field_names
from router.api.openai import answers as openais
from router.api.routes import BodyRoute, LongText
from router.api.unserved import is_anthropics
from router.models.table import ModelTable

LONGEST_TOLD = 2000
"""Maximum length of an error's message and of the field's name, in characters."""
_ANTHROPICS = {
    "chat_template_kwargs": "output_config.effort",
    "continue_final_message": "messages",
    "input": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
_RESPONSES = {"max_tokens": "max_output_tokens", "messages": "input", "structured_outputs": "text.format"}
NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"input": "messages"},
    "/v1/completions": {"input": "prompt", "token_ids": "prompt"},
    "/v1/messages": _ANTHROPICS,
    "/v1/messages/count_tokens": _ANTHROPICS,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
}
"""Path -> the service's name of a field -> its name there."""
_OF_TOOL_IN_CHATS = re.compile(r"(?<=\btools\[)(\d+\])\.function\.parameters\b")
_OF_TOOL: Mapping[str, str] = {"/v1/messages": "input_schema", "/v1/responses": "parameters"}
"""Path or its prefix -> the field of a tool that holds the schema of its arguments."""
_OF_STRUCTURE: Mapping[str, str] = {
    "output_config.format": "output_config.format.schema",
    "response_format": "response_format.json_schema.schema",
    "structured_outputs": "structured_outputs.json",
    "text.format": "text.format.schema",
}
"""Field that asks for a structure -> the field in it that holds the schema."""
_OF_GRPC = re.compile(r"\bsampling\.(?=[a-z])")
REFUSALS = {
    "400": "The request is invalid; the error says what to change.",
    "401": "The API key is missing or unknown.",
    "403": "The tenant lacks permission for this.",
    "404": "No model of this name is served, or the tenant may not use it.",
    "409": "Another call has taken this request over to continue it.",
    "413": "The body is too long, or the prompt does not fit in a worker's memory.",
    "415": "The content type of the body is not JSON, or the body is compressed.",
    "421": "The request names a host that is not this router's.",
    "429": "The tenant or the router is at its limit of requests; Retry-After says when to try again.",
    "503": "The cluster cannot serve the request now; Retry-After says when to try again.",
}
OPENAPI_PATH = "/openapi.json"
_KEYS: list[dict[str, Any]] = [{"key": []}, {"x_api_key": []}]


def add_apis(app: FastAPI, models: ModelTable) -> None:
    """Add the endpoints of all APIs, and the OpenAPI document of the application.

    Sets `app.state.field_names`: the names of the fields of all bodies, at any depth, and of further fields that
    clients are known to send. They are the label values of metrics, so their number must be bounded.
    """
    openai.add_endpoints(app, models)
    responses.add_endpoints(app, models)
    anthropic.add_endpoints(app, models)

    bodies = [route.body for route in app.routes if isinstance(route, BodyRoute) and route.body]
    app.state.field_names = frozenset(MARKS | responses.REFUSED_TOOLS.keys()).union(*map(field_names, bodies))

    @functools.cache
    def described() -> asyncio.Task[LongText]:
        # Any client may request it, and writing it takes as long as hundreds of requests: once, and in a thread.
        return asyncio.create_task(asyncio.to_thread(lambda: LongText(ascii_json(document(app.routes)))))

    @app.get(OPENAPI_PATH, include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return (await asyncio.shield(described())).answer(request, "application/json")


def error_body(
    path: str, error: BatonError | HTTPException, request_id: str, written: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the body of an error response, with the format and the field names of the API to which the path belongs.

    Args:
        written: see `in_words_of`.
    """
    if isinstance(error, BatonError):
        error = in_words_of(path, error, written)
    body = anthropic.error_body(error, request_id) if is_anthropics(path) else openai.error_body(error)
    # The message may quote text of the client, so its length must be bounded.
    told = {name: text[:LONGEST_TOLD] if isinstance(text, str) else text for name, text in body["error"].items()}
    return {**body, "error": told}


def in_words_of(path: str, error: BatonError, written: Mapping[str, str] | None = None) -> BatonError:
    """Return a copy of the error with the field names of the API at a path.

    Args:
        written: the service's name of a field -> the field that this request used for the same.
    """
    message, names = _OF_GRPC.sub("", str(error)), {**NAMES.get(path, {}), **(written or {})}
    found = copy.copy(error)
    if isinstance(found, (InvalidRequest, Unsupported)) and found.param and not isinstance(found, UnknownField):
        known, own = found.param, names.get(found.param, found.param)
        if own != known and ("_" in known or message.startswith(f"{known} ")):
            message = re.sub(rf"\b{re.escape(known)}\b", own, message)
        if own in _OF_STRUCTURE and message.startswith("schema"):
            message = f"{_OF_STRUCTURE[own]}{message.removeprefix('schema')}"
        schema = next((field for above, field in _OF_TOOL.items() if path.startswith(above)), "function.parameters")
        message, found.param = (_OF_TOOL_IN_CHATS.sub(rf"\1.{schema}", text) for text in (message, own))
    found.args = (message,)
    return found


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of an application with these routes."""
    found = get_openapi(title="Baton", version="1", routes=routes)
    schemas: dict[str, Any] = found["components"]["schemas"]
    del schemas["HTTPValidationError"], schemas["ValidationError"]  # FastAPI's own errors, which no client gets
    schemas |= {each.ERROR_NAME: each.ERROR_SCHEMA for each in (anthropics, openais)}
    for path, item in found["paths"].items():
        error = {"$ref": REF_PREFIX + (anthropics if is_anthropics(path) else openais).ERROR_NAME}
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
