"""Decides what the next placement of a choice avoids after failed attempts. Pure: failures in, `Avoidance` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster import WorkerInfo
from baton.errors import (
    AdapterUnreadable,
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
"""Number of failed KV transfers of a choice after which its decode worker computes the prompt itself."""
MAX_LOST_DEVICES = 2
"""Number of devices lost in steps of one choice after which the choice counts as the cause and is not tried again."""
PROGRESS_TOKENS = 16
"""Number of new tokens after which the failure count resets. A long answer may outlive several workers. A request that
crashes every worker never gets this far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt of a choice."""

    worker: WorkerInfo
    """The worker whose call failed."""
    error: BatonError
    placement: Placement
    num_emitted: int
    """Number of tokens that the choice had by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoidance:
    """Workers and modes that the next placement of a choice avoids."""

    refused: frozenset[str] = frozenset()
    """Workers that refused the choice: their queue was full, they do not support a requested field, or they cannot read
    its adapter."""
    refusal: Unsupported | AdapterUnreadable | None = None
    """The last refusal for another reason than a full queue."""
    no_sources: frozenset[str] = frozenset()
    """Workers from which no prefix is pulled: sources of failed attempts, and workers that failed to transfer."""
    doubted: frozenset[str] = frozenset()
    """Peers of failed transfers, and both workers of an incompatible pair. A peer may be dead although its stream is
    still open, so it is used only if no other worker is available."""
    kv_transfer: bool = False
    """True after MAX_FAILED_TRANSFERS failed KV transfers: mode `auto` then means aggregated, which needs none but may
    be slower."""


NOTHING = Avoidance()
"""The Avoidance of a choice that has not failed."""


def consecutive(failures: Sequence[Failure], latest: Failure) -> tuple[Failure, ...]:
    """Return the failures since the choice last made progress, with the latest one."""
    num_emitted = failures[-1].num_emitted if failures else 0
    if latest.num_emitted - num_emitted >= PROGRESS_TOKENS:
        return (latest,)
    return (*failures, latest)


def is_used_up(failures: Sequence[Failure], max_attempts: int) -> bool:
    """Return whether these consecutive failures rule out a further attempt."""
    num_lost = sum(isinstance(failure.error, LostInStep) for failure in failures)
    return len(failures) >= max_attempts or num_lost >= MAX_LOST_DEVICES


def to_avoid(failures: Sequence[Failure]) -> Avoidance:
    """Return what the next placement avoids after these consecutive failures."""
    refused: set[str] = set()
    no_sources: set[str] = set()
    doubted: set[str] = set()
    refusal: Unsupported | AdapterUnreadable | None = None
    num_failed_transfers = 0
    for failure in failures:
        error, placement = failure.error, failure.placement
        if isinstance(error, Overloaded | Unsupported | AdapterUnreadable):
            refused.add(failure.worker.id)  # it refused before it pulled, so the source is not suspect
            refusal = refusal if isinstance(error, Overloaded) else error
            continue
        no_sources.add(placement.source)
        if isinstance(error, TransferError):
            # A refused transfer means that the two workers are incompatible: they stay so, and one failure suffices.
            num_failed_transfers += MAX_FAILED_TRANSFERS if isinstance(error, TransferRefused) else 1
            no_sources.add(placement.prefill_worker)
            pair = {placement.prefill_worker, placement.decode_worker}
            if isinstance(error, TransferRefused):  # either one may be incompatible with the other workers, too
                doubted |= pair
            elif not isinstance(error, TransferCorrupted):  # corrupted data shows that the peer is alive
                doubted |= pair - {failure.worker.id}
    return Avoidance(
        refused=frozenset(refused),
        refusal=refusal,
        no_sources=frozenset(no_sources),
        doubted=frozenset(doubted),
        kv_transfer=num_failed_transfers >= MAX_FAILED_TRANSFERS,
    )


def given_up(failures: Sequence[Failure]) -> BatonError:
    """Return the error for the client after the last attempt: of the last failure's type, listing all failures."""
    error = failures[-1].error
    if len(failures) == 1 or isinstance(error, Overloaded):
        return error
    reasons = "; ".join(f"{failure.worker.label}: {failure.error}" for failure in failures)
    return type(error)(f"{len(failures)} placements failed: {reasons}")
