"""One choice of one request inside an engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from baton.engine.core.kv_spec import BlockTables
from baton.engine.core.runner import BlockCopy
from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from baton.scores import TokenScores


class Purpose(Enum):
    """What a worker asks of a sequence."""

    GENERATE = "generate"
    """Prefill here and decode here (aggregated mode)."""
    PREFILL = "prefill"
    """Compute the prompt and one token, then hold the blocks until they are handed over.

    It gets all its blocks at once and is never preempted, so a transfer can follow the computing.
    """
    RECEIVE = "receive"
    """Reserve blocks for KV that another worker computes; then decode here, or leave it in the cache."""


class Status(Enum):
    """Who holds a sequence's blocks, and what happens next."""

    WAITING = "waiting"
    """Holds nothing; queued for blocks."""
    RESERVED = "reserved"
    """Holds blocks that a transfer fills; `insert` makes it run, `adopt` names what is in them."""
    RUNNING = "running"
    """Holds blocks that the engine reads and writes."""
    HELD = "held"
    """Finished here, blocks kept for the sender until the sequence is ended."""
    FINISHED = "finished"
    """Holds nothing, for good."""


_KEYS = itertools.count()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """What the engine knows of one choice. It never leaves the engine: what others get are values."""

    spec: SequenceSpec
    purpose: Purpose
    arrival_s: float
    token_ids: list[int] = field(init=False)
    """All known tokens: prompt and answer. Computed tokens catch up with them."""
    key: int = field(default_factory=_KEYS.__next__)
    """Identifies it within this process."""
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks."""
    num_kv_tokens: tuple[int, ...] = ()
    """Tokens in the blocks of each table; empty while nothing is computed."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    block_ids: BlockTables = ()
    """A block table per layer group, and the states' one; empty while it holds nothing."""
    num_block_tokens: int = 0
    """Tokens that the blocks of every layer group hold."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies that its first step performs, after a fork. The sources are held until then."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full blocks, as far as they were computed; one per `GroupPool.key_tokens` tokens."""
    num_registered_keys: int = 0
    """Leading block keys under which its blocks are known to the prefix cache."""
    was_admitted: bool = False
    in_flight: bool = False
    """Whether it is part of the step that is being executed: its blocks must not be given away."""
    aborted: bool = False
    scheduled_s: float = 0.0
    blocked_s: float = 0.0
    """Time before the first admission during which the head of the queue lacked KV blocks."""
    first_token_s: float = 0.0
    prompt_scores: list[TokenScores] = field(default_factory=list)
    """Scores of its prompt's tokens, a step's at a time, until they are reported."""
    needs_history: bool = field(init=False)
    """Whether its draws depend on the tokens before them."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.needs_history = self.spec.sampling.needs_history

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt is computed here with log probabilities: whole, nothing of it comes from the cache."""
        is_asked = self.spec.sampling.prompt_logprobs is not None
        return is_asked and not self.first_token_s and self.purpose is not Purpose.RECEIVE

    @property
    def deadline_s(self) -> float:
        """When the first token is due, on the clock of `arrival_s`."""
        return self.arrival_s + self.spec.ttft_s

    @property
    def awaits_kv(self) -> bool:
        """Whether its KV is to be received. Once it has been preempted it is computed here, like any other."""
        return self.purpose is Purpose.RECEIVE and not self.was_admitted

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Answer tokens that were generated since it came here."""
        return len(self.token_ids) - len(self.spec.token_ids)

    def may_fork(self, sibling: Sequence, *, has_state: bool) -> bool:
        """Returns whether another choice of the same request has computed all that this one needs but its last token.

        Args:
            has_state: whether a state comes with the KV, which cannot be cropped.
        """
        num_shared = self.num_tokens - 1
        return (
            self.purpose is Purpose.GENERATE
            and not self.num_output_tokens
            and sibling.spec.request_id == self.spec.request_id
            and sibling.spec.cache_seed == self.spec.cache_seed
            and sibling.num_computed_tokens >= num_shared
            and not (has_state and sibling.num_computed_tokens > num_shared)
            and sibling.token_ids[:num_shared] == self.token_ids[:num_shared]
        )

    def append(self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Adds a sampled token and returns why the sequence ends with it; None: it goes on."""
        self.token_ids.append(token_id)
        if token_id in self.spec.sampling.stop_token_ids or (
            token_id in eos_token_ids and not self.spec.sampling.ignore_eos
        ):
            return FinishReason.STOP
        if self.num_output_tokens >= self.spec.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None
