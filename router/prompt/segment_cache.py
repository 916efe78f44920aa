"""Encodes prompts with a cache of segments, because most of a prompt has usually been encoded before.

Every turn sends the chat again, and every chat sends its system prompt again. Special tokens such as <|im_start|> split
a prompt into independent segments: a tokenizer searches for these tokens first, and encodes the text between two of
them separately (Hugging Face's `AddedVocabulary::extract_and_normalize`). So the tokens of each segment are cached for
the next prompt that contains it. The routers of SGLang (SMG) and Dynamo do this with whole prefixes.

A segment starts with the special token before it. Otherwise a tokenizer would take its text for the start of a prompt,
where some tokenizers insert a space.
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
"""Size limit of the cache: about 25 to 35 MB of English text, with its tokens."""
LARGEST_SHARE = 1 / 16
"""Largest segment that is cached, as a share of MAX_BYTES: otherwise a single one could evict all others."""
MIN_CHARACTERS = 64
"""Minimum length of a segment that another one follows: shorter ones would cost more than they save."""
OVERHEAD_BYTES = 300
"""Estimated bytes of a cached segment in addition to its text and tokens."""


def encode_batch(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Raises:
        InvalidRequest: a text is not valid Unicode, or the tokenizer cannot encode it.
    """
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)  # fast: without offsets
    except TypeError as error:  # JSON escapes can put half of a surrogate pair into a str
        raise InvalidRequest("the prompt is not valid Unicode: it contains half of a surrogate pair") from error
    except BaseException as error:
        raise InvalidRequest(f"the model's tokenizer cannot encode the prompt: {complaint_of(error)}") from error
    return [encoding.ids for encoding in encodings]


class SegmentEncoder:
    """Cached and thread-safe equivalent of `tokenizer.encode(text, add_special_tokens=False)`.

    It assumes that the tokenizer's post-processor only adds special tokens.

    Args:
        max_bytes: size limit over all scopes; the least recently used segments are evicted first.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._cuts = _cuts(tokenizer.get_added_tokens_decoder().values())
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, scope: str) -> list[int]:
        """Return the token ids of `text`.

        Args:
            scope: the tenant's cache scope. The duration reveals whether a text was cached, so only prompts of the same
                scope share segments.

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
        """Current size of the cache."""
        return self._num_bytes

    def _keep(self, new: dict[tuple[str, str], array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                num_bytes = _size(key, ids)
                was_first = key not in self._kept  # another thread may have encoded the same segment
                if was_first and num_bytes <= LARGEST_SHARE * self._max_bytes:
                    self._kept[key] = ids
                    self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: tuple[str, str], ids: array[int]) -> int:
    return OVERHEAD_BYTES + sys.getsizeof(key[1]) + len(ids) * ids.itemsize


def _segments(text: str, cuts: re.Pattern[str]) -> list[str]:
    """Split `text` into segments; each one but the first starts with an added token."""
    segments, begin = [], 0
    for match in cuts.finditer(text):
        if match.start() - begin >= MIN_CHARACTERS:
            segments.append(text[begin : match.start()])
            begin = match.start()
    return [*segments, text[begin:]]


def _cuts(tokens: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Return a pattern that finds special tokens as the tokenizer does; None: no pattern can.

    A tokenizer searches for all added tokens at once, and takes the leftmost and then the longest match. Some models
    have thousands of ordinary added tokens. The pattern needs only those that may overlap a special token, or another
    token of the pattern.
    """
    raw = [token for token in tokens if not token.normalized]  # normalized ones are searched later, within segments
    sought = {token.content for token in raw if token.special}
    if not sought or any(token.lstrip or token.single_word for token in raw):  # these depend on the text before them
        return None
    ordinary = {token.content for token in raw} - sought
    begins = {content[0] for content in sought}
    while rivals := {content for content in ordinary if not begins.isdisjoint(content)}:
        sought |= rivals
        ordinary -= rivals
        begins |= {content[0] for content in rivals}
    return re.compile(longest_of(sought))


def longest_of(words: Iterable[str]) -> str:
    """Return a pattern for the longest of the words. It is a trie, which is faster than an alternation of all words."""
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
