"""One choice's answer: tokens in, text that may be shown out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.sampling import FinishReason
from router.answer.detokenizer import IncrementalDetokenizer
from router.answer.stop_strings import StopChecker
from router.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What new tokens add to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class AnswerWriter:
    """Detokenizes, looks for stop strings, and says when the answer ends. Plain state: rebuilt by replaying tokens.

    What `k` tokens have given out is a function of those tokens alone, however they were grouped: each is taken by
    itself, and what an answer's end flushes belongs to its last token.

    Args:
        num_delivered: leading tokens that the client has, from a stream that broke: they and their text do not come
            out again.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str], num_delivered: int = 0
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = StopChecker(stops)
        self.num_awaited = num_delivered
        """Of the delivered tokens, those not taken yet. If some are left when the answer ends, it is not the one that
        the client has."""
        self._is_last_delivered = num_delivered > 0
        """Whether the client has the last token that was taken."""

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Takes new tokens and the engine's word on the end. Tokens after one that completes a stop string are cut."""
        text = ""
        begin = min(self.num_awaited, len(token_ids))
        for count, token_id in enumerate(token_ids, 1):
            new_text, stopped = self._stops.push(self._detokenizer.push([token_id]))
            if count > begin:
                text += new_text
            else:
                self.num_awaited -= 1
            if stopped:
                return Piece(text, tuple(token_ids[begin:count]), FinishReason.STOP)
        if token_ids:
            self._is_last_delivered = begin == len(token_ids)
        if finish_reason is not None:
            for new_text, stopped in (self._stops.push(self._detokenizer.flush()), self._stops.flush()):
                if not self._is_last_delivered:
                    text += new_text
                finish_reason = FinishReason.STOP if stopped else finish_reason
        return Piece(text, tuple(token_ids[begin:]), finish_reason)
