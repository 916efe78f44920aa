"""The OpenAPI document of the HTTP port, made of what each API says of itself."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.fields import Refusal
from router.api.schemas import REF, Schemas

REFUSALS = {
    "400": "The request cannot be served; the error says what to change.",
    "401": "The API key is missing or not known.",
    "403": "The tenant may not ask for this.",
    "404": "Another model is served.",
    "409": "Another call has taken the request over, to continue it.",
    "413": "The body is too long, or the prompt for a worker's memory.",
    "415": "The body is not JSON by its content type, or it is compressed.",
    "421": "The request names a host that is not this router's.",
    "429": "The tenant or the router has as many requests as it takes; Retry-After says when to try again.",
    "503": "The cluster cannot serve it now; Retry-After says when to try again.",
}
OPENAPI_PATH = "/openapi.json"
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_PLAIN_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_KEYS: list[dict[str, Any]] = [{"key": []}, {"x_api_key": []}]
_EVENTS: dict[str, Any] = {
    # In OpenAPI 3.1 the schema of a stream is that of each event.
    "text/event-stream": {
        "schema": {
            "type": "object",
            "required": ["data"],
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        }
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A path that takes a body by POST."""

    body: type[BaseModel]
    is_streamed: bool = False
    """Whether answers may be streams."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """What of the body's fields is refused by name, beside those that it declares."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Which of the body's fields change no answer -> why."""

    def field_names(self) -> set[str]:
        """The names of all fields that it knows, at any depth."""
        return {*self.refused, *self.without_effect, *_names(self.body)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """A path for operators: a question, or an order, which has a body and is sent by POST."""

    summary: str
    query: Mapping[str, Schemas] = field(default_factory=dict)
    """The query's parameters, none of which is needed -> their schemas."""
    body: type[BaseModel] | None = None
    answer: Callable[[Schemas], Schemas] | None = None
    """Adds the schemas that it needs, and returns the answer's. None: the answer is plain text."""

    @property
    def method(self) -> str:
        """The method, as the document writes it."""
        return "post" if self.body else "get"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What one API serves."""

    endpoints: Mapping[str, Endpoint]
    """Path -> what it takes."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Path to be read by GET -> what it gives."""
    calls: Mapping[str, OperatorCall] = field(default_factory=dict)
    """Path -> what operators ask or order there."""
    error_name: str
    """The name of the form of its errors; APIs may share one."""
    error: Mapping[str, Any]
    """The JSON schema of its errors."""


def _names(annotation: Any) -> Iterator[str]:
    for inner in typing.get_args(annotation):
        yield from _names(inner)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, each in annotation.model_fields.items():
            yield each.alias or name
            yield from _names(each.annotation)


def document(apis: Sequence[Api]) -> dict[str, Any]:
    """The document of all APIs, in the form of OpenAPI 3.1."""
    bodies = dict.fromkeys(endpoint.body for api in apis for endpoint in api.endpoints.values())
    bodies |= dict.fromkeys(call.body for api in apis for call in api.calls.values() if call.body)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    components = schemas["$defs"]
    paths: dict[str, Any] = {}
    for api in apis:
        components[api.error_name] = dict(api.error)
        for path, endpoint in api.endpoints.items():
            _add_unserved(components[endpoint.body.__name__], endpoint)
            paths[path] = {"post": _operation(endpoint, api)}
        paths |= {path: {"get": _reading(path, what, api)} for path, what in api.read.items()}
        paths |= {path: {call.method: _call(path, call, api, components)} for path, call in api.calls.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [*_KEYS, {}],
        "paths": paths,
    }


def _add_unserved(schema: dict[str, Any], endpoint: Endpoint) -> None:
    """Adds what a body takes without serving it: values that ask for nothing."""
    properties = schema["properties"]
    for name, refusal in endpoint.refused.items():
        if name not in properties:
            properties[name] = refusal.schema()
    for name, why in endpoint.without_effect.items():
        properties[name]["description"] = f"Has no effect: {why}."
    schema["additionalProperties"] = False


def _operation(endpoint: Endpoint, api: Api) -> dict[str, Any]:
    content = {**_JSON, **(_EVENTS if endpoint.is_streamed else {})}
    return {
        "summary": (endpoint.body.__doc__ or "").partition("\n")[0],
        "requestBody": _body(endpoint.body),
        "responses": {"200": {"description": "The answer.", "content": content}, **_refusals(api)},
    }


def _reading(path: str, what: str, api: Api) -> dict[str, Any]:
    return {
        "summary": what,
        "parameters": _in_path(path),
        "responses": {"200": {"description": "The answer.", "content": _JSON}, **_refusals(api)},
    }


def _call(path: str, call: OperatorCall, api: Api, components: Schemas) -> dict[str, Any]:
    content = {"application/json": {"schema": call.answer(components)}} if call.answer else _PLAIN_TEXT
    asked = [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in call.query.items()]
    order = {"requestBody": _body(call.body), "security": _KEYS} if call.body else {}
    return {
        "summary": call.summary,
        "parameters": [*_in_path(path), *asked],
        "responses": {"200": {"description": "The answer.", "content": content}, **_refusals(api)},
        **order,
    }


def _body(body: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=body.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _in_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _refusals(api: Api) -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": REF.format(model=api.error_name)}}}
    return {status: {"description": why, "content": schema} for status, why in REFUSALS.items()}
