"""Learns what this worker's steps cost from the steps that it takes.

Two lines are fitted. Steps in which all sequences decode show what decoding costs: a constant (overhead and weights),
a sequence, a token of context. Steps with a prompt show, less what decoding adds to them, what computing costs: the
overhead, a token, a pair of tokens of which one attends to the other. Small prompts hide behind the reading of the
weights and say nothing of computing.

What drafts cost, tokens more of sequences that decode, is what steps with drafts take beyond those without
(`draft_costs`). Such steps do not move the first line: where all steps have drafts, nothing would tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.costs import PRIOR, StepCosts
from baton.fit import CostFit
from engine.core.draft_costs import DraftCosts, DraftFit
from engine.core.runner import StepInput

LEAST_PLAIN = 5
"""Steps without drafts in which all sequences decode, before what drafts add to such steps is observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step computes; see `StepCosts.step_s`."""

    num_new: int = 0
    num_pairs: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_drafts: int = 0
    """Tokens that are checked beside the new ones; see `StepPart.num_drafts`."""

    @classmethod
    def of(cls, step: StepInput) -> StepSize:
        """Returns the size of a step."""
        num_new = num_pairs = num_decoding = num_kv_tokens = num_drafts = 0
        for part in step.parts:
            num_tokens, start = len(part.token_ids) - part.num_drafts, part.num_computed_tokens
            num_new += num_tokens
            num_drafts += part.num_drafts
            if part.is_decoding:
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
        """Returns what a step of this size takes by what steps cost."""
        return costs.step_s(self.num_new - self.num_decoding, self.num_pairs, self.num_decoding, self.num_kv_tokens)


class StepFit:
    """The costs that explain the steps so far. It learns from sizes and times alone, whatever engine took them."""

    def __init__(self, prior: StepCosts = PRIOR) -> None:
        self._decoding = CostFit((prior.s_overhead + prior.s_weights, prior.s_per_sequence, prior.s_per_kv_token))
        self._computing = CostFit((prior.s_overhead, prior.s_per_token, prior.s_per_pair))
        self.costs = prior
        self._drafts = DraftFit()

    @property
    def draft_costs(self) -> DraftCosts:
        """What drafts add to steps, as far as it is known."""
        return self._drafts.costs(self.costs.s_per_token)

    def observe(self, size: StepSize, took_s: float) -> None:
        """Learns from one step."""
        self._drafts.fade()
        is_decoding = size.num_new == size.num_decoding
        if is_decoding and self._decoding.num_observations >= LEAST_PLAIN:
            predicted_s = self.costs.step_s(0, 0, size.num_decoding, size.num_kv_tokens)
            self._drafts.observe(size.num_decoding, size.num_drafts, predicted_s, took_s)
        if size.num_drafts:
            return
        if is_decoding:
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
            s_decoding = s_overhead  # without a step of decoding alone, what reading the weights takes is not seen
        self.costs = StepCosts(
            s_overhead=s_overhead,
            s_per_token=s_per_token,
            s_per_pair=s_per_pair,
            s_weights=s_decoding - s_overhead,
            s_per_sequence=s_per_sequence,
            s_per_kv_token=s_per_kv_token,
        )
