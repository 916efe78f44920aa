"""Checksums of chunks, over the bytes that travel."""

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


class Checksum(Protocol):
    """A 64-bit checksum of a `uint8` payload, updated part by part while each is in the processor's cache.

    The division into parts makes no difference. On a GPU each part except the last is a multiple of 8 bytes.
    """

    def update(self, part: torch.Tensor | NDArray[np.uint8]) -> None:
        """Adds the next part."""

    def digest(self) -> int:
        """Returns the checksum of all parts so far."""


def new_checksum(device: torch.device) -> Checksum:
    """Returns the checksum for payloads on `device`; both sides of a transport stage on the same kind of device."""
    return Xxh3() if device.type == "cpu" else WordSum()


class Xxh3:
    """XXH3, for payloads in main memory."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, part: torch.Tensor | NDArray[np.uint8]) -> None:
        self._state.update(np.asarray(part).data)

    def digest(self) -> int:
        return self._state.intdigest()


class WordSum:
    """A sum computed on the payload's device, each word weighted by its position: a plain sum misses permuted blocks.

    First the upper half of a word is mixed into the lower, so that changes of the same bit of two words do not cancel.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._num_words = 0

    def update(self, part: torch.Tensor | NDArray[np.uint8]) -> None:
        padded = torch.nn.functional.pad(torch.as_tensor(part), (0, -len(part) % _WORD_BYTES))
        words = padded.view(torch.int64)
        words = words ^ (words >> 31 & _LOW_33_BITS)
        places = torch.arange(self._num_words, self._num_words + len(words), device=words.device, dtype=torch.int64)
        self._sum += int((words * (places * _WEIGHT | 1)).sum().item())
        self._num_words += len(words)

    def digest(self) -> int:
        return self._sum & 0xFFFFFFFFFFFFFFFF
