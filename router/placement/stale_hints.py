"""Compares what placement believed of a worker's cache with what the worker found there.

The worker that computes a prompt reports how much of it was cached. Less than believed means that the hint was stale.
It is counted, and the mirror takes back what was wrong, unless events of the worker have come since.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster import Worker
from baton.messages import SequenceSpec
from baton.telemetry.instruments import Instruments
from kvstore.index import Mirror, Position
from router.placement import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What the worker that is to compute a prompt was believed to hold of it."""

    worker_id: str
    block_size: int
    keys: tuple[bytes, ...]
    """Keys of the leading blocks that it could use if it held them."""
    as_of: Position | None
    """Where the mirror stood in the worker's events; None: it knew nothing of the worker."""

    num_tokens: int
    """Leading tokens that placement counted on."""


class HintTracker:
    """Notes hints as requests are placed, and settles them as workers answer."""

    def __init__(self, mirror: Mirror, instruments: Instruments) -> None:
        self._mirror = mirror
        self._instruments = instruments

    def note(self, spec: SequenceSpec, prompt: Prompt, worker: Worker, num_believed_tokens: int) -> Hint:
        """Must be called before the mirror that placement looked into has changed."""
        # The last token is computed whatever is cached. Of an answer that goes on elsewhere nothing is noted: workers
        # report what they found of the prompt alone, but all that they pulled.
        num_tokens = 0 if spec.is_continued else min(num_believed_tokens, spec.num_prompt_tokens - 1)
        info = worker.info
        keys = prompt.block_keys[: num_tokens // info.block_size]
        return Hint(
            worker_id=info.id,
            block_size=info.block_size,
            keys=keys,
            as_of=self._mirror.position(info.id),
            num_tokens=num_believed_tokens,
        )

    def settle(self, hint: Hint, num_found_tokens: int) -> None:
        """The worker held `num_found_tokens` leading tokens of the prompt, not counting what it pulled for it."""
        stale = hint.keys[num_found_tokens // hint.block_size :]
        if not stale:
            return
        self._instruments.stale_hints.add(1)
        self._instruments.stale_tokens.add(len(stale) * hint.block_size)
        self._mirror.disbelieve(hint.worker_id, hint.as_of, stale)
