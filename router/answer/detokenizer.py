"""Token ids into text while they arrive.

A token is not text: it may hold a part of a character's bytes, or a leading space that depends on what came before. So,
as text-generation-inference does (server/text_generation_server/models/model.py, `decode_token`) and vLLM after it, the
new tokens are decoded together with a few before them, and the text of those is cut off:

    ... | context | pending |        text = decode(context + pending), without decode(context)
        prefix    read      end

When that text ends in U+FFFD, a character may be unfinished and all pending tokens wait; else they become the context.

`tokenizers.decoders.DecodeStream` (0.23.3) does the same and is right, but it never gives up on bytes that are broken
for good, so a run of them is withheld for ever at quadratic cost (4,000 tokens: 1.4 s), as is a run of special tokens,
and it has no flush. Hence this code, with two rules more: skipped tokens never enter the window, and a window of
`MAX_PENDING` tokens is cut where that provably changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_PENDING = 8
MAX_CHARACTER_TOKENS = 4
"""A character has at most four bytes in UTF-8, and a token at least one byte."""
NUM_CONTEXT = 6


class IncrementalDetokenizer:
    """The text of one choice, given out in whole characters.

    All that `push` and `flush` return, joined, is `tokenizer.decode` of all ids. With `context`, the prompt, the answer
    is decoded as its continuation, so that "▁Paris" keeps its space. A push decodes a bounded number of tokens.

    Args:
        skipped_ids: tokens that have no text; None: special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), skipped_ids: frozenset[int] | None = None
    ) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._skipped_ids = tokenizer.special_ids if skipped_ids is None else skipped_ids
        self._decode, self._text_of = tokenizer.decode_all, tokenizer.text_of
        self._window = self._with_text(context[-NUM_CONTEXT:])
        self._context_text = self._decode(self._window)
        if self._context_text.endswith(REPLACEMENT):
            self._window, self._context_text = [], ""  # the prompt ends inside a character: nothing to continue
        self._num_context = len(self._window)

    @property
    def holds_back(self) -> bool:
        """Whether tokens were pushed whose text has not been given out."""
        return len(self._window) > self._num_context

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join([self._push(token_id) for token_id in self._with_text(token_ids)])

    def flush(self) -> str:
        """The answer has ended: what was held back, with U+FFFD for bytes that make no character."""
        return self._advance(len(self._window))

    def _with_text(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that have a text: none outside the vocabulary, nor those that are skipped."""
        size, skipped = self._vocab_size, self._skipped_ids
        return [token_id for token_id in token_ids if 0 <= token_id < size and token_id not in skipped]

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._context_text) and not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_context >= MAX_PENDING:
            return self._advance(self._safe_cut(text))
        return ""

    def _safe_cut(self, text: str) -> int:
        """The last boundary in the window that no character spans, so that more tokens cannot change what is before it.

        In lossy UTF-8 decoding, text(a + b) == text(a) + text(b) for a non-empty b just when no character and no
        beginning of one goes over the boundary; a broken character ends within three bytes, so one of these holds.
        """
        for cut in range(len(self._window) - 1, len(self._window) - 1 - MAX_CHARACTER_TOKENS, -1):
            if self._decode(self._window[:cut]) + self._decode(self._window[cut:]) == text:
                return cut
        return self._num_context

    def _advance(self, end: int, text: str | None = None) -> str:
        """Gives out the text of the window up to `end`; the tokens it came from become the context."""
        if end == self._num_context:
            return ""
        text = self._decode(self._window[:end]) if text is None else text
        new_text = text[len(self._context_text) :]
        del self._window[: self._num_context]
        self._num_context = end - self._num_context
        context = self._window[: self._num_context]
        self._context_text = self._text_of(context[0]) if len(context) == 1 else self._decode(context)
        return new_text
