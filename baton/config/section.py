"""Sections of settings: frozen pydantic dataclasses whose errors name the setting.

The annotation of a field parses and validates it: one of the types below, or `Annotated` with pydantic's constraints
and a `Must`, which words the error. The docstring after a field is its description, also in the chart. Only
`tools.chart_docs` reads it, from the source, because that would slow down the start of each process.
Checks of more than one field are in `__post_init__` and raise ConfigError themselves.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from baton.addresses import MAX_PORT, has_no_port
from baton.config.secrets import HIDDEN
from baton.errors import ConfigError
from baton.spelling import nearest

T = TypeVar("T")
MAX_TIMEOUT_S = 7 * 86_400
"""Upper limit of the timeouts that operators wait for, in seconds."""


@dataclass(frozen=True, slots=True)
class Must:
    """Error text of a field. In `text`, {name} is `section.field`, {field} the field alone and {value} the value."""

    text: str

    @staticmethod
    def be(rule: str) -> Must:
        return Must(f"{{name}} must be {rule}, got {{value}}")


SECRET = "secret"
"""Annotation of a setting whose value is never shown."""
UNLISTED = "unlisted"
"""Annotation of a section that documentation and errors do not name."""


class OneOf:
    """Annotation of a string with a fixed set of values. Unlike with `Literal`, callers may pass any `str`."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))


def _switch(value: Any) -> Any:
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise PydanticCustomError("switch", "must be true or false")
    return str(value).lower() in ("true", "1")


def _no_switch(value: Any) -> Any:
    """Refuse booleans, which Python would count as 0 and 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def _whole(value: Any) -> Any:
    """Parse a whole number from the environment."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise PydanticCustomError("int_parsing", "must be a whole number") from None
    return _no_switch(value)


def _on_off(value: Any) -> Any:
    """Return "on" or "off" for a bool: YAML reads a bare on or off as one."""
    return value if not isinstance(value, bool) else "on" if value else "off"


def _listed(value: Any) -> Any:
    """Split a list from the environment at its commas."""
    if not isinstance(value, str):
        return value
    return tuple(item for item in (part.strip() for part in value.split(",")) if item)


def _from_json(value: Any) -> Any:
    """Parse a mapping from the environment as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise PydanticCustomError("json", "{error}", {"error": str(error)}) from error


def _address(value: Any) -> Any:
    if isinstance(value, str) and has_no_port(value):
        raise PydanticCustomError("address", "must have a port")
    return value


NUMBER = BeforeValidator(_no_switch)
WHOLE = BeforeValidator(_whole)
COMMA_SEPARATED = BeforeValidator(_listed)
JSON = BeforeValidator(_from_json)
ON_OFF = BeforeValidator(_on_off)
"""These must come after a field's constraints; otherwise pydantic's schema does not contain the constraints."""
Switch: TypeAlias = Annotated[bool, BeforeValidator(_switch)]
Int: TypeAlias = Annotated[int, WHOLE]
Float: TypeAlias = Annotated[float, NUMBER]
String: TypeAlias = Annotated[str, ON_OFF]
Secret: TypeAlias = Annotated[str, ON_OFF, SECRET]

AtLeastOne: TypeAlias = Annotated[int, Field(ge=1), WHOLE, Must.be("at least 1")]
NotNegative: TypeAlias = Annotated[int, Field(ge=0), WHOLE, Must.be("at least 0")]
Port: TypeAlias = Annotated[int, Field(ge=0, le=MAX_PORT), WHOLE, Must.be(f"a port, 0 to {MAX_PORT}")]
HostPort: TypeAlias = Annotated[
    str, ON_OFF, BeforeValidator(_address), Must(f"the port of {{name}} must be a number of 0 to {MAX_PORT}")
]
"""Address or URL with a valid port. Errors do not show it, since a URL may contain a password."""
Share: TypeAlias = Annotated[float, Field(gt=0, le=1), NUMBER, Must.be("more than 0 and at most 1")]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER, Must.be("more than 0 seconds")]
Wait: TypeAlias = Annotated[
    float, Field(gt=0, le=MAX_TIMEOUT_S), NUMBER, Must.be(f"more than 0 seconds, and at most {MAX_TIMEOUT_S}")
]
"""Timeout that an operator may have to wait for, in seconds."""

_RULES = {
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "address"),
    "string_pattern_mismatch",
}
_UNKNOWN = {"unexpected_keyword_argument", "invalid_key"}


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(name: str = "") -> Callable[[type[T]], type[T]]:
    """Decorate a section. Constructing a section, or replacing one of its fields, validates it.

    Args:
        name: prefix of the section's settings, before the dot; empty: the class holds all sections.
    """
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    def made(cls: type[T]) -> type[T]:
        found: Any = pydantic_dataclass(frozen=True, slots=True, kw_only=True, config=config)(cls)
        construct = found.__init__

        def __init__(self: Any, **values: Any) -> None:  # noqa: N807 - it takes the place of the generated one
            try:
                construct(self, **values)
            except ValidationError as error:
                raise ConfigError(_sentence(found, error, name)) from None

        found.__init__ = __init__
        return typing.cast("type[T]", found)

    return made


def build(cls: type[T], values: Mapping[Any, Any]) -> T:
    """Return an instance of `cls` from nested mappings, as they come from YAML, JSON and the environment.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed; the message names the setting.
    """
    try:
        found: T = cls.__pydantic_validator__.validate_python(values)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(_sentence(cls, error, "")) from None
    return found


def is_listed(cls: type[Any], name: str) -> bool:
    """Return whether documentation and errors name this field of a section."""
    return UNLISTED not in cls.__pydantic_fields__[name].metadata


def _sentence(cls: type[Any], error: ValidationError, prefix: str) -> str:
    """Return the text of the first error; unknown names come before wrong values."""
    details = error.errors(include_url=False)
    first = next((each for each in details if each["type"] in _UNKNOWN), details[0])
    owner, field, path = _place(cls, first["loc"])
    name = ".".join((*((prefix,) if prefix else ()), *path))
    if first["type"] in _UNKNOWN:
        known = sorted(each for each in owner.__pydantic_fields__ if is_listed(owner, each))
        if meant := nearest(path[-1], known):
            return f"unknown setting {name}; did you mean {name.removesuffix(path[-1])}{meant}?"
        return f"unknown setting {name}; known here: {', '.join(known)}"
    if field is None or first["type"] == "dataclass_type":
        return f"{name} must be a section of settings"
    # A value of a union failed for each of its types; the last of them is not a keyword such as `auto`.
    last = [each for each in details if _place(cls, each["loc"])[2] == path][-1]
    return _refusal(last, field, name, path[-1], field.annotation)


def _place(cls: type[Any], loc: tuple[int | str, ...]) -> tuple[Any, Any, tuple[str, ...]]:
    """Return the section with the setting at `loc`, the setting's field, and its path of names from `cls`.

    The field is None if the section has no such setting.
    """
    owner: Any = cls
    field: Any = None
    path: list[str] = []
    parts = list(loc)
    while parts and is_dataclass(owner):
        path.append(str(parts.pop(0)))
        field = typing.cast("Any", owner).__pydantic_fields__.get(path[-1])
        if field is None:
            return owner, None, tuple(path)
        kind = field.annotation
        if typing.get_origin(kind) is dict and parts:
            path.append(str(parts.pop(0)))
            kind = typing.get_args(kind)[1]
        if not parts:
            break
        if is_dataclass(kind):
            owner = kind
        else:
            break
    return owner, field, tuple(path)


def _refusal(detail: ErrorDetails, field: Any, name: str, key: str, kind: Any) -> str:
    value = HIDDEN if SECRET in field.metadata else detail["input"]
    if detail["type"] == "json":
        return f"{name} must be JSON in the environment: {detail['msg']}"
    if detail["type"] == "literal_error":
        return f"{name} must be one of {', '.join(_choices(Annotated[kind, *field.metadata]))}; got {value!r}"
    must = next((each for each in field.metadata if isinstance(each, Must)), None)
    if must is not None and detail["type"] in _RULES:
        kind = _of_number(kind)
        number = value if kind is str else int(value) if kind is int else float(value)
        return must.text.format(name=name, field=key, value=number)
    return f"{name} must be {_kind_in_words(kind)}, got {value!r}"


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the allowed values of a setting, or of an item of a list; none if it has no fixed set of values."""
    if isinstance(kind, OneOf):
        return kind.words
    return next(filter(None, map(_choices, typing.get_args(kind))), ())


def _of_number(kind: Any) -> Any:
    """Return the type of a value, without annotations; of a union with auto, its other type."""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        kind = typing.get_args(kind)[1]
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _kind_in_words(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    if typing.get_origin(kind) is tuple:
        return "a list"
    if typing.get_origin(kind) in (typing.Union, UnionType):  # auto and another type
        return f"auto or {_kind_in_words(_of_number(kind))}"
    return f"of type {kind.__name__}"
