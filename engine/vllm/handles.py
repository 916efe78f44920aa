"""Objects that a `VllmEngine` gives its callers: handles of sequences, pins and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.errors import BatonError
from baton.scores import NO_SCORES, TokenScores
from engine.core.outputs import OnProgress, Output, OutputQueue, Pin
from engine.vllm.admission import Hosted


class Calls(Protocol):
    """Calls of a sequence's handle to its engine; see `ServedSequence`."""

    def pin(self, sequence: Hosted) -> Pin: ...

    def watch(self, sequence: Hosted, on_progress: OnProgress) -> None: ...

    def insert(self, sequence: Hosted, first_token: int | None, num_tokens: int | None) -> None: ...

    def adopt(self, sequence: Hosted, num_tokens: int) -> None: ...


class PinnedBlocks:
    """Blocks that vLLM keeps for readers.

    Args:
        sequence: the sequence whose blocks they are; None: they are a cached prefix, which the host must look up.
    """

    def __init__(self, sequence: Hosted | None = None) -> None:
        self.sequence = sequence
        self.block_ids: list[int] = []
        self.num_taken = 0
        """Number of pinned blocks that no sequence used before; their maximum until the host has answered."""
        self.num_blocks = 0
        """Number of pinned blocks; a number that it cannot exceed until the host has answered."""
        self.is_unwanted = False
        """True if `pin_prefix` was cancelled before the host answered."""
        self.is_known: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class VllmSequence(OutputQueue):
    """A sequence of a `VllmEngine` (`serving.ServedSequence`)."""

    def __init__(self, engine: Calls, sequence: Hosted, queue: asyncio.Queue[Output | BatonError]) -> None:
        super().__init__(queue)
        self._engine = engine
        self._sequence = sequence

    async def pin(self) -> Pin:
        """See `ServedSequence.pin`."""
        return self._engine.pin(self._sequence)

    def watch(self, on_progress: OnProgress) -> None:
        """See `ServedSequence.watch`."""
        self._engine.watch(self._sequence, on_progress)

    def insert(self, first_token: int | None, num_tokens: int | None = None) -> None:
        """See `ServedSequence.insert`."""
        self._engine.insert(self._sequence, first_token, num_tokens)

    def adopt(self, num_tokens: int) -> None:
        """See `ServedSequence.adopt`."""
        self._engine.adopt(self._sequence, num_tokens)


def scores_of(found: Sequence[Sequence[tuple[int, float]]], num_top: int) -> TokenScores:
    """Return the scores of tokens.

    Args:
        found: for each token, itself and then other tokens, best first, as pairs of an id and a log probability.
        num_top: number of other tokens that the request asked for.
    """
    if not found:
        return NO_SCORES
    tops = [each for token in found for each in token[1 : 1 + num_top]]
    return TokenScores([token[0][1] for token in found], [each for each, _ in tops], [value for _, value in tops])
