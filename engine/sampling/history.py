"""Token histories of sequences, in the form that penalties need.

A history is a function of the tokens alone; keeping it only saves work. The history of a forgotten sequence, for
instance after a long preemption, is read again from its first token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.sampling.row import Row

Number = TypeVar("Number", bound=np.generic)
MAX_KEPT = 512
"""Number of sequences whose histories are kept."""


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
        """State of `dry` for this number of tokens."""

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
    """Histories of the most recently sampled sequences."""

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
