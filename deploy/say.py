"""Writes results to standard output without rich, because importing rich takes longer than most commands.

Results may hold text from models, clients and workers (see `deploy.terminal`). Output to a file or pipe is unchanged.
"""

from __future__ import annotations

import sys

from baton.visible import visible


def say(text: str, end: str = "\n") -> None:
    """Write text to standard output and flush it. On a terminal, control characters are made visible."""
    sys.stdout.write((visible(text) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()
