"""Placement: prefix overlap against load, in tokens.

The cost of a worker is the work it must do before this request's first token: the tokens already queued there and the
prompt tokens it does not hold. A prefix that every worker holds (a shared system prompt) lowers all costs alike, so
only the overlap *in excess of the pool's* attracts, and only as far as the owner is not busier by more than it saves.
Naive longest-prefix routing sends a whole trace with one system prompt to a single worker; this does not. Equal costs
are broken by rendezvous hashing of the prompt's first blocks, so that a session stays where it began even when
nobody's cache is known.

Whoever computes the prompt may pull a prefix from another worker's cache first. That is no part of the cost yet: the
source is chosen after the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
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
    source: str = ""
    """Worker from which the one that computes the prompt pulls a prefix first; empty: nobody."""
    source_tokens: int = 0
    """Leading prompt tokens that the source is believed to hold."""


def place(
    prompt: Prompt,
    candidates: Sequence[Candidate],
    mode: str = "auto",
    *,
    load_weight: float = 1.0,
    aggregate_below_tokens: int = 0,
    pull_above_tokens: int = 64,
    not_from: Collection[str] = (),
) -> Placement | None:
    """Chooses the workers of a request, and the source of its prefix.

    Args:
        mode: "split", "aggregated", or "auto": aggregated when there is no prefill worker, or when the decode worker
            has fewer than `aggregate_below_tokens` prompt tokens to compute (handing over costs more than that). What
            it would pull counts as computed only where the prefill worker would have to pull as well: then one
            transfer replaces two. A prefix that the prefill worker holds itself is handed over after the first token,
            and pulling the same tokens would delay that token.
        load_weight: uncached prompt tokens that one token of load is worth.
        pull_above_tokens: the source is whoever holds the longest prefix, where that is at least so many tokens (1 or
            more) longer than that of the worker which computes; of several, the one with the least load.
        not_from: workers that are no source.

    Returns:
        None when no candidate fits the mode.
    """
    session = b"".join(prompt.block_keys[:SESSION_BLOCKS])

    def cheapest(role: Role) -> Candidate | None:
        pool = [c for c in candidates if c.role is role]
        return min(pool, key=lambda c: (_cost(c, prompt, load_weight), _tie_break(session, c)), default=None)

    def source_for(computes: Candidate) -> Candidate | None:
        """Never `computes` itself, which does not hold more than it holds."""
        enough = computes.num_cached_tokens + pull_above_tokens
        owners = [c for c in candidates if c.num_cached_tokens >= enough and c.worker_id not in not_from]
        return min(owners, key=lambda c: (-c.num_cached_tokens, c.load_tokens, _tie_break(session, c)), default=None)

    decode, prefill = cheapest(Role.DECODE), cheapest(Role.PREFILL)
    if decode is None or (prefill is None and mode == Mode.SPLIT):
        return None
    to_decode = source_for(decode)
    to_prefill = source_for(prefill) if prefill is not None else None
    num_held = to_decode.num_cached_tokens if to_decode and to_prefill else decode.num_cached_tokens
    is_short = prompt.num_tokens - num_held < aggregate_below_tokens
    if prefill is None or mode == Mode.AGGREGATED or (mode == "auto" and is_short):
        return Placement(Mode.AGGREGATED, decode.worker_id, "", *_named(to_decode))
    return Placement(Mode.SPLIT, decode.worker_id, prefill.worker_id, *_named(to_prefill))


def _named(source: Candidate | None) -> tuple[str, int]:
    return (source.worker_id, source.num_cached_tokens) if source else ("", 0)


def _cost(candidate: Candidate, prompt: Prompt, load_weight: float) -> float:
    return load_weight * candidate.load_tokens + prompt.num_tokens - candidate.num_cached_tokens


def _tie_break(session: bytes, candidate: Candidate) -> bytes:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
    return hashlib.blake2b(session + candidate.worker_id.encode(), digest_size=8).digest()
