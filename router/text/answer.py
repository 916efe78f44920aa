"""One choice's answer: tokens in, text that may be shown out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.sampling import FinishReason
from router.text.detokenizer import IncrementalDetokenizer
from router.text.stop import StopChecker
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What new tokens add to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class AnswerWriter:
    """Detokenizes, looks for stop strings, and says when the answer ends. Plain state: rebuilt by replaying tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = StopChecker(stops)

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Takes new tokens and the engine's word on the end. Tokens after one that completes a stop string are cut."""
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            new_text, stopped = self._stops.push(self._detokenizer.push([token_id]))
            text += new_text
            if stopped:
                return Piece(text, tuple(token_ids[:count]), FinishReason.STOP)
        if finish_reason is not None:
            for new_text, stopped in (self._stops.push(self._detokenizer.flush()), self._stops.flush()):
                text += new_text
                finish_reason = FinishReason.STOP if stopped else finish_reason
        return Piece(text, tuple(token_ids), finish_reason)
