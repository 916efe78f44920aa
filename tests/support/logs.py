"""Logs of the processes that tests start: a test that fails shows how they end."""

from __future__ import annotations

from collections.abc import Callable

NUM_LINES = 40
_shown: dict[str, Callable[[], str]] = {}


def show_on_failure(name: str, read: Callable[[], str]) -> None:
    """Shows the end of a log with every test that fails from now on."""
    _shown[name] = read


def forget(name: str) -> None:
    """Shows a log no more; its process is about to end."""
    _shown.pop(name, None)


def ends_of_logs() -> list[tuple[str, str]]:
    """Returns the title and the last lines of each log that is not empty."""
    ends = [(f"Log of {name}", "\n".join(read().splitlines()[-NUM_LINES:])) for name, read in _shown.items()]
    return [(title, text) for title, text in ends if text]
