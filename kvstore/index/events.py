"""The events that a worker publishes about its prefix cache, and the answers of the index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Cursor: TypeAlias = tuple[int, int]
"""A position in the event stream: everything up to it has been read. Cursors of one boot are ordered."""
ORIGIN: Cursor = (0, 0)


class Op(StrEnum):
    """The kinds of change of a worker's cache."""

    STORED = "+"
    REMOVED = "-"
    CLEARED = "clear"
    SNAPSHOT_BEGIN = "snap"
    """Announces that the parts that follow are the whole cache; the previous blocks count until SNAPSHOT_END."""
    SNAPSHOT_PART = "snap+"
    SNAPSHOT_END = "snap."
    """Replaces the previous blocks by the parts, atomically."""


class Tier(StrEnum):
    """The memory that holds a block. Workers use their device today.

    An entry of the index is a block key, followed by the tier's letter unless the tier is the device. So one set holds
    all tiers of a worker, operations on the worker cover all of them, and a look-up of bare keys finds blocks on the
    device only.
    """

    DEVICE = ""
    HOST = "h"
    DISK = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of one worker's cache, identified by (worker_id, epoch, seq); seq counts from 1 without gaps.

    `tier` is the tier of `keys`; CLEARED and the beginning and end of a snapshot cover all tiers. Only SNAPSHOT_BEGIN
    may jump ahead in seq. SNAPSHOT_END carries no keys, but in `num_keys` the number of keys of its parts, so that a
    reader detects a missing part.
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
        """The entries of the index: the keys with the tier's letter."""
        if not self.tier:
            return self.keys
        letter = self.tier.encode()
        return tuple(key + letter for key in self.keys)


class IndexOutcome(StrEnum):
    """What the index did with an event."""

    APPLIED = "applied"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """The result of an event: APPLIED, or RESYNC (nothing changed; publish a snapshot with a seq above `seq`)."""

    outcome: IndexOutcome
    seq: int
    """The last event of this epoch that the index has applied; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Position:
    """The last event of a worker that is applied."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class IndexState:
    """A state of the index, read with its tip last: every event that `owners` counts lies at or before `tip`."""

    boot: str
    """A token that changes whenever the store starts without its state."""
    owners: dict[str, Position]
    """The positions of the workers whose lease is alive."""
    tip: Cursor
