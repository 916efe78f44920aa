"""Tables, progress and errors, which rich writes.

They may contain names, messages and outputs from models, clients, workers and Redis. Control sequences in such text
are made visible instead of being executed (`baton.visible`), and rich does not interpret it as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from baton.visible import visible


class Terminal(Console):
    """Console of rich for untrusted text.

    Args:
        options: options of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield rich's segments with control characters made visible, except rich's own cursor control."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
