"""How a router soon sees that nobody reads an answer, while others want the place that it takes.

A write waits only once everything between router and client is full: over gRPC a window of 64 KiB by default, over HTTP
the client's socket and ours. An answer of small messages would be computed for hundreds of tokens by then, so its
messages are filled up until it has come to that much, and not beyond, so that the message that waits is a small one. A
client that reads gets so much more of an answer at most, in small parts, and of an answer that has come to as much
already, nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unread:
    """What is taken of an answer that nobody reads, by default. A client may have made more room, which nobody knows.

    Attributes:
        part_bytes: what a message is filled up with: so little that a client with a slow line has got it long before
            its write has waited too long.
    """

    num_bytes: int
    part_bytes: int


GRPC = Unread(64 * 2**10 - 1, 4 * 2**10)
HTTP = Unread(256 * 2**10, 8 * 2**10)
FRAME_BYTES = 10
"""What gRPC or HTTP puts around a message, and what says of filling that it is some, in bytes at most."""


class AnswerFilling:
    """What the messages of one answer are filled up with.

    Args:
        is_crowded: says whether requests are refused, or wait, as too many answers are being computed.
    """

    def __init__(self, unread: Unread, is_crowded: Callable[[], bool]) -> None:
        self._unread = unread
        self._is_crowded = is_crowded
        self._num_bytes = 0
        """Length of the messages so far, with their frames."""

    def of_next(self, num_bytes: int) -> int:
        """Returns by how many bytes the next message is to be filled up.

        Args:
            num_bytes: its length.
        """
        self._num_bytes += num_bytes + FRAME_BYTES
        left = self._unread.num_bytes - self._num_bytes
        if left <= 0 or not self._is_crowded():
            return 0
        padding = min(self._unread.part_bytes, left)
        self._num_bytes += padding
        return padding
