"""What becomes of every field that clients may send: how an API declares it.

A body declares what is served. Of the rest an API says by name what is refused and why, and what has no effect: in a
mapping for fields of a whole body, or on a field of a model (`Annotated[Any, Refusal(...)]`) at depth. Others are not
known: `router.api.ignored` says which of them are ignored, and the rest is refused. The check, `/openapi.json` and
docs/http.md are made of these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from baton.chat import asks_for_nothing

UNSUPPORTED = "unsupported"
"""The type of pydantic's error for a field that is refused by name."""
LEFT_OUT = "left_out"
"""The type of pydantic's error for a member of a list that is refused by `router.strict` alone, and else left out."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is refused unless it asks for what happens anyway."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, as null always does."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.schema()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the field."""
        return {"enum": [*self.neutral, None], "description": f"Other values are refused: {self.why}."}

    def _checked(self, value: Any) -> Any:
        if not asks_for_nothing(value, self.neutral):
            raise PydanticCustomError(UNSUPPORTED, "is not supported: {why}; leave it out", {"why": self.why})
        return value


class NotesFields(Protocol):
    """Notes the fields that are ignored. See `router.api.ignored.Ignored`."""

    def note(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A field that is taken and changes no answer. The context of the validation, if it has one, notes it."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(_noted, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"Has no effect: {self.why}."}


def _noted(value: Any, info: ValidationInfo[NotesFields | None]) -> Any:
    if value and info.context is not None and info.field_name is not None:
        info.context.note(info.field_name)
    return value
