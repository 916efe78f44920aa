"""The OpenAPI document of the HTTP port, built from the declarations of each API."""

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
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_PLAIN_TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
_KEYS: list[dict[str, Any]] = [{"key": []}, {"x_api_key": []}]
_EVENTS: dict[str, Any] = {
    # In OpenAPI 3.1 the schema of a stream describes one event.
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
    """Path that takes a body by POST."""

    body: type[BaseModel]
    is_streamed: bool = False
    """Whether answers may be streams."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Fields of the body that are refused by name, in addition to those that its model declares."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Fields of the body that change no answer -> why."""

    def field_names(self) -> set[str]:
        """Return the names of all fields that it knows, at any depth."""
        return {*self.refused, *self.without_effect, *_names(self.body)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """Path for operators: a query by GET, or an order by POST with a body."""

    summary: str
    query: Mapping[str, Schemas] = field(default_factory=dict)
    """Optional parameters of the query -> their schemas."""
    body: type[BaseModel] | None = None
    answer: Callable[[Schemas], Schemas] | None = None
    """Adds the schemas that the answer needs, and returns the answer's schema. None: the answer is plain text."""

    @property
    def method(self) -> str:
        """The HTTP method, in lower case as in the document."""
        return "post" if self.body else "get"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """Description of one API: its paths and its errors."""

    endpoints: Mapping[str, Endpoint]
    """Path -> its endpoint."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Path that is read by GET -> its summary."""
    calls: Mapping[str, OperatorCall] = field(default_factory=dict)
    """Path -> the call of operators there."""
    error_name: str
    """The schema name of its errors; APIs may share one."""
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
    """Return the OpenAPI 3.1 document of all APIs."""
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
    """Add to a body's schema the fields that are accepted only with values that ask for nothing."""
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
