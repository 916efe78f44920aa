"""One choice of one request inside an engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from baton.messages import PrefillReport, SequenceSpec
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from engine.core.beams import BeamSearch
from engine.core.kv_spec import BlockTables
from engine.core.ngrams import NgramIndex
from engine.core.runner import UNKNOWN_TOKEN, BlockCopy, StepPart


class Purpose(Enum):
    """What a worker asks of a sequence."""

    GENERATE = "generate"
    """Prefill here and decode here (aggregated mode)."""
    PREFILL = "prefill"
    """Compute the prompt and one token, then hold the blocks until they are transferred.

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
    BRANCHED = "branched"
    """Holds nothing: its beams do, and run."""
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
    in_flight: int = 0
    """Steps that it is part of and that are not committed: meanwhile its blocks must not be given away."""
    num_ahead_tokens: int = 0
    """The last of its computed tokens that are only being computed: of a step after which the next one is planned
    already."""
    aborted: bool = False
    """Whether it has ended, and takes part in no further step. It is taken out when none is in flight."""
    scheduled_s: float = 0.0
    blocked_s: float = 0.0
    """Time before the first admission during which the head of the queue lacked KV blocks."""
    first_token_s: float = 0.0
    prompt_scores: list[TokenScores] = field(default_factory=list)
    """Scores of its prompt's tokens, a step's at a time, until they are reported."""
    search: BeamSearch | None = None
    """The search that finds its answers. Such a sequence is a parent: it computes what all beams begin with, and then
    each of them is a sequence of its own. None: its tokens are drawn one by one, or it is a beam."""
    beams: list[Sequence] = field(default_factory=list)
    """A branched parent's beams, in the order of the search."""
    places: tuple[int, ...] | None = None
    """The places in `beams` that the beams of the next step continue, one each, or of the parent where it has none;
    None: it has the beams of the next step."""
    parent: Sequence | None = None
    """The parent, where this is one of its beams."""
    most_tokens: int = field(init=False)
    """Tokens of its prompt and its whole answer, if the model takes so many."""
    stop_token_ids: tuple[int, ...] = field(init=False)
    """Tokens that end its answer, beside those that end every one."""
    needs_history: bool = field(init=False)
    """Whether its draws depend on the tokens before them."""
    ngrams: NgramIndex | None = None
    """What guesses its next tokens, once it decodes; None: nothing does."""
    forgone_s: float = 0.0
    """What drafts of a draft model would have gained since look-up last had some; see `Drafter`."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.most_tokens = self.spec.num_prompt_tokens + self.spec.max_tokens
        self.stop_token_ids = self.spec.sampling.stop_token_ids
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
    def num_missing_tokens(self) -> int:
        """Known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Leading tokens whose KV is in the blocks now; see `num_ahead_tokens`."""
        return self.num_computed_tokens - self.num_ahead_tokens

    @property
    def has_unknown(self) -> bool:
        """Whether its last token is being sampled; it stands as `UNKNOWN_TOKEN`."""
        return self.token_ids[-1] == UNKNOWN_TOKEN

    @property
    def owner(self) -> Sequence:
        """The sequence that is known outside: of a beam its parent, else itself."""
        return self if self.parent is None else self.parent

    @property
    def group(self) -> list[Sequence]:
        """The sequences that decode together with it, or not at all: of a beam all beams, else itself."""
        return [self] if self.parent is None else self.parent.beams

    @property
    def num_seats(self) -> int:
        """How many sequences run for it at the most."""
        return 1 if self.search is None else self.search.width

    @property
    def is_due(self) -> bool:
        """Whether a parent has to branch before the next step."""
        if self.places is not None or self.search is None:
            return self.places is not None
        return len(self.search.running) > 1 and self.status is Status.RUNNING and self.num_missing_tokens == 1

    @property
    def waits_for_others(self) -> bool:
        """Whether its last known token is not computed by itself: with the other beams', or by them."""
        return self.parent is not None or (self.search is not None and len(self.search.running) > 1)

    def beam(self, token_ids: tuple[int, ...]) -> Sequence:
        """Returns a beam of this parent.

        Args:
            token_ids: of the beam's answer so far.
        """
        beam = Sequence(spec=self.spec, purpose=Purpose.GENERATE, arrival_s=self.arrival_s, parent=self)
        beam.token_ids = [*self.spec.token_ids[: self.spec.num_prompt_tokens], *token_ids]
        beam.first_token_s = self.first_token_s
        return beam

    def give_to(self, beam: Sequence) -> None:
        """Gives all that this parent holds to one of its beams."""
        beam.status, beam.was_admitted = Status.RUNNING, True
        for name in ("block_ids", "num_block_tokens", "num_kv_tokens", "num_registered_keys", "num_computed_tokens"):
            setattr(beam, name, getattr(self, name))
        beam.block_keys = list(self.block_keys)
        self.block_ids = ()

    def fold(self) -> None:
        """Makes a parent one sequence again, which computes what its beams begin with."""
        assert self.search is not None
        prompt_ids = self.spec.token_ids[: self.spec.num_prompt_tokens]
        self.token_ids = [*prompt_ids, *self.search.hypotheses.shared_token_ids()]
        self.beams, self.places, self.num_computed_tokens = [], None, 0

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
            and not sibling.copies
            and not (has_state and sibling.num_computed_tokens > num_shared)
            and sibling.token_ids[:num_shared] == self.token_ids[:num_shared]
        )

    def append(self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Adds a sampled token and returns why the sequence ends with it; None: it goes on."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids or (token_id in eos_token_ids and not self.spec.sampling.ignore_eos):
            return FinishReason.STOP
        if len(token_ids) >= self.most_tokens or len(token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def run_ahead(self, part: StepPart, max_model_len: int) -> None:
        """Counts what a step is computing of it as computed.

        Where the step samples a token after which the sequence may go on, whichever it is, that stands as unknown.
        """
        self.num_computed_tokens, self.num_kv_tokens = part.end, part.num_kv_tokens
        self.num_ahead_tokens = len(part.token_ids)
        goes_on = self.num_output_tokens + 1 < self.spec.max_tokens and self.num_tokens + 1 < max_model_len
        if part.sample and goes_on and not self.aborted and self.purpose is not Purpose.PREFILL:
            self.token_ids.append(UNKNOWN_TOKEN)

    def catch_up(self) -> None:
        """Forgets, of a step that is over, what `run_ahead` has supposed of its tokens."""
        self.num_ahead_tokens = 0
        if self.has_unknown:
            self.token_ids.pop()

    def part(self, num_tokens: int, drafts: tuple[int, ...] = ()) -> StepPart:
        """Returns what a step computes of it: its next `num_tokens` known tokens, and drafts behind the last one."""
        assert num_tokens > 0, f"{self.sequence_id} is scheduled with nothing to compute"
        token_ids, spec, tables = self.token_ids, self.spec, self.block_ids
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        samples = end == len(token_ids)
        scores_prompt = not self.first_token_s and self.scores_prompt
        return StepPart.__new__(  # without the detour of a call of the class, which takes half as long again
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
        )

    def report(self) -> PrefillReport:
        """Returns how it was computed here, once its first token is there."""
        return PrefillReport(
            num_cached_tokens=self.num_cached_tokens,
            queue_s=self.scheduled_s - self.arrival_s,
            prefill_s=max(0.0, self.first_token_s - self.scheduled_s),  # a step planned ahead may begin early
            room_s=self.blocked_s,
            prompt_scores=TokenScores.joined(self.prompt_scores) if self.prompt_scores else NO_SCORES,
        )
