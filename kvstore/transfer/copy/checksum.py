"""Checksums of chunks over the transferred bytes: XXH3 for payloads in main memory, a sum of words on a GPU.

Both sides of a transport stage on the same kind of device, so they use the same checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WEIGHT: Final = 0x1E3779B97F4A7C15
_WORD_BYTES: Final = 8
_LOW_33_BITS: Final = (1 << 33) - 1
_64_BITS: Final = (1 << 64) - 1


class Checksum(Protocol):
    """A 64-bit checksum of a `uint8` payload, updated part by part while each is in the processor's cache."""

    def update(self, part: torch.Tensor | NDArray[np.uint8]) -> None:
        """Add the next part; the division into parts makes no difference."""

    def digest(self) -> int:
        """Return the checksum of all parts so far."""


class Xxh3:
    """XXH3, for payloads in main memory."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, part: torch.Tensor | NDArray[np.uint8]) -> None:
        self._state.update(np.asarray(part).data)

    def digest(self) -> int:
        return self._state.intdigest()


def word_sum(payload: torch.Tensor) -> torch.Tensor:
    """Add up the words of a payload in place, each weighted by its position: a plain sum misses permuted blocks.

    First the upper half of a word is mixed into the lower, so that changes of the same bit of two words do not cancel.

    Returns:
        The sum, a single `int64`; `digest_of` makes it the checksum.
    """
    padded = torch.nn.functional.pad(payload, (0, -len(payload) % _WORD_BYTES))
    words = padded.view(torch.int64)
    words = words ^ (words >> 31 & _LOW_33_BITS)
    places = torch.arange(len(words), device=words.device, dtype=torch.int64)
    return (words * (places * _WEIGHT | 1)).sum()


def digest_of(sums: NDArray[np.int64]) -> int:
    """Return the checksum of a payload from the partial sums of a GPU's programs."""
    return int(sums.sum()) & _64_BITS
