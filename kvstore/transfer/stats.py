"""Counts of a worker's transfers, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import (
    BatonError,
    TransferCancelled,
    TransferCorrupted,
    TransferExpired,
    TransferRefused,
    TransferTimeout,
)

_REASONS = (
    (TransferCorrupted, "corrupted"),
    (TransferExpired, "expired"),
    (TransferTimeout, "timed_out"),
    (TransferRefused, "refused"),
    (BatonError, "lost"),
)
"""Failure counters by error class; the first matching entry counts."""


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Monotonic counters of one side. Written on the event loop, a field at a time; read at any moment."""

    committed: int = 0
    corrupted: int = 0
    """Failed because a header or a checksum did not match the received bytes."""
    expired: int = 0
    """Failed because the lease ended before the KV arrived."""
    timed_out: int = 0
    """Failed because one operation took too long."""
    refused: int = 0
    """Failed because the two sides are incompatible."""
    lost: int = 0
    """Failed because the transport, the connection or the other worker was lost."""
    num_bytes: int = 0
    """Payload of committed transfers, in bytes."""
    num_chunks: int = 0
    transfer_s: float = 0.0
    """Time from the first chunk to the acknowledged commit, summed over committed transfers; senders only."""
    exposed_s: float = 0.0
    """The part of it after the last token was computed, which no computation hid; senders only."""
    fenced: int = 0
    """Dropped messages and chunks of an unknown transfer or a past generation."""
    resent: int = 0
    """Messages sent again because no answer came; senders only."""

    @property
    def failed(self) -> int:
        return self.corrupted + self.expired + self.timed_out + self.refused + self.lost

    def count_failure(self, error: BatonError) -> None:
        """Count a transfer that did not arrive. A cancelled transfer has not failed."""
        if not isinstance(error, TransferCancelled):
            reason = next(name for cls, name in _REASONS if isinstance(error, cls))
            setattr(self, reason, getattr(self, reason) + 1)
