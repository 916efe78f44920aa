"""Detects early that a client has stopped reading, so that its slot can be reused while other requests wait.

A write blocks only once every buffer between router and client is full: over gRPC a window of 64 KiB by default, over
HTTP the client's socket buffer and ours. An answer of small messages would need hundreds of tokens to fill them. So,
while the router is crowded, its messages are padded until the answer has reached that size, and not beyond. A client
that reads receives at most that much padding, in small parts, and none if its answer is already longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unread:
    """Default buffer size of a transport. A client may have larger buffers, which the router cannot know.

    Attributes:
        num_bytes: bytes of an unread answer that the buffers take before a write blocks.
        part_bytes: maximum padding of one message: small enough to arrive over a slow line long before the write has
            waited too long.
    """

    num_bytes: int
    part_bytes: int


GRPC = Unread(64 * 2**10 - 1, 4 * 2**10)
HTTP = Unread(256 * 2**10, 8 * 2**10)
FRAME_BYTES = 10
"""Maximum overhead of a message, in bytes: the frame of gRPC or HTTP, and the marker of the padding."""


class AnswerPadding:
    """Computes the padding of one answer's messages.

    Args:
        is_crowded: returns whether requests are refused or wait because too many answers are being computed.
    """

    def __init__(self, unread: Unread, is_crowded: Callable[[], bool]) -> None:
        self._unread = unread
        self._is_crowded = is_crowded
        self._num_bytes = 0
        """Total length of the messages so far, with their frames and padding."""

    def of_next(self, num_bytes: int) -> int:
        """Return the padding of the next message, in bytes.

        Args:
            num_bytes: length of the message.
        """
        self._num_bytes += num_bytes + FRAME_BYTES
        left = self._unread.num_bytes - self._num_bytes
        if left <= 0 or not self._is_crowded():
            return 0
        padding = min(self._unread.part_bytes, left)
        self._num_bytes += padding
        return padding
