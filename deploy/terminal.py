"""Tables, progress and errors, which rich writes. All of it may hold others' words.

Names, messages and answers come from models, clients, workers and Redis. On a terminal none of them is obeyed
(`baton.visible`), and none is markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from baton.visible import visible


class Terminal(Console):
    """rich's console, for text of others.

    Args:
        options: rich's.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Returns rich's segments; those that are its own control of the cursor stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
