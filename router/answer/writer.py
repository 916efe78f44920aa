"""Writes the answer of one choice: takes tokens, and returns text and chunks for the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.api import GenerateChunk, GenerateRequest
from baton.errors import InvalidRequest
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, TokenScores
from baton.tools import ToolCallDelta
from router.answer.channels import Channels, Delta
from router.answer.detokenizer import IncrementalDetokenizer
from router.answer.stop_strings import StopChecker
from router.prompt.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Increment of an answer from new tokens."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    num_reasoning_tokens: int = 0
    """See `GenerateChunk.num_reasoning_tokens`."""
    stop_reason: str | int | None = None
    """See `GenerateChunk.stop_reason`."""
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, if the request asks for them."""


class AnswerWriter:
    """Writer of one answer: detokenizes, and finds stop strings and the end. Plain state, rebuilt by replaying tokens.

    The output of `k` tokens depends on those tokens alone, however they are grouped: each token is processed by itself,
    and text that is flushed at the end belongs to the last token.

    Args:
        params: stop conditions and text options of the request.
        num_delivered: number of leading tokens that the client already has from a broken stream. They and their text
            are not returned again.
        channels: split the text; None: all of it is content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        num_delivered: int = 0,
        channels: Channels | None = None,
    ) -> None:
        skipped_ids = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        if channels is not None:
            skipped_ids -= channels.shown_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skipped_ids)
        self._channels = channels
        self._num_reasoning = 0
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._params = params
        self.num_taken = 0
        """Number of tokens in the answer so far, without those behind a stop string."""
        self.num_awaited = num_delivered
        """Number of delivered tokens that have not been replayed. If some are left at the end, the answer differs from
        the one that the client has."""
        self._is_last_delivered = num_delivered > 0
        """Whether the client already has the last token that was processed."""

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, scores: TokenScores = NO_SCORES
    ) -> Piece:
        """Process new tokens and the engine's finish reason. Tokens behind one that completes a stop string are cut.

        A token that ends the answer has no text, unless the client asks for it.
        """
        texts: list[str] = []
        deltas: list[Delta] = []
        begin, stopped = min(self.num_awaited, len(token_ids)), False
        for count, token_id in enumerate(token_ids, 1):
            self.num_taken += 1
            is_end = finish_reason is FinishReason.STOP and count == len(token_ids)
            shown = [] if is_end and not self._params.include_stop_str_in_output else [token_id]
            text, stopped = self._stops.push(self._detokenizer.push(shown), self._may_stop)
            delta = None if self._channels is None else self._delta(text, self._channels)
            if count <= begin:
                self.num_awaited -= 1
            elif delta is None:
                texts.append(text)
            else:
                deltas.append(delta)
            if stopped:
                token_ids, finish_reason = token_ids[:count], FinishReason.STOP
                break
        if token_ids:
            self._is_last_delivered = begin >= len(token_ids)
        if finish_reason is not None:
            text, stopped = self._rest(stopped)
            if not self._is_last_delivered:
                texts.append(text)
            if self._channels is not None:
                is_whole = stopped or finish_reason is FinishReason.STOP
                rest = [self._channels.push(text), self._channels.flush(is_whole=is_whole)]
                deltas += [] if self._is_last_delivered else rest
            finish_reason = FinishReason.STOP if stopped else finish_reason
            if finish_reason is FinishReason.STOP and self._channels is not None and self._channels.has_calls:
                finish_reason = FinishReason.TOOL_CALLS
        delta = Delta("".join(texts)) if self._channels is None else Delta.joined(deltas)
        return Piece(
            text=delta.text,
            token_ids=tuple(token_ids[begin:]),
            finish_reason=finish_reason,
            reasoning=delta.reasoning,
            tool_calls=delta.calls,
            num_reasoning_tokens=self._num_reasoning,
            stop_reason=None if finish_reason is None else self._stop_reason(token_ids, finish_reason),
            scores=scores.part(begin, len(token_ids)) if scores else scores,
        )

    def _delta(self, text: str, channels: Channels) -> Delta:
        """Return the channels' increment for a token's text, and count the token if it belongs to the reasoning."""
        was_reasoning = channels.is_reasoning
        delta = channels.push(text)
        self._num_reasoning += was_reasoning or channels.is_reasoning
        return delta

    def _rest(self, stopped: bool) -> tuple[str, bool]:
        """Flush an answer that has ended, and return (the held text, whether a stop string was found)."""
        if stopped:
            return "", True
        text, stopped = self._stops.push(self._detokenizer.flush(), self._may_stop)
        held, found = self._stops.flush()
        return text + held, stopped or found

    @property
    def _may_stop(self) -> bool:
        return self.num_taken > self._params.min_tokens

    def _stop_reason(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str | int | None:
        if self._stops.matched is not None:
            return self._stops.matched
        is_stop = (
            finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
            and token_ids
            and token_ids[-1] in self._params.stop_token_ids
        )
        return token_ids[-1] if is_stop else None


class AnswerChunks:
    """Writer of the chunks of one choice.

    Args:
        request: selects the parts of the answer that the client wants.
        request_id: the client's id of the request, or the one that it was given.
    """

    def __init__(self, writer: AnswerWriter, request: GenerateRequest, *, request_id: str, choice_index: int) -> None:
        self._writer = writer
        self.request_id = request_id
        self.choice_index = choice_index
        self._skip_text = request.skip_text
        self._skip_reasoning = request.skip_text or request.skip_reasoning
        self.num_tokens = 0
        """Number of tokens processed so far, including those behind a stop string."""
        self.has_ended = False

    @property
    def num_kept(self) -> int:
        """Number of tokens in the answer so far, without those behind a stop string."""
        return self._writer.num_taken

    def write(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, scores: TokenScores = NO_SCORES
    ) -> GenerateChunk | None:
        """Return the chunk for new tokens and the engine's finish reason; None: the client already has all of it.

        Raises:
            InvalidRequest: the answer has ended, and `resume_from` is above its number of tokens.
        """
        self.num_tokens += len(token_ids)
        piece = self._writer.push(token_ids, finish_reason, scores)
        self.has_ended = piece.finish_reason is not None
        if self.has_ended:
            self._check_awaited()
        if not piece.token_ids and piece.finish_reason is None:
            return None
        return GenerateChunk(
            request_id=self.request_id,
            choice_index=self.choice_index,
            text="" if self._skip_text else piece.text,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
            reasoning="" if self._skip_reasoning else piece.reasoning,
            tool_calls=() if self._skip_text else piece.tool_calls,
            num_reasoning_tokens=piece.num_reasoning_tokens,
            stop_reason=piece.stop_reason,
            scores=piece.scores,
        )

    def vetoed(self, num_reasoning_tokens: int) -> GenerateChunk:
        """Return the last chunk of an answer that moderation stops.

        Args:
            num_reasoning_tokens: reasoning tokens of the chunks that are sent.

        Raises:
            InvalidRequest: see `write`.
        """
        self._check_awaited()
        return GenerateChunk(
            request_id=self.request_id,
            choice_index=self.choice_index,
            finish_reason=FinishReason.CONTENT_FILTER,
            num_reasoning_tokens=num_reasoning_tokens,
        )

    def _check_awaited(self) -> None:
        if self._writer.num_awaited:
            raise InvalidRequest(
                f"resume_from exceeds the tokens of choice {self.choice_index} by {self._writer.num_awaited}; send the "
                "unchanged request with the number of tokens that were received",
                "resume_from",
            )
