"""Placement: prefix overlap against load, in tokens.

The cost of a worker is the work it must do before this request's first token: the tokens already queued there and the
prompt tokens it does not hold. A prefix that every worker holds (a shared system prompt) lowers all costs alike, so
only the overlap *in excess of the pool's* attracts, and only as far as the owner is not busier by more than it saves.
Naive longest-prefix routing sends a whole trace with one system prompt to a single worker; this does not. Equal costs
are broken by rendezvous hashing of the prompt's first blocks, so that a session stays where it began even when
nobody's cache is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.cluster import Role

SESSION_BLOCKS = 2
"""Leading blocks that tell sessions apart: the first alone is often a shared system prompt."""


class Mode(StrEnum):
    SPLIT = "split"
    """A prefill worker computes the prompt and hands its KV over to a decode worker."""
    AGGREGATED = "aggregated"
    """The decode worker computes the prompt itself."""


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    block_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the request, as the router sees it now."""

    worker_id: str
    role: Role
    load_tokens: int
    """Prompt tokens queued there (prefill), or tokens of the sequences it decodes (decode)."""
    num_cached_tokens: int
    """Leading prompt tokens it is believed to hold."""


@dataclass(frozen=True, slots=True)
class Placement:
    mode: Mode
    decode_worker: str
    prefill_worker: str = ""


def place(
    prompt: Prompt,
    candidates: Sequence[Candidate],
    mode: str = "auto",
    *,
    load_weight: float = 1.0,
    aggregate_below_tokens: int = 0,
) -> Placement | None:
    """Chooses the workers of a request.

    Args:
        mode: "split", "aggregated", or "auto": aggregated when the decode worker lacks fewer than
            `aggregate_below_tokens` prompt tokens (handing over costs more than computing them) or when there is no
            prefill worker.
        load_weight: uncached prompt tokens that one token of load is worth.

    Returns:
        None when no candidate fits the mode.
    """
    session = b"".join(prompt.block_keys[:SESSION_BLOCKS])

    def cheapest(role: Role) -> Candidate | None:
        pool = [c for c in candidates if c.role is role]
        return min(pool, key=lambda c: (_cost(c, prompt, load_weight), _tie_break(session, c)), default=None)

    decode, prefill = cheapest(Role.DECODE), cheapest(Role.PREFILL)
    if decode is None or (prefill is None and mode == Mode.SPLIT):
        return None
    is_short = prompt.num_tokens - decode.num_cached_tokens < aggregate_below_tokens
    if prefill is None or mode == Mode.AGGREGATED or (mode == "auto" and is_short):
        return Placement(Mode.AGGREGATED, decode.worker_id)
    return Placement(Mode.SPLIT, decode.worker_id, prefill.worker_id)


def _cost(candidate: Candidate, prompt: Prompt, load_weight: float) -> float:
    return load_weight * candidate.load_tokens + prompt.num_tokens - candidate.num_cached_tokens


def _tie_break(session: bytes, candidate: Candidate) -> bytes:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
    return hashlib.blake2b(session + candidate.worker_id.encode(), digest_size=8).digest()
