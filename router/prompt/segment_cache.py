"""Encodes prompts of which most has been encoded before.

A chat comes again with every turn, and its system prompt with every chat. Special tokens (<|im_start|> and its like)
cut a prompt into segments that do not see each other: a tokenizer looks for those tokens first, and encodes whatever
lies between two of them by itself (Hugging Face's `AddedVocabulary::extract_and_normalize`). So the tokens of each
segment are kept for the next prompt that holds it. The routers of SGLang (SMG) and Dynamo do this with whole prefixes.

A segment begins with the token that cuts it off, so that no tokenizer takes its text for the beginning of a prompt,
before which some write a space.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from baton.errors import InvalidRequest
from baton.rust import complaint_of

MAX_BYTES = 64 * 2**20
"""Kept at most: about 25 to 35 MB of English text, and its tokens."""
LARGEST_SHARE = 1 / 16
"""Largest segment that is kept, as a share of MAX_BYTES: otherwise a single one could evict all others."""
MIN_CHARACTERS = 64
"""Shortest segment that is kept when another one follows: shorter ones would cost more than they save."""
OVERHEAD_BYTES = 300
"""Bytes of a kept segment beside its text and its tokens: about what the dictionary and the objects take."""


def encode_batch(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """The token ids of each text.

    Raises:
        InvalidRequest: a text is not valid Unicode, or is none that the tokenizer can encode.
    """
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)  # fast: without offsets
    except TypeError as error:  # JSON may smuggle half of a surrogate pair into a str
        raise InvalidRequest("The prompt is not valid Unicode: it holds half of a surrogate pair.") from error
    except BaseException as error:
        raise InvalidRequest(f"The model's tokenizer cannot encode the prompt: {complaint_of(error)}") from error
    return [encoding.ids for encoding in encodings]


class SegmentEncoder:
    """Text to token ids, as `tokenizer.encode(text, add_special_tokens=False)` does it for any number of threads.

    That a tokenizer's post-processor does no more than to add special tokens is taken for granted.

    Args:
        max_bytes: kept at most, of all scopes together; what was used least recently goes first.
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
            scope: the tenant's cache scope. The time that this takes reveals what came before, so only prompts of the
                same scope share segments.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        if self._cuts is None:
            return encode_batch(self._tokenizer, [text], add_special_tokens=False)[0]
        keys = [(scope, segment) for segment in _segments(text, self._cuts)]
        with self._lock:
            found = {key: ids for key in keys if (ids := self._kept.get(key)) is not None}
            for key in found:
                self._kept.move_to_end(key)
        if missing := [key for key in dict.fromkeys(keys) if key not in found]:
            encoded = encode_batch(self._tokenizer, [segment for _, segment in missing], add_special_tokens=False)
            new = {key: array("I", ids) for key, ids in zip(missing, encoded, strict=True)}
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

    def _keep(self, new: dict[tuple[str, str], array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                num_bytes = _size(key, ids)
                was_first = key not in self._kept  # else another thread was
                if was_first and num_bytes <= LARGEST_SHARE * self._max_bytes:
                    self._kept[key] = ids
                    self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: tuple[str, str], ids: array[int]) -> int:
    return OVERHEAD_BYTES + sys.getsizeof(key[1]) + len(ids) * ids.itemsize


def _segments(text: str, cuts: re.Pattern[str]) -> list[str]:
    """`text` in pieces, each but the first beginning with an added token."""
    segments, begin = [], 0
    for match in cuts.finditer(text):
        if match.start() - begin >= MIN_CHARACTERS:
            segments.append(text[begin : match.start()])
            begin = match.start()
    return [*segments, text[begin:]]


def _cuts(tokens: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """What finds special tokens as a tokenizer does; None: this one has none that can be found that way.

    It looks for all its added tokens at once, the leftmost first and of those the longest. Ordinary ones, of which some
    models have thousands, matter only as far as they could take the place of a special one, or of one that matters.
    """
    raw = [token for token in tokens if not token.normalized]  # the others are looked for after these, in between
    sought = {token.content for token in raw if token.special}
    if not sought or any(token.lstrip or token.single_word for token in raw):  # these look at what precedes them
        return None
    ordinary = {token.content for token in raw} - sought
    begins = {content[0] for content in sought}
    while rivals := {content for content in ordinary if not begins.isdisjoint(content)}:
        sought |= rivals
        ordinary -= rivals
        begins |= {content[0] for content in rivals}
    return re.compile(longest_of(sought))


def longest_of(words: Iterable[str]) -> str:
    """A pattern for the longest of the words, as a trie: in an alternation each would be tried at every place."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}  # a word ends here
    return _pattern(trie)


def _pattern(trie: dict[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(node) for character, node in trie.items() if character]
    if "" in trie:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else branches[0]
