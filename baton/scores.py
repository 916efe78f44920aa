"""Log probabilities of drawn tokens in the model's distribution."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities of consecutive tokens, by the model's distribution before temperature, penalties and the like.

    The values are stored as arrays: a token with 20 others takes 0.5 KB, instead of 1.5 KB as Python's numbers.

    Raises:
        ValueError: the number of likeliest tokens differs between tokens.
    """

    logprobs: Sequence[float] = ()
    """Log probability of each token; empty: none were requested."""
    top_ids: Sequence[int] = ()
    """Likeliest tokens at each position, best first, the same number for each."""
    top_logprobs: Sequence[float] = ()

    def __post_init__(self) -> None:
        if len(self.top_ids) != len(self.top_logprobs) or len(self.top_ids) != self.num_top * len(self.logprobs):
            raise ValueError(f"{len(self.top_ids)} and {len(self.top_logprobs)} scores of {len(self.logprobs)} tokens")
        for name, code in _CODES.items():
            if not isinstance(given := getattr(self, name), array):
                object.__setattr__(self, name, array(code, given))

    def __hash__(self) -> int:  # arrays are not hashable
        return hash((*self.logprobs, *self.top_ids, *self.top_logprobs))

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens at each position."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def part(self, begin: int, end: int) -> TokenScores:
        """Return the scores of some of the tokens."""
        if not self.logprobs or (begin == 0 and end >= len(self.logprobs)):
            return self
        tops = slice(begin * self.num_top, end * self.num_top)
        return TokenScores(self.logprobs[begin:end], self.top_ids[tops], self.top_logprobs[tops])

    def top(self, index: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens at a position, best first, with their log probabilities."""
        tops = slice(index * self.num_top, (index + 1) * self.num_top)
        return list(zip(self.top_ids[tops], self.top_logprobs[tops], strict=True))

    @staticmethod
    def joined(parts: Iterable[TokenScores]) -> TokenScores:
        """Return the scores of all tokens, one part after the other."""
        kept = [part for part in parts if part.logprobs]
        if len(kept) <= 1:
            return kept[0] if kept else NO_SCORES
        return TokenScores(
            list(chain.from_iterable(part.logprobs for part in kept)),
            list(chain.from_iterable(part.top_ids for part in kept)),
            list(chain.from_iterable(part.top_logprobs for part in kept)),
        )


_CODES = {"logprobs": "d", "top_ids": "I", "top_logprobs": "d"}
"""Type code of each field's array."""
NO_SCORES = TokenScores()


class Candidates(NamedTuple):
    """Likeliest next tokens of a sequence, in falling order, if more than one is of interest."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log probability of each, among those that penalties, biases and structure leave."""
    scores: tuple[TokenScores, ...] = ()
    """Scores of each one by the model; empty: none were requested."""


class Sampled(NamedTuple):
    """Results of a step's rows, each of which draws a sequence's next token."""

    token_ids: list[int]
    """One token per row; undefined for a row that failed or belongs to a beam search."""
    scores: list[TokenScores] | None = None
    """Scores of each token; None: no row asks for them."""
    failures: Mapping[int, str] = {}
    """Reasons why rows have no token, by row."""
    candidates: Mapping[int, Candidates] = {}
    """Next tokens of the rows of beam searches, by row."""
