"""State of one choice of a request, and the workers and calls that serve it.

Choice   its prompt and its tokens so far, as long as the request lives
Run      workers and calls of its current attempt
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.context import Context

from baton.cluster import Worker
from baton.hypotheses import NO_HYPOTHESES, Hypotheses
from baton.messages import Decoding, Fetched, FirstToken, PrefixSource, SequenceSpec, Ticket, Transferred
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.tasks import Flag
from kvstore.leases import Noted
from router.admission import Claim, QueueEntry
from router.placement import Job, Placement, Prompt
from router.placement.pool_view import Hint
from router.serve.images import RequestImages
from router.serve.machine import (
    AWAIT_DECODE,
    CallFailed,
    ChoiceMachine,
    Event,
    LeaderBegun,
    NoRoom,
    Source,
    Stays,
)
from router.serve.worker_client import WorkerCallError, WorkerStream
from router.timeline.events import ChoiceTimeline


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice of a request. The driver and the service update it while it runs."""

    spec: SequenceSpec
    """The prompt and the parameters of the request; attempts add the tokens emitted so far."""
    claim: Claim
    trace: Context

    emitted: list[int] = field(default_factory=list)
    """Tokens of the answer so far, from all workers and routers that served it."""
    finish_reason: FinishReason | None = None
    """Why the engine ended the answer; None: it is still generating."""
    hypotheses: Hypotheses = NO_HYPOTHESES
    """State of its beam search when its worker asked for a migration; the next worker continues from it."""
    num_computed_before: int = 0
    """Value of `timeline.num_computed` when its beam search had this state."""
    sampler: str = ""
    """Name of the sampler of the latest attempt, on this router or another; it has drawn the emitted tokens."""
    is_continued: bool = False
    """True if the client has tokens of it from an earlier call."""
    is_answered: bool = False
    """True if the client needs no more tokens, because the engine or a stop string ended the answer. The service sets
    it; the driver then cancels the running attempt."""

    machine: ChoiceMachine = field(default_factory=ChoiceMachine)
    """State machine of the choice; its `avoid` lists the workers and modes that the next placement must not use."""
    leader: Choice | None = None
    """The choice whose attempt computes the prompt for this one as well. This choice is placed on the leader's decode
    worker. None: it is placed independently."""
    num_followers: int = 0
    """Number of sequences that decode on the same worker with this one: choices that it leads, or other beams."""
    has_begun: bool = False
    """True if a worker has begun to decode it, or it has ended before."""
    kv_is_on: str = ""
    """The decode worker that has the prompt's KV; empty: none yet."""
    images: RequestImages | None = None
    """Images of its prompt; None: it has none."""

    timeline: ChoiceTimeline = field(default_factory=ChoiceTimeline)
    """What happened to it."""
    prompt_scores: TokenScores | None = None
    """Scores of the prompt that have arrived and are not yet sent to the client; None: there are none."""
    block_keys: tuple[bytes, ...] = ()
    """Keys of the prompt's blocks at its first placement."""

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
        """Name of the only sampler that can continue it; None: any sampler can, because no token is drawn yet, or ever.

        The engine does not matter. Logits of different engines are equal except for near ties, so greedy answers can
        continue on another engine, and a sampler draws the same tokens from equal logits.
        """
        return self.sampler if self.emitted and self.is_drawn else None

    @property
    def is_of_unknown_sampler(self) -> bool:
        """True if the client has drawn tokens and no router has recorded which sampler drew them."""
        return self.is_continued and self.is_drawn and not self.emitted

    def next_spec(self, now_s: float, num_expected_tokens: int) -> SequenceSpec:
        """Return the sequence for the next attempt: with the tokens emitted so far and the remaining TTFT budget."""
        claim, sampling = self.claim, self.spec.sampling
        is_begun = self.emitted or self.hypotheses.running
        if is_begun and sampling.prompt_logprobs is not None:  # the scores came with the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self.spec,
            sampling=sampling,
            token_ids=self.spec.token_ids + self.known_ids,
            hypotheses=self.hypotheses,
            attempt=self.machine.num_attempts,
            priority=claim.priority,
            itl_s=claim.objective.itl_s,
            num_expected_tokens=num_expected_tokens,
            ttft_s=max(0.0, claim.arrived_s + claim.objective.ttft_s - now_s),
        )

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Known leading tokens of the answer; for a beam search the tokens that all beams share."""
        return self.hypotheses.shared_token_ids() if self.hypotheses.running else tuple(self.emitted)

    def reach(self, hypotheses: Hypotheses) -> None:
        """Record the state from which its beam search continues on the next worker."""
        self.hypotheses, self.num_computed_before = hypotheses, self.timeline.num_computed

    def go_back(self) -> None:
        """Forget the tokens that its beam search has drawn since its recorded state: they are computed again."""
        if self.spec.sampling.use_beam_search:
            self.timeline.num_computed = self.num_computed_before

    def has_kv(self) -> None:
        """Record that its decode worker has the prompt's KV now, so its followers may be placed there."""
        self.kv_is_on = self.timeline.decode_worker
        self.has_begun = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGroup:
    """The choices of one request. They share the prompt, the claim and the trace."""

    choices: tuple[Choice, ...]

    @staticmethod
    def begin(
        spec: SequenceSpec,
        claim: Claim,
        trace: Context,
        num_choices: int,
        noted: Mapping[int, Noted],
        *,
        images: RequestImages | None = None,
    ) -> ChoiceGroup:
        """Create the choices of a request.

        Args:
            spec: the sequence of the first choice.
            noted: recorded tokens, by index, of the choices that the client continues.
            images: those of the prompt; None: it has none.
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
                images=images,
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
        """True if one beam search produces all choices."""
        return bool(self.choices) and self.choices[0].spec.sampling.use_beam_search

    @property
    def timelines(self) -> tuple[ChoiceTimeline, ...]:
        """The choices' timelines."""
        return tuple(choice.timeline for choice in self.choices)

    def unanswered(self) -> ChoiceGroup:
        """Return the group without the choices that are already answered."""
        if not any(choice.is_answered for choice in self.choices):
            return self
        return ChoiceGroup(choices=tuple(choice for choice in self.choices if not choice.is_answered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The workers that serve an attempt: a snapshot from the placement, even if their leases change later."""

    placement: Placement
    decode: Worker
    prefill: Worker | None
    source: PrefixSource | None
    hint: Hint | None
    """The expected prefix hit on the worker that computes the prompt; None: the attempt is a migration."""
    moves_from: WorkerStream[Decoding] | None = None
    """The call that has decoded until now. It is cancelled after the next calls have started, so that its worker does
    not exit in between."""

    def leave_old_call(self) -> None:
        """Cancel the call that the choice migrates from, if it migrates; idempotent."""
        if self.moves_from is not None:
            self.moves_from.leave()


class Run:
    """Workers, calls and accounting of a choice's current attempt, and the wait for its first token."""

    def __init__(self, choice: Choice, num_expected_tokens: int, arrived: Flag) -> None:
        self.choice = choice
        self.num_expected_tokens = num_expected_tokens
        self.arrived = arrived
        """Set when a choice of the request may have an event."""
        self.time_up_s = math.inf
        """Time limit of the machine's wait, on the monotonic clock."""
        self.place_by_s = math.inf
        """Time until which it waits for workers; infinite: it does not wait for any."""
        self.waits_for_change = False
        """True if no worker was ready, and the pools have not changed since."""
        self.prompt: Prompt
        """The sequence of this attempt, as placement sees it."""
        self.moves_to: Assignment | None = None
        """The workers of a migration that is prepared, or is being prepared."""
        self.ticket: Ticket
        self.spec: SequenceSpec
        """The sequence of the choice, as sent in this attempt."""
        self.assignment: Assignment
        self.job: Job
        self.entry: QueueEntry
        self.images: tuple[bytes, ...] = ()
        """Encoded images for the worker that computes the prompt."""
        self.began_s = 0.0
        """Start of the attempt: the router began to look for workers."""
        self.held_s = 0.0
        """Time in which the choice took no events because the client had not yet read tokens of the request."""
        self.reset()

    def reset(self) -> None:
        """Forget the calls, timers and accounting of the last attempt. The caller has ended them."""
        self.decode: WorkerStream[Decoding] | None = None
        self.prefill: WorkerStream[FirstToken | Transferred] | None = None
        self.fetch: WorkerStream[Fetched] | None = None
        """The call by which the next worker of a migration pulls the KV."""
        self.fetch_accounting = contextlib.ExitStack()
        self.seeks: asyncio.TimerHandle | None = None
        """The next search for a worker to which the choice can migrate."""
        self.found_none: NoRoom | Stays | None = None
        """Result of the latest search; None: it has found a worker, or has not run yet."""
        self.accounting: contextlib.ExitStack | None = None
        """The load that the attempt adds to its workers; None: there are no calls."""
        self.is_begun = False
        """True if the prompt is computed."""
        self.first_token_by_s = math.inf
        """Deadline of the first token, on the monotonic clock."""
        self.waits_for_room: asyncio.TimerHandle | None = None
        """Timer that runs until the decode worker answers; None: it has answered, or there is no call."""
        self.is_preempted = False

    def look_again(self) -> None:
        """Try to place the choice again, because the pools have changed."""
        self.waits_for_change = False
        self.arrived.set()

    @property
    def awaits_tokens_alone(self) -> bool:
        """True if only the decode worker's next message is awaited, as nearly always."""
        return self.choice.machine.then is AWAIT_DECODE and self.is_begun and not self.choice.is_answered

    @property
    def is_silent(self) -> bool:
        """True if the choice awaits only the decode worker's next message, which has not come.

        The loop may skip it: it has no time limit, and events of other choices do not concern it. Of many choices, most
        are silent nearly always.
        """
        return self.awaits_tokens_alone and self.decode is not None and not self.decode.has_message

    @property
    def wakes_at_s(self) -> float:
        """Time at which it has an event even if none arrives; infinite: never."""
        return min(self.time_up_s, self.place_by_s, self.first_token_by_s)

    def extend(self, held_s: float) -> None:
        """Extend the deadline of the first token by the time that a slow client took."""
        self.held_s += held_s
        self.first_token_by_s += held_s

    def preempt(self) -> None:
        """End the wait for the first token."""
        self.is_preempted = True
        self.arrived.set()

    def take(self, source: Source) -> Event | None:
        """Return the next event of a source; None: it has none yet."""
        if source is Source.LEADER:
            return LeaderBegun() if self.choice.leader is None or self.choice.leader.has_begun else None
        if source is Source.MIGRATION and self.found_none is not None:
            found_none, self.found_none = self.found_none, None
            return found_none
        if (stream := self._stream(source)) is None:
            return None
        try:
            event: Event | None = stream.take()
        except WorkerCallError as failure:
            event = CallFailed(source, failure.worker, failure.error)
        if event is not None and source is Source.MIGRATION:
            self.end_fetch()
        return event

    def _stream(self, source: Source) -> WorkerStream[Any] | None:
        match source:
            case Source.DECODE:
                return self.decode
            case Source.PREFILL:
                return self.prefill
            case Source.MIGRATION:
                return self.fetch
            case Source.LEADER:
                return None

    def end_fetch(self) -> None:
        """Cancel the search for the next worker of a migration, or the call by which that worker pulls; idempotent."""
        if self.seeks is not None:
            self.seeks.cancel()
        if self.fetch is not None:
            self.fetch.on_arrival = None
            self.fetch.leave()
        self.fetch = self.seeks = self.found_none = None
        self.fetch_accounting.close()

    async def next_tokens(self) -> Event:
        """Return the next event of the decode worker's call, when nothing else is awaited."""
        assert self.decode is not None
        try:
            return await self.decode.read()
        except WorkerCallError as failure:
            return CallFailed(Source.DECODE, failure.worker, failure.error)

    def count_unread(self) -> None:
        """Count the unread tokens of a call that is cancelled: workers computed them for this client, too."""
        if self.is_begun and self.decode is not None:
            self.choice.timeline.num_computed += self.decode.num_unread
