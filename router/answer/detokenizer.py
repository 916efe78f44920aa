"""Converts token ids to text as they arrive.

A token is not text: it may hold a part of a character's bytes, or a leading space that depends on the text before it.
So new tokens are decoded together with a few tokens before them, and the text of those is cut off. This follows
text-generation-inference (server/text_generation_server/models/model.py, `decode_token`) and vLLM:

    ... | context | pending |        text = decode(context + pending), without decode(context)
        prefix    read      end

If the text ends in U+FFFD, a character may be incomplete, and all pending tokens wait. Otherwise they become the
context.

`tokenizers.decoders.DecodeStream` (0.23.3) does the same correctly, but it waits for ever for invalid bytes to become
valid. It withholds a run of them, or of special tokens, at quadratic cost (4,000 tokens: 1.4 s), and has no flush. So
this code adds two rules: skipped tokens never enter the window, and a window of `MAX_PENDING` tokens is cut at a
position where that provably changes nothing.
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
    """Decoder of one choice's tokens, which returns whole characters.

    The joined results of `push` and `flush` equal `tokenizer.decode` of all ids. A push decodes a bounded number of
    tokens.

    Args:
        context: tokens of the prompt. The answer is decoded as its continuation, so that "▁Paris" keeps its space.
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
        """True if the text of pushed tokens is held back."""
        return len(self._window) > self._num_context

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that they complete; it may be empty."""
        return "".join([self._push(token_id) for token_id in self._with_text(token_ids)])

    def flush(self) -> str:
        """Return the held text at the end of the answer, with U+FFFD for bytes that are not a character."""
        return self._advance(len(self._window))

    def _with_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that have text: those in the vocabulary that are not skipped."""
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
        """Return the last boundary in the window that no character spans; more tokens cannot change the text before it.

        In lossy UTF-8 decoding, text(a + b) == text(a) + text(b) for a non-empty b exactly if no character, complete or
        incomplete, spans the boundary. An invalid character ends within three bytes, so one of the boundaries works.
        """
        for cut in range(len(self._window) - 1, len(self._window) - 1 - MAX_CHARACTER_TOKENS, -1):
            if self._decode(self._window[:cut]) + self._decode(self._window[cut:]) == text:
                return cut
        return self._num_context

    def _advance(self, end: int, text: str | None = None) -> str:
        """Return the text of the window up to `end`; its tokens become the context."""
        if end == self._num_context:
            return ""
        text = self._decode(self._window[:end]) if text is None else text
        new_text = text[len(self._context_text) :]
        del self._window[: self._num_context]
        self._num_context = end - self._num_context
        context = self._window[: self._num_context]
        self._context_text = self._text_of(context[0]) if len(context) == 1 else self._decode(context)
        return new_text
