"""The life of one choice on the workers, as a pure state machine: an event in, a step out. It has no clock and no I/O.

                 ┌──────────────────────── a call failed, or its worker leaves: placed again ──────────────────────┐
                 v                                                                                                 │
    PLACING ──> RESERVING ──> PREFILLING ──> TRANSFERRING ──> DECODING ──> REPORTING ──> ENDED      disaggregated  │
       └──────> COMPUTING ───────────────────────────────────────┘                                  aggregated ────┘

The driver (`router.serve.driver`) carries out the instructions of each step, and waits as the step says. Messages of
workers are events without conversion. Decision 0018 has the table of states, events and instructions.

    machine = ChoiceMachine()
    step = machine.on(Begun(max_attempts=3))  # Step((), FindPlace())
    step = machine.on(Placed(placement))      # Step((OpenDecode(await_kv=True),), Await((Source.DECODE,)))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from baton.cluster import Worker
from baton.errors import BatonError, ImagesMissing, InvalidRequest, TransferCancelled, WorkerDraining
from baton.hypotheses import Hypotheses
from baton.messages import Fetched, FirstToken, Migrate, NewTokens, PrefillReport, Ticket, Transferred
from router.placement import Mode, Placement
from router.serve.retry import NOTHING, Avoidance, Failure, consecutive, given_up, is_used_up, to_avoid

REPORT_S = 1.0
"""Time limit for the prefill worker's report on the KV transfer if nothing else is missing. The report has usually
arrived by then, unless that worker hangs."""


class State(StrEnum):
    """State of a choice. Each one waits for what its docstring names."""

    FOLLOWING = "following"
    """Another choice of the request, whose attempt computes the prompt for this one as well."""
    PLACING = "placing"
    """Workers."""
    COMPUTING = "computing"
    """The first tokens of the worker that computes the prompt and decodes."""
    RESERVING = "reserving"
    """The decode worker's ticket: it reserves blocks."""
    PREFILLING = "prefilling"
    """The prefill worker's first token."""
    TRANSFERRING = "transferring"
    """The decode worker's first message, which it sends when it has the KV."""
    DECODING = "decoding"
    """Further tokens. During a migration also the next worker."""
    REPORTING = "reporting"
    """The prefill worker's report on the KV transfer, with the last tokens in hand."""
    ENDED = "ended"


class Source(StrEnum):
    """Origin of an event."""

    DECODE = "decode"
    """The call on the decode worker, which computes the prompt as well if there is no prefill worker."""
    PREFILL = "prefill"
    """The call on the prefill worker."""
    LEADER = "leader"
    """The choice that computes the prompt for this one as well."""
    MIGRATION = "migration"
    """The search for the next worker of a migration, and the call by which that worker pulls the KV."""


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """The choice may be placed."""

    max_attempts: int
    """Number of consecutive failures after which the choice is given up."""
    num_beams: int = 0
    """Number of beams that the client gets; 0: the choice is not a beam search."""
    follows: bool = False
    """True if another choice of the request computes the prompt for this one as well. If this choice were placed
    earlier, it would compute the prompt a second time."""
    has_images: bool = False
    """True if the prompt has images."""


@dataclass(frozen=True, slots=True)
class LeaderBegun:
    """The leader's decode worker has the prompt's KV, or the leader has ended without it."""


class Placed(NamedTuple):
    """Workers are chosen, and the choice is admitted."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call is over: its worker has refused, failed or ended it."""

    source: Source
    worker: Worker
    error: BatonError


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No worker to which the choice could migrate has room now."""


@dataclass(frozen=True, slots=True)
class Stays:
    """The worker that was about to leave has decided to stay."""


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The limit of `Await.timeout_s` has passed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The choice got no first token in time, or another tenant preempted it while it waited."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Answered:
    """The client needs no more tokens, for instance because a stop string has ended the answer."""


Event = (
    Begun
    | LeaderBegun
    | Placed
    | Ticket
    | FirstToken
    | Transferred
    | NewTokens
    | Migrate
    | CallFailed
    | NoRoom
    | Fetched
    | Stays
    | TimeUp
    | Refused
    | Answered
)


# -- instructions ------------------------------------------------------------------------------------------------------


class OpenDecode(NamedTuple):
    """Start the call on the decode worker."""

    await_kv: bool
    """True if a prefill worker computes the prompt and transfers its KV."""


class OpenPrefill(NamedTuple):
    """Record that the decode worker has room, and start the call on the prefill worker, which sends the KV there."""

    ticket: Ticket


class Computed(NamedTuple):
    """Record that the prompt is computed: the wait for the first token is over."""

    report: PrefillReport


@dataclass(frozen=True, slots=True)
class HasKv:
    """Record that the decode worker has the prompt's KV, so that other choices of the request may be placed there."""


class NoteTransfer(NamedTuple):
    """Record the prefill worker's report on the KV transfer."""

    report: Transferred


class Emit(NamedTuple):
    """Pass tokens on to the client."""

    tokens: NewTokens


@dataclass(frozen=True, slots=True)
class Reach:
    """Record the state of a beam search from which the next worker continues."""

    hypotheses: Hypotheses


@dataclass(frozen=True, slots=True)
class Leaves:
    """Record that the decode worker is about to leave its role, and takes no new work in it."""


@dataclass(frozen=True, slots=True)
class PrepareMove:
    """Find another decode worker, and have it pull the KV that exists so far. The old worker decodes meanwhile.

    The next event of the migration is `NoRoom`, `Stays`, `Fetched`, or `CallFailed`.
    """

    unable: frozenset[str] = frozenset()
    """Ids of workers that have failed to pull it."""
    waits: bool = False
    """Wait for a moment before the search, because no worker had room."""


class NotePull(NamedTuple):
    """Record whether the next worker of a migration has pulled the KV."""

    result: Fetched | CallFailed


@dataclass(frozen=True, slots=True)
class KeepOldCall:
    """Let the call on the leaving worker outlive this attempt: that worker must not exit before it has sent the KV."""


@dataclass(frozen=True, slots=True)
class LeaveCalls:
    """Cancel the calls of this attempt, and end its accounting. A choice is placed again only after that."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """Forget the tokens that a beam search has drawn since its recorded state: they are computed again."""


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """Record that a worker leaves its role before it has computed anything of the choice."""

    worker: Worker | None
    """None: the decode worker."""


@dataclass(frozen=True, slots=True)
class LacksImages:
    """Record that a worker no longer holds the images: the next attempt carries their bytes."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Failing:
    """Record a failed attempt that is followed by another one, or by the end of the choice."""

    worker: Worker
    error: BatonError
    is_last: bool


Instruction = (
    OpenDecode
    | OpenPrefill
    | Computed
    | HasKv
    | NoteTransfer
    | Emit
    | Reach
    | Leaves
    | PrepareMove
    | NotePull
    | KeepOldCall
    | LeaveCalls
    | GoBack
    | WorkerLeaves
    | LacksImages
    | Failing
)


# -- how the next event comes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindPlace:
    """Choose workers that `ChoiceMachine.avoid` does not exclude."""

    is_move: bool = False
    """True: take the workers of the prepared migration."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for an event of one of the sources. If several have one, the earliest in the tuple comes first."""

    sources: tuple[Source, ...]
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The choice is complete."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The choice ends with this error."""

    error: BatonError


Then = FindPlace | Await | End | GiveUp


class Step(NamedTuple):
    """Instructions to carry out in this order, and how the next event comes."""

    instructions: tuple[Instruction, ...]
    then: Then


DECODING = State.DECODING
DECODE, PREFILL, MIGRATION = Source.DECODE, Source.PREFILL, Source.MIGRATION
AWAIT_LEADER = Await((Source.LEADER,))
AWAIT_DECODE = Await((DECODE,))
PLACE, MOVE = FindPlace(), FindPlace(is_move=True)
LEAVE_CALLS, HAS_KV = LeaveCalls(), HasKv()
END = End()


@dataclass(slots=True, kw_only=True)
class ChoiceMachine:
    """The state of one choice. `on` changes it."""

    state: State = State.PLACING
    then: Then = PLACE
    """How the next event comes, as the last step says."""
    num_attempts: int = 0
    """Attempts that have ended."""
    avoid: Avoidance = NOTHING
    """Workers and modes that the next placement avoids because of the failures."""
    carries_images: bool = False
    """True if the next attempt carries all images, because a worker lacked them or failed."""
    is_moving: bool = False
    """True while a migration is prepared."""
    _begun: Begun = Begun(max_attempts=1)
    _num_emitted: int = 0
    """Tokens that workers have sent to this router."""
    _failures: tuple[Failure, ...] = ()
    """Consecutive failures, see `router.serve.retry`."""
    _placement: Placement | None = None
    _held: NewTokens | CallFailed | None = None
    """Message of the decode worker that waits: until the first token (PREFILLING), or for the report (REPORTING)."""
    _lacks_report: bool = field(default=False)
    """True until the prefill worker has reported the KV transfer, or its call has failed."""
    _unable: frozenset[str] = frozenset()
    """Ids of workers that have failed to pull the KV in this migration."""

    def on(self, event: Event) -> Step:
        """Handle an event, and return what to do and how the next event comes.

        The event must be one that the last step asked for, or `Refused` before the first token, or `Answered`.
        """
        decodes = self.then is AWAIT_DECODE and self.state is DECODING
        if decodes and type(event) is NewTokens and event.finish_reason is None:
            self._num_emitted += len(event.token_ids)
            return Step((Emit(event),), AWAIT_DECODE)  # nearly every step
        step = self._on(event)
        self.then = step.then
        return step

    def _on(self, event: Event) -> Step:
        match event:
            case NewTokens():
                return self._tokens(event)
            case Begun():
                self._begun = event
                self.state = State.FOLLOWING if event.follows else State.PLACING
                return Step((), AWAIT_LEADER if event.follows else PLACE)
            case LeaderBegun():
                self.state = State.PLACING
                return Step((), PLACE)
            case Placed(placement):
                return self._placed(placement)
            case Ticket():
                assert self.state is State.RESERVING
                self.state = State.PREFILLING
                return Step((OpenPrefill(event),), Await((PREFILL, DECODE)))
            case FirstToken():
                return self._first_token(event)
            case Transferred():
                self._lacks_report = False
                return self._after_report((NoteTransfer(event),))
            case Migrate():
                return self._migrate(event)
            case Fetched():
                return self._end_attempt((NotePull(event), KeepOldCall(), LEAVE_CALLS, GoBack()), MOVE)
            case NoRoom():
                self._unable = frozenset()
                return Step((PrepareMove(waits=True),), self._await_tokens())
            case Stays():
                self.is_moving = False
                return Step((), self._await_tokens())
            case CallFailed():
                return self._call_failed(event)
            case TimeUp():
                return self._time_up()
            case Refused(error):
                self.state = State.ENDED
                return Step((LEAVE_CALLS,), GiveUp(error))
            case Answered():
                self.state = State.ENDED
                return Step((LEAVE_CALLS,), END)

    def _placed(self, placement: Placement) -> Step:
        assert self.state is State.PLACING
        self._placement, self._held, self._lacks_report, self.is_moving = placement, None, False, False
        is_disaggregated = placement.mode is Mode.DISAGGREGATED
        self.state = State.RESERVING if is_disaggregated else State.COMPUTING
        return Step((OpenDecode(await_kv=is_disaggregated),), AWAIT_DECODE)

    def _first_token(self, first: FirstToken) -> Step:
        assert self.state is State.PREFILLING
        token_ids = () if first.token_id is None else (first.token_id,)
        tokens = NewTokens(token_ids=token_ids, finish_reason=first.finish_reason, scores=first.scores)
        if first.finish_reason is not None:
            return self._finish((Computed(first.report),), tokens)
        did = (Computed(first.report), *self._emitted(tokens))
        self.state, self._lacks_report = State.TRANSFERRING, True
        if self._held is None:
            return Step(did, Await((DECODE, PREFILL)))
        held, self._held = self._held, None
        after = self._on(held)
        return Step((*did, *after.instructions), after.then)

    def _tokens(self, tokens: NewTokens) -> Step:
        did: tuple[Instruction, ...] = ()
        match self.state:
            case State.PREFILLING:  # the prompt is computed, and the prefill worker's message is on its way
                self._held = tokens
                return Step((), Await((PREFILL,)))
            case State.COMPUTING:
                did = (HAS_KV, Computed(tokens.report or PrefillReport()))
            case State.TRANSFERRING:
                did = (HAS_KV,)
        self.state = State.DECODING
        if tokens.finish_reason is None:
            return Step((*did, *self._emitted(tokens)), self._await_tokens())
        if self._lacks_report:
            # The decode worker has the KV. A prefill worker that dies or stalls now must not fail the choice.
            self.state, self._held = State.REPORTING, tokens
            return Step(did, Await((PREFILL,), REPORT_S))
        return self._finish(did, tokens)

    def _migrate(self, order: Migrate) -> Step:
        if self.state is not State.DECODING:  # it has decoded nothing, so there is no KV to migrate
            return self._leave(None)
        did: tuple[Instruction, ...] = (Leaves(),)
        if self._begun.num_beams:
            if not order.hypotheses.running:  # the search cannot migrate: its worker completes it
                return Step((), self._await_tokens())
            did = (*did, Reach(order.hypotheses))
        if not self.is_moving:
            self.is_moving, self._unable = True, frozenset()
            did = (*did, PrepareMove())
        return Step(did, self._await_tokens())

    def _call_failed(self, failed: CallFailed) -> Step:
        if failed.source is MIGRATION:
            self._unable |= {failed.worker.info.id}
            return Step((NotePull(failed), PrepareMove(self._unable)), self._await_tokens())
        if failed.source is PREFILL and self.state in (State.DECODING, State.REPORTING):
            self._lacks_report = False
            return self._after_report(())
        if self.state is State.PREFILLING and failed.source is DECODE and isinstance(failed.error, TransferCancelled):
            # This is no failure if the first token is also the last: the prefill worker then cancels the transfer, and
            # its own message may arrive shortly after the decode worker's.
            self._held = failed
            return Step((), Await((PREFILL,), REPORT_S))
        return self._fail(failed)

    def _time_up(self) -> Step:
        if self.state is State.REPORTING:
            return self._after_report(())
        assert isinstance(self._held, CallFailed)
        return self._fail(self._held)

    def _after_report(self, did: tuple[Instruction, ...]) -> Step:
        """Continue after the prefill worker's report, or without it."""
        if self.state is State.TRANSFERRING:
            return Step(did, AWAIT_DECODE)
        if self.state is State.DECODING:
            return Step(did, self._await_tokens())
        assert isinstance(self._held, NewTokens)
        return self._finish(did, self._held)

    def _fail(self, failed: CallFailed) -> Step:
        error, worker = failed.error, failed.worker
        if isinstance(error, InvalidRequest):  # other workers would reject it, too
            self.state = State.ENDED
            return Step((LEAVE_CALLS,), GiveUp(error))
        if isinstance(error, WorkerDraining):
            return self._leave(worker)
        has_carried, self.carries_images = self.carries_images, self._begun.has_images
        if isinstance(error, ImagesMissing) and self._begun.has_images and not has_carried:
            return self._end_attempt((LEAVE_CALLS, GoBack(), LacksImages(worker)), PLACE)
        assert self._placement is not None
        failure = Failure(worker=worker.info, error=error, placement=self._placement, num_emitted=self._num_emitted)
        self._failures = consecutive(self._failures, failure)
        is_last = is_used_up(self._failures, self._begun.max_attempts)
        did = (LEAVE_CALLS, GoBack(), Failing(worker, error, is_last))
        if is_last:
            self.state = State.ENDED
            return Step(did, GiveUp(given_up(self._failures)))
        self.avoid = to_avoid(self._failures)
        return self._end_attempt(did, PLACE)

    def _leave(self, worker: Worker | None) -> Step:
        return self._end_attempt((LEAVE_CALLS, WorkerLeaves(worker)), PLACE)

    def _end_attempt(self, did: tuple[Instruction, ...], then: Then) -> Step:
        self.num_attempts += 1
        self.state = State.PLACING
        return Step(did, then)

    def _finish(self, did: tuple[Instruction, ...], tokens: NewTokens) -> Step:
        self.num_attempts += 1
        self.state = State.ENDED
        then: Then = END
        if len(tokens.beams) < self._begun.num_beams:
            found = f"the beam search found only {len(tokens.beams)} answers that the request allows"
            then = GiveUp(InvalidRequest(f"n is {self._begun.num_beams}, but {found}; lower n", "n"))
        return Step((*did, *self._emitted(tokens), LEAVE_CALLS), then)

    def _emitted(self, tokens: NewTokens) -> tuple[Instruction, ...]:
        if not (tokens.token_ids or tokens.num_searched or tokens.finish_reason is not None):
            return ()
        self._num_emitted += len(tokens.token_ids)
        return (Emit(tokens),)

    @property
    def _awaits_tokens_alone(self) -> bool:
        return not (self._lacks_report or self.is_moving)

    def _await_tokens(self) -> Await:
        if self._awaits_tokens_alone:
            return AWAIT_DECODE
        sources = (DECODE, *((PREFILL,) if self._lacks_report else ()), *((MIGRATION,) if self.is_moving else ()))
        return Await(sources)
