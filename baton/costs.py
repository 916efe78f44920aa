"""Cost model of an engine step, in seconds: workers plan with it, routers predict with it, the arena simulates it.

A step computes T new tokens, each of which attends to those before it, and reads the KV of its sequences:

    s_overhead + max(s_weights, s_per_token * T + s_per_pair * pairs) + s_per_sequence * B + s_per_kv_token * context

B sequences decode over `context` tokens. The weights are read while the matrices are multiplied, so the longer of the
two counts (the roofline of Williams, Waterman and Patterson, 2009). Attention of decoding sequences is bound by reading
their KV, and is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from baton.fit import CostFit

ITL_TARGET = 0.9
"""Fraction of the decoding sequences' ITL objective for which steps are planned, since predictions err."""
LEAST_SHARE = 8
"""Prompts get at least 1 / LEAST_SHARE of a step's tokens; a batch that breaks its objective would starve them."""
ALIKE = 1.25
"""Workers whose steps differ by at most this factor are of one kind."""
FASTEST = 8
"""Largest accepted speed of a worker, as a multiple of the median's.

A worker that reports almost no costs would otherwise get all requests. The factor spans accelerators that may serve in
one cluster: an H100 (989 TFLOPS of dense bfloat16, 3.35 TB/s) computes 7.9 times as fast as an A10 (125 TFLOPS, 0.6
TB/s), and reads its memory 5.6 times as fast.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Cost model of one worker."""

    s_overhead: float
    s_per_token: float
    s_per_pair: float
    s_weights: float
    s_per_sequence: float
    s_per_kv_token: float

    def step_s(self, num_new: int, num_pairs: int, num_decoding: int, num_kv_tokens: int) -> float:
        """Return the duration of one step.

        Args:
            num_new: tokens to compute, including one for each sequence that decodes.
            num_pairs: for each token of a prompt the tokens that it attends to, summed.
            num_decoding: sequences that decode.
            num_kv_tokens: their context, summed.
        """
        computing_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return self.s_overhead + max(self.s_weights, computing_s) + self.decoding_s(num_decoding, num_kv_tokens)

    def decoding_s(self, num_decoding: int, num_kv_tokens: int) -> float:
        """Return the time that the decoding sequences add to a step."""
        return self.s_per_sequence * num_decoding + self.s_per_kv_token * num_kv_tokens

    def decode_step_s(self, num_decoding: int, num_kv_tokens: int) -> float:
        """Return the duration of a step in which all sequences decode."""
        computing_s = self.s_per_token * num_decoding
        return (
            self.s_overhead
            + (max(self.s_weights, computing_s))
            + self.s_per_sequence * num_decoding
            + self.s_per_kv_token * num_kv_tokens
        )

    def prefill_s(self, num_tokens: int, num_cached_tokens: int, chunk_tokens: int) -> float:
        """Return the prefill time of a prompt alone on an idle worker, in chunks."""
        num_new = num_tokens - num_cached_tokens
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // chunk_tokens)
        num_pairs = num_new * (num_cached_tokens + num_tokens) // 2
        computing_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return num_steps * self.s_overhead + max(computing_s, num_steps * self.s_weights)

    def computing_room_s(self, step_s: float, num_decoding: int, num_kv_tokens: int) -> float:
        """Return how long prompts may compute in a step of `step_s`.

        Time that overlaps with reading the weights is free.
        """
        room_s = step_s - self.s_overhead - self.decoding_s(num_decoding, num_kv_tokens)
        return max(room_s, self.s_weights) - self.s_per_token * num_decoding

    def tokens_within(self, computing_s: float, num_context_tokens: int, at_most: int) -> int:
        """Return how many tokens of a prompt, after its first `num_context_tokens`, can be computed in this time."""
        s_per_token = self.s_per_token + self.s_per_pair * (num_context_tokens + at_most / 2)
        return min(at_most, max(0, int(computing_s / s_per_token))) if s_per_token > 0 else at_most


PRIOR = StepCosts(
    s_overhead=5e-4,
    s_per_token=1e-4,
    s_per_pair=2e-9,
    s_weights=1e-2,
    s_per_sequence=1e-4,
    s_per_kv_token=2e-8,
)
"""Assumed costs before any measurement: a model of tens of billions of parameters on a server's GPUs."""


_NAMES = tuple(f.name for f in fields(StepCosts))


def typical(costs: Collection[StepCosts], otherwise: StepCosts = PRIOR) -> StepCosts:
    """Return the median of each cost over the workers that have measured it.

    Args:
        otherwise: costs that none of them has measured.
    """
    values = {}
    for name in _NAMES:
        prior = getattr(PRIOR, name)
        measured = [value for one in costs if (value := getattr(one, name)) != prior]
        values[name] = statistics.median(measured) if measured else getattr(otherwise, name)
    return StepCosts(**values)


def least_of(costs: Collection[StepCosts]) -> StepCosts:
    """Return the lower bound of any worker's costs: the median of the measured values of each cost, over FASTEST.

    A cost that no worker has measured has the bound 0. It is the upper median, so that one of two workers cannot lower
    it.
    """
    values = {}
    for name in _NAMES:
        prior = getattr(PRIOR, name)
        measured = [value for one in costs if (value := getattr(one, name)) != prior]
        values[name] = statistics.median_high(measured) / FASTEST if measured else 0.0
    return StepCosts(**values)


def lifted(costs: StepCosts, least: StepCosts) -> StepCosts:
    """Return the costs; each measured cost below the lower bound is raised to it."""
    raised = {
        name: bound
        for name in _NAMES
        if (value := getattr(costs, name)) < (bound := getattr(least, name)) and value != getattr(PRIOR, name)
    }
    return replace(costs, **raised) if raised else costs


def believed(costs: StepCosts, usual: StepCosts) -> StepCosts:
    """Return the costs that a router assumes for a worker: the usual ones unless its measured costs differ much.

    A worker that seems slower than it is would get no requests while others are idle: its cache would stay empty and
    its costs unchanged. Fits of like workers differ by the other load of their machines, so small differences are
    ignored. Costs that the worker has not measured are the usual ones.
    """
    own = {name: value for name in _NAMES if (value := getattr(costs, name)) != getattr(PRIOR, name)}
    completed = replace(usual, **own)
    if _are_alike(completed.prefill_s(1000, 0, 1000), usual.prefill_s(1000, 0, 1000)) and _are_alike(
        completed.decode_step_s(8, 8000), usual.decode_step_s(8, 8000)
    ):
        return usual
    return completed


def _are_alike(one_s: float, other_s: float) -> bool:
    return one_s <= ALIKE * other_s and other_s <= ALIKE * one_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Size of a step; see `StepCosts.step_s`."""

    num_new: int = 0
    num_pairs: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_drafts: int = 0
    """Drafts that are checked, in addition to the new tokens; see `StepPart.num_drafts`."""

    def expected_s(self, costs: StepCosts) -> float:
        """Return the time of a step of this size under given step costs."""
        return costs.step_s(self.num_new - self.num_decoding, self.num_pairs, self.num_decoding, self.num_kv_tokens)


class StepFit:
    """Step costs that fit the steps so far. It learns only from sizes and times, of any engine.

    Two linear models are fitted. Steps in which all sequences decode give the cost of decoding: a constant (overhead
    and weights), a cost per sequence and a cost per token of context. Steps with a prompt, less the decoding in them,
    give the cost of prefill: the overhead, a cost per token and a cost per pair of tokens of which one attends to the
    other. Small prompts take no longer than reading the weights, so they do not count for prefill.

    Nothing is learned from steps with drafts: their time is measured against these costs (`DraftPrice`).
    """

    def __init__(self, prior: StepCosts = PRIOR) -> None:
        self._decoding = CostFit((prior.s_overhead + prior.s_weights, prior.s_per_sequence, prior.s_per_kv_token))
        self._computing = CostFit((prior.s_overhead, prior.s_per_token, prior.s_per_pair))
        self.costs = prior

    def observe(self, size: StepSize, took_s: float) -> None:
        """Learn from one step."""
        if size.num_drafts:
            return
        if size.num_new == size.num_decoding:
            self._decoding.observe((1.0, size.num_decoding, size.num_kv_tokens), took_s)
        else:
            costs = self.costs
            computing_s = costs.s_per_token * size.num_new + costs.s_per_pair * size.num_pairs
            rest_s = took_s - costs.decoding_s(size.num_decoding, size.num_kv_tokens)
            if computing_s < costs.s_weights and self._decoding.num_observations and self._computing.num_observations:
                return
            self._computing.observe((1.0, size.num_new, size.num_pairs), rest_s)
        s_decoding, s_per_sequence, s_per_kv_token = self._decoding.coefficients
        s_overhead, s_per_token, s_per_pair = self._computing.coefficients
        if self._decoding.num_observations:
            s_overhead = min(s_overhead, s_decoding)
        else:
            s_decoding = s_overhead  # without a decoding-only step the time of reading the weights is not observed
        self.costs = StepCosts(
            s_overhead=s_overhead,
            s_per_token=s_per_token,
            s_per_pair=s_per_pair,
            s_weights=s_decoding - s_overhead,
            s_per_sequence=s_per_sequence,
            s_per_kv_token=s_per_kv_token,
        )
