"""Log probabilities of drawn tokens, and of the likeliest ones: of the logits as the model gave them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from baton.scores import NO_SCORES, TokenScores
from engine.sampling.ranking import falling
from engine.sampling.row import Row
from engine.sampling.weights import Buffers

LEAST = -9999.0
"""The log probability of what is impossible: infinity is no JSON."""
BLOCK = 64
"""Tokens whose largest logit is found at once, before the largest of all are looked for."""


def scores_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> TokenScores:
    """Returns the scores of known tokens.

    Args:
        logits: `[tokens, vocab_size]`, any floating dtype: those in the place of each token.
        token_ids: the tokens.
        num_top: likeliest tokens with scores of their own.
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
    """Returns the likeliest tokens of each row, `[rows, count]`, in falling order, and their logits."""
    count = min(count, logits.shape[-1])
    best, found = _largest(logits, min(count + 1, logits.shape[-1]))
    ids = found[:, :count].tolist()
    is_tied = (best[:, 1:] == best[:, :-1]).any(-1)
    for row in is_tied.nonzero()[:, 0].tolist() if count else ():
        ids[row] = falling(logits[row], best[row, count - 1])[0][:count].tolist()
    return ids, best[:, :count]


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest values of each row, in falling order, and their places, each `[rows, count]`.

    The largest ones lie in the blocks with the largest maxima, as many as are looked for: a `topk` of these maxima, and
    another one of what is in these blocks, take half the time of one of the whole row.
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
    """The logits of the rows that ask for scores, before anything changes them.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
        rows: all rows, of which at least one asks.
        buffers: for two arrays of that shape, of which one must not change before `scores`.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row], buffers: Buffers) -> None:
        self._num_rows = len(rows)
        self._asking = {i: row.sampling for i, row in enumerate(rows) if row.sampling.wants_scores}
        asking = logits[list(self._asking)] if len(self._asking) < len(rows) else logits
        self._logits = buffers.like("raw", asking)
        self._logits.copy_(asking)
        best = self._logits.amax(-1, keepdim=True)
        shares = torch.sub(self._logits, best, out=buffers.like("products", asking)).exp_()
        # Sums of few float32 numbers are exact enough, and those of all of them in float64 take as long as the rest.
        partial = shares.view(len(asking), -1, BLOCK).sum(-1) if shares.shape[-1] % BLOCK == 0 else shares
        self._log_sums = best[:, 0].double() + partial.sum(-1, dtype=torch.float64).log()

    def scores(self, token_ids: Sequence[int]) -> list[TokenScores]:
        """Returns the scores of one token for each of all rows."""
        chosen = torch.tensor([token_ids[index] for index in self._asking], device=self._logits.device)
        logprobs = self._finite(self._logits.gather(1, chosen[:, None])[:, 0] - self._log_sums)
        tops = self._tops
        found = [NO_SCORES] * self._num_rows
        for place, index in enumerate(self._asking):
            found[index] = TokenScores((logprobs[place],), *tops[place])
        return found

    def of_candidates(self, index: int, token_ids: Sequence[int]) -> tuple[TokenScores, ...]:
        """Returns the scores of each of several tokens for one row, none where it does not ask."""
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
        """Returns the likeliest tokens of each row that asks, or those that it names, with their log probabilities."""
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
