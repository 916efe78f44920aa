"""What a worker says about its prefix cache, and what the index answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Cursor: TypeAlias = tuple[int, int]
"""A position in the event stream: everything up to it has been read. Cursors of one boot are ordered."""
ORIGIN: Cursor = (0, 0)


class Op(StrEnum):
    STORED = "+"
    REMOVED = "-"
    CLEARED = "clear"
    SNAPSHOT_BEGIN = "snap"
    """The parts that follow are the worker's whole cache. What it owned until now counts until SNAPSHOT_END."""
    SNAPSHOT_PART = "snap+"
    SNAPSHOT_END = "snap."
    """The parts replace what the worker owned, all at once."""


class Tier(StrEnum):
    """Where a block lies. Workers have their device today.

    An entry of the index is a block key, followed by the tier's letter where that is not the device. So one set holds
    all tiers of a worker, what concerns the whole worker concerns all of them, and who looks up bare keys sees the
    device alone.
    """

    DEVICE = ""
    HOST = "h"
    DISK = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of one worker's cache. (worker_id, epoch, seq) names it; seq counts from 1 without gaps.

    `tier` is that of `keys`; CLEARED and the beginning and end of a snapshot concern all tiers. Only SNAPSHOT_BEGIN may
    jump ahead in seq. SNAPSHOT_END carries no keys but how many its parts had, in `num_keys`, so that a reader who
    missed a part knows.
    """

    worker_id: str
    epoch: int
    seq: int
    op: Op
    keys: tuple[bytes, ...] = ()
    num_keys: int = 0
    tier: Tier = Tier.DEVICE

    @property
    def entries(self) -> tuple[bytes, ...]:
        if not self.tier:
            return self.keys
        letter = self.tier.encode()
        return tuple(key + letter for key in self.keys)


class Outcome(StrEnum):
    APPLIED = "applied"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an event: APPLIED, or RESYNC (nothing changed; publish a snapshot with a seq above `seq`)."""

    outcome: Outcome
    seq: int
    """Of the last event the index holds of this epoch; 0: none."""


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a worker's events are applied."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class IndexState:
    """Read together, the tip last: every event that `owners` counts lies at or before `tip`."""

    boot: str
    """Drawn anew whenever the store starts without its state."""
    owners: dict[str, Position]
    """The workers whose lease is alive."""
    tip: Cursor
