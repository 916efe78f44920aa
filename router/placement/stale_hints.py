"""Compares the prefix hits that placement expected with those that workers report.

The worker that computes a prompt reports how much of it was cached. If that is less than expected, the hint was stale.
The router counts it and removes the wrong entries from its mirror, unless newer events of the worker have arrived.
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
    """Expected prefix hit of a prompt on the worker that computes it."""

    worker_id: str
    block_size: int
    keys: tuple[bytes, ...]
    """Keys of the leading blocks that the worker is expected to hold and can use."""
    as_of: Position | None
    """Position of the mirror in the worker's events; None: the mirror did not know the worker."""

    num_tokens: int
    """Number of leading tokens that placement expected."""


class HintTracker:
    """Records hints when requests are placed, and checks them when workers report."""

    def __init__(self, mirror: Mirror, instruments: Instruments) -> None:
        self._mirror = mirror
        self._instruments = instruments

    def note(self, spec: SequenceSpec, prompt: Prompt, worker: Worker, num_believed_tokens: int) -> Hint:
        """Record a hint. Call this before the mirror changes after the placement."""
        # The last token is always computed. A continued answer gets an empty hint, because workers report the hit of
        # the prompt alone but the pulled tokens of the whole sequence.
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
        """Check a hint against a worker's report.

        Args:
            num_found_tokens: number of leading prompt tokens that the worker held, without those that it pulled.
        """
        stale = hint.keys[num_found_tokens // hint.block_size :]
        if not stale:
            return
        self._instruments.stale_hints.add(1)
        self._instruments.stale_tokens.add(len(stale) * hint.block_size)
        self._mirror.disbelieve(hint.worker_id, hint.as_of, stale)
