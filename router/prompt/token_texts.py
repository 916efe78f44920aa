"""What single tokens stand for, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

BLOCK = 64
"""Tokens that are decoded together."""


class TokenTexts:
    """The text of each token, decoded once, with others beside it in the vocabulary. What has been decoded is kept as
    one string a block: a string a token would take 50 bytes more, and all come up once clients ask for log
    probabilities.

    Args:
        decode: returns the text of each of several sequences.
    """

    def __init__(self, decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]) -> None:
        self._decode = decode
        self._blocks: dict[int, tuple[str, array[int]]] = {}
        """The texts of each block, one after the other, and where each begins, with the end of the last."""

    def of(self, token_id: int) -> str:
        """Return a token's text."""
        number, place = divmod(token_id, BLOCK)
        text, begins = self._blocks.get(number) or self._read(number)
        return text[begins[place] : begins[place + 1]]

    def _read(self, number: int) -> tuple[str, array[int]]:
        texts = self._decode([(token_id,) for token_id in range(BLOCK * number, BLOCK * (number + 1))])
        self._blocks[number] = block = "".join(texts), array("I", accumulate(map(len, texts), initial=0))
        return block
