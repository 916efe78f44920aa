"""Counts of a worker's transfers, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferStats:
    """Rising counts of one side. Written on the event loop, a field at a time; read at any moment."""

    committed: int = 0
    failed: int = 0
    corrupted: int = 0
    """Of the failed: a header or a checksum did not match what arrived."""
    num_bytes: int = 0
    """Payload of committed transfers."""
    num_chunks: int = 0
    transfer_s: float = 0.0
    """From the first chunk to the acknowledged commit, summed over committed transfers; senders only."""
    exposed_s: float = 0.0
    """The part of it after the last token was computed: what no computing hid; senders only."""
    fenced: int = 0
    """Messages and chunks of an unknown transfer or a past generation, dropped."""
    expired: int = 0
    """Leases that ended before the KV arrived."""
    resent: int = 0
    """Messages said again because no answer came."""
