"""Encodes prompts of which most has been encoded before.

A chat comes again with every turn, and its system prompt with every chat. Special tokens (<|im_start|> and its like)
cut a prompt into segments that do not see each other: a tokenizer looks for those tokens first, and encodes whatever
lies between two of them by itself (Hugging Face's `AddedVocabulary::extract_and_normalize`). So the tokens of each
segment are kept for the next prompt that holds it. The routers of SGLang (SMG) and Dynamo do this with whole prefixes.

A segment begins with its special token, so that no tokenizer takes its text for the beginning of a prompt, before which
some write a space.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import tokenizers

MAX_BYTES = 64 * 2**20
"""Kept at most: of English text, about 40 MB with the tokens of it."""
MIN_CHARACTERS = 64
"""Of a segment that another one follows: shorter ones would cost more than they save."""
OVERHEAD_BYTES = 300
"""Of a kept segment, beside its text and its tokens: about what the dictionary and the objects take."""


class SegmentEncoder:
    """Text to token ids, as `tokenizer.encode(text, add_special_tokens=False)`, for any number of threads.

    Args:
        max_bytes: kept at most; what was used least recently goes first.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._cuts = _cuts(tokenizer.get_added_tokens_decoder().values())
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, scope: str) -> list[int]:
        """The token ids of `text`.

        Args:
            scope: whose prompt it is. How long this takes tells what came before, so only prompts of the same scope
                share segments.

        Raises:
            TypeError: the text is not valid Unicode.
        """
        keys = [(scope, segment) for segment in self._segments(text)]
        with self._lock:
            found = {key: ids for key in keys if (ids := self._kept.get(key)) is not None}
            for key in found:
                self._kept.move_to_end(key)
        if missing := [key for key in dict.fromkeys(keys) if key not in found]:
            encodings = self._tokenizer.encode_batch_fast([text for _, text in missing], add_special_tokens=False)
            new = {key: array("I", encoding.ids) for key, encoding in zip(missing, encodings, strict=True)}
            self._keep(new)
            found |= new
        token_ids: list[int] = []
        for key in keys:
            token_ids.extend(found[key])
        return token_ids

    @property
    def num_bytes(self) -> int:
        """Kept now."""
        return self._num_bytes

    def _segments(self, text: str) -> Sequence[str]:
        """`text` in pieces, each but the first beginning with a special token."""
        if self._cuts is None:
            return [text]
        segments, begin = [], 0
        for match in self._cuts.finditer(text):
            if match.start() - begin >= MIN_CHARACTERS:
                segments.append(text[begin : match.start()])
                begin = match.start()
        return [*segments, text[begin:]]

    def _keep(self, new: dict[tuple[str, str], array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                if key not in self._kept:  # else another thread was first
                    self._kept[key] = ids
                    self._num_bytes += _size(key, ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def _cuts(tokens: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """What finds special tokens as a tokenizer does; None: this one's cannot be found that way.

    It looks for all its added tokens at once, the leftmost first and of those the longest. Ordinary ones, of which some
    models have thousands, matter only as far as they could take a special token's place.
    """
    raw = [token for token in tokens if not token.normalized]  # the others are looked for after these, in between
    special = {token.content for token in raw if token.special}
    if not special or any(token.lstrip or token.single_word for token in raw):  # these look at what precedes them
        return None
    begins = {content[0] for content in special}
    rivals = {token.content for token in raw if begins & set(token.content)}
    longest_first = sorted(special | rivals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _size(key: tuple[str, str], ids: array[int]) -> int:
    return OVERHEAD_BYTES + sys.getsizeof(key[1]) + len(ids) * ids.itemsize
