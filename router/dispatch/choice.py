"""One choice of a request on its way through the router, and the values of an attempt to serve it.

Choice     from the request to its end, changed as things happen: the prompt asked for, the answer so far, the record
Attempt    one placement of a choice: the sequence as it is now, and the workers that serve it
Outcome    how an attempt ended, the last thing that an exchange yields
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from opentelemetry.context import Context

from baton.cluster import Worker
from baton.hypotheses import NO_HYPOTHESES, Hypotheses
from baton.messages import Decoding, PrefixSource, SequenceSpec
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.tasks import Flag
from kvstore.leases import Noted
from router.admission import Claim, QueueEntry
from router.dispatch.decisions import PlacementDecision
from router.dispatch.events import EventLog
from router.dispatch.retry import NOTHING, Avoidance, Failure
from router.dispatch.worker_client import WorkerCallError, WorkerStream
from router.placement import Job, Placement
from router.placement.stale_hints import Hint
from router.slo import StageLog


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice, filled in as things happen to it."""

    spec: SequenceSpec
    """The prompt and what is asked for, as of the request; attempts add the tokens emitted so far."""
    claim: Claim
    trace: Context

    emitted: list[int] = field(default_factory=list)
    """Tokens of the answer so far, from whatever worker or router."""
    finish_reason: FinishReason | None = None
    """Why the engine ended the answer; None: it has not."""
    num_computed: int = 0
    """Tokens that workers have computed for it in this call, also of what no client gets; those computed again because
    a worker failed count once."""
    hypotheses: Hypotheses = NO_HYPOTHESES
    """Where its beam search was when its worker asked for a move: the next worker goes on there."""
    sampler: str = ""
    """Name of the sampler of the latest attempt, on this router or another: what is emitted is drawn by it."""
    is_continued: bool = False
    """True if the client has tokens of it from an earlier call."""
    is_answered: bool = False
    """True if the client needs no more of it, because of the engine or a stop string. Set by the service: the attempt
    that runs is then left."""

    num_attempts: int = 0
    failures: tuple[Failure, ...] = ()
    """Consecutive ones, see `router.dispatch.retry`."""
    avoid: Avoidance = NOTHING
    """What the next placement avoids because of them."""
    retries: int = 0
    """All failed attempts that were followed by another one."""
    leader: Choice | None = None
    """The choice of the request that computes the prompt for this one, too: it goes to its decode worker. None: it goes
    its own way."""
    num_followers: int = 0
    """Sequences that decode beside this one where it does: choices of which it is the leader, or other beams."""
    has_begun: Flag = field(default_factory=Flag)
    """Set once a worker decodes it, or it has come to its end without."""
    kv_is_on: str = ""
    """The decode worker that has the prompt's KV; empty: none yet."""
    superseded: list[WorkerStream[Decoding]] = field(default_factory=list)
    """Calls that the choice has moved from. They outlive their attempt and are left when the choice ends."""

    began_s: float = 0.0
    """When the latest attempt began, on the monotonic clock."""
    stages: StageLog = field(default_factory=StageLog)
    """Stages of its life; a move to another decode worker is a part of decoding."""
    events: EventLog = field(default_factory=EventLog)
    """What happened to it, for people."""
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    source: str = ""
    """Worker from which a prefix was to be pulled; empty: none."""
    decision: PlacementDecision | None = None
    """The first placement, explained."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in caches by the first attempt; later attempts find what it left behind."""
    prompt_scores: TokenScores | None = None
    """Scores of the prompt that have come and have not been passed on; None: there are none."""
    num_seen_tokens: int = 0
    """Leading prompt tokens that came before: what a cache that forgets nothing would have had."""
    block_keys: tuple[bytes, ...] = ()
    """Keys of the prompt's blocks, as it was first placed."""

    @property
    def index(self) -> int:
        """Index of the choice among those of its request."""
        return self.spec.choice_index

    @property
    def is_drawn(self) -> bool:
        """True if its tokens depend on random numbers, and so on the sampler."""
        return self.spec.sampling.temperature > 0

    @property
    def only_sampler(self) -> str | None:
        """Name of the only sampler that can go on with it; None: any can, as nothing is drawn, or nothing yet.

        The engine does not matter: greedy answers go on across engines too, whose logits are equal but for near ties,
        and the same sampler makes the same of equal logits.
        """
        return self.sampler if self.emitted and self.is_drawn else None

    @property
    def is_of_unknown_sampler(self) -> bool:
        """True if the client has drawn tokens of which no router has noted what drew them."""
        return self.is_continued and self.is_drawn and not self.emitted

    def next_spec(self, now_s: float, num_expected_tokens: int) -> SequenceSpec:
        """The sequence as the next attempt sends it: with the tokens emitted so far, and what is left of its time."""
        claim, sampling = self.claim, self.spec.sampling
        is_begun = self.emitted or self.hypotheses.running
        if is_begun and sampling.prompt_logprobs is not None:  # the scores came with the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self.spec,
            sampling=sampling,
            token_ids=self.spec.token_ids + self.known_ids,
            hypotheses=self.hypotheses,
            attempt=self.num_attempts,
            priority=claim.priority,
            itl_s=claim.objective.itl_s,
            num_expected_tokens=num_expected_tokens,
            ttft_s=max(0.0, claim.arrived_s + claim.objective.ttft_s - now_s),
        )

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Tokens with which the answer is known to begin: of a search those of all its beams."""
        return self.hypotheses.shared_token_ids() if self.hypotheses.running else tuple(self.emitted)

    def has_kv(self) -> None:
        """Record that its decode worker has the prompt's KV now: its followers may go there."""
        self.kv_is_on = self.decode_worker
        self.has_begun.set()

    def leave_superseded(self) -> None:
        """Leave the calls that the choice has moved from; idempotent."""
        for stream in self.superseded:
            stream.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGroup:
    """The choices of one request, served together: they share the prompt, the claim and the trace."""

    choices: tuple[Choice, ...]

    @staticmethod
    def begin(
        spec: SequenceSpec, claim: Claim, trace: Context, num_choices: int, noted: Mapping[int, Noted]
    ) -> ChoiceGroup:
        """Make the choices of a request.

        Args:
            spec: the first choice's.
            noted: what has been generated of the choices that the client continues.
        """
        others = spec
        if spec.sampling.prompt_logprobs is not None:
            others = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=None))
        choices = tuple(
            Choice(
                spec=replace(others, choice_index=index) if index else others if index in noted else spec,
                claim=claim,
                trace=trace,
                emitted=list(known.token_ids),
                finish_reason=known.finish_reason,
                sampler=known.sampler,
                is_continued=index in noted,
            )
            for index in range(num_choices)
            for known in (noted.get(index, Noted()),)
        )
        if spec.sampling.use_beam_search:
            choices[0].num_followers = spec.sampling.num_beams - 1  # one search finds all of them
        elif new := [choice for choice in choices if not choice.is_continued]:
            leader, *followers = new
            leader.num_followers = len(followers)
            for follower in followers:
                follower.leader = leader
        return ChoiceGroup(choices=choices)

    @property
    def is_search(self) -> bool:
        """True if one beam search finds all of the answers."""
        return bool(self.choices) and self.choices[0].spec.sampling.use_beam_search

    @property
    def num_computed(self) -> int:
        """Tokens that workers have computed for all of them in this call."""
        return sum(choice.num_computed for choice in self.choices)

    def unanswered(self) -> ChoiceGroup:
        """The choices of which the client still needs something."""
        if not any(choice.is_answered for choice in self.choices):
            return self
        return ChoiceGroup(choices=tuple(choice for choice in self.choices if not choice.is_answered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The workers that serve an attempt, as they were when that was decided, whatever becomes of their leases."""

    placement: Placement
    decode: Worker
    prefill: Worker | None
    source: PrefixSource | None
    hint: Hint | None
    """What was believed of the cache of the worker that computes the prompt; None: the attempt is a move."""
    moves_from: WorkerStream[Decoding] | None = None
    """The call that decodes until now. It is left once the next calls have begun, so that its worker waits for them."""

    def leave_old_call(self) -> None:
        """Leave the call that the choice moves from, if it moves; idempotent."""
        if self.moves_from is not None:
            self.moves_from.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One placement of one choice."""

    choice: Choice
    spec: SequenceSpec
    """The choice's, as of this attempt."""
    assignment: Assignment
    job: Job
    entry: QueueEntry


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer has come to its end."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The choice goes on elsewhere; everything is prepared."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """A worker asks for the choice to be moved before it has decoded any of it: there is nothing to move."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A worker refused, failed or broke off."""

    failure: WorkerCallError


Outcome = Finished | Moved | WorkerLeaving | AttemptFailed
