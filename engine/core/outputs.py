"""Outputs of an engine for the services of its worker, as immutable values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.cluster import BlockCounts
from baton.costs import StepCosts
from baton.errors import BatonError
from baton.hypotheses import Beam
from baton.messages import PrefillReport
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from engine.core.block_pool import BlockChange
from engine.core.runner import BlockTables, Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A RECEIVE sequence has its blocks."""

    sequence_key: int
    block_ids: BlockTables
    num_tokens: int
    """Number of leading tokens whose KV must arrive: all known ones, or all but the last if the engine computes it."""
    num_cached_tokens: int
    """Leading tokens that are already in the blocks of the layer groups without a window."""
    begins: tuple[int, ...] = ()
    """First token whose KV must arrive, by layer group; empty: `num_cached_tokens` for all groups.

    Each is a multiple of its group's block size.
    """


@dataclass(frozen=True, slots=True)
class Admitted:
    """A PREFILL sequence has its first blocks. An engine that allocates step by step reports more in `KvProgress`."""

    sequence_key: int
    block_ids: BlockTables
    num_cached_tokens: int
    """Leading tokens that are already in the blocks."""


class Generated(NamedTuple):
    """A sequence's next tokens: none, one or several. It is a named tuple because each step makes one per sequence."""

    sequence_key: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    scores: TokenScores = NO_SCORES
    report: PrefillReport | None = None
    """Set in the first output after the prefill, if this engine computed it."""
    beams: tuple[Beam, ...] = ()
    """All hypotheses of a beam search, best first. They are in its last output, which has no tokens."""
    num_searched: int = 0
    """Beams of a search whose next token this step has computed."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence has lost its blocks. It is computed again and continues. Pinned blocks, which transfers read, stay."""

    sequence_key: int


class Refused(NamedTuple):
    """A sequence has ended without a response."""

    sequence_key: int
    error: BatonError


Output = Reserved | Admitted | Generated | Preempted | Refused


class KvProgress(NamedTuple):
    """The KV of the first `num_tokens` tokens is in the blocks, in the model's first `num_layers` layers.

    A reader must first wait for `fence` on its own stream. If it is None, the KV can be read at once.
    """

    num_tokens: int
    num_layers: int
    fence: Fence | None = None
    block_ids: BlockTables | None = None
    """All blocks of the sequence so far, if their number has changed since the last report."""


OnProgress = Callable[[KvProgress], None]
"""Callback for the progress of a sequence's KV; see `ServedSequence.watch`."""


class OutputQueue:
    """Reading end of a sequence's outputs, as `serving.ServedSequence` has it. Its queue ends with an error, if any."""

    def __init__(self, queue: asyncio.Queue[Output | BatonError]) -> None:
        self._queue = queue

    async def next(self) -> Output:
        """See `ServedSequence.next`."""
        output = await self._queue.get()
        if isinstance(output, BatonError):
            raise output
        return output

    def take_ready(self) -> list[Output]:
        """See `ServedSequence.take_ready`."""
        ready: list[Output] = []
        while not self._queue.empty():
            output = self._queue.get_nowait()
            if isinstance(output, BatonError):
                self._queue.put_nowait(output)  # the last one; `next` raises it
                break
            ready.append(output)
        return ready


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks that keep their content until the pin is released."""

    pin_id: int
    block_ids: BlockTables
    num_tokens: int = 0
    """Length of the pinned prefix in tokens, for `pin_prefix`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine: its work and its blocks."""

    running: int
    waiting: int
    queued_tokens: int
    blocks: BlockCounts
    state_rows: BlockCounts = field(default_factory=BlockCounts)
    """Rows of the states' pool; none if the model has no states."""
    preemptions: int
    """Number of preemptions since the start."""
    costs: StepCosts
    """Step costs as measured so far."""
    busy_s: float
    """Seconds spent in steps, since the start."""
    computed_tokens: int
    """Tokens computed in those steps, without rejected drafts."""
    drafted_tokens: int = 0
    """Drafts that were checked, since the start."""
    accepted_tokens: int = 0
    """Drafts that were accepted, since the start."""
    model_drafted_tokens: int = 0
    """Checked drafts that a draft model proposed."""
    model_accepted_tokens: int = 0
    """Accepted drafts that a draft model proposed."""
    expert_tokens: tuple[int, ...] = ()
    """Tokens that the model has sent to each expert; empty: not counted."""
    adapters: tuple[str, ...] = ()
    """Digests of the loaded adapters; the one used longest ago is first."""
    adapter_load_s: float = 0.0
    """Recent mean time to load an adapter, in seconds; 0: none was loaded yet."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The last sequence and the last pin have gone."""


EngineEvent = BlockChange | Idle
OnEngineEvent = Callable[[EngineEvent], None]
"""Called on the event loop, between two steps."""


def ignore_event(event: EngineEvent) -> None:
    """Do nothing: an `OnEngineEvent` for callers that need no events."""
