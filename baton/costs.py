"""What a step of an engine takes, in seconds: the model with which workers plan, routers predict and the arena counts.

A step computes T new tokens, each of which attends to those before it, and reads the KV of what its sequences hold:

    s_overhead + max(s_weights, s_per_token * T + s_per_pair * pairs) + s_per_sequence * B + s_per_kv_token * context

where B sequences decode over `context` tokens. The weights are read while the matrices are multiplied, so the longer of
the two counts (the roofline of Williams, Waterman and Patterson, 2009); attention of sequences that decode is bound by
reading their KV, and comes on top.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

ITL_TARGET = 0.9
"""Steps are planned for this share of the ITL objective of the sequences that decode: predictions err."""
LEAST_SHARE = 8
"""Prompts get at least 1 / LEAST_SHARE of a step's tokens, or a batch that breaks its objective would starve them."""
ALIKE = 1.25
"""Workers whose steps differ by no more than this factor are of one kind."""
FASTEST = 8
"""No worker is believed to be faster than the median by more than this factor: one that reports next to no costs would
be given everything. The factor spans accelerators that may serve side by side: an H100 (989 TFLOPS of dense bfloat16,
3.35 TB/s) computes 7.9 times as fast as an A10 (125 TFLOPS, 0.6 TB/s), and reads its memory 5.6 times as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One worker's."""

    s_overhead: float
    s_per_token: float
    s_per_pair: float
    s_weights: float
    s_per_sequence: float
    s_per_kv_token: float

    def step_s(self, num_new: int, num_pairs: int, num_decoding: int, num_kv_tokens: int) -> float:
        """One step.

        Args:
            num_new: tokens to compute, one for each sequence that decodes.
            num_pairs: for each token of a prompt the tokens that it attends to, summed.
            num_decoding: sequences that decode.
            num_kv_tokens: their context, summed.
        """
        computing_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return self.s_overhead + max(self.s_weights, computing_s) + self.decoding_s(num_decoding, num_kv_tokens)

    def decoding_s(self, num_decoding: int, num_kv_tokens: int) -> float:
        """What the sequences that decode add to a step."""
        return self.s_per_sequence * num_decoding + self.s_per_kv_token * num_kv_tokens

    def decode_step_s(self, num_decoding: int, num_kv_tokens: int) -> float:
        """A step in which all sequences decode."""
        computing_s = self.s_per_token * num_decoding
        return (
            self.s_overhead
            + (max(self.s_weights, computing_s))
            + self.s_per_sequence * num_decoding
            + self.s_per_kv_token * num_kv_tokens
        )

    def prefill_s(self, num_tokens: int, num_cached_tokens: int, chunk_tokens: int) -> float:
        """A prompt alone on an idle worker, in chunks."""
        num_new = num_tokens - num_cached_tokens
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // chunk_tokens)
        num_pairs = num_new * (num_cached_tokens + num_tokens) // 2
        computing_s = self.s_per_token * num_new + self.s_per_pair * num_pairs
        return num_steps * self.s_overhead + max(computing_s, num_steps * self.s_weights)

    def computing_room_s(self, step_s: float, num_decoding: int, num_kv_tokens: int) -> float:
        """How long prompts may compute in a step that is to take `step_s`. What hides behind the weights is free."""
        room_s = step_s - self.s_overhead - self.decoding_s(num_decoding, num_kv_tokens)
        return max(room_s, self.s_weights) - self.s_per_token * num_decoding

    def tokens_within(self, computing_s: float, num_context_tokens: int, at_most: int) -> int:
        """Tokens of a prompt, after `num_context_tokens` of it, that compute in the time given."""
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
"""What counts before anything was measured: a model of tens of billions of parameters on a server's GPUs."""


_NAMES = tuple(f.name for f in fields(StepCosts))


def typical(costs: Collection[StepCosts]) -> StepCosts:
    """The median of each cost, of the workers that have measured it; the prior's if none has."""
    values = {}
    for name in _NAMES:
        prior = getattr(PRIOR, name)
        measured = [value for one in costs if (value := getattr(one, name)) != prior]
        values[name] = statistics.median(measured) if measured else prior
    return StepCosts(**values)


def least_of(costs: Collection[StepCosts]) -> StepCosts:
    """Returns the least that any worker's costs are taken to be: of each cost the median of those who have measured it,
    over FASTEST; 0 if nobody has. The upper median, so that one of two workers cannot lower it.
    """
    values = {}
    for name in _NAMES:
        prior = getattr(PRIOR, name)
        measured = [value for one in costs if (value := getattr(one, name)) != prior]
        values[name] = statistics.median_high(measured) / FASTEST if measured else 0.0
    return StepCosts(**values)


def lifted(costs: StepCosts, least: StepCosts) -> StepCosts:
    """Returns the costs, with what was measured to be below the least lifted to it."""
    raised = {
        name: bound
        for name in _NAMES
        if (value := getattr(costs, name)) < (bound := getattr(least, name)) and value != getattr(PRIOR, name)
    }
    return replace(costs, **raised) if raised else costs


def believed(costs: StepCosts, usual: StepCosts) -> StepCosts:
    """What a router takes one worker's to be: what is usual, for what it has not measured, and unless it differs much.

    A worker that is thought slower than it is would not be asked while others are idle, its cache would stay empty and
    its costs as they are. Fits of like workers differ by what else their machines did, so small differences are none.
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
