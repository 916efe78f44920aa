"""Writes results to standard output without rich, because importing rich takes longer than most commands.

Results may hold text from models, clients and workers (see `deploy.terminal`). Output to a file or pipe is unchanged.
"""

from __future__ import annotations

import sys

from baton.visible import visible


def say(text: str, end: str = "\n") -> None:
    """Writes to standard output at once: as it is, or what a terminal can show of it."""
    sys.stdout.write((visible(text) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()
