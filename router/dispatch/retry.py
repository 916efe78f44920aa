"""What the failed attempts of a choice mean for its next placement. Pure: failures in, what to avoid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster import WorkerInfo
from baton.errors import (
    BatonError,
    LostInStep,
    Overloaded,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    Unsupported,
)
from router.placement import Placement

MAX_FAILED_TRANSFERS = 2
"""Failed KV transfers of a choice before the decode worker computes the prompt itself."""
MAX_LOST_DEVICES = 2
"""Devices that are lost in steps of a choice before it is taken for the cause, and breaks no third one."""
PROGRESS_TOKENS = 16
"""The failure count resets after this many tokens. A long answer may outlive several workers; a request that crashes
every worker never gets this far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt of a choice."""

    worker: WorkerInfo
    """The worker whose call failed."""
    error: BatonError
    placement: Placement
    num_emitted: int
    """Tokens that the choice had by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoidance:
    """What the next placement of a choice avoids."""

    refused: frozenset[str] = frozenset()
    """Workers whose queue was full, or that do not know what they were asked for."""
    unsupported: Unsupported | None = None
    """The last refusal of the second kind."""
    no_sources: frozenset[str] = frozenset()
    """Workers from which no prefix is pulled: sources of failed attempts, and workers that could not transfer."""
    doubted: frozenset[str] = frozenset()
    """The peers of failed transfers, and both of two workers that do not fit each other. A peer may be dead although
    its stream is still open, so it is used only if no other worker is available."""
    kv_transfer: bool = False
    """True if enough KV transfers have failed: `auto` then means the mode in which nothing has to travel, slower
    perhaps.
    """


NOTHING = Avoidance()
"""The Avoidance of a choice that has not failed."""


def consecutive(failures: Sequence[Failure], latest: Failure) -> tuple[Failure, ...]:
    """The failures that count with the latest one: those since the choice last made progress."""
    num_emitted = failures[-1].num_emitted if failures else 0
    if latest.num_emitted - num_emitted >= PROGRESS_TOKENS:
        return (latest,)
    return (*failures, latest)


def is_used_up(failures: Sequence[Failure], max_attempts: int) -> bool:
    """Return whether no further attempt is made after these consecutive failures."""
    num_lost = sum(isinstance(failure.error, LostInStep) for failure in failures)
    return len(failures) >= max_attempts or num_lost >= MAX_LOST_DEVICES


def to_avoid(failures: Sequence[Failure]) -> Avoidance:
    """What the next placement avoids after these consecutive failures."""
    refused: set[str] = set()
    no_sources: set[str] = set()
    doubted: set[str] = set()
    unsupported: Unsupported | None = None
    num_failed_transfers = 0
    for failure in failures:
        error, placement = failure.error, failure.placement
        if isinstance(error, Overloaded | Unsupported):
            refused.add(failure.worker.id)  # before anything was pulled: nothing speaks against the source
            unsupported = error if isinstance(error, Unsupported) else unsupported
            continue
        no_sources.add(placement.source)
        if isinstance(error, TransferError):
            # Workers that do not fit each other will not fit the next time either.
            num_failed_transfers += MAX_FAILED_TRANSFERS if isinstance(error, TransferRefused) else 1
            no_sources.add(placement.prefill_worker)
            pair = {placement.prefill_worker, placement.decode_worker}
            if isinstance(error, TransferRefused):  # one of them may fit no other either, and nobody knows which
                doubted |= pair
            elif not isinstance(error, TransferCorrupted):  # then the other side has answered
                doubted |= pair - {failure.worker.id}
    return Avoidance(
        refused=frozenset(refused),
        unsupported=unsupported,
        no_sources=frozenset(no_sources),
        doubted=frozenset(doubted),
        kv_transfer=num_failed_transfers >= MAX_FAILED_TRANSFERS,
    )


def given_up(failures: Sequence[Failure]) -> BatonError:
    """The error that the client sees when no further attempt is made: the last one's kind, with all that happened."""
    error = failures[-1].error
    if len(failures) == 1 or isinstance(error, Overloaded):
        return error
    reasons = "; ".join(f"{failure.worker.label}: {failure.error}" for failure in failures)
    return type(error)(f"{len(failures)} placements failed: {reasons}")
