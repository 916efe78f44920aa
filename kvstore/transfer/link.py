"""A link moves bytes one way between two processes, in order, and knows nothing else.

It may only be used by its owner thread. Both sides take sizes from the same plan: a receive and the send that meets
it are equally long, because no link here reports a length, and gloo ends the process that receives too much.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.transfer.header import HEADER_BYTES


class Operation(Protocol):
    def wait(self) -> None:
        """Blocks until the bytes have moved and the buffer is the caller's again.

        Raises:
            TransferTimeout: not within the link's operation timeout; the link is closed and its buffers quarantined.
            TransferError: the peer is gone.
        """


class Link(Protocol):
    """Rank 0 sends, rank 1 receives."""

    device: torch.device
    """Where the buffers must be."""

    def send(self, buffer: torch.Tensor) -> Operation: ...

    def recv(self, buffer: torch.Tensor) -> Operation: ...

    def close(self) -> None:
        """Called by the owner thread, with no operation under way."""

    def abort(self) -> None:
        """Called by any thread: ends what is under way as soon as the link can. Idempotent."""


class Slot:
    """Staging for one chunk: header and payload in one buffer, `uint8`, allocated once with its pair."""

    def __init__(self, slot_bytes: int, device: torch.device, pinned: bool) -> None:
        self.buffer = torch.zeros(HEADER_BYTES + slot_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    @property
    def header(self) -> torch.Tensor:
        return self.buffer[:HEADER_BYTES]

    def payload(self, num_bytes: int) -> torch.Tensor:
        return self.buffer[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def message(self, num_bytes: int) -> torch.Tensor:
        """Header and payload."""
        return self.buffer[: HEADER_BYTES + num_bytes]
