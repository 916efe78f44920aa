"""Placement: prefix overlap against load, in tokens that have to be computed.

The cost of a worker is the work that must be done before this request's first token: the prompt tokens queued there and
not cached, those of this prompt that it does not hold, and, where another worker's cache has more of it, what pulling
that costs instead of computing it. A prefix that every worker holds (a shared system prompt) lowers all costs alike, so
only the overlap *in excess of the pool's* attracts, and only as far as the owner is not busier by more than it saves.
Naive longest-prefix routing sends a whole trace with one system prompt to a single worker; this does not.

A prompt that is computed away from its owner, pulled or not, takes room in a second cache, which later prompts miss.
That costs this request nothing, so it is an extra, for each token that the chosen worker lacks and another one holds.
Equal costs are broken by rendezvous hashing of the prompt's first blocks, so that a session stays where it began even
when nobody's cache is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.cluster import Role
from baton.config import RouterConfig

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
    queued_tokens: int
    """Prompt tokens that it has to compute for others first."""
    active_tokens: int
    """Prompt tokens of the sequences it decodes, or will."""
    num_cached_tokens: int
    """Leading prompt tokens it is believed to hold."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What things cost, in prompt tokens to compute."""

    load: float
    """A prompt token that is queued."""
    active: float
    """A prompt token of a sequence that is decoded beside the computing."""
    pull: float
    """A token that is pulled."""
    affinity: float
    """A token that another worker holds and this one will hold as well: it takes the room of another."""

    @classmethod
    def of(cls, config: RouterConfig) -> Weights:
        return cls(config.load_weight, config.active_weight, config.pull_weight, config.affinity_weight)


DEFAULT_WEIGHTS = Weights.of(RouterConfig())


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
    weights: Weights = DEFAULT_WEIGHTS,
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
        pull_above_tokens: the source is whoever holds the longest prefix, where that is at least so many tokens (1 or
            more) longer than that of the worker which computes; of several, the one with the least to do.
        not_from: workers that are no source.

    Returns:
        None when no candidate fits the mode.
    """
    session = b"".join(prompt.block_keys[:SESSION_BLOCKS])
    sources = [c for c in candidates if c.worker_id not in not_from]
    longest = max((c.num_cached_tokens for c in sources), default=0)
    owner = min(
        (c for c in sources if c.num_cached_tokens == longest),
        key=lambda c: (c.queued_tokens + c.active_tokens, _tie_break(session, c)),
        default=None,
    )

    def source_for(computes: Candidate) -> Candidate | None:
        """Never `computes` itself, which does not hold more than it holds."""
        return owner if longest >= computes.num_cached_tokens + pull_above_tokens else None

    def to_first_token(candidate: Candidate) -> float:
        """Of a worker that computes the prompt."""
        lacks = max(0, longest - candidate.num_cached_tokens)
        pulls = lacks if source_for(candidate) else 0
        computes = prompt.num_tokens - candidate.num_cached_tokens - pulls
        return weights.load * candidate.queued_tokens + computes + weights.pull * pulls + weights.affinity * lacks

    def cheapest(role: Role, cost: Callable[[Candidate], float]) -> Candidate | None:
        pool = [c for c in candidates if c.role is role]
        return min(pool, key=lambda c: (cost(c), _tie_break(session, c)), default=None)

    prefill = cheapest(Role.PREFILL, to_first_token)
    both = cheapest(Role.DECODE, lambda c: to_first_token(c) + weights.active * c.active_tokens)
    decode = cheapest(Role.DECODE, lambda c: c.queued_tokens + c.active_tokens - c.num_cached_tokens)
    if both is None or decode is None or (prefill is None and mode == Mode.SPLIT):
        return None
    to_both = source_for(both)
    to_prefill = source_for(prefill) if prefill is not None else None
    num_held = longest if to_both and to_prefill else both.num_cached_tokens
    is_short = prompt.num_tokens - num_held < aggregate_below_tokens
    if prefill is None or mode == Mode.AGGREGATED or (mode == "auto" and is_short):
        return Placement(Mode.AGGREGATED, both.worker_id, "", *_named(to_both))
    return Placement(Mode.SPLIT, decode.worker_id, prefill.worker_id, *_named(to_prefill))


def _named(source: Candidate | None) -> tuple[str, int]:
    return (source.worker_id, source.num_cached_tokens) if source else ("", 0)


def _tie_break(session: bytes, candidate: Candidate) -> bytes:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
    return hashlib.blake2b(session + candidate.worker_id.encode(), digest_size=8).digest()
