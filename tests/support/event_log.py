"""What an engine's loop tells, for tests that look at it."""

from __future__ import annotations

from engine.core.block_pool import BlockChange
from engine.core.outputs import EngineEvent, Idle


class EventLog:
    """An `OnEngineEvent` that keeps what it was told, in order."""

    def __init__(self) -> None:
        self.changes: list[BlockChange] = []
        self.num_idle = 0

    def __call__(self, event: EngineEvent) -> None:
        if isinstance(event, Idle):
            self.num_idle += 1
        else:
            self.changes.append(event)
