"""Log probabilities of drawn tokens, and of the likeliest ones: of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.sampling.row import Row
from baton.engine.sampling.weights import Buffers
from baton.scores import NO_SCORES, TokenScores


class RawLogits:
    """The logits of the rows that ask for scores, before anything changes them.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
        rows: all rows, of which at least one asks.
        buffers: for two arrays of that shape, of which one must not change before `scores`.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row], buffers: Buffers) -> None:
        self._num_rows = len(rows)
        self._num_top = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
        asking = logits[list(self._num_top)] if len(self._num_top) < len(rows) else logits
        self._logits = buffers.like("raw", asking)
        self._logits.copy_(asking)
        best = self._logits.amax(-1, keepdim=True)
        shares = torch.sub(self._logits, best, out=buffers.like("products", asking)).exp_()
        self._log_sums = best[:, 0].double() + shares.sum(-1, dtype=torch.float64).log()

    def scores(self, token_ids: Sequence[int]) -> list[TokenScores]:
        """Returns the scores of one token for each of all rows."""
        indices = list(self._num_top)
        chosen = torch.tensor([token_ids[index] for index in indices], device=self._logits.device)
        logprobs = (self._logits.gather(1, chosen[:, None])[:, 0] - self._log_sums).tolist()
        best = self._logits.topk(max(self._num_top.values()), dim=-1)
        top_ids, top_logprobs = best.indices.tolist(), (best.values - self._log_sums[:, None]).tolist()
        found = [NO_SCORES] * self._num_rows
        for place, (index, num_top) in enumerate(self._num_top.items()):
            found[index] = TokenScores(
                (logprobs[place],), tuple(top_ids[place][:num_top]), tuple(top_logprobs[place][:num_top])
            )
        return found
