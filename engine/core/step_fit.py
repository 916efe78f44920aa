"""Fits the costs of this worker's steps to measured steps.

Two linear models are fitted. Steps in which all sequences decode give the cost of decoding: a constant (overhead and
weights), a cost per sequence and a cost per token of context. Steps with a prompt, less the decoding in them, give the
cost of prefill: the overhead, a cost per token and a cost per pair of tokens of which one attends to the other. Small
prompts take no longer than reading the weights, so they do not count for prefill.

Nothing is learned from steps with drafts: their time is measured against these costs (`DraftPrice`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.costs import PRIOR, StepCosts
from baton.fit import CostFit
from engine.core.runner import StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Size of a step; see `StepCosts.step_s`."""

    num_new: int = 0
    num_pairs: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_drafts: int = 0
    """Drafts that are checked, in addition to the new tokens; see `StepPart.num_drafts`."""

    @classmethod
    def of(cls, step: StepInput, *, denoises: bool = False) -> StepSize:
        """Return the size of a step.

        Args:
            denoises: whether the model denoises canvases: each step of one counts as decoding, also of the first one.
        """
        num_new = num_pairs = num_decoding = num_kv_tokens = num_drafts = 0
        for part in step.parts:
            num_tokens, start = len(part.token_ids) - part.num_drafts, part.num_computed_tokens
            num_new += num_tokens
            num_drafts += part.num_drafts
            if part.is_decoding or (denoises and part.sample and num_tokens == 1):
                num_decoding += 1
                num_kv_tokens += start + 1
            else:
                num_pairs += num_tokens * (2 * start + num_tokens) // 2
        return cls(
            num_new=num_new,
            num_pairs=num_pairs,
            num_decoding=num_decoding,
            num_kv_tokens=num_kv_tokens,
            num_drafts=num_drafts,
        )

    def expected_s(self, costs: StepCosts) -> float:
        """Return the time of a step of this size under given step costs."""
        return costs.step_s(self.num_new - self.num_decoding, self.num_pairs, self.num_decoding, self.num_kv_tokens)


class StepFit:
    """Step costs that fit the steps so far. It learns only from sizes and times, of any engine."""

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
