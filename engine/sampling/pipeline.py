"""Sampler: turns logits into token ids in a fixed order of stages.

    logits    repetition, presence and frequency penalty -> DRY -> bias -> bad words, allowed tokens, early ends
              -> structure, and the end of a reasoning
    best      at temperature 0 the likeliest token is taken
    weights   temperature -> top-k -> top-p -> min-p -> typical -> XTC
    draw      a random number, looked up in the running sum of the weights
    search    instead of best, weights and draw: the likeliest tokens of a beam

A stage has a cost for the rows that use it, and next to none for the others. Every random decision uses one number from
`steps.uniform(seed, choice, position, purpose)`, and penalties are functions of the tokens before, so a token depends
only on its request and its logits: not on the batch, the worker or earlier requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.sampling import SamplingParams
from baton.scores import Candidates, Sampled
from engine.sampling import steps, structure
from engine.sampling.scores import RawLogits, falling
from engine.sampling.steps import Histories, Row
from engine.sampling.structure import Masks, Structures
from engine.sampling.weights import BLOCK, EVERYTHING, Buffers, TokenWeights, WeightBounds, first_beyond
from engine.uploads import uploaded

SAMPLER = "inverse-transform-blake2b/2"
"""Name of the contract: the same seed, choice, position and logits give the same token in every release with this
name."""
_NO_MASKS = Masks({}, {})
_Asks = Callable[[SamplingParams], bool]
_Truncates = Callable[[torch.Tensor, Sequence[SamplingParams]], WeightBounds]
Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

DOUBT = 1e-9
"""Relative error bound of a sum in float64: millions of additions round by less."""
COARSE_DOUBT = 1e-5
"""Relative error bound of a sum in float32: a hundred successive additions round by less, and numpy adds in pairs."""
CUTS = 16.0, 0.9
"""Cuts for top-p, as multiples of the excluded mass divided by the vocabulary size. Weights below the last cut sum to
less than the excluded mass even over the whole vocabulary. The first cut leaves fewer tokens, and usually still all
that remain."""
LEAST_POSITIVE = np.finfo(np.float32).smallest_subnormal
LEAST_POSSIBLE = torch.finfo(torch.float32).min
"""Log probability below which a token counts as excluded."""


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
            (lambda params: params.top_k > 0, steps.top_k),
            (lambda params: params.top_p < 1, steps.top_p),
            (lambda params: params.min_p > 0, steps.min_p),
            (lambda params: params.typical_p < 1, functools.partial(steps.typical, buffers=buffers)),
        )

    def begin(self, rows: Sequence[Row]) -> None:
        """Start the part of a step's work that does not need its logits; `sample` must follow with the same rows."""
        if structured := _asking(rows, _is_structured):
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
        structured = _asking(rows, _is_structured)
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
            steps.penalize(logits, penalized, histories)
        if repeating:
            steps.penalize_repetitions(logits, repeating, histories)
        if biased := {i: row for i, row in asking.items() if row.sampling.logit_bias}:
            steps.add_bias(logits, biased)
        if excluding := {i: row for i, row in asking.items() if steps.excludes(row)}:
            steps.exclude(logits, excluding, self._eos_token_ids)
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
        if excluding := _asking(rows, steps.is_without_top):
            most = steps.xtc(self._weights.all, excluding, self._eos_token_ids)
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


def _is_structured(row: Row) -> bool:
    """Return whether a row has a structure or a reasoning budget."""
    return row.sampling.is_structured


def best(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row; among equal ones the first.

    Args:
        logits: `[rows, vocab_size]` in float32, on a CPU.
    """
    # Numpy uses vector instructions: an eighth of torch's time.
    tokens: list[int] = logits.numpy().argmax(-1).tolist()
    return tokens


class QuickDraws:
    """Fast draws on CPUs, row by row, from the few remaining tokens: equal to the definition at lower cost.

    The vocabulary is not sorted, and excluded tokens are not summed: a cut below the least remaining weight leaves
    hundreds of 50,000 tokens. The order of summation differs from the definition's (`steps`, `PrefixSums`), so the sums
    differ by rounding errors below `DOUBT` and `COARSE_DOUBT`. If such an error could change the token, there is no
    quick draw, and the definition decides. So every draw equals the definition's, and depends only on its row.

    They are those of one model, and reuse the memory of one row, which stays in the CPU's cache.
    """

    def __init__(self) -> None:
        self._weights = torch.empty(0)

    def tokens(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
        """Return the token of each row; None: the definition must decide.

        Args:
            logits: `[rows, vocab_size]`, any floating dtype.
            rows: the rows' parameters, which define the truncation.
        """
        if logits.dtype is not torch.float32 or logits.device.type != "cpu":
            return [None] * len(rows)
        num_drawing = sum(row.draws for row in rows)
        found: list[int | None] = [*best(logits)] if num_drawing < len(rows) else [None] * len(rows)
        if not num_drawing:
            return found
        with torch.inference_mode():
            for index, of_row in enumerate(logits.unbind()):
                if rows[index].draws:
                    found[index] = self._drawn(of_row, rows[index])
        return found

    def _drawn(self, logits: torch.Tensor, row: Row) -> int | None:
        if row.sampling.typical_p < 1 or steps.is_without_top(row):
            return None
        if len(self._weights) != len(logits):
            self._weights = torch.empty(len(logits))
        self._fill(logits, row.divisor)
        return token_of(self._weights.numpy(), row.sampling, row.number)

    def _fill(self, logits: torch.Tensor, temperature: float) -> None:
        """Do what `TokenWeights.fill` does, bit for bit, for one row."""
        if temperature == 1:
            torch.softmax(logits, -1, out=self._weights)  # it subtracts the maximum itself
        else:
            torch.sub(logits, logits.amax(), out=self._weights).div_(torch.tensor(temperature))
            torch.softmax(self._weights, -1, out=self._weights)


def token_of(weights: Floats, params: SamplingParams, number: float) -> int | None:
    """Return the token that a row draws by top-k, top-p and min-p; None: rounding might decide.

    Args:
        weights: the row's weights, `[vocab_size]`.
        params: the row's parameters.
        number: the random number.
    """
    if 0 < params.top_k < len(weights):
        place = len(weights) - params.top_k
        return _of_those_above(np.partition(weights, place)[place], weights, params, number)
    if params.top_p < 1:
        mean = (1 - params.top_p) / len(weights)
        tokens = (_of_those_above(np.float32(cut * mean), weights, params, number) for cut in CUTS)
        return next((token for token in tokens if token is not None), None)
    if params.min_p > 0:
        return _of_those_above(_least_by_min_p(weights, params), weights, params, number)
    return _of_all(weights, number)


def _of_those_above(cut: np.float32, weights: Floats, params: SamplingParams, number: float) -> int | None:
    """Return the token that a row draws among those whose weight is at least `cut`.

    Args:
        cut: lower bound of the remaining weights. If a lighter token might remain, the result is None.
        weights: the row's weights.
        params: the row's parameters.
        number: the random number.
    """
    ids = (weights >= (cut if cut > 0 else LEAST_POSITIVE)).nonzero()[0]
    if not len(ids):
        return None
    kept = weights[ids]
    least = _least_by_min_p(kept, params)
    if params.top_p < 1:
        is_after_top_k = 0 < params.top_k < len(weights)
        by_top_p = _least_by_top_p(kept, 0.0 if is_after_top_k else _sum_of_others(weights, ids), params)
        if by_top_p is None:
            return None
        least = max(least, by_top_p)
    if least > cut:
        places = (kept >= least).nonzero()[0]
        ids, kept = ids[places], kept[places]
    sums = kept.cumsum(dtype=np.float64)
    place = _place(sums, number * sums[-1], sums[-1])
    return None if place is None else int(ids[place])


def _sum_of_others(weights: Floats, ids: npt.NDArray[np.intp]) -> float:
    """Return the approximate sum of all weights but these. A sum of all in float64 takes twice as long."""
    kept = weights[ids]
    weights[ids] = 0
    others = float(weights.sum())
    weights[ids] = kept
    return others


def _least_by_top_p(weights: Floats, others: float, params: SamplingParams) -> np.float32 | None:
    """Return the least weight that top-p keeps; None: it is not among these, or rounding might decide.

    Args:
        weights: the heaviest weights, in any order.
        others: sum of the other weights that top-p considers.
        params: the row's parameters.
    """
    rising = np.sort(weights)
    sums = others + rising.cumsum(dtype=np.float64)
    wanted = (1 - params.top_p) * sums[-1]
    doubt = DOUBT * sums[-1] + COARSE_DOUBT * others
    if not others <= wanted - doubt:
        return None
    first, last = sums.searchsorted((wanted - doubt, wanted + doubt), side="right")
    least: np.float32 = rising[first]
    return least if least == rising[min(last, len(rising) - 1)] else None


def _least_by_min_p(weights: Floats, params: SamplingParams) -> np.float32:
    """Return the least weight that min-p keeps."""
    return np.float32(params.min_p) * weights.max() if params.min_p > 0 else np.float32(0)


def _of_all(weights: Floats, number: float) -> int | None:
    """Return the token that a row draws among all tokens: first its block, then the token."""
    whole = len(weights) // BLOCK * BLOCK
    blocks = np.einsum("ij->i", weights[:whole].reshape(-1, BLOCK), dtype=np.float64)  # the fastest way to sum
    sums = np.append(blocks, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted, total = number * sums[-1], sums[-1]
    if (block := _place(sums, wanted, total)) is None:
        return None
    before = sums[block - 1] if block else 0.0
    within = before + weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    place = _place(within, wanted, total)
    return None if place is None else block * BLOCK + place


def _place(sums: Sums, wanted: float, total: float) -> int | None:
    """Return the index of the first running sum that exceeds `wanted`; None: rounding might decide."""
    first, last = sums.searchsorted((wanted - DOUBT * total, wanted + DOUBT * total), side="right")
    return int(first) if first == last < len(sums) else None


def candidates_of(
    logits: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int], raw: RawLogits | None
) -> dict[int, Candidates]:
    """Return the likeliest tokens of each row, by index: as many as a search may need, or as are possible.

    A search needs as many tokens that do not end a hypothesis as it has beams, and all tokens likelier than the last of
    those.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype, of all rows of the step, after all adjustments.
        rows: rows of beam searches, by index.
        eos_token_ids: tokens that end every response.
        raw: the model's own logits; None: no scores are requested.
    """
    logprobs = logits[list(rows)].float().log_softmax(-1)
    ends = [_ends(row.sampling, eos_token_ids) for row in rows.values()]
    most = max(row.sampling.num_beams + len(of_row) for row, of_row in zip(rows.values(), ends, strict=True))
    least = logprobs.topk(min(most, logits.shape[-1]), dim=-1).values[:, -1].clamp(min=LEAST_POSSIBLE)
    found = {}
    for place, ((index, row), of_row) in enumerate(zip(rows.items(), ends, strict=True)):
        ids, values = (each.tolist() for each in falling(logprobs[place], least[place]))
        num_needed = num_going_on = 0
        while num_going_on < row.sampling.num_beams and num_needed < len(ids):
            num_going_on += ids[num_needed] not in of_row
            num_needed += 1
        token_ids = tuple(ids[:num_needed])
        scores = raw.of_candidates(index, token_ids) if raw and token_ids else ()
        found[index] = Candidates(token_ids, tuple(values[:num_needed]), scores)
    return found


def _ends(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    return frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids))
