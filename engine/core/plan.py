"""A step under construction, and the result of scheduling."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.runner import StepInput, StepPart
from engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of one call of `Scheduler.schedule`."""

    step: StepInput
    admitted: tuple[Sequence, ...] = ()
    """Sequences that have their blocks now."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that have lost their blocks and wait again."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step under construction."""

    budget: int
    """Tokens that may still be added."""
    canvas_length: int = 0
    """Tokens that the step computes beside those of each part that samples."""
    sequences: list[Sequence] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, part: StepPart) -> None:
        """Add one sequence's part to the step."""
        self.sequences.append(sequence)
        self.parts.append(part)
        self.budget -= len(part.token_ids) + self.canvas_length * part.sample
