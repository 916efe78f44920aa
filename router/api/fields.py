"""Declarations for the fields that clients may send: served, refused, or without effect.

A body declares the fields that are served. For others an API declares which it refuses and why, and which have no
effect: in a mapping for fields of a whole body, or on a field of a nested model (`Annotated[Any, Refusal(...)]`). All
other fields are unknown: `router.api.ignored` decides which of them are ignored, and the rest is refused. The
validation, `/openapi.json` and docs/http.md derive from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from baton.chat import asks_for_nothing

UNSUPPORTED = "unsupported"
"""Type of pydantic's error for a field that is refused by name."""
LEFT_OUT = "left_out"
"""Type of pydantic's error for a member of a list that is refused with `router.strict`, and dropped without."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Declaration of a field that is refused unless its value asks for what happens anyway."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway. null always does."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.schema()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        return {"enum": [*self.neutral, None], "description": f"Other values are refused: {self.why}."}

    def _checked(self, value: Any) -> Any:
        if not asks_for_nothing(value, self.neutral):
            raise PydanticCustomError(UNSUPPORTED, "is not supported: {why}; leave it out", {"why": self.why})
        return value


class NotesFields(Protocol):
    """Record of ignored fields. See `router.api.ignored.Ignored`."""

    def note(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """Declaration of a field that is accepted and changes no answer. The validation's context, if any, records it."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(_noted, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"Has no effect: {self.why}."}


def _noted(value: Any, info: ValidationInfo[NotesFields | None]) -> Any:
    if value and info.context is not None and info.field_name is not None:
        info.context.note(info.field_name)
    return value
