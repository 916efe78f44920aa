"""Events that a worker publishes about its prefix cache, and the index's results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Cursor: TypeAlias = tuple[int, int]
"""Position in the event stream: everything up to it has been read. Cursors of one boot are ordered."""
ORIGIN: Cursor = (0, 0)


class Op(StrEnum):
    """Kinds of change of a worker's cache."""

    STORED = "+"
    REMOVED = "-"
    CLEARED = "clear"
    SNAPSHOT_BEGIN = "snap"
    """Announces that the following parts are the whole cache; the previous blocks count until SNAPSHOT_END."""
    SNAPSHOT_PART = "snap+"
    SNAPSHOT_END = "snap."
    """Replaces the previous blocks by the parts, atomically."""


class Tier(StrEnum):
    """Memory that holds a block. Workers currently use only their device.

    An entry of the index is a block key, followed by the tier's character unless the tier is the device. So one set
    holds all tiers of a worker, operations on the worker cover all of them, and a lookup of bare keys finds blocks on
    the device only.
    """

    DEVICE = ""
    HOST = "h"
    DISK = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of one worker's cache, identified by (worker_id, epoch, seq); seq counts from 1 without gaps.

    `tier` is the tier of `keys`; CLEARED, SNAPSHOT_BEGIN and SNAPSHOT_END cover all tiers. Only SNAPSHOT_BEGIN may jump
    ahead in seq. SNAPSHOT_END carries no keys, but `num_keys` is the number of keys of its parts, so that a reader
    detects a missing part.
    """

    worker_id: str
    epoch: int
    seq: int
    op: Op
    keys: tuple[bytes, ...] = ()
    num_keys: int = 0
    tier: Tier = Tier.DEVICE
    load: bytes = b""
    """The worker's load as of the event, encoded; empty: the event does not report it."""

    @property
    def entries(self) -> tuple[bytes, ...]:
        """Entries of the index: the keys with the tier's character."""
        if not self.tier:
            return self.keys
        letter = self.tier.encode()
        return tuple(key + letter for key in self.keys)


class IndexOutcome(StrEnum):
    """The index's decision about an event."""

    APPLIED = "applied"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """Result of an event: APPLIED, or RESYNC (nothing changed; publish a snapshot with a seq above `seq`)."""

    outcome: IndexOutcome
    seq: int
    """Last event of this epoch that the index has applied; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Position:
    """Last applied event of a worker."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class IndexState:
    """State of the index, read with its tip last: every event that `owners` counts lies at or before `tip`."""

    boot: str
    """Token that changes whenever the store starts without its state."""
    owners: dict[str, Position]
    """Positions of the workers whose lease is alive."""
    tip: Cursor
