"""What lies in the store and cannot be read.

Whatever can reach Redis can write to it: another release, a person with a shell, a program that was given the wrong
address. So every value is checked for its type, form and bounds where it is read. What does not fit is skipped, noted
here, and written anew by its owner if it has one; it harms nobody but who it was to speak of.
"""

from __future__ import annotations

import logging
from collections import Counter

from baton.cluster import StoreGarbage

logger = logging.getLogger(__name__)
MAX_LOGGED = 1000
"""Values that are logged, each once; more are only counted."""
MAX_CHARACTERS = 200
"""Of a key or a reason, in what is shown."""


class GarbageBook:
    """Counts what could not be read; several connections of a process may share one."""

    def __init__(self) -> None:
        self._times = Counter[str]()
        self._latest: dict[str, str] = {}
        self._logged: set[tuple[str, str]] = set()

    def note(self, what: str, key: str, reason: object) -> None:
        """A value was skipped.

        Args:
            what: the kind of value, of a few.
            key: where it lies.
            reason: what is wrong with it.
        """
        where = f"{_shown(key)}: {_shown(str(reason))}"
        self._times[what] += 1
        self._latest[what] = where
        if (what, key) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((what, key))
            logger.warning("%s in Redis cannot be read and is skipped: %s", what, where)

    def seen(self) -> tuple[StoreGarbage, ...]:
        """What was skipped since the process started, by kind."""
        return tuple(StoreGarbage(what, times, self._latest[what]) for what, times in sorted(self._times.items()))


def _shown(text: str) -> str:
    """On one line, and not at any length."""
    printable = text.encode("unicode_escape").decode()
    return printable if len(printable) <= MAX_CHARACTERS else printable[:MAX_CHARACTERS] + "..."
