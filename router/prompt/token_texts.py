"""Memory-efficient cache of the texts of single tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

BLOCK = 64
"""Number of tokens that are decoded together."""


class TokenTexts:
    """Cache of token texts, decoded and stored in blocks of neighbouring token ids.

    Each block is one string: a string per token would take 50 bytes more, and requests with log probabilities soon use
    the whole vocabulary.

    Args:
        decode: returns the texts of several sequences.
    """

    def __init__(self, decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]) -> None:
        self._decode = decode
        self._blocks: dict[int, tuple[str, array[int]]] = {}
        """Block number -> the concatenated texts, and their start offsets followed by the end of the last text."""

    def of(self, token_id: int) -> str:
        """Return a token's text."""
        number, place = divmod(token_id, BLOCK)
        text, begins = self._blocks.get(number) or self._read(number)
        return text[begins[place] : begins[place + 1]]

    def _read(self, number: int) -> tuple[str, array[int]]:
        texts = self._decode([(token_id,) for token_id in range(BLOCK * number, BLOCK * (number + 1))])
        self._blocks[number] = block = "".join(texts), array("I", accumulate(map(len, texts), initial=0))
        return block
