"""The models of a router as operators name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.errors import InvalidRequest, ModelNotFound
from router.models.entry import ModelEntry


class OperatedModels:
    """Finds the models that an operator's request names: by name, release or content id.

    Args:
        entries: returns all models that the router serves.
    """

    def __init__(self, entries: Callable[[], Sequence[ModelEntry]]) -> None:
        self._entries = entries

    def named(self, name: str) -> Sequence[ModelEntry]:
        """Return the models of this name; empty: all models.

        Raises:
            ModelNotFound: there is none.
        """
        entries = self._entries()
        if not name:
            return entries
        found = [each for each in entries if name in _names(each)]
        if not found:
            known = ", ".join(sorted({each.announcement.release for each in entries})[:8]) or "none"
            raise ModelNotFound(f"no model or release is called {name!r:.200}; there are {known}", "model")
        return found

    def one(self, name: str) -> ModelEntry:
        """Return the model of this name; empty: the only one.

        Raises:
            ModelNotFound: there is none.
            InvalidRequest: there are several.
        """
        found = self.named(name)
        if not found:
            raise ModelNotFound("no model is served", "model")
        if len(found) > 1:
            releases = ", ".join(sorted(each.announcement.release for each in found)[:8])
            raise InvalidRequest(f"there are several models: {releases}; name one of these releases", "model")
        return found[0]


def _names(entry: ModelEntry) -> tuple[str, ...]:
    return entry.announcement.name, entry.announcement.release, entry.announcement.content_id
