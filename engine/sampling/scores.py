"""Log probabilities of sampled tokens and of the likeliest tokens, from the model's own logits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from baton.scores import NO_SCORES, TokenScores
from engine.sampling.steps import Row
from engine.sampling.weights import Buffers

LEAST = -9999.0
"""Log probability of an impossible token: JSON has no infinity."""
BLOCK = 64
"""Tokens per block whose maximum logit is found first, when the largest logits are searched."""


def scores_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> TokenScores:
    """Return the scores of known tokens.

    Args:
        logits: `[tokens, vocab_size]`, any floating dtype: the logits from which each token was sampled.
        token_ids: the tokens.
        num_top: number of likeliest tokens with scores.
    """
    logits = logits.float()
    log_sums = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - log_sums
    best_ids, best = _likeliest(logits, num_top)
    tops = (best - log_sums).clamp(min=LEAST)
    return TokenScores(
        tuple(chosen[:, 0].clamp(min=LEAST).tolist()),
        tuple(itertools.chain.from_iterable(best_ids)),
        tuple(tops.flatten().tolist()),
    )


def _likeliest(logits: torch.Tensor, count: int) -> tuple[list[list[int]], torch.Tensor]:
    """Return the likeliest tokens of each row, `[rows, count]`, in descending order, and their logits."""
    count = min(count, logits.shape[-1])
    best, found = _largest(logits, min(count + 1, logits.shape[-1]))
    ids = found[:, :count].tolist()
    is_tied = (best[:, 1:] == best[:, :-1]).any(-1)
    for row in is_tied.nonzero()[:, 0].tolist() if count else ():
        ids[row] = falling(logits[row], best[row, count - 1])[0][:count].tolist()
    return ids, best[:, :count]


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row, in descending order, and their indices, each `[rows, count]`.

    The `count` largest values lie in the `count` blocks with the largest maxima. A `topk` over the maxima and another
    over these blocks take half the time of one over the whole row.
    """
    rows, size = logits.shape
    if size % BLOCK or count * BLOCK >= size:
        whole = logits.topk(count, dim=-1)
        return whole.values, whole.indices
    blocks = logits.reshape(rows, -1, BLOCK)
    chosen = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    best = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count, dim=-1)
    return best.values, chosen.gather(1, best.indices // BLOCK) * BLOCK + best.indices % BLOCK


class RawLogits:
    """Logits of the rows that request scores, before any adjustment.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
        rows: all rows, of which at least one requests scores.
        buffers: memory for two arrays of that shape, one of which must not change before `scores`.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row], buffers: Buffers) -> None:
        self._num_rows = len(rows)
        self._asking = {i: row.sampling for i, row in enumerate(rows) if row.sampling.wants_scores}
        asking = logits[list(self._asking)] if len(self._asking) < len(rows) else logits
        self._logits = buffers.like("raw", asking)
        self._logits.copy_(asking)
        best = self._logits.amax(-1, keepdim=True)
        shares = torch.sub(self._logits, best, out=buffers.like("products", asking)).exp_()
        # Float32 is exact enough for sums of few numbers; summing all of them in float64 takes as long as the rest.
        partial = shares.view(len(asking), -1, BLOCK).sum(-1) if shares.shape[-1] % BLOCK == 0 else shares
        self._log_sums = best[:, 0].double() + partial.sum(-1, dtype=torch.float64).log()

    def scores(self, token_ids: Sequence[int]) -> list[TokenScores]:
        """Return the scores of one token for each of all rows."""
        chosen = torch.tensor([token_ids[index] for index in self._asking], device=self._logits.device)
        logprobs = self._finite(self._logits.gather(1, chosen[:, None])[:, 0] - self._log_sums)
        tops = self._tops
        found = [NO_SCORES] * self._num_rows
        for place, index in enumerate(self._asking):
            found[index] = TokenScores((logprobs[place],), *tops[place])
        return found

    def of_candidates(self, index: int, token_ids: Sequence[int]) -> tuple[TokenScores, ...]:
        """Return the scores of several tokens for one row; none if it does not request scores."""
        if index not in self._asking:
            return ()
        place = list(self._asking).index(index)
        logprobs = self._finite(self._logits[place, list(token_ids)] - self._log_sums[place])
        tops = self._tops[place]
        return tuple(TokenScores((logprob,), *tops) for logprob in logprobs)

    @staticmethod
    def _finite(logprobs: torch.Tensor) -> Any:
        return logprobs.clamp(min=LEAST).tolist()

    @functools.cached_property
    def _tops(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Return the likeliest tokens of each row with scores, or the tokens that it names, with log probabilities."""
        most = max(0 if params.logprob_token_ids else params.logprobs or 0 for params in self._asking.values())
        top_ids, best = _likeliest(self._logits, most)
        top_logprobs = self._finite(best - self._log_sums[:, None])
        tops = []
        for place, params in enumerate(self._asking.values()):
            if named := params.logprob_token_ids:
                tops.append((named, tuple(self._finite(self._logits[place, list(named)] - self._log_sums[place]))))
            else:
                tops.append((tuple(top_ids[place][: params.logprobs]), tuple(top_logprobs[place][: params.logprobs])))
        return tops


def falling(values: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the values that are at least `least`, in descending order, and these values.

    Among equal values the lower token id comes first: `topk` returns any of equal values, and different ones if another
    row of the batch asks for more.

    Args:
        values: values of one row, `[vocab_size]`.
        least: lower bound.
    """
    ids = (values >= least).nonzero()[:, 0]
    kept, order = values[ids].sort(descending=True, stable=True)
    return ids[order], kept
