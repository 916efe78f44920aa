"""How deeply JSON of a client is nested: what reads or writes it goes down with it."""

from __future__ import annotations

from baton.errors import InvalidRequest

MAX_LEVELS = 64
"""Deepest nesting of a client's JSON."""


def levels(value: object) -> int:
    """Returns how many levels of objects and lists a JSON value has, itself included."""
    count, layer = 0, [value]
    while layer:
        count += 1
        values = [
            each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list | tuple)
        ]
        layer = [inner for each in values for inner in each if isinstance(inner, dict | list | tuple)]
    return count


def check_levels(value: object, name: str) -> None:
    """Raises InvalidRequest for a JSON value that is nested too deeply.

    Args:
        name: the field that has it.
    """
    if value and levels(value) > MAX_LEVELS:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_LEVELS} levels; make it flatter", name)
