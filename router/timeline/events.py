"""What happened to a request: typed events in order. `router.timeline.folds` derives reports from them.

    Timeline            one request: its facts, counts and events
      ChoiceTimeline    one of its choices: the counts and events of its attempts

Times are on the router's monotonic clock. Nothing here quotes the prompt or the answer, so timelines may be kept.

    choice = ChoiceTimeline()
    choice.add(Attempted(at_s=1.0, attempt=0, last_token_s=0.0))
    router.timeline.folds.choice_phases(choice, now_s=2.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from baton.cluster import Role
from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.messages import PrefillReport, Transferred
from baton.sampling import FinishReason
from baton.timelines import RUNNING
from router.admission import Claim
from router.placement import Mode, Placement, Prediction

MOST_EVENTS = 100
"""Maximum number of events of one choice. If there are more, events in the middle are dropped."""
MOST_CHOICES = 8
"""Maximum number of choices of an ended request whose events are kept."""


class Arrived(NamedTuple):
    """The request arrived."""

    at_s: float


class Held(NamedTuple):
    """The model is awake, and has taken the request, which the router held until then."""

    at_s: float
    held_s: float


class Admitted(NamedTuple):
    """The request is valid, within its tenant's limits, and tokenized."""

    at_s: float
    num_prompt_tokens: int


class FirstTokenSent(NamedTuple):
    """The first token has left for the client."""

    at_s: float


class Ended(NamedTuple):
    """The request ended."""

    at_s: float
    status: str
    """How it ended: ok, or why it failed (`baton_requests_total`)."""
    outcome: str
    """A value of `baton.timelines.OUTCOMES`: the status, or the SLO outcome of a request that is ok."""
    blamed_stage: str = ""
    """Stage responsible for a missed objective; empty: none was missed."""
    error_type: str = ""
    error: str = ""
    """Text of `error_text`; empty: no error."""


class Attempted(NamedTuple):
    """An attempt has started: the router looks for workers. Any earlier attempt has ended without an answer."""

    at_s: float
    attempt: int
    last_token_s: float
    """Time of the last token that the client got; 0: none yet."""


class Placed(NamedTuple):
    """The router has chosen workers."""

    at_s: float
    attempt: int
    waited_s: float
    """Time since the start of the attempt."""
    placement: Placement
    prediction: Prediction
    num_expected_tokens: int


class Migrated(NamedTuple):
    """Another decode worker has the KV and continues."""

    at_s: float
    attempt: int
    worker: str


class Refused(NamedTuple):
    """The gate refused the choice, its first token did not come in time, or another tenant preempted it."""

    at_s: float
    reason: str


class Reserved(NamedTuple):
    """The decode worker has room."""

    at_s: float
    attempt: int
    worker: str


class Computed(NamedTuple):
    """The first token has come from the worker that computed the prompt."""

    at_s: float
    attempt: int
    worker: str
    role: Role
    num_emitted: int
    """Tokens of the answer that were already known."""
    report: PrefillReport
    """Without the scores of the prompt."""


class Decoded(NamedTuple):
    """The decode worker's first tokens of an attempt have come, so it has the KV."""

    at_s: float
    attempt: int


class KvTransferred(NamedTuple):
    """The prefill worker has reported the KV transfer."""

    at_s: float
    attempt: int
    worker: str
    """The decode worker."""
    report: Transferred


class Left(NamedTuple):
    """A worker leaves its role before it has computed anything of the choice."""

    at_s: float
    attempt: int
    worker: str
    role: Role


class LackedImages(NamedTuple):
    """The worker that computes the prompt no longer holds its images. The next attempt carries them."""

    at_s: float
    attempt: int
    worker: str
    role: Role


class Failed(NamedTuple):
    """A worker failed or refused the call."""

    at_s: float
    attempt: int
    worker: str
    role: Role
    num_emitted: int
    error: str
    """Text of `error_text`."""


class Finished(NamedTuple):
    """The choice is complete."""

    at_s: float
    num_tokens: int
    """Number of its tokens that the client got from this call."""
    reason: FinishReason


RequestEvent = Arrived | Held | Admitted | FirstTokenSent | Ended
ChoiceEvent = (
    Attempted
    | Placed
    | Migrated
    | Refused
    | Reserved
    | Computed
    | Decoded
    | KvTransferred
    | Left
    | LackedImages
    | Failed
    | Finished
)
E = TypeVar("E", RequestEvent, ChoiceEvent)


@dataclass(slots=True, kw_only=True, eq=False)
class _Log(Generic[E]):
    events: list[E] = field(default_factory=list)
    """The first and the latest events, in order."""
    num_left_out: int = 0

    def add(self, event: E) -> None:
        """Add an event; if there are too many, drop one in the middle."""
        self.events.append(event)
        if len(self.events) > MOST_EVENTS:
            del self.events[MOST_EVENTS // 2]
            self.num_left_out += 1

    @property
    def gap(self) -> int | None:
        """Index of the first event after the dropped ones; None: none was dropped."""
        return MOST_EVENTS // 2 if self.num_left_out else None


@dataclass(slots=True, kw_only=True, eq=False)
class ChoiceTimeline(_Log[ChoiceEvent]):
    """Timeline of one choice."""

    num_seen_tokens: int = 0
    """Leading prompt tokens seen in earlier requests: the prefix hit of an unlimited cache."""
    num_computed: int = 0
    """Tokens that workers have computed for it in this call, including tokens that no client gets. Tokens that are
    computed again after a failure count once."""
    num_sent: int = 0
    """Tokens that the client got from this call."""
    num_delivered: int = 0
    """Tokens that the client had before this call."""
    num_reasoning: int = 0
    """Reasoning tokens among those of this call and those before it."""
    last_token_s: float = 0.0
    """Time of the last token that the client got; 0: none yet."""
    retries: int = 0
    """Failed attempts that were followed by another one."""

    @property
    def placed(self) -> Placed | None:
        """The latest placement; None: there is none."""
        return next((event for event in reversed(self.events) if isinstance(event, Placed)), None)

    @property
    def mode(self) -> str:
        """Mode of the latest placement; empty: there is none."""
        return placed.placement.mode if (placed := self.placed) is not None else ""

    @property
    def prefill_worker(self) -> str:
        """Prefill worker of the latest placement; empty: there is none."""
        return placed.placement.prefill_worker if (placed := self.placed) is not None else ""

    @property
    def decode_worker(self) -> str:
        """The decode worker now, which changes if the choice migrates; empty: there is none."""
        for event in reversed(self.events):
            if isinstance(event, Migrated):
                return event.worker
            if isinstance(event, Placed):
                return event.placement.decode_worker
        return ""

    @property
    def source(self) -> str:
        """Worker from which the latest placement pulls a prefix; empty: none."""
        return placed.placement.source if (placed := self.placed) is not None else ""

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the first attempt found in caches; None: there is no first token yet.

        Later attempts do not count: they find what the first one left behind.
        """
        computed = (event for event in self.events if isinstance(event, Computed) and not event.num_emitted)
        return next((event.report.num_cached_tokens for event in computed), None)

    def drop_candidates(self) -> None:
        """Forget the candidates of the placements, which take most of the memory on a large pool."""
        self.events = [
            event._replace(placement=replace(event.placement, considered=())) if isinstance(event, Placed) else event
            for event in self.events
        ]


@dataclass(slots=True, kw_only=True, eq=False)
class Timeline(_Log[RequestEvent]):
    """Timeline of one request."""

    request_id: str
    """Empty: it has none yet."""
    tenant: str
    model: str
    release: str = ""
    """Release of the model that serves it; empty: it was refused before one was chosen."""
    operation: str
    """chat or text_completion."""
    is_streamed: bool = False
    arrived_s: float
    arrived_ns: int
    """Arrival as Unix time, in nanoseconds."""
    claim: Claim | None = None
    """None: the request is not validated yet, or was not valid."""
    num_prompt_tokens: int = 0
    num_choices: int = 0
    """Number of choices that the client gets."""
    choices: Sequence[ChoiceTimeline] = ()
    """The choices that the client gets."""
    drawn: Sequence[ChoiceTimeline] = ()
    """All choices, including those that the client does not get."""
    is_search: bool = False
    """One beam search draws all choices."""
    comes_at_once: bool = False
    """The best of the drawn choices are selected at the end."""
    num_drawn: int = 0
    """Tokens of all drawn choices."""
    num_sent: int = 0
    """Tokens that the client got from this call, also those of choices that `trim` drops."""
    num_delivered: int = 0
    """Tokens that the client had before this call."""
    first_token_s: float = 0.0
    """Time of the first chunk with a token; 0: there was none."""
    ended_s: float = 0.0
    """Time at which the last chunk was sent, or the request failed; 0: not yet."""

    @property
    def ended(self) -> Ended | None:
        """How it ended; None: it has not."""
        last = self.events[-1]
        return last if isinstance(last, Ended) else None

    @property
    def outcome(self) -> str:
        """A value of `baton.timelines.OUTCOMES`."""
        return ended.outcome if (ended := self.ended) is not None else RUNNING

    @property
    def num_computed(self) -> int:
        """Tokens that workers have computed in this call.

        This includes tokens after a stop string, tokens that moderation held back, and tokens that the client claims to
        have although no router has recorded them.
        """
        return sum(choice.num_computed for choice in self.drawn)

    def ns(self, at_s: float) -> int:
        """Convert a time of the monotonic clock to Unix time, in nanoseconds."""
        return self.arrived_ns + round((at_s - self.arrived_s) * 1e9)

    def trim(self) -> None:
        """Keep the events of MOST_CHOICES choices. The request has ended."""
        self.choices, self.drawn = self.choices[:MOST_CHOICES], ()


def error_text(error: BaseException) -> str:
    """Describe an error. Its message is left out if it may quote the request."""
    kind = type(error).__name__
    is_ours = isinstance(error, BatonError) and not isinstance(error, InvalidRequest | Unsupported)
    return f"{kind}: {error}" if is_ours else kind


def is_disaggregated(placed: Placed) -> bool:
    """Return whether one worker computes the prompt, and another one decodes."""
    return placed.placement.mode is Mode.DISAGGREGATED
