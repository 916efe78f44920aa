"""Base classes and field types that the bodies of all APIs share."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError

from baton.errors import InvalidRequest
from router.api.fields import Refusal
from router.api.ignored import Ignored, is_empty

T = TypeVar("T")
MAX_LISTED = 4096


def _of_some_length(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_LISTED:
        told = {"field_type": "List", "max_length": MAX_LISTED, "actual_length": len(value)}
        raise PydanticKnownError("too_long", told)
    return value


Listed = Annotated[list[T], Field(max_length=MAX_LISTED), BeforeValidator(_of_some_length)]
"""List in a body. Its length is checked before its values; the limit is above that of every single list field."""
Values = Annotated[list[T], Field(max_length=MAX_LISTED, fail_fast=True), BeforeValidator(_of_some_length)]
"""List of numbers or texts. An error names its first wrong value only."""


class StrictBody(BaseModel):
    """Body or field whose names and types are all checked."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DeclaredBody(BaseModel):
    """Body of an API that declares which further fields it refuses, and which fields have no effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    refused: ClassVar[Mapping[str, Refusal]] = {}
    """Fields that the body does not have -> why they are refused."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Fields of the body that change no answer -> why."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the fields in the tables of docs/http.md."""
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema["properties"]
        schema["properties"] = {name: refusal.schema() for name, refusal in cls.refused.items()} | properties
        for name, why in cls.without_effect.items():
            properties[name]["description"] = f"Has no effect: {why}."
        schema["additionalProperties"] = False
        return schema

    def check_fields(self, ignored: Ignored) -> None:
        """Record the fields that are ignored.

        Raises:
            InvalidRequest: a field is unknown.
            Unsupported: a field is refused.
        """
        if self.model_extra:
            ignored.check_unserved(self.model_extra, self.refused)
        for name in self.model_fields_set & self.without_effect.keys():
            if not is_empty(getattr(self, name)):
                ignored.note(name)


class StreamBody(DeclaredBody):
    """Body whose answer may come as a stream."""

    stream: bool | None = None
    stream_options: Any = None

    def check_fields(self, ignored: Ignored) -> None:
        """Record ignored fields, among them `stream_options` without `stream`, which `router.strict` refuses."""
        super().check_fields(ignored)
        if self.stream_options is not None and not self.stream:
            if ignored.is_strict:
                raise InvalidRequest("stream_options needs stream; set stream to true", "stream_options")
            ignored.note("stream_options")


def field_names(annotation: Any) -> set[str]:
    """Return the names of all fields that a body knows, at any depth."""
    names = set[str]().union(*map(field_names, typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, each in annotation.model_fields.items():
            names |= {each.alias or name, *field_names(each.annotation)}
        names |= annotation.refused.keys() if issubclass(annotation, DeclaredBody) else set()
    return names
