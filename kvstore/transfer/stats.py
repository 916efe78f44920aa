"""Counts of one side of the hand-over, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster import TransferCounts


@dataclass(slots=True)
class TransferStats:
    """Rising counts, except `num_pairs`. Written by one process, a field at a time; read at any moment."""

    num_transfers: int = 0
    """Committed."""
    num_failed: int = 0
    num_bytes: int = 0
    """Payload of committed transfers."""
    num_chunks: int = 0
    transfer_s: float = 0.0
    """From the offer to the commit, summed over transfers."""
    num_corrupted: int = 0
    """Transfers of which a chunk failed its header or checksum test."""
    num_fenced: int = 0
    """Messages about an unknown transfer or a past generation, dropped."""
    num_expired: int = 0
    """Leases that ended before the KV arrived."""
    num_pairs: int = 0
    """Open now."""

    def counts(self) -> TransferCounts:
        """What the worker's lease tells of it."""
        return TransferCounts(
            self.num_transfers, self.num_failed, self.num_corrupted, self.num_expired, self.num_fenced
        )
