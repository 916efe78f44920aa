"""Progress of the preparation of a model folder, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    stage: str
    """wait, fix, download, verify, dequantise or write."""
    done: int
    total: int
    """The total in `unit`; 0 while it is unknown."""
    unit: str = "bytes"
    detail: str = ""


OnModelProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Ignore the progress, for callers that show none."""
