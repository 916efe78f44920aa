"""One choice of one request inside an engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from baton.messages import PrefillReport, SequenceSpec
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, Candidates, TokenScores
from engine.core.beams import BeamSearch
from engine.core.ngrams import NgramIndex
from engine.core.runner import UNKNOWN_TOKEN, BlockCopy, BlockTables, StepPart


class Purpose(Enum):
    """Task of a sequence on this worker."""

    GENERATE = "generate"
    """Prefill and decode here (aggregated mode)."""
    PREFILL = "prefill"
    """Compute the prompt and one token, then hold the blocks until they are transferred.

    It gets all its blocks at once and is never preempted, so a transfer can follow the computation.
    """
    RECEIVE = "receive"
    """Reserve blocks for KV that another worker computes; then decode here, or leave the KV in the cache."""


class Status(Enum):
    """State of a sequence: who holds its blocks, and what happens next."""

    WAITING = "waiting"
    """Holds nothing; queued for blocks."""
    RESERVED = "reserved"
    """Holds blocks that a transfer fills; `insert` starts it, `adopt` registers its blocks."""
    RUNNING = "running"
    """Holds blocks that the engine reads and writes."""
    HELD = "held"
    """Finished here, blocks kept for the sender until the sequence is ended."""
    FINISHED = "finished"
    """Holds nothing any more."""


@dataclass(slots=True, eq=False)
class Search:
    """A beam search in an engine. The scheduler treats its beams like any other sequences."""

    state: BeamSearch
    owner: Sequence
    """The sequence by which callers know the search. It computes the tokens that all beams start with."""
    beams: list[Sequence] = field(default_factory=list)
    """A sequence for each running beam, in their order; at the start only `owner`."""
    found: dict[Sequence, Candidates] = field(default_factory=dict)
    """Next tokens of the beams that are computed. When all are there, the search advances."""


_KEYS = itertools.count()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The engine's state of one choice. It stays inside the engine, which gives out only values."""

    spec: SequenceSpec
    purpose: Purpose
    arrival_s: float
    token_ids: list[int] = field(init=False)
    """All known tokens: prompt and output. Computed tokens catch up with them."""
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
    """A block table per layer group, followed by the states' table; empty while it holds nothing."""
    num_block_tokens: int = 0
    """Tokens that the blocks of every layer group hold."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies that the next step performs after a fork. The sources are held until then."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full blocks, as far as they were hashed; one per `GroupPool.key_tokens` tokens."""
    num_registered_keys: int = 0
    """Number of leading block keys under which its blocks are registered in the prefix cache."""
    begins: tuple[int, ...] = ()
    """First token whose KV was missing at the last admission, by layer group."""
    snapshot_ends: tuple[int, ...] = ()
    """Numbers of tokens after which steps over its prompt end and a snapshot of its state is kept, in addition to the
    multiples of `engine.snapshot_tokens`."""
    passing_key: bytes | None = None
    """Key of its last snapshot, if the next one replaces it."""
    was_admitted: bool = False
    in_flight: int = 0
    """Number of uncommitted steps that include it. Until they are committed its blocks must not be freed."""
    num_ahead_tokens: int = 0
    """Number of computed tokens at the end that are still being computed, in a step after which the next one is already
    planned."""
    aborted: bool = False
    """True if it has ended and takes part in no further step. It is removed when no step is in flight."""
    scheduled_s: float = 0.0
    blocked_s: float = 0.0
    """Time before the first admission during which the head of the queue lacked KV blocks."""
    first_token_s: float = 0.0
    prompt_scores: list[TokenScores] = field(default_factory=list)
    """Scores of its prompt's tokens, one entry per step, until they are reported."""
    adapter: int = 0
    """Slot of its adapter, which it pins until it ends; 0: it is computed without one."""
    search: Search | None = None
    """The beam search of which this is a beam, or whose start it computes; None: there is none."""
    most_tokens: int = field(init=False)
    """Tokens of its prompt and its whole response, limited by the model's maximum length."""
    stop_token_ids: tuple[int, ...] = field(init=False)
    """Tokens that end its response, in addition to those that end every response."""
    only_computes: bool = False
    """True if only its KV is computed here: no token is drawn after it."""
    needs_history: bool = field(init=False)
    """True if its draws depend on the tokens before them."""
    ngrams: NgramIndex | None = None
    """Index that guesses its next tokens while it decodes; None: there is none."""
    forgone_s: float = 0.0
    """Seconds that drafts of a draft model would have gained since look-up last found some; see `Drafter`."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.most_tokens = self.spec.num_prompt_tokens + self.spec.max_tokens
        self.stop_token_ids = self.spec.sampling.stop_token_ids
        self.needs_history = self.spec.sampling.needs_history

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt is computed here with log probabilities. It is then computed whole, without cached
        blocks.
        """
        is_asked = self.spec.sampling.prompt_logprobs is not None
        return is_asked and not self.first_token_s and self.purpose is not Purpose.RECEIVE

    @property
    def deadline_s(self) -> float:
        """Time at which the first token is due, on the clock of `arrival_s`."""
        return self.arrival_s + self.spec.ttft_s

    @property
    def awaits_kv(self) -> bool:
        """True if it waits for transferred KV. After a preemption it is computed here, like any other."""
        return self.purpose is Purpose.RECEIVE and not self.was_admitted

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Number of known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Number of leading tokens whose KV is in the blocks now; see `num_ahead_tokens`."""
        return self.num_computed_tokens - self.num_ahead_tokens

    @property
    def has_unknown(self) -> bool:
        """True if its last token is still being sampled and stands as `UNKNOWN_TOKEN`."""
        return self.token_ids[-1] == UNKNOWN_TOKEN

    @property
    def owner(self) -> Sequence:
        """The sequence that callers know: the first one of its beam search, or this sequence itself."""
        return self if self.search is None else self.search.owner

    @property
    def group(self) -> tuple[Sequence, ...]:
        """The sequences that end together: all beams of its search, or only itself."""
        return (self,) if self.search is None else tuple(self.search.beams)

    @property
    def waits_for_beams(self) -> bool:
        """True if all its tokens are computed, and its search waits for other beams."""
        return self.search is not None and len(self.token_ids) == self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Number of output tokens that were generated on this worker."""
        return len(self.token_ids) - len(self.spec.token_ids)

    def may_fork(self, sibling: Sequence, *, has_state: bool) -> bool:
        """Return whether another choice of the same request has computed all tokens that this one needs but the last.

        Args:
            has_state: whether the KV comes with a state, which cannot be cropped.
        """
        num_shared = self.num_tokens - 1
        return (
            self.purpose is Purpose.GENERATE
            and not self.num_output_tokens
            and sibling.spec.request_id == self.spec.request_id
            and sibling.spec.key_seed == self.spec.key_seed
            and sibling.spec.images == self.spec.images
            and sibling.num_computed_tokens >= num_shared
            and not sibling.copies
            and not (has_state and sibling.num_computed_tokens > num_shared)
            and sibling.token_ids[:num_shared] == self.token_ids[:num_shared]
        )

    def append(self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Add a sampled token. Return the reason why the sequence ends with it; None: it continues."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids or (token_id in eos_token_ids and not self.spec.sampling.ignore_eos):
            return FinishReason.STOP
        if len(token_ids) >= self.most_tokens or len(token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def run_ahead(self, part: StepPart, max_model_len: int) -> None:
        """Count the tokens that a step is computing as computed.

        If the step samples a token and the sequence can continue after any token, an unknown token is appended.
        """
        self.num_computed_tokens, self.num_kv_tokens = part.end, part.num_kv_tokens
        self.num_ahead_tokens = len(part.token_ids)
        goes_on = self.num_output_tokens + 1 < self.spec.max_tokens and self.num_tokens + 1 < max_model_len
        if part.sample and goes_on and not self.aborted and self.purpose is not Purpose.PREFILL:
            self.token_ids.append(UNKNOWN_TOKEN)

    def catch_up(self) -> None:
        """Undo, after a step, the assumptions of `run_ahead` about its tokens."""
        self.num_ahead_tokens = 0
        if self.has_unknown:
            self.token_ids.pop()

    def part(self, num_tokens: int, drafts: tuple[int, ...] = ()) -> StepPart:
        """Return its part of a step: its next `num_tokens` known tokens, followed by drafts."""
        assert num_tokens > 0, f"{self.sequence_id} is scheduled with nothing to compute"
        token_ids, spec, tables = self.token_ids, self.spec, self.block_ids
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        samples = end == len(token_ids) and not self.only_computes
        scores_prompt = not self.first_token_s and self.scores_prompt
        return StepPart.__new__(  # calling the class instead takes half as long again
            StepPart,
            self.key,
            (token_ids[start],) if num_tokens == 1 and not drafts else (*token_ids[start:end], *drafts),
            start,
            tables,
            (end + len(drafts),) * len(tables),
            samples,
            num_tokens == 1 and len(token_ids) > spec.num_prompt_tokens,
            spec.sampling,
            spec.choice_index,
            spec.num_prompt_tokens,
            tuple(token_ids) if (samples and self.needs_history) or scores_prompt else (),
            scores_prompt,
            len(drafts),
            None,
            self.adapter,
            spec.images,
        )

    def report(self) -> PrefillReport:
        """Return the report of this sequence's prefill. Call it once the first token has been sampled."""
        return PrefillReport(
            num_cached_tokens=self.num_cached_tokens,
            queue_s=self.scheduled_s - self.arrival_s,
            prefill_s=max(0.0, self.first_token_s - self.scheduled_s),  # a step planned ahead may start early
            room_s=self.blocked_s,
            prompt_scores=TokenScores.joined(self.prompt_scores) if self.prompt_scores else NO_SCORES,
        )
