"""Sampler: turns logits into token ids in a fixed order of stages.

    logits    repetition, presence and frequency penalty -> DRY -> bias -> bad words, allowed tokens, early ends
              -> structure, and the end of a reasoning
    best      at temperature 0 the likeliest token is taken
    weights   temperature -> top-k -> top-p -> min-p -> typical -> XTC
    draw      a random number, looked up in the running sum of the weights
    search    instead of best, weights and draw: the likeliest tokens of a beam

A stage has a cost for the rows that use it, and next to none for the others. Every random decision uses one number from
`random.uniform(seed, choice, position, purpose)`, and penalties are functions of the tokens before, so a token depends
only on its request and its logits: not on the batch, the worker or earlier requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from baton.sampling import SamplingParams
from baton.scores import Sampled
from engine.sampling import bias, dry, exclusions, penalties, structure, truncation, xtc
from engine.sampling.candidates import candidates_of
from engine.sampling.history import Histories
from engine.sampling.masses import first_beyond
from engine.sampling.quick import QuickDraws
from engine.sampling.row import Row
from engine.sampling.scores import RawLogits
from engine.sampling.structure import Masks, Structures
from engine.sampling.typical import typical
from engine.sampling.weights import EVERYTHING, Buffers, TokenWeights, WeightBounds
from engine.uploads import uploaded

SAMPLER = "inverse-transform-blake2b/2"
"""Name of the contract: the same seed, choice, position and logits give the same token in every release with this
name."""
_NO_MASKS = Masks({}, {})
_Asks = Callable[[SamplingParams], bool]
_Truncates = Callable[[torch.Tensor, Sequence[SamplingParams]], WeightBounds]


class Sampler:
    """Samples for one model. It caches intermediate results, but no state that a token depends on.

    Args:
        eos_token_ids: tokens that end every response and have a logit.
        structures: structures of structured responses; None: there are none.
    """

    def __init__(self, eos_token_ids: Collection[int] = (), structures: Structures | None = None) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._structures = structures or Structures(None, 0, ())
        self._histories = Histories()
        self._buffers = buffers = Buffers()
        self._weights = TokenWeights(buffers)
        self._quick = QuickDraws()
        self._truncations: tuple[tuple[_Asks, _Truncates], ...] = (
            (lambda params: params.top_k > 0, truncation.top_k),
            (lambda params: params.top_p < 1, truncation.top_p),
            (lambda params: params.min_p > 0, truncation.min_p),
            (lambda params: params.typical_p < 1, functools.partial(typical, buffers=buffers)),
        )

    def begin(self, rows: Sequence[Row]) -> None:
        """Start the part of a step's work that does not need its logits; `sample` must follow with the same rows."""
        if structured := _asking(rows, structure.is_asked):
            self._structures.begin(structured)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """Return one token for each row, as `sample_and_score` does."""
        return self.sample_and_score(logits, rows).token_ids

    def sample_and_score(self, logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
        """Return one token for each row, and its scores.

        Args:
            logits: `[rows, vocab_size]`, any floating dtype; may be changed.
            rows: one for each row of logits; the seed must be set unless the row is greedy.
        """
        if all(row.sampling.is_plain for row in rows):
            return Sampled(self._sampled(logits, rows))
        return self._specially(logits, rows)

    @torch.inference_mode()
    def _specially(self, logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
        structured = _asking(rows, structure.is_asked)
        masks = self._structures.masks(structured) if structured else _NO_MASKS
        raw = RawLogits(logits, rows, self._buffers) if any(row.sampling.wants_scores for row in rows) else None
        if any(row.sampling.adjusts_logits for row in rows):
            logits = self._adjusted(logits.float(), rows)
            structure.apply(logits, masks)
        tokens = self._sampled(logits, rows)
        scores = raw.scores(tokens) if raw else None
        searching = _asking(rows, lambda row: row.sampling.use_beam_search)
        found = candidates_of(logits, searching, self._eos_token_ids, raw) if searching else {}
        return Sampled(tokens, scores, masks.failures, found)

    @torch.inference_mode()
    def tokens(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Return one token for each row, `[rows]` on the device of the logits, without waiting for the device.

        Args:
            rows: rows without structure, scores and beam search.
        """
        if any(row.sampling.adjusts_logits for row in rows):
            return self._defined(self._adjusted(logits.float(), rows), rows)
        return self._defined(logits, rows)

    def _sampled(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        found = self._quick.tokens(logits, rows)
        if left := [index for index, token in enumerate(found) if token is None]:
            asked = logits[left] if len(left) < len(rows) else logits
            defined = self._defined(asked, [rows[index] for index in left]).tolist()
            for index, token in zip(left, defined, strict=True):
                found[index] = token
        return [token for token in found if token is not None]

    def _adjusted(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        asking = _asking(rows, lambda row: row.sampling.adjusts_logits)
        penalized = {i: row for i, row in asking.items() if row.sampling.penalizes}
        repeating = {i: row for i, row in asking.items() if row.sampling.dry_multiplier}
        histories = {i: self._histories.of(row) for i, row in (penalized | repeating).items()}
        if penalized:
            penalties.apply(logits, penalized, histories)
        if repeating:
            dry.apply(logits, repeating, histories)
        if biased := {i: row for i, row in asking.items() if row.sampling.logit_bias}:
            bias.apply(logits, biased)
        if excluding := {i: row for i, row in asking.items() if exclusions.is_asked(row)}:
            exclusions.apply(logits, excluding, self._eos_token_ids)
        return logits

    @torch.inference_mode()
    def _defined(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Return the tokens of rows, `[rows]` on the device, without waiting for the device."""
        drawing = [index for index, row in enumerate(rows) if row.draws]
        if not drawing:
            return logits.argmax(dim=-1)
        if len(drawing) == len(rows):
            return self._drawn(logits, rows)
        places = uploaded(torch.tensor(drawing), logits.device)
        drawn = self._drawn(logits.index_select(0, places), [rows[index] for index in drawing])
        return logits.argmax(dim=-1).index_copy_(0, places, drawn)

    def _drawn(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        self._weights.fill(logits, [row.divisor for row in rows])
        if truncating := _asking(rows, self._is_truncated):
            self._truncate(truncating)
        if excluding := _asking(rows, xtc.is_asked):
            most = xtc.xtc(self._weights.all, excluding, self._eos_token_ids)
            self._weights.truncate(list(excluding), WeightBounds(most=most))
        shares = torch.tensor([row.number for row in rows], dtype=torch.float64)
        return first_beyond(self._weights.all, uploaded(shares, logits.device))

    def _is_truncated(self, row: Row) -> bool:
        return any(is_asked(row.sampling) for is_asked, _ in self._truncations)

    def _truncate(self, rows: Mapping[int, Row]) -> None:
        indices, params = list(rows), [row.sampling for row in rows.values()]
        rising = self._weights.rising(indices)
        kept = bounds = EVERYTHING
        for is_asked, step in self._truncations:
            if any(map(is_asked, params)):
                self._weights.narrow(rising, bounds)  # what the step before has excluded
                bounds = step(rising, params)
                kept = kept.within(bounds)
        self._weights.truncate(indices, kept)


def _asking(rows: Sequence[Row], asks: Callable[[Row], bool]) -> dict[int, Row]:
    return {index: row for index, row in enumerate(rows) if asks(row)}
