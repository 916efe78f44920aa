"""Accounting of unreadable values in the store.

Any process that reaches Redis can write to it: another release, a shell, a program with the wrong address. So every
value is checked for its type, form and bounds when it is read. An invalid value is skipped and recorded here. Its
owner, if it has one, writes it again; only the worker or router that it describes is affected.
"""

from __future__ import annotations

import logging
from collections import Counter

from baton.cluster import StoreGarbage

logger = logging.getLogger(__name__)
MAX_LOGGED = 20
"""Number of values of one kind that are logged, once each; further values are only counted."""
MAX_CHARACTERS = 200
"""Maximum length of a key or reason in a message."""


class GarbageBook:
    """Counter of unreadable values; several connections of a process may share one."""

    def __init__(self) -> None:
        self._times = Counter[str]()
        self._latest: dict[str, str] = {}
        self._logged: dict[str, set[str]] = {}
        """Keys by kind."""

    def note(self, what: str, key: str, reason: object) -> None:
        """Count a value that was skipped.

        Args:
            what: the kind of value; there are only a few.
            key: its key in the store.
            reason: the reason why it is invalid.
        """
        where = f"{_shown(key)}: {_shown(str(reason))}"
        self._times[what] += 1
        self._latest[what] = where
        logged = self._logged.setdefault(what, set())
        if key not in logged and len(logged) < MAX_LOGGED:
            logged.add(key)
            rest = "; further ones are counted but not logged" if len(logged) == MAX_LOGGED else ""
            logger.warning("%s in Redis cannot be read and is skipped: %s%s", what, where, rest)

    def seen(self) -> tuple[StoreGarbage, ...]:
        """Return the skipped values since the process started, by kind."""
        return tuple(StoreGarbage(what, times, self._latest[what]) for what, times in sorted(self._times.items()))


def _shown(text: str) -> str:
    """Return the text on one line, cut to MAX_CHARACTERS."""
    printable = text.encode("unicode_escape").decode()
    return printable if len(printable) <= MAX_CHARACTERS else printable[:MAX_CHARACTERS] + "..."
