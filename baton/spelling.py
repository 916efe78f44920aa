"""Nearest existing name for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKE = 0.6
"""Minimum similarity of two names, 0 to 1, at which one may be meant by the other."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant; empty: none is similar. Case does not matter."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=LIKE)
    return by_lower[found[0]] if found else ""
