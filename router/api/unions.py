"""Union fields: objects that a `type` or a `role` distinguishes, and a text in place of a list.

Pydantic's own unions put the names of their members into the path of an error. An error here names the client's field.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from router.api.fields import LEFT_OUT, UNSUPPORTED


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByType:
    """Annotation of a union of models that a field of the value distinguishes. Other members are literal texts."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Other values of the field that clients may send -> why they are refused."""
    default: str = ""
    """Value of the field in an object without it; empty: the field is required."""
    by: str = "type"
    """Name of the field."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Types of objects that are dropped from their list, unless `router.strict` refuses them -> why."""
    leaves_out: bool = False
    """Whether objects of unknown types are dropped as well."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = typing.get_args(source) or (source,)
        models = {
            kind: each
            for each in members
            if isinstance(each, type) and issubclass(each, BaseModel)
            for kind in typing.get_args(each.model_fields[self.by].annotation)
        }
        texts = [text for each in members for text in typing.get_args(each) if isinstance(text, str)]

        def chosen(value: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            return self._chosen(value, models, texts, info.context)

        return core_schema.with_info_wrap_validator_function(chosen, handler(source))

    def _chosen(self, value: Any, models: Mapping[str, type[BaseModel]], texts: list[str], context: Any) -> Any:
        if isinstance(value, str) and value in texts:
            return value
        if not isinstance(value, dict):
            known = " or ".join((*texts, f"an object with a {self.by}"))
            raise PydanticCustomError("one_of_several", "must be {known}", {"known": known})
        kind = value.get(self.by) or self.default
        is_left_out = isinstance(kind, str) and (kind in self.left_out or bool(self.leaves_out and kind not in models))
        if isinstance(kind, str) and kind and (kind in self.refused or is_left_out):
            why = self.refused.get(kind) or self.left_out.get(kind, "it is not known")
            raise PydanticCustomError(
                LEFT_OUT if is_left_out else UNSUPPORTED,
                "of {by} {kind} is not supported: {why}; leave it out",
                {"by": self.by, "kind": kind[:80].encode("ascii", "backslashreplace").decode(), "why": why},
            )
        if not isinstance(kind, str) or kind not in models:
            what = {"by": self.by, "known": ", ".join(models)}
            raise PydanticCustomError("type", "must have a {by} out of: {known}", what)
        return models[kind].model_validate(value, context=context)


@dataclass(frozen=True, slots=True, eq=False)
class OrText:
    """Annotation of a union of a text and a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (of_list,) = (each for each in typing.get_args(source) if each is not str)
        return core_schema.no_info_wrap_validator_function(_text_or_list, handler.generate_schema(of_list))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def _text_or_list(value: Any, of_list: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_list", "must be a text or a list")
    return of_list(value)
