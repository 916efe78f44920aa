"""How a router soon sees over gRPC that nobody reads an answer, while others want the place that it takes.

gRPC takes what its window holds, 64 KiB by default, from the router whether a client reads or not: a write waits only
then. An answer of small messages would be computed for hundreds of tokens by then, in a place that others want, so its
messages are filled up. A client that reads gets 64 KiB more of an answer at most, in small parts, and of one that has
got as much already, nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.v1 import inference_pb2

WINDOW_BYTES = 64 * 2**10
"""gRPC's default window. What a client has opened further is not known here."""
PADDING_BYTES = 4 * 2**10
"""So little that a client with a slow line has got each part long before its write has waited too long."""


class Padding:
    """What the messages of one answer are filled up with.

    Args:
        is_crowded: says whether requests are refused, or wait, as too many answers are being computed.
    """

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self._is_crowded = is_crowded
        self._num_bytes = 0
        """Length of the messages so far."""

    def fill(self, message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """Returns the next message of the answer, filled up if it is to be."""
        if self._num_bytes < WINDOW_BYTES:
            if self._is_crowded():
                message.padding = bytes(PADDING_BYTES)
            self._num_bytes += message.ByteSize()
        return message
