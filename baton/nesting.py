"""Nesting depth of a client's JSON, over which parsers and writers recurse."""

from __future__ import annotations

from baton.errors import InvalidRequest

MAX_LEVELS = 64
"""Maximum nesting depth of a client's JSON."""


def levels(value: object) -> int:
    """Return the number of nested objects and lists in a JSON value, including itself."""
    count, layer = 0, [value]
    while layer:
        count += 1
        values = [
            each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list | tuple)
        ]
        layer = [inner for each in values for inner in each if isinstance(inner, dict | list | tuple)]
    return count


def check_levels(value: object, name: str) -> None:
    """Raise InvalidRequest for a JSON value that is nested too deeply.

    Args:
        name: the field that has it.
    """
    if value and levels(value) > MAX_LEVELS:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_LEVELS} levels; make it flatter", name)
