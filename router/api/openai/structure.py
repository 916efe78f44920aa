"""Structured outputs, requested with OpenAI's field `response_format` or vLLM's field `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from baton.errors import InvalidRequest
from baton.structure import StructuredOutputs
from router.api.strict import StrictBody, Values


class JsonSchemaBody(StrictBody):
    """The field `response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    of_json: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted, but every schema is enforced."""


class ResponseFormatBody(StrictBody):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    of_json: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema of a json_object: an older spelling, which llama.cpp and Together support."""


class StructuredOutputsBody(StrictBody):
    """The field `structured_outputs`."""

    of_json: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Values[str] | None = None
    grammar: str | None = None


def structure_of(
    response_format: ResponseFormatBody | None, structured_outputs: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """Return the structure that a body asks for; None: free text.

    Raises:
        InvalidRequest: both fields ask for a structure, or one asks for several structures or for a too large one.
    """
    asked = response_format is not None and response_format.type != "text"
    if response_format and (response_format.type == "json_schema") != (response_format.json_schema is not None):
        raise InvalidRequest(
            "response_format.json_schema needs response_format.type json_schema; set both or none", "response_format"
        )
    if response_format and response_format.of_json is not None and response_format.type != "json_object":
        raise InvalidRequest(
            "response_format.schema needs response_format.type json_object; unset the schema", "response_format"
        )
    if asked and structured_outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs cannot be combined; set one of them", "structured_outputs"
        )
    if structured_outputs is not None:
        return StructuredOutputs(
            json=_text(structured_outputs.of_json),
            json_object=bool(structured_outputs.json_object),
            regex=structured_outputs.regex or "",
            choice=tuple(structured_outputs.choice or ()),
            grammar=structured_outputs.grammar or "",
        )
    if response_format is None or not asked:
        return None
    if response_format.of_json is not None:
        return StructuredOutputs(json=_text(response_format.of_json))
    if response_format.json_schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=_text(response_format.json_schema.of_json))


def _text(schema: dict[str, Any] | bool | str | None) -> str:
    if schema is None:
        return ""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
