"""What an engine says to the services of its worker, as values: nothing here changes once it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.cluster import BlockCounts
from baton.costs import StepCosts
from baton.errors import BatonError
from baton.hypotheses import Beam
from baton.messages import PrefillReport
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from engine.core.block_pool import BlockChange
from engine.core.kv_spec import BlockTables
from engine.core.runner import Fence


@dataclass(frozen=True, slots=True)
class Reserved:
    """A RECEIVE sequence has its blocks."""

    sequence_key: int
    block_ids: BlockTables
    num_tokens: int
    """Leading tokens whose KV it wants: all known ones, or all but the last of an engine that computes that one."""
    num_cached_tokens: int
    """Leading tokens that are already in the blocks."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A PREFILL sequence has blocks. An engine that gives them bit by bit reports the others with its progress."""

    sequence_key: int
    block_ids: BlockTables
    num_cached_tokens: int
    """Leading tokens that are already in the blocks."""


class Generated(NamedTuple):
    """A sequence's next tokens, none to several. A named tuple, because each step makes one per sequence."""

    sequence_key: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    scores: TokenScores = NO_SCORES
    report: PrefillReport | None = None
    """How the prompt was computed: in the first output of a sequence that was computed here, whose KV is there then."""
    beams: tuple[Beam, ...] = ()
    """All answers of a beam search, best first: in its last output, which has no tokens."""
    num_searched: int = 0
    """Beams of a search whose next token this step has computed."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence gave its blocks up. It is computed again and goes on; what a transfer reads of it is pinned."""

    sequence_key: int


class Refused(NamedTuple):
    """A sequence has ended without an answer."""

    sequence_key: int
    error: BatonError


Output = Reserved | Admitted | Generated | Preempted | Refused


class KvProgress(NamedTuple):
    """The KV of the first `num_tokens` tokens is in the blocks, in the model's first `num_layers` layers, for a reader
    that has waited for `fence` on its own stream (None: at once).
    """

    num_tokens: int
    num_layers: int
    fence: Fence | None = None
    block_ids: BlockTables | None = None
    """All blocks of the sequence so far, where it has got more since the last report."""


OnProgress = Callable[[KvProgress], None]
"""Receives how far a sequence's KV has come; see `ServedSequence.watch`."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks that stay what they are until the pin is given back."""

    pin_id: int
    block_ids: BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine has to do and what it holds."""

    running: int
    waiting: int
    queued_tokens: int
    blocks: BlockCounts
    preemptions: int
    """Number since the start."""
    costs: StepCosts
    """What steps cost, as far as the ones so far have shown."""
    busy_s: float
    """Seconds spent in steps, since the start."""
    computed_tokens: int
    """Tokens computed in those steps, without drafts that proved wrong."""
    drafted_tokens: int = 0
    """Tokens that were guessed and checked, since the start."""
    accepted_tokens: int = 0
    """Guessed tokens that proved right, since the start."""
    model_drafted_tokens: int = 0
    """Guessed tokens that a draft model proposed."""
    model_accepted_tokens: int = 0
    """Guessed tokens that a draft model proposed and that proved right."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The last sequence and the last pin have gone."""


EngineEvent = BlockChange | Idle
OnEngineEvent = Callable[[EngineEvent], None]
"""Called on the event loop, between two steps."""
