"""Ignored fields: a client sends them and they change no answer. They are accepted, and named in a header and a metric.

A field that an API does not know is ignored if its value asks for nothing (null, false, an empty text, list or object),
or if its name marks it as the client's own (`router.api.marks`). Any other unknown field is refused, because it might
change the answer. `router.strict` refuses all unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from pydantic import ValidationError

from baton.chat import check_asks_for_nothing
from baton.errors import UnknownField
from router.api.fields import LEFT_OUT, UNSUPPORTED, Refusal
from router.api.marks import is_mark

IGNORED_HEADER = "x-baton-ignored"
MAX_NAMED = 16
"""Maximum number of fields that one header names."""
MAX_NAME = 64
"""Maximum length of a name in the header, in characters."""
MAX_ERRORS = 256
"""Maximum number of validation errors that are examined one by one; a body with more is refused."""
MAX_READINGS = 2
"""Maximum number of validations that may each remove ignored fields: an error in one field may hide another."""


def is_empty(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, or an empty text, list or object."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


class Ignored:
    """Record of the ignored fields of one request's body.

    Args:
        is_strict: whether unknown fields are refused, whatever they hold.
    """

    __slots__ = ("is_strict", "names")

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.names: dict[str, None] = {}
        """Names of the fields, each once, at most MAX_NAMED."""

    def note(self, name: str) -> None:
        """Record an ignored field by its own name, without its path."""
        if len(self.names) < MAX_NAMED:
            self.names[name] = None

    def takes(self, name: str, value: Any) -> bool:
        """Return whether an unknown field changes no answer; if so, record it."""
        if self.is_strict or not (is_empty(value) or is_mark(name)):
            return False
        self.note(name)
        return True

    def check_unserved(self, fields: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
        """Check the fields of a body that the API does not serve.

        Args:
            refused: fields that the API refuses by name.

        Raises:
            InvalidRequest: a field is unknown and cannot be ignored.
            Unsupported: a field is refused.
        """
        for name, value in fields.items():
            refusal = refused.get(name)
            if refusal is None:
                if not self.takes(name, value):
                    raise UnknownField(f"unknown field {name[:80]!a}; remove it or correct its name", name)
            elif is_empty(value) and not self.is_strict and value is not None and not _is_asked(value, refusal):
                self.note(name)
            else:
                check_asks_for_nothing(name, value, refusal.neutral)

    def drop_from(self, fields: MutableMapping[str, Any], unknown: Iterable[str]) -> None:
        """Remove the unknown fields of an object that change no answer."""
        for name in list(unknown):
            if self.takes(name, fields[name]):
                del fields[name]

    def headers(self) -> dict[str, str]:
        """Return the header that names the fields, in printable ASCII and of bounded length."""
        if not self.names:
            return {}
        return {IGNORED_HEADER: ", ".join(_printable(name) for name in self.names)}


def _is_asked(value: Any, refusal: Refusal) -> bool:
    """Return whether the value is false and thereby asks for something, because true is what happens anyway."""
    return value is False and any(each is True for each in refusal.neutral)


def _printable(name: str) -> str:
    plain = "".join(character if "!" <= character <= "~" and character not in ',;"\\' else "?" for character in name)
    return plain[:MAX_NAME]


def without_ignored(value: Any, error: ValidationError, ignored: Ignored) -> bool:
    """Remove the fields from a body that failed validation and change no answer.

    Args:
        value: the body; changed in place.
        error: the validation error.

    Returns:
        Whether a field was removed, so that the body should be validated again.
    """
    if ignored.is_strict or error.error_count() > MAX_ERRORS:
        return False
    has_changed = False
    for each in reversed(
        error.errors(include_url=False, include_context=False)
    ):  # from the end, so list indices stay valid
        kind, where = each["type"], each["loc"]
        if kind not in ("extra_forbidden", UNSUPPORTED, LEFT_OUT) or not where:
            continue
        holder = value
        for step in where[:-1]:
            holder = holder[step]
        name: Any = where[-1]
        if kind == LEFT_OUT:
            ignored.note(str(holder[name]["type"]))
        elif kind == UNSUPPORTED and isinstance(name, str) and is_empty(holder[name]):
            ignored.note(name)
        elif kind == UNSUPPORTED or not ignored.takes(str(name), holder[name]):
            continue
        del holder[name]
        has_changed = True
    return has_changed
