"""Rows of a step's logits, and the stages of the sampler that they may ask for, in the order of `pipeline`.

    logits    penalize -> penalize_repetitions (DRY) -> add_bias -> exclude
    weights   top_k -> top_p -> min_p -> typical -> xtc

Stages of logits change them in place. Top-k, top-p and min-p take weights in ascending order (`TokenWeights.rising`),
with 0 for tokens that earlier stages have excluded, and return bounds: the least weight that remains. Rows that do not
use a stage are not changed by it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton.sampling import MAX_DRY_LENGTH, SamplingParams
from engine.sampling.weights import Buffers, PrefixSums, WeightBounds, first_beyond
from engine.uploads import uploaded

Number = TypeVar("Number", bound=np.generic)
MAX_KEPT = 512
"""Number of sequences whose histories are kept."""
MIN_TEMPERATURE = 1e-30
"""Minimum temperature; lower ones are treated as this one, because of float32's range."""
DRAW = 0
XTC = 1


class Row(NamedTuple):
    """Inputs, other than the logits, that decide the token of a row."""

    sampling: SamplingParams
    choice_index: int
    position: int
    """Position of the token to sample, counted from the first prompt token."""
    num_prompt_tokens: int = 0
    history: tuple[int, ...] = ()
    """All tokens before it, if the sampling needs them."""
    sequence_key: int = -1
    """Identifies the sequence within its engine. The history of a key only grows."""

    @property
    def draws(self) -> bool:
        """True if a random number decides the token; otherwise the likeliest token is taken."""
        return self.sampling.temperature > 0

    @property
    def divisor(self) -> float:
        """Number by which the logits of a row that draws are divided."""
        return max(self.sampling.temperature, MIN_TEMPERATURE)

    @property
    def number(self) -> float:
        """The random number of a row that draws."""
        assert self.sampling.seed is not None
        return uniform(self.sampling.seed, self.choice_index, self.position)


def uniform(seed: int, choice_index: int, position: int, purpose: int = DRAW) -> float:
    """Return the random number in [0, 1) that decides the token at `position` of a choice.

    Each purpose has its own numbers, so other random decisions are independent of the draw. The number is a pure
    function of its arguments, so a stream that is resumed on another worker draws the same numbers.
    """
    counter = (seed % 2**64).to_bytes(8, "little") + choice_index.to_bytes(4, "little") + position.to_bytes(8, "little")
    if purpose != DRAW:
        counter += purpose.to_bytes(1, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


class History:
    """Tokens of a sequence, and how often each occurs in its output."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens = np.empty(1024, np.int64)
        self.num_seen = 0
        self._ids = np.empty(1024, np.int64)
        self._counts = np.empty(1024, np.float32)
        self._places: dict[int, int] = {}
        self.repeated: tuple[int, npt.NDArray[np.int16]] = 0, np.zeros(0, np.int16)
        """State of `repetitions` for this number of tokens."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """All tokens, in order."""
        return self._tokens[: self.num_tokens]

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Every distinct token of prompt and output."""
        return self._ids[: self.num_seen]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Number of occurrences in the output for each of `ids`."""
        return self._counts[: self.num_seen]

    def take(self, row: Row) -> None:
        """Add the new tokens."""
        new = row.history[self.num_tokens :]
        self._tokens = _with_room(self._tokens, self.num_tokens + len(new))
        self._tokens[self.num_tokens : self.num_tokens + len(new)] = new
        for position, token_id in enumerate(new, self.num_tokens):
            place = self._places.setdefault(token_id, self.num_seen)
            if place == self.num_seen:
                self.num_seen += 1
                self._ids = _with_room(self._ids, self.num_seen)
                self._counts = _with_room(self._counts, self.num_seen)
                self._ids[place], self._counts[place] = token_id, 0
            if position >= row.num_prompt_tokens:
                self._counts[place] += 1
        self.num_tokens += len(new)


class Histories:
    """Histories of the most recently sampled sequences.

    A history is a function of the tokens alone; keeping it only saves work. The history of a forgotten sequence, for
    instance after a long preemption, is read again from its first token.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, History] = OrderedDict()

    def of(self, row: Row) -> History:
        """Return the history of a row's sequence, with all its tokens."""
        history = self._kept.pop(row.sequence_key, None)
        if history is None or row.sequence_key < 0:
            history = History()
        history.take(row)
        self._kept[row.sequence_key] = history
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return history


def _with_room(array: npt.NDArray[Number], size: int) -> npt.NDArray[Number]:
    return np.resize(array, max(size, 2 * len(array))) if size > len(array) else array


def penalize(logits: torch.Tensor, rows: Mapping[int, Row], histories: Mapping[int, History]) -> None:
    """Apply repetition, presence and frequency penalty: reduce the logits of tokens that the text already contains.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), as transformers applies it: over prompt and output.
    The others are OpenAI's, over the output alone. Only the logits of tokens that occur are changed: float32 logits
    `[rows, vocab_size]`, in place.

    Args:
        rows: rows with penalties, by index.
        histories: histories of the same rows.
    """
    sizes = [histories[index].num_seen for index in rows]
    params = [row.sampling for row in rows.values()]
    penalties = np.array([[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params], np.float32)
    columns = (
        np.repeat(list(rows), sizes),
        np.concatenate([histories[index].ids for index in rows]),
        np.concatenate([histories[index].counts for index in rows]),
        penalties.repeat(sizes, axis=0),
    )
    where, ids, counts, each = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
    repetition, presence, frequency = each.unbind(-1)
    values = logits[where, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where, ids] = values - presence * (counts > 0) - frequency * counts


def penalize_repetitions(logits: torch.Tensor, rows: Mapping[int, Row], histories: Mapping[int, History]) -> None:
    """Apply DRY ("don't repeat yourself"): penalize tokens that would continue a repetition, the more the longer it is.

    The definition is the author's (p-e-w, text-generation-webui, pull request 5677). If the last tokens have occurred
    before, the token that followed them then loses `multiplier * base ** (length - allowed_length)`, where `length` is
    that of the longest such occurrence. A repetition ends at a sequence breaker, and its length is counted up to
    MAX_DRY_LENGTH tokens. Changes float32 logits `[rows, vocab_size]` in place.

    Args:
        rows: rows with DRY, by index.
        histories: histories of the same rows.
    """
    for index, row in rows.items():
        ids, lengths = repetitions(histories[index], row.sampling)
        penalties = row.sampling.dry_multiplier * row.sampling.dry_base ** (lengths - row.sampling.dry_allowed_length)
        columns = ids, penalties.astype(np.float32)
        where, lost = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
        logits[index, where] -= lost


def repetitions(history: History, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens that would continue a repetition of at least `dry_allowed_length` tokens, and its length."""
    tokens, breakers = history.tokens, params.dry_breaker_ids
    begin = max(0, len(tokens) - params.dry_range) if params.dry_range else 0
    lengths = _lengths(history, breakers)[begin:]
    places = np.flatnonzero(lengths >= params.dry_allowed_length)
    # Tokens before the range do not belong to a repetition.
    lengths = np.minimum(lengths[places], places + 1)
    following = tokens[begin + places + 1]
    kept = (lengths >= params.dry_allowed_length) & ~np.isin(following, breakers)
    ids, of = np.unique(following[kept], return_inverse=True)
    longest = np.zeros(len(ids))
    np.maximum.at(longest, of, lengths[kept])
    return ids, longest


def _lengths(history: History, breakers: tuple[int, ...]) -> npt.NDArray[np.int16]:
    """Return, for each token but the last, the length of the repetition of the text's end that ends at it.

    A repetition contains no breaker. Each new token costs one pass over the tokens; if many are new, only the last
    MAX_DRY_LENGTH tokens are processed again.
    """
    tokens = history.tokens
    begin, lengths = history.repeated
    if begin < len(tokens) - MAX_DRY_LENGTH:
        begin = len(tokens) - MAX_DRY_LENGTH
        lengths = np.zeros(begin - 1, np.int16)
    for end in range(begin, len(tokens)):
        longer = np.zeros(end, np.int16)
        if tokens[end] not in breakers:
            longer[1:] = lengths[: max(0, end - 1)]
            np.minimum(longer + 1, MAX_DRY_LENGTH, out=longer)
            longer *= tokens[:end] == tokens[end]
        lengths = longer
    history.repeated = len(tokens), lengths
    return lengths


def add_bias(logits: torch.Tensor, rows: Mapping[int, Row]) -> None:
    """Add the values that a client has for the logits of single tokens to float32 logits `[rows, vocab_size]`.

    Args:
        rows: rows with a logit bias, by index.
    """
    entries = [_columns(row.sampling.logit_bias) for row in rows.values()]
    columns = (
        np.repeat(list(rows), [len(ids) for ids, _ in entries]),
        np.concatenate([ids for ids, _ in entries]),
        np.concatenate([biases for _, biases in entries]),
    )
    where, ids, biases = (uploaded(torch.from_numpy(column), logits.device) for column in columns)
    logits[where, ids] += biases


@functools.lru_cache(maxsize=256)
def _columns(logit_bias: tuple[tuple[int, float], ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return ids and biases as arrays; cached, because they are the same in every step of a sequence."""
    ids, biases = zip(*logit_bias, strict=True)
    return np.array(ids, np.int64), np.array(biases, np.float32)


EXCLUDED = float("-inf")


def excludes(row: Row) -> bool:
    """Return whether a row excludes tokens."""
    params = row.sampling
    return bool(params.bad_word_ids or params.allowed_token_ids) or _is_too_short(row)


def exclude(logits: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int]) -> None:
    """Exclude bad words, all but the allowed tokens, and tokens that would end a response too early.

    If bad words and early ends would exclude all allowed tokens, the allowed tokens stay. Changes float32 logits
    `[rows, vocab_size]` in place.

    Args:
        rows: rows with exclusions, by index.
        eos_token_ids: tokens that end every response.
    """
    for index, row in rows.items():
        banned = _bad_words(row)
        if _is_too_short(row):
            banned.update(eos_token_ids, row.sampling.stop_token_ids)
        if allowed := row.sampling.allowed_token_ids:
            left = [token_id for token_id in allowed if token_id not in banned] or list(allowed)
            places = uploaded(torch.tensor(left), logits.device)
            kept = logits[index].index_select(0, places)
            logits[index] = EXCLUDED
            logits[index].index_copy_(0, places, kept)
        elif 0 < len(banned) < logits.shape[-1]:
            places = uploaded(torch.tensor(list(banned)), logits.device)
            logits[index].index_fill_(0, places, EXCLUDED)


def _is_too_short(row: Row) -> bool:
    return row.position - row.num_prompt_tokens < row.sampling.min_tokens


def _bad_words(row: Row) -> set[int]:
    """Return the tokens that would complete a bad word."""
    banned = set()
    for *begin, last in row.sampling.bad_word_ids:
        if not begin or row.history[-len(begin) :] == tuple(begin):
            banned.add(last)
    return banned


def top_k(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the k likeliest tokens."""
    vocab_size = rising.shape[-1]
    kept = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    places = uploaded(torch.tensor([vocab_size - k for k in kept]), rising.device)
    return WeightBounds(rising.gather(1, places[:, None])[:, 0])


def top_p(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the smallest set of likeliest tokens with a total probability of at least p (Holtzman et al., 2020)."""
    rest = uploaded(torch.tensor([1 - p.top_p for p in params], dtype=torch.float64), rising.device)
    return WeightBounds(rising.gather(1, first_beyond(rising, rest)[:, None])[:, 0])


def min_p(rising: torch.Tensor, params: Sequence[SamplingParams]) -> WeightBounds:
    """Keep the tokens that are at least p times as likely as the best one (Nguyen et al., 2024)."""
    return WeightBounds(uploaded(torch.tensor([p.min_p for p in params]), rising.device) * rising[:, -1])


TINY = torch.finfo(torch.float32).tiny
INFINITE = 0x7F800000
"""Bits of an infinite float32. For positive numbers the order of the bits is the order of the numbers."""
SHIFTS = (26, 21, 16, 11, 6, 1)
"""Shifts that select five of these bits at a time, from the highest; one bit is left."""


def typical(rising: torch.Tensor, params: Sequence[SamplingParams], buffers: Buffers) -> WeightBounds:
    """Keep the tokens whose surprisal is closest to the entropy (Meister et al., 2023).

    The weights are probabilities up to a common factor, so a token's surprisal is the logarithm of that factor minus
    the token's log weight. The tokens closest to the entropy are thus those whose log weight is closest to the mean log
    weight. Returns the bounds of the remaining weights.

    Args:
        rising: weights in ascending order, `[rows, vocab_size]`.
        params: the rows' parameters.
        buffers: memory for two arrays of that shape.
    """
    shares = uploaded(torch.tensor([p.typical_p for p in params], dtype=torch.float64), rising.device)
    sums = PrefixSums(rising)
    wanted = (shares * sums.total)[:, None]
    logs = torch.clamp(rising, min=TINY, out=buffers.like("logs", rising)).log_()  # log of 0 takes ten times as long
    products = torch.mul(rising, logs, out=buffers.like("products", rising))
    mean = (products.sum(-1, dtype=torch.float64) / sums.total).float()[:, None]
    # Search for the least distance that contains the share: five bits at a time, over all prefixes of a number.
    bits = torch.zeros(len(params), 1, dtype=torch.int64, device=rising.device)
    for shift, width in (*((shift, 32) for shift in SHIFTS), (0, 2)):
        largest = bits + (torch.arange(1, width + 1, device=rising.device) << shift) - 1
        before, through = sums.until(torch.cat(_window(logs, mean, largest), -1)).chunk(2, -1)
        is_enough = through - before >= wanted
        bits += (~is_enough).sum(-1, keepdim=True) << shift
    begin, end = _window(logs, mean, bits)
    lower = rising.gather(1, begin.clamp(max=rising.shape[-1] - 1))[:, 0]
    upper = rising.gather(1, (end - 1).clamp(min=0))[:, 0]
    is_asked = shares < 1
    return WeightBounds(torch.where(is_asked, lower, 0.0), torch.where(is_asked, upper, torch.inf))


def _window(logs: torch.Tensor, mean: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end of the logs within given distances of the mean; distances are float32 bits."""
    distance = bits.clamp(max=INFINITE).to(torch.int32).view(torch.float32)
    return torch.searchsorted(logs, mean - distance), torch.searchsorted(logs, mean + distance, right=True)


def is_without_top(row: Row) -> bool:
    """Return whether `xtc` excludes tokens from this draw, decided by seed, choice and position."""
    params = row.sampling
    if not params.xtc_probability:
        return False
    assert params.seed is not None
    return uniform(params.seed, row.choice_index, row.position, XTC) < params.xtc_probability


def xtc(weights: torch.Tensor, rows: Mapping[int, Row], eos_token_ids: Collection[int]) -> torch.Tensor:
    """Exclude the likeliest tokens ("exclude top choices"): return the greatest weight that remains in each row.

    The definition is the author's (p-e-w, text-generation-webui, pull request 6335). With probability
    `xtc_probability`, all tokens that are at least as likely as `xtc_threshold` are excluded, except the least likely
    of them. If a line break or an end token is among them, no token is excluded, and the greatest weight is infinite.

    Args:
        weights: `[all rows, vocab_size]`.
        rows: rows that exclude tokens, by index.
        eos_token_ids: tokens that end every response.
    """
    chosen = weights.index_select(0, uploaded(torch.tensor(list(rows)), weights.device))
    thresholds = uploaded(torch.tensor([row.sampling.xtc_threshold for row in rows.values()]), weights.device)
    is_top = (chosen >= (thresholds * chosen.sum(-1, dtype=torch.float64)).float()[:, None]) & (chosen > 0)
    most = torch.where(is_top, chosen, torch.inf).amin(-1)
    for place, row in enumerate(rows.values()):
        exempt = [*eos_token_ids, *row.sampling.stop_token_ids, *row.sampling.xtc_exempt_token_ids]
        if exempt:  # decided on the device of the weights, so that the host need not wait for them
            heaviest = chosen[place].index_select(0, uploaded(torch.tensor(exempt), weights.device)).amax()
            most[place].masked_fill_(heaviest > most[place], torch.inf)
    return most
