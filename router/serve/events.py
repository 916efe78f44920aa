"""Time line of a choice, which `baton status --explain` and the page show."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from baton.cluster import Role, WorkerInfo, with_role
from baton.errors import BatonError, InvalidRequest, Unsupported
from router.placement import Mode, Placement

MOST_EVENTS = 40
"""Maximum number of events in one log; beyond it, events in the middle are dropped."""
SLOW_PLACEMENT_S = 0.01
"""A placement that takes longer counts as a wait for a worker, and its text says so."""


class EventKind(StrEnum):
    """Kinds of events, in the order of a request without failures."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    """The request is valid, within its tenant's limits, and tokenized."""
    PLACED = "placed"
    ROOM = "room"
    """The decode worker has room."""
    COMPUTED = "computed"
    """The first token has come from the worker that computed the prompt."""
    FIRST_TOKEN = "first_token"
    """The first token has left for the client."""
    TRANSFERRED = "transferred"
    FAILED = "failed"
    """A worker failed or refused the call."""
    IMAGES = "images"
    """The worker that computes the prompt needs the bytes of its images."""
    LEAVING = "leaving"
    """A worker leaves its role before it has computed anything of the choice."""
    MOVED = "moved"
    """Another worker has the KV and continues."""
    FINISHED = "finished"
    """The choice is complete."""
    ENDED = "ended"


class LifeEvent(NamedTuple):
    """One event, with its time on the router's monotonic clock."""

    at_s: float
    what: EventKind
    text: str
    attempt: int = 0
    worker: str = ""


@dataclass(slots=True)
class EventLog:
    """The first and the latest events of one choice or request."""

    events: list[LifeEvent] = field(default_factory=list)
    num_left_out: int = 0

    def note(self, at_s: float, what: EventKind, text: str, attempt: int = 0, worker: str = "") -> None:
        """Add an event; if the log is full, drop one in the middle."""
        self.events.append(LifeEvent(at_s, what, text, attempt, worker))
        if len(self.events) > MOST_EVENTS:
            del self.events[MOST_EVENTS // 2]
            self.num_left_out += 1


def placed_text(placement: Placement, waited_s: float) -> str:
    """Describe a placement, and the wait for a worker if there was one."""
    by_role = {Role.PREFILL: placement.prefill_worker, Role.DECODE: placement.decode_worker}
    workers = " -> ".join(with_role(worker_id, role) for role, worker_id in by_role.items() if worker_id)
    text = f"placed: {'disaggregated' if placement.mode is Mode.DISAGGREGATED else 'aggregated'} on {workers}"
    if placement.source:
        text += f", pulls {placement.source_tokens} tokens from {placement.source}"
    text += f"; first token predicted in {placement.prediction.ttft_s:.3f} s"
    return text if waited_s < SLOW_PLACEMENT_S else f"{text}; waited {waited_s:.3f} s for a suitable worker"


def error_text(error: BaseException) -> str:
    """Describe an error. Its message is left out if it may quote the request."""
    kind = type(error).__name__
    is_ours = isinstance(error, BatonError) and not isinstance(error, InvalidRequest | Unsupported)
    return f"{kind}: {error}" if is_ours else kind


def failed_text(worker: WorkerInfo, error: BatonError, num_emitted: int) -> str:
    """Describe which worker failed, after how many tokens, and why."""
    return f"failed on {worker.label} after {num_emitted} tokens: {error_text(error)}"
