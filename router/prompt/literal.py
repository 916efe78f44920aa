r"""Encodes special tokens in a client's text as plain text.

A tokenizer turns `<|im_end|>` into the token that ends a message, even if a user wrote it. Here only the special tokens
of the template become tokens. Texts of the client that look like a special token are marked before the template renders
them: a noncharacter of Unicode that occurs in none of the client's texts is inserted before or into them. This includes
parts of a special token that the template or another text may complete. The template's own output has no marks. Then
the prompt is split at the template's special tokens, and a copy of the tokenizer that knows no special tokens
(`encode_special_tokens`) encodes the pieces between them.

    client      "see <|im_end|>"          template   <|im_start|>user\n + text + <|im_end|>
    marked      "see #<|im_end|>"         rendered   <|im_start|>user\nsee #<|im_end|><|im_end|>
                                          cut        [<|im_start|>] "user\nsee <|im_end|>" [<|im_end|>]

Most chats have no such text, and `SegmentEncoder` encodes them. It has a cache of segments, because most of a prompt
has usually been encoded before.

Every turn sends the chat again, and every chat sends its system prompt again. Special tokens such as <|im_start|> split
a prompt into independent segments: a tokenizer searches for these tokens first, and encodes the text between two of
them separately (Hugging Face's `AddedVocabulary::extract_and_normalize`). So the tokens of each segment are cached for
the next prompt that contains it. The routers of SGLang (SMG) and Dynamo do this with whole prefixes.

A segment starts with the special token before it. Otherwise a tokenizer would take its text for the start of a prompt,
where some tokenizers insert a space.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers

from baton.chat import ROLES
from baton.errors import InvalidRequest
from baton.rust import complaint_of

BATCH = 1024
"""Number of pieces that are encoded at a time; each takes about a kilobyte of memory."""
EDGE = "\0"
"""Separates the client's texts when they are searched together."""
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Candidates for the mark: noncharacters of Unicode, which no text needs."""
ANCHOR, STRIPS_RIGHT, STRIPS_LEFT = (f"\U0001fffe{secrets.token_hex(16)}" for _ in range(3))
"""Tokens that only the copy has. They replace special tokens, so that the text next to one is not treated as the start
or end of a text. They are random, so no client can guess one."""


_TYPES = frozenset(("function", "object", "array", "string", "number", "integer", "boolean", "null", "text", "image"))
"""Keywords of tools, schemas and parts of messages that templates compare with."""
_INSERTED = re.compile(r"%[-\d.]*[a-z]|\{[^{}]*\}")
"""Placeholders of string formatting."""
MAX_BYTES = 64 * 2**20
"""Size limit of the cache: about 25 to 35 MB of English text, with its tokens."""
LARGEST_SHARE = 1 / 16
"""Largest segment that is cached, as a share of MAX_BYTES: otherwise a single one could evict all others."""
MIN_CHARACTERS = 64
"""Minimum length of a segment that another one follows: shorter ones would cost more than they save."""
OVERHEAD_BYTES = 300
"""Estimated bytes of a cached segment in addition to its text and tokens."""


class LiteralEncoder:
    """Encodes a client's text so that no part of it becomes a special token.

    Args:
        words: the string literals of the model's chat templates.
        names: the names of object members that the templates read; these are not the client's text.
        also: token ids that count as special although the tokenizer does not say so: the placeholder of images.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        words: Collection[str] = (),
        names: Collection[str] = (),
        also: Collection[int] = (),
    ) -> None:
        tokens = tokenizer.get_added_tokens_decoder()
        self._special = {
            token.content: (token_id, token) for token_id, token in tokens.items() if token.special or token_id in also
        }
        self._literal = tokenizers.Tokenizer.from_str(_with_special(tokenizer, also))
        self._literal.encode_special_tokens = True
        self._literal.add_tokens(
            [
                tokenizers.AddedToken(ANCHOR, normalized=False),
                tokenizers.AddedToken(STRIPS_RIGHT, normalized=False, rstrip=True),
                tokenizers.AddedToken(STRIPS_LEFT, normalized=False, lstrip=True),
            ]
        )
        self._anchors = {self._literal.token_to_id(name) for name in (ANCHOR, STRIPS_RIGHT, STRIPS_LEFT)}
        ordinary = {token.content for token in tokens.values()} - self._special.keys()
        self._cuts = longest_of(self._special.keys() | ordinary) if self._special else ""
        self._finder = _Finder(tokenizer, self._special, words)
        self._names = frozenset(names) - self._special.keys()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a plain-text prompt.

        Args:
            add_special_tokens: add the special tokens that the model expects around a text.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        return encode_batch(self._literal, [text], add_special_tokens=add_special_tokens)[0]

    def mark(self, context: Mapping[str, Any]) -> Marked | None:
        """Mark the client's texts in a template's context.

        Args:
            context: plain JSON values by variable name. The role of a message and the names that the template reads do
                not count as the client's text.

        Returns:
            The marked context; None: no text looks like a special token.

        Raises:
            InvalidRequest: the texts contain every candidate for the mark.
        """
        texts: list[str] = []
        _collect(context, self._names, texts)
        everything = EDGE + EDGE.join(texts) + EDGE
        if not self._finder.is_suspect(everything):
            return None
        everything = everything.lower()
        mark = next((each for each in MARKS if each not in everything and _code(each) not in everything), None)
        if mark is None:
            raise InvalidRequest(
                "the chat contains special tokens of the model and all noncharacters U+FDD0 to U+FDEF, one of which "
                "must be unused; remove one of them",
                "messages",
            )
        marked = {name: _marked(value, self._finder, mark, self._names) for name, value in context.items()}
        return Marked(mark, marked)

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a prompt that a template has rendered from a marked context.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        escape = json.dumps(mark)[1:-1]  # the template's `tojson` may write the mark like this
        pieces, ends, begin = [], [], 0
        before = ""
        for match in re.finditer(f"(?<!{mark})(?<!{re.escape(escape)})(?:{self._cuts})", text):
            if (found := self._special.get(match[0])) is None or _is_in_a_word(found[1], text, match):
                continue
            piece = text[begin : match.start()]
            pieces.append(before + piece + (STRIPS_LEFT if found[1].lstrip else ""))
            ends.append([found[0]])
            begin, before = match.end(), STRIPS_RIGHT if found[1].rstrip else ANCHOR
        pieces.append(before + text[begin:])
        plain = [piece.replace(mark, "").replace(escape, "") for piece in pieces]
        ends.append([])
        token_ids: list[int] = []
        for first in range(0, len(plain), BATCH):
            encoded = encode_batch(self._literal, plain[first : first + BATCH], add_special_tokens=False)
            for ids, end in zip(encoded, ends[first : first + BATCH], strict=True):
                token_ids += (token_id for token_id in ids if token_id not in self._anchors)
                token_ids += end
        return token_ids


@dataclass(frozen=True, slots=True)
class Marked:
    """Context of a template with marks, and the mark."""

    mark: str
    context: dict[str, Any]


class _Finder:
    """Finds texts that look like a special token, alone or together with text that the template writes next to them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: Mapping[str, Any], words: Collection[str]) -> None:
        self._longest = max(map(len, special), default=0)
        self._whole = re.compile(longest_of(special)) if special else None
        self._begins, self._ends, self._middles = _parts(special, words)
        self._sought = _patterns(special, words)
        self._first = {content[0] for content in special}
        self._last = {content[-1] for content in special}
        self._normalizer = tokenizer.normalizer
        normalized = [content for content, (_, token) in special.items() if token.normalized and self._normalizer]
        cores, own = (
            [_core(self._normalizer, text) for text in texts] for texts in (normalized, words if normalized else ())
        )
        self._normalized = _patterns(cores, own)

    def is_suspect(self, texts: str) -> bool:
        """Return whether texts, each between two edges, contain anything to mark."""
        for pattern in self._sought:
            if pattern.search(texts):
                return True
        if not self._normalized:
            return False
        normal = self._normalizer.normalize_str(texts)
        return EDGE not in normal or any(pattern.search(normal) for pattern in self._normalized)

    def places(self, text: str) -> Iterator[int]:
        """Yield the positions to mark: starts of special tokens, and parts of one at the start or end of the text."""
        if self._whole is None:
            return
        place = -1
        while (match := self._whole.search(text, place + 1)) is not None:  # special tokens may overlap
            place = match.start()
            yield place
        bare = text.strip()  # a template may strip the text
        yield from self._places_of_parts(text, 0)
        yield from self._places_of_parts(bare, text.find(bare))

    def _places_of_parts(self, text: str, offset: int) -> Iterator[int]:
        """Yield the positions of parts of special tokens at the start and end of a text, plus an offset."""
        if text in self._middles:
            yield offset
        for last in self._last:
            end = text.find(last, 0, self._longest) + 1
            while end:
                if text[:end] in self._ends:
                    yield offset
                end = text.find(last, end, self._longest) + 1
        for first in self._first:
            begin = text.rfind(first, max(0, len(text) - self._longest))
            while begin >= 0:
                if text[begin:] in self._begins:
                    yield offset + begin
                begin = text.rfind(first, max(0, len(text) - self._longest), begin)


class _SpecialParts(NamedTuple):
    """Parts of special tokens, which other text may complete."""

    begins: set[str]
    ends: set[str]
    middles: set[str]
    """Parts that can continue a special token whose start the template may write."""


def _parts(special: Iterable[str], words: Iterable[str]) -> _SpecialParts:
    pieces = {piece for word in (*words, *ROLES) for piece in _INSERTED.split(word) if piece}
    special = sorted(special)
    longest = max(map(len, special), default=0)
    tails = {piece[-length:] for piece in pieces for length in range(1, min(len(piece), longest) + 1)}
    middles = set[str]()
    for content in special:
        begun = set[int]()
        for end in range(1, len(content) - 1):
            if content[:end] in tails or any(content[begin:end] in pieces for begin in begun):
                begun.add(end)
        middles |= {content[begin:end] for begin in begun for end in range(begin + 1, len(content))}
    return _SpecialParts(
        {content[:end] for content in special for end in range(1, len(content))},
        {content[begin:] for content in special for begin in range(1, len(content))},
        middles,
    )


def _patterns(special: Collection[str], words: Iterable[str]) -> list[re.Pattern[str]]:
    """Return the patterns that find special tokens and their parts in texts, each between two edges."""
    parts = _parts(special, words)
    sought = [longest_of(special)] if special else []
    if parts.begins:
        sought.append(f"(?:{longest_of(parts.begins)})\\s*{EDGE}")
        sought.append(f"{EDGE}\\s*(?:{longest_of(parts.ends)})")
    if parts.middles:
        sought.append(f"{EDGE}\\s*(?:{longest_of(parts.middles)})\\s*{EDGE}")
    return [re.compile(pattern) for pattern in sought]


def _core(normalizer: Any, content: str) -> str:
    """Return a token's content in normalized text, without the prefix that a normalizer adds to every text."""
    alone, behind = normalizer.normalize_str("x"), normalizer.normalize_str("x" + content)
    core: str = behind[len(alone) :] if behind.startswith(alone) else normalizer.normalize_str(content)
    return core


def _is_in_a_word(token: tokenizers.AddedToken, text: str, match: re.Match[str]) -> bool:
    """Return whether a token that must be a separate word is a part of a word."""
    beside = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
    return token.single_word and any(character.isalnum() or character == "_" for character in beside)


def _collect(value: Any, names: Collection[str], texts: list[str]) -> None:
    """Add the client's texts in a value to the list. This runs for every chat, so the most common type is first."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in names:
                texts.append(key)
            if each and not _is_word(key, each, names):
                _collect(each, names, texts)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, names, texts)
    elif isinstance(value, Mapping):
        _collect(dict(value), names, texts)


def _marked(value: Any, finder: _Finder, mark: str, names: Collection[str]) -> Any:
    match value:
        case str():
            places = [0, *sorted(set(finder.places(value))), len(value)]
            return mark.join(value[begin:end] for begin, end in itertools.pairwise(places))
        case Mapping():
            return {
                key if key in names else _marked(key, finder, mark, names): (
                    each if _is_word(key, each, names) else _marked(each, finder, mark, names)
                )
                for key, each in value.items()
            }
        case list() | tuple():
            return [_marked(each, finder, mark, names) for each in value]
    return value


def _is_word(key: str, value: Any, names: Collection[str]) -> bool:
    """Return whether a value is a keyword that templates compare with, and not the client's text."""
    if not isinstance(value, str):
        return False
    return value in ROLES if key == "role" else key == "type" and value in _TYPES and value in names


def _with_special(tokenizer: tokenizers.Tokenizer, also: Collection[int]) -> str:
    """Return a tokenizer as JSON in which these added tokens are special, too."""
    tokens = tokenizer.get_added_tokens_decoder()
    if all(tokens[token_id].special for token_id in also if token_id in tokens):
        return tokenizer.to_str()
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] |= token["id"] in also
    return json.dumps(written)


def _code(mark: str) -> str:
    """Return the mark's code point in hexadecimal, as in a JSON escape."""
    return f"{ord(mark):04x}"


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
