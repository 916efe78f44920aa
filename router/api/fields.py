"""What becomes of every field that clients may send: how an API declares it.

A body declares what is served. Of the rest an API says by name what is refused and why, and what has no effect: in a
mapping for fields of a whole body, or on a field of a model (`Annotated[Any, Refusal(...)]`) at depth. Others are
refused as unknown. The check, `/openapi.json` and docs/http.md are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from baton.chat import asks_for_nothing, check_asks_for_nothing
from baton.errors import InvalidRequest

UNSUPPORTED = "unsupported"
"""The type of pydantic's error for a field that is refused by name."""


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


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A field that is taken and changes no answer."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"Has no effect: {self.why}."}


def check_unserved(fields: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
    """Checks the fields of a body that it does not serve.

    Args:
        refused: what the API refuses by name.

    Raises:
        InvalidRequest: one is not known.
        Unsupported: one is refused.
    """
    for name, value in fields.items():
        if name not in refused:
            raise InvalidRequest(f"unknown field {name!a}; remove it or correct its name", name)
        check_asks_for_nothing(name, value, refused[name].neutral)
