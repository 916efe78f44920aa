"""Cases of a test of which `make check` runs a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], other: pytest.MarkDecorator, every: int) -> list[Any]:
    """Return the cases, all but the first of `every` so many with the mark.

    Args:
        cases: single values, or a tuple for each case of several arguments.
    """
    return [
        case if number % every == 0 else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=other)
        for number, case in enumerate(cases)
    ]


def chosen(cases: Iterable[Any], other: pytest.MarkDecorator, *checked: Any) -> list[Any]:
    """Return the cases, all but the chosen ones with the mark."""
    return [case if case in checked else pytest.param(case, marks=other) for case in cases]
