"""A step while it is put together, and what came of that."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.runner import StepInput, StepPart
from engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a call of `Scheduler.schedule` has decided."""

    step: StepInput
    admitted: tuple[Sequence, ...] = ()
    """Sequences that have their blocks now."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that gave their blocks up, and wait again."""
    too_large: tuple[Sequence, ...] = ()
    """Parents whose beams do not fit, although nobody else holds a block."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step while it is put together."""

    budget: int
    """Tokens that may still be added."""
    sequences: list[Sequence] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    too_large: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, part: StepPart) -> None:
        """Adds what the step computes of one sequence."""
        self.sequences.append(sequence)
        self.parts.append(part)
        self.budget -= len(part.token_ids)
