"""Base classes and field types that the bodies of all APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

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
