"""The field `text` of the Responses API, which sets the format of an answer."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.structure import StructuredOutputs
from router.api.fields import WithoutEffect
from router.api.strict import StrictBody
from router.api.unions import ByType


class PlainTextFormat(StrictBody):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(StrictBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str
    of_json: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Accepted, but every schema is enforced."""


TextFormat = PlainTextFormat | JsonObjectFormat | JsonSchemaFormat


class TextBody(StrictBody):
    """The field `text`."""

    format: Annotated[TextFormat, ByType()] | None = None
    verbosity: Annotated[str | None, WithoutEffect("no known chat template reads it")] = None

    def structure(self) -> StructuredOutputs | None:
        """Return the structure that the answer must have; None: free text.

        Raises:
            InvalidRequest: the schema is too large.
        """
        match self.format:
            case JsonSchemaFormat(of_json=schema):
                return StructuredOutputs(json=json.dumps(schema, ensure_ascii=False))
            case JsonObjectFormat():
                return StructuredOutputs(json_object=True)
        return None

    def echoed(self) -> dict[str, Any]:
        """Return the field as a response echoes it."""
        form = {"type": "text"} if self.format is None else self.format.model_dump(by_alias=True, exclude_none=True)
        return {"format": form, "verbosity": "medium"}
