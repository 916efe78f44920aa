"""What the text of an answer is to be, in the words of the Responses API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.structure import StructuredOutputs
from router.api.fields import WithoutEffect
from router.api.strict import StrictBody
from router.api.unions import ByType


class PlainTextFormat(StrictBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(StrictBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    of_json: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Every schema is enforced."""


TextFormat = PlainTextFormat | JsonObjectFormat | JsonSchemaFormat


class TextBody(StrictBody):
    """The field `text`."""

    format: Annotated[TextFormat, ByType()] | None = None
    verbosity: Annotated[str | None, WithoutEffect("no template is known to read it")] = None

    def structure(self) -> StructuredOutputs | None:
        """Returns what the answer must be; None: any text.

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
        """The field as a response has it."""
        form = {"type": "text"} if self.format is None else self.format.model_dump(by_alias=True, exclude_none=True)
        return {"format": form, "verbosity": "medium"}
