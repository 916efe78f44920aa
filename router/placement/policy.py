"""Placement: chooses the workers that are predicted to complete a request's answer soonest. All costs are in seconds.

The time to the first token on the worker that computes the prompt is

    max(wait for earlier prompts, wait for room to decode) + pulling a prefix + computing the rest

A prefix is pulled from the worker that holds the longest one if that is faster than computing it. Each worker fits the
costs of its steps itself (`baton.costs`), and the router fits the costs of KV transfers (`Prices`). A decode worker
computes a prompt between the steps of the sequences that it decodes, so the prompt takes longer, and so do they. A KV
transfer costs the part that computing did not hide. The remaining tokens take as long as the decode worker's steps, and
a worker whose steps would miss the objective ranks after all others.

A prefix that every worker holds (a shared system prompt) speeds up all of them equally, so only a longer overlap than
the others' attracts a request. It does so only until the owner is busier by more than the overlap saves. Then another
worker pulls the prefix, and a hot prefix spreads. Naive longest-prefix routing would send a whole trace with one system
prompt to a single worker.

A prompt that is computed on another worker than its owner, with or without a pull, takes room in a second cache, which
later prompts lack. This costs the request itself nothing, so it is an extra penalty for each token that the chosen
worker lacks and another one holds. A worker that must compute images which another one has decoded needs their bytes
and the time to decode them, which is added too. Rendezvous hashing of the prompt's first blocks breaks ties, so a
session tends to stay on the same workers even if no cached prefix is known.

A worker that does not hold the request's adapter loads it first. A decode worker does so before it reserves room, so in
disaggregated mode both times count.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType

import xxhash

from baton.cluster import Role
from baton.costs import ITL_TARGET, LEAST_SHARE, PRIOR, StepCosts
from baton.fit import CostFit

SESSION_BLOCKS = 2
"""Number of leading blocks that identify a session: the first one alone is often a shared system prompt."""
EQUAL_SHARE = 0.01
"""Costs that differ by less than this share count as equal: predictions are not more exact."""

LARGE_POOL = 32
"""Number of workers beyond which only a shortlist is evaluated."""
SHORTLIST = 8
"""A worker is on the shortlist if fewer than this many others hold as much of the prompt and have less load."""
BREACH = 10.0
"""Penalty in seconds for each second by which a step exceeds the objective."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of KV transfers: seconds per transfer, and seconds per token."""

    pull_s: float = 2e-3
    pull_s_per_token: float = 5e-6
    exposed_s: float = 2e-3
    """Part of a KV transfer after the first token."""
    exposed_s_per_token: float = 1e-7


DEFAULT_PRICES = Prices()


class PriceFit:
    """Fit of transfer costs over all workers: a single pair of workers seldom has enough transfers."""

    def __init__(self, prior: Prices = DEFAULT_PRICES) -> None:
        self._pull = CostFit((prior.pull_s, prior.pull_s_per_token))
        self._exposed = CostFit((prior.exposed_s, prior.exposed_s_per_token))
        self.prices = prior

    def pulled(self, num_tokens: int, took_s: float) -> None:
        """Learn from the duration of a pull."""
        self._pull.observe((1.0, num_tokens), took_s)
        self._update()

    def transferred(self, num_tokens: int, exposed_s: float) -> None:
        """Learn from the time between the first token and the arrival of a prompt's KV."""
        self._exposed.observe((1.0, num_tokens), exposed_s)
        self._update()

    def _update(self) -> None:
        self.prices = Prices(*self._pull.coefficients, *self._exposed.coefficients)


class Mode(StrEnum):
    """Division of a request's work between workers."""

    DISAGGREGATED = "disaggregated"
    """A prefill worker computes the prompt and transfers its KV to a decode worker."""
    AGGREGATED = "aggregated"
    """The decode worker computes the prompt itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCosts:
    """Costs of a prompt's images on workers that have to get and to decode them, in seconds."""

    total_s: float
    saved_s: Mapping[str, float]
    """Worker -> the part of the costs for the images whose pixels it holds."""
    end: int
    """End of the last image. A worker that caches so many tokens needs no image."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sequence as placement sees it. `hash_block_keys` are for permits to pull."""

    num_tokens: int
    block_keys: tuple[bytes, ...]
    num_expected_tokens: int = 128
    hash_block_keys: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A worker that could serve the request, in its current state as the router knows it."""

    worker_id: str
    role: Role
    num_cached_tokens: int = 0
    """Number of leading prompt tokens that it is believed to hold."""
    wait_s: float = 0.0
    """Time to compute the prompts ahead of this one if the worker does nothing else."""
    recent_s: float = 0.0
    """Recent prompt computing, in seconds, exponentially decayed."""
    num_decoding: int = 0
    num_kv_tokens: int = 0
    """Total context of the sequences that it decodes or will decode."""
    room_tokens: int = 10**9
    """Tokens of KV that fit without waiting for other sequences to finish; cached prefixes count as free."""
    freed_tokens_per_s: float = math.inf
    """Rate at which finished sequences free KV."""
    costs: StepCosts = PRIOR
    chunk_tokens: int = 2048
    """Maximum number of prompt tokens in one step."""
    takes_work: bool = True
    """True if it takes new work; otherwise it is only a source of prefixes."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objectives of a request."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    """Mean time between tokens."""
    e2e_s: float = math.inf
    """Time to the last token. Placement ignores it."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of costs other than this request's own latency."""

    affinity: float = 1.0
    """Penalty per token that another worker has cached and this one has not, as a multiple of the time to compute that
    token."""
    interference: float = 0.02
    """Penalty per sequence that the worker decodes while it computes the prompt, as a share of the time to compute the
    prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted times of one request on the chosen workers, in seconds."""

    wait_s: float
    """Wait for the prompts ahead of this one."""
    room_s: float
    """Time until the decode worker has room."""
    pull_s: float
    compute_s: float
    exposed_s: float
    """Part of the KV transfer after the first token."""
    step_s: float
    """Time between two tokens."""
    load_s: float = 0.0
    """Time to load the adapter, on both workers one after the other."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return max(self.wait_s, self.room_s) + self.load_s + self.pull_s + self.compute_s


@dataclass(slots=True)
class Terms:
    """Predicted costs of one request on one candidate, in seconds; see `Prediction`."""

    worker_id: str
    role: Role
    num_cached_tokens: int
    recent_s: float
    wait_s: float
    num_pulled: int
    pull_s: float
    compute_s: float
    first_s: float
    """Time to the first token if this candidate computes the prompt, plus penalties."""
    room_s: float = 0.0
    exposed_s: float = 0.0
    step_s: float = 0.0
    answer_s: float = 0.0
    """Time for the tokens after the first one."""
    load_s: float = 0.0
    """Time to load the adapter; a part of `first_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The chosen workers of a request, with the prediction for them."""

    mode: Mode
    decode_worker: str
    prefill_worker: str = ""
    source: str = ""
    """Worker from which a prefix is pulled before the prompt is computed; empty: none."""
    source_tokens: int = 0
    """Number of leading prompt tokens that the source is believed to hold."""
    prediction: Prediction = Prediction(wait_s=0.0, room_s=0.0, pull_s=0.0, compute_s=0.0, exposed_s=0.0, step_s=0.0)
    considered: tuple[Terms, ...] = field(default=(), compare=False, repr=False)
    """All candidates with their costs."""

    @property
    def computes(self) -> str:
        """Id of the worker that computes the prompt."""
        return self.prefill_worker or self.decode_worker


NO_OBJECTIVE, DEFAULT_WEIGHTS = Objective(), Weights()
NO_LOADS: Mapping[str, float] = MappingProxyType({})


def place(
    prompt: Prompt,
    candidates: Sequence[Candidate],
    mode: str = "auto",
    *,
    objective: Objective = NO_OBJECTIVE,
    weights: Weights = DEFAULT_WEIGHTS,
    prices: Prices = DEFAULT_PRICES,
    pull_above_tokens: int = 64,
    not_from: Collection[str] = (),
    loads_s: Mapping[str, float] = NO_LOADS,
    images: ImageCosts | None = None,
    rotates: bool = True,
) -> Placement | None:
    """Choose the workers of a request, and the source of its prefix.

    Args:
        mode: "disaggregated", "aggregated", or "auto", which takes the one that is predicted to be faster.
        pull_above_tokens: number of tokens (1 or more) by which a pulled prefix exceeds the computing worker's own.
        not_from: ids of workers that must not be a source.
        loads_s: workers that would have to load the adapter, with the seconds that it takes.
        images: costs of the prompt's images; None: it has none.
        rotates: whether sessions begin with different ones of equal candidates; False: the order sees to that.

    Returns:
        None if no candidate fits the mode.
    """
    if len(candidates) > LARGE_POOL:
        holders = [c for c in candidates if images is not None and c.worker_id in images.saved_s]
        candidates = _shortlist(candidates, session_of(prompt) if rotates else 0, loads_s)
        candidates += [candidate for candidate in holders if candidate not in candidates]
    costs = _Costs(
        prompt,
        candidates,
        objective=objective,
        weights=weights,
        prices=prices,
        pull_above_tokens=pull_above_tokens,
        not_from=not_from,
        images=images,
    )
    pools = {role: [c for c in candidates if c.role is role and c.takes_work] for role in Role}
    decodes = costs.on_decode(pools[Role.DECODE])
    prefills = costs.on_prefill(pools[Role.PREFILL]) if mode != Mode.AGGREGATED else []
    considered = (*prefills, *decodes)
    _load_first(considered, loads_s)
    if not decodes or (mode == Mode.DISAGGREGATED and not prefills):
        return None
    if prefills:
        prefill = costs.least(prefills, [terms.first_s for terms in prefills])
        decode = costs.least(decodes, [t.room_s + t.load_s + t.exposed_s + t.answer_s for t in decodes])
        split_s = max(prefill.first_s, decode.room_s + decode.load_s + prefill.first_s - prefill.wait_s)
        split_s += decode.exposed_s + decode.answer_s
        if mode == Mode.DISAGGREGATED:
            return costs.placement(Mode.DISAGGREGATED, prefill, decode, considered)
    both = costs.least(decodes, [terms.first_s + terms.answer_s for terms in decodes])
    # At equal costs prefer the disaggregated mode: the prompt then does not delay the sequences on the decode worker.
    if prefills and split_s <= both.first_s + both.answer_s + weights.interference * both.compute_s:
        return costs.placement(Mode.DISAGGREGATED, prefill, decode, considered)
    return costs.placement(Mode.AGGREGATED, both, both, considered)


NUM_CACHED_TOKENS, WAIT_S, NUM_KV_TOKENS = map(attrgetter, ("num_cached_tokens", "wait_s", "num_kv_tokens"))


def _load_first(found: Iterable[Terms], loads_s: Mapping[str, float]) -> None:
    """Add the time to load the request's adapter to the costs of the candidates that do not hold it."""
    for terms in found if loads_s else ():
        terms.load_s = loads_s.get(terms.worker_id, 0.0)
        terms.first_s += terms.load_s


def _shortlist(
    candidates: Sequence[Candidate], session: int, loads_s: Mapping[str, float] = NO_LOADS
) -> list[Candidate]:
    """Return the candidates without those that SHORTLIST others of their role dominate.

    Workers that must load the request's adapter do not dominate those that hold it, and are considered separately.

    A worker dominates another one if it holds at least as much of the prompt and has less load. The cost falls with the
    cached prefix and rises with the load, so among workers of one speed a dominated worker never costs less. A decode
    worker has two loads, prompts and decoding. Each is considered separately, so a worker that is second best in both
    may be missed.
    """
    chosen: dict[str, Candidate] = {}
    for role in Role:
        pool = [candidate for candidate in candidates if candidate.role is role and candidate.takes_work]
        begin = session % max(1, len(pool))  # different sessions get different ones of several equal workers
        pool = pool[begin:] + pool[:begin]
        alike = [pool]
        if loads_s:
            alike = [[c for c in pool if (c.worker_id in loads_s) is must_load] for must_load in (False, True)]
        for each in alike:
            picked = _not_outdone(each, WAIT_S)
            if role is Role.DECODE:
                picked += _not_outdone(each, NUM_KV_TOKENS)
            chosen |= {candidate.worker_id: candidate for candidate in picked}
    return [*chosen.values(), *(candidate for candidate in candidates if not candidate.takes_work)]


def _not_outdone(pool: Sequence[Candidate], to_do: Callable[[Candidate], float]) -> list[Candidate]:
    """Return the candidates that fewer than SHORTLIST others dominate; of equal candidates, the first ones."""
    found: list[Candidate] = []
    least: list[float] = []
    """Loads of the SHORTLIST least loaded candidates found so far, ascending."""
    for candidate in sorted(sorted(pool, key=to_do), key=NUM_CACHED_TOKENS, reverse=True):
        load = to_do(candidate)
        if len(least) < SHORTLIST or load < least[-1]:
            found.append(candidate)
            bisect.insort(least, load)
            del least[SHORTLIST:]
    return found


def session_of(prompt: Prompt) -> int:
    """Return the number of a prompt's session, below 2**64: a hash of its first blocks."""
    return xxhash.xxh64_intdigest(b"".join(prompt.block_keys[:SESSION_BLOCKS]))


class _Costs:
    """Costs of one request on each candidate.

    The loops run for every request and every worker, so they are plain arithmetic on local names.
    """

    def __init__(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        *,
        objective: Objective,
        weights: Weights,
        prices: Prices,
        pull_above_tokens: int,
        not_from: Collection[str],
        images: ImageCosts | None = None,
    ) -> None:
        self._prompt = prompt
        self._images = images
        self._itl_s = objective.itl_s
        self._weights = weights
        self._prices = prices
        self._pull = prices.pull_s, prices.pull_s_per_token
        self._pull_above = pull_above_tokens
        self._session = session_of(prompt)
        self._sources = [c for c in candidates if c.num_cached_tokens and c.worker_id not in not_from]
        self._longest = max((c.num_cached_tokens for c in self._sources), default=0)

    def on_prefill(self, pool: Sequence[Candidate]) -> list[Terms]:
        """Return the costs of computing the prompt on workers that do not decode."""
        num_tokens, longest, pull_above = self._prompt.num_tokens, self._longest, self._pull_above
        affinity, pull_s_at_least, pull_s_per_token = self._weights.affinity, *self._pull
        found = []
        for c in pool:
            costs, held, wait_s = c.costs, c.num_cached_tokens, c.wait_s
            num_pulled, pull_s, extra_s, missing = 0, 0.0, 0.0, longest - held
            if missing > 0:
                extra_s = affinity * missing * costs.s_per_token
                if missing >= pull_above:
                    compute_s_per_token = costs.s_per_token + costs.s_per_pair * (held + longest) / 2
                    pull_s = pull_s_at_least + pull_s_per_token * missing
                    if pull_s < compute_s_per_token * missing:
                        num_pulled = missing
                    else:
                        pull_s = 0.0
            compute_s = costs.prefill_s(num_tokens, held + num_pulled, c.chunk_tokens)
            first_s = wait_s + pull_s + compute_s + extra_s
            found.append(Terms(c.worker_id, c.role, held, c.recent_s, wait_s, num_pulled, pull_s, compute_s, first_s))
        if (images := self._images) is not None:
            for terms in found:
                if terms.num_cached_tokens + terms.num_pulled < images.end:
                    terms.first_s += max(0.0, images.total_s - images.saved_s.get(terms.worker_id, 0.0))
        return found

    def on_decode(self, pool: Sequence[Candidate]) -> list[Terms]:
        """Return the costs of computing the prompt on decode workers, and of decoding the answer there."""
        prompt, prices, interference, itl_s = self._prompt, self._prices, self._weights.interference, self._itl_s
        num_tokens, num_expected = prompt.num_tokens, prompt.num_expected_tokens
        found = self.on_prefill(pool)
        for c, terms in zip(pool, found, strict=True):
            costs, num_decoding, num_missing = c.costs, c.num_decoding, num_tokens - c.num_cached_tokens
            lacking = num_missing + num_expected - c.room_tokens
            if lacking > 0:
                terms.room_s = lacking / max(c.freed_tokens_per_s, 1.0)
            alone_s, extra_s = terms.compute_s, terms.first_s - terms.wait_s - terms.compute_s
            if num_decoding:
                # Prompts share steps with decoding sequences. Their chunks are small enough to keep these within their
                # objective.
                between_s = costs.s_overhead + costs.decoding_s(num_decoding, c.num_kv_tokens)
                chunk_s = costs.s_per_token * c.chunk_tokens
                chunk_s = min(chunk_s, max(ITL_TARGET * itl_s - between_s, chunk_s / LEAST_SHARE))
                stretch = 1.0 + between_s / chunk_s if chunk_s > 0 else 1.0
                terms.wait_s *= stretch
                terms.compute_s *= stretch
                extra_s += interference * num_decoding * alone_s
            terms.first_s = max(terms.wait_s, terms.room_s) + terms.compute_s + extra_s
            terms.exposed_s = prices.exposed_s + prices.exposed_s_per_token * num_missing
            terms.step_s = step_s = costs.decode_step_s(num_decoding + 1, c.num_kv_tokens + num_tokens)
            # Steps that exceed the objective are penalized, because their tokens are late.
            breach_s = step_s - itl_s
            terms.answer_s = num_expected * (step_s + BREACH * breach_s if breach_s > 0 else step_s)
        return found

    def least(self, pool: Sequence[Terms], costs: Sequence[float]) -> Terms:
        """Return the cheapest candidate, by the costs of each.

        Among equally cheap ones, rendezvous hashing picks two for the session, and the one with less recent computing
        wins (the power of two choices: Mitzenmacher, 2001).
        """
        limit = min(costs) * (1 + EQUAL_SHARE)
        equal = [terms for terms, value in zip(pool, costs, strict=True) if value <= limit]
        if len(equal) == 1:
            return equal[0]
        equal.sort(key=lambda terms: self._tie_break(terms.worker_id))
        return min(equal[:2], key=lambda terms: terms.recent_s)

    def placement(self, mode: Mode, computes: Terms, decodes: Terms, considered: tuple[Terms, ...]) -> Placement:
        prediction = Prediction(
            wait_s=computes.wait_s,
            room_s=decodes.room_s,
            pull_s=computes.pull_s,
            compute_s=computes.compute_s,
            exposed_s=decodes.exposed_s if mode is Mode.DISAGGREGATED else 0.0,
            step_s=decodes.step_s,
            load_s=computes.load_s + (decodes.load_s if mode is Mode.DISAGGREGATED else 0.0),
        )
        prefill_worker = computes.worker_id if mode is Mode.DISAGGREGATED else ""
        source, num_tokens = "", 0
        if computes.num_pulled:
            source, num_tokens = self._owner().worker_id, self._longest
        return Placement(
            mode=mode,
            decode_worker=decodes.worker_id,
            prefill_worker=prefill_worker,
            source=source,
            source_tokens=num_tokens,
            prediction=prediction,
            considered=considered,
        )

    def _owner(self) -> Candidate:
        """Return the source of a prefix: the least loaded worker that holds the longest one."""
        owners = [c for c in self._sources if c.num_cached_tokens == self._longest]
        least = min((c.wait_s, c.num_kv_tokens) for c in owners)
        idle = [c for c in owners if (c.wait_s, c.num_kv_tokens) == least]
        return min(idle, key=lambda c: self._tie_break(c.worker_id))

    def _tie_break(self, worker_id: str) -> int:
        """Return the rank of a worker by rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
        return xxhash.xxh64_intdigest(worker_id.encode(), self._session)
