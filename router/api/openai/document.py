"""The OpenAPI document of the HTTP API, made of the bodies and of `router.api.openai.fields`."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.openai.chat import ChatBody
from router.api.openai.completions import CompletionBody
from router.api.openai.fields import REFUSED, WITHOUT_EFFECT
from router.api.openai.tokens import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
STREAMED = ("/v1/chat/completions", "/v1/completions")
READ = {"/v1/models": "Lists the served model.", "/v1/models/{model}": "Describes a model."}
REFUSALS = {
    "400": "The request cannot be served; the error says what to change.",
    "401": "The API key is missing or not known.",
    "403": "The tenant may not ask for this.",
    "404": "Another model is served.",
    "409": "Another call has taken the request over, to continue it.",
    "413": "The body is too long.",
    "429": "The tenant or the router has as many requests as it takes; Retry-After says when to try again.",
    "503": "The cluster cannot serve it now; Retry-After says when to try again.",
}
_REF = "#/components/schemas/{model}"
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@functools.cache
def document() -> dict[str, Any]:
    """The document, in the form of OpenAPI 3.1."""
    _, schemas = models_json_schema([(body, "validation") for body in BODIES.values()], ref_template=_REF)
    components = schemas["$defs"]
    for path in STREAMED:
        _add_unserved(components[BODIES[path].__name__])
    paths = {path: {"post": _operation(path, body)} for path, body in BODIES.items()}
    paths |= {path: {"get": _reading(path, what)} for path, what in READ.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
        "paths": paths,
    }


def _add_unserved(schema: dict[str, Any]) -> None:
    """Adds what a body takes without serving it: values that ask for nothing."""
    properties = schema["properties"]
    for name, refusal in REFUSED.items():
        if name not in properties:
            neutral = [*refusal.neutral, None]
            properties[name] = {"enum": neutral, "description": f"Other values are refused: {refusal.why}."}
    for name, why in WITHOUT_EFFECT.items():
        properties[name]["description"] = f"Has no effect: {why}."
    schema["additionalProperties"] = False


def _operation(path: str, body: type[BaseModel]) -> dict[str, Any]:
    content: dict[str, Any] = dict(_JSON)
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": (body.__doc__ or "").partition("\n")[0],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}},
        },
        "responses": {"200": {"description": "The answer.", "content": content}, **_refusals()},
    }


def _reading(path: str, what: str) -> dict[str, Any]:
    parameters = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}] * ("{" in path)
    return {
        "summary": what,
        "parameters": parameters,
        "responses": {"200": {"description": "The answer.", "content": _JSON}, **_refusals()},
    }


def _refusals() -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {status: {"description": why, "content": schema} for status, why in REFUSALS.items()}
