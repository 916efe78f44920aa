"""Writes the answer of one choice: takes tokens, and returns text and chunks for the client.

`IncrementalDetokenizer` converts the tokens to text, `StopChecker` finds stop strings in it, and `AnswerSelection`
selects the answers of a request that its client gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from baton.api import GenerateChunk, GenerateRequest, PromptScores
from baton.errors import InvalidRequest
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, TokenScores
from baton.tools import ToolCallDelta, joined_calls
from router.answer.channels import Channels, Delta
from router.prompt.tokenizer import Tokenizer

REPLAY_TOKENS = 64
"""Tokens of a continued answer that are detokenized before other tasks get the event loop."""
REPLACEMENT = "\ufffd"
MAX_PENDING = 8
MAX_CHARACTER_TOKENS = 4
"""A character has at most four bytes in UTF-8, and a token at least one byte."""
NUM_CONTEXT = 6


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
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
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
            text, stopped = self._checked(self._detokenizer.push(shown))
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
        text, stopped = self._checked(self._detokenizer.flush())
        held, found = self._stops.flush() if self._stops is not None else ("", False)
        return text + held, stopped or found

    def _checked(self, text: str) -> tuple[str, bool]:
        """Return (text that is safe to give out, whether a stop string was found)."""
        if self._stops is None:
            return text, False
        return self._stops.push(text, may_stop=self.num_taken > self._params.min_tokens)

    def _stop_reason(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str | int | None:
        if self._stops is not None and self._stops.matched is not None:
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


class SentAnswer:
    """Writer of one choice's answer whose chunks are all sent at once."""

    def __init__(self, chunks: AnswerChunks) -> None:
        self._chunks = chunks

    @property
    def has_ended(self) -> bool:
        """True if the client needs no more tokens."""
        return self._chunks.has_ended

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, including those after a stop string."""
        return self._chunks.num_tokens

    async def replay(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> AsyncGenerator[Sequence[GenerateChunk]]:
        """Take the tokens from before this call, and yield to the event loop in between.

        Raises:
            InvalidRequest: see `AnswerChunks.write`.
        """
        for begin in range(0, len(token_ids), REPLAY_TOKENS):
            end = begin + REPLAY_TOKENS
            yield await self.write(token_ids[begin:end], finish_reason if end >= len(token_ids) else None)
            if self.has_ended:
                return
            await asyncio.sleep(0)

    async def write(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, scores: TokenScores = NO_SCORES
    ) -> Sequence[GenerateChunk]:
        """Take new tokens and the finish reason, and return the chunks to send now.

        Raises:
            InvalidRequest: see `AnswerChunks.write`.
        """
        chunk = self._chunks.write(token_ids, finish_reason, scores)
        return () if chunk is None else (chunk,)


class IncrementalDetokenizer:
    """Decoder of one choice's tokens, which converts them to text as they arrive, in whole characters.

    A token is not text: it may hold a part of a character's bytes, or a leading space that depends on the text before
    it. So new tokens are decoded together with a few tokens before them, and the text of those is cut off. This follows
    text-generation-inference (server/text_generation_server/models/model.py, `decode_token`) and vLLM:

        ... | context | pending |        text = decode(context + pending), without decode(context)
            prefix    read      end

    If the text ends in U+FFFD, a character may be incomplete, and all pending tokens wait. Otherwise they become the
    context.

    `tokenizers.decoders.DecodeStream` (0.23.3) does the same correctly, but it waits for ever for invalid bytes to
    become valid. It withholds a run of them, or of special tokens, at quadratic cost (4,000 tokens: 1.4 s), and has no
    flush. So this code adds two rules: skipped tokens never enter the window, and a window of `MAX_PENDING` tokens is
    cut at a position where that provably changes nothing.

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


class StopChecker:
    r"""Filter that cuts a stream of text before the first occurrence of any stop string.

    However the stream is split, the output is `text[:min(text.find(s) for s in stops)]`: the match that starts earliest
    wins. Text is held back only while it may be the start of a stop string.

        kept (given out)          held                    text not seen yet
        ──────────────────────────┬───────────────────────┬────────────────
        The capital of France is  \n\nUs                  er:          stops = ["\n\nUser:"]
    """

    def __init__(self, stops: Sequence[str], includes_match: bool = False) -> None:
        """Create a filter for these stop strings.

        Args:
            stops: the stop strings, at least one and none of them empty.
            includes_match: whether the stop string itself is given out.
        """
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._includes_match = includes_match
        self._held = ""
        self._num_deaf = 0
        """Number of held characters at which a stop string must not end."""
        self.stopped = False
        self.num_kept = 0
        """Characters given out so far. Once stopped, tokens whose text starts at or after it are not in the answer."""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def num_held(self) -> int:
        """Number of characters that were seen and not given out."""
        return len(self._held)

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Add text, and return (text that is safe to give out, whether a stop string was found).

        Once stopped, further text is ignored.

        Args:
            may_stop: if false, a stop string that this text completes is treated as normal text.
        """
        if self.stopped:
            return "", True
        buffer = self._held + text
        if not may_stop:
            self._num_deaf = len(buffer)
        match, begin = self._first_match(buffer), self._first_beginning(buffer)
        if match is not None and match[0] <= begin:
            return self._stop(buffer, match), True
        # A match that starts after `begin` must wait: the text at `begin` may become an earlier match.
        self._held, self._num_deaf = buffer[begin:], max(0, self._num_deaf - begin)
        return self._keep(buffer[:begin]), False

    def flush(self) -> tuple[str, bool]:
        """End the stream, and return (held text outside of a stop string, whether a stop string was found)."""
        if self.stopped:
            return "", True
        buffer, self._held = self._held, ""
        if (match := self._first_match(buffer)) is not None:
            return self._stop(buffer, match), True
        return self._keep(buffer), False

    def _keep(self, text: str) -> str:
        self.num_kept += len(text)
        return text

    def _stop(self, buffer: str, match: tuple[int, str]) -> str:
        self.stopped, self._held, self.matched = True, "", match[1]
        return self._keep(buffer[: match[0] + (len(match[1]) if self._includes_match else 0)])

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        deaf = self._num_deaf
        return min(
            ((i, stop) for stop in self._stops if (i := buffer.find(stop, max(0, deaf - len(stop) + 1))) >= 0),
            default=None,
        )

    def _first_beginning(self, buffer: str) -> int:
        """Return the start of the longest suffix of `buffer` that is a prefix of a stop string; len(buffer) if none."""
        first = len(buffer)
        for stop in self._stops:
            i = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= i < first and not stop.startswith(buffer[i:]):
                i = buffer.find(stop[0], i + 1)
            if 0 <= i < first:
                first = i
        return first


class AnswerSelection:
    """Filter of the chunks of a request's answers.

    More answers are generated than the client wants, so all chunks are kept until the answers have ended. Then the best
    answers are returned whole, with the first indices. The best have the highest mean log probability of their tokens
    in the model's own distribution; ties go to the first.

    Args:
        params: sampling parameters of the client.
        resume_from: choice index -> number of tokens that the client already has from a broken stream.
    """

    def __init__(self, params: SamplingParams, resume_from: Mapping[int, int]) -> None:
        self._params = params
        self._resume_from = resume_from
        self._kept: dict[int, list[GenerateChunk]] = {}
        self._prompt_scores: PromptScores | None = None
        self._num_ended = 0

    def take(self, chunk: GenerateChunk) -> list[GenerateChunk]:
        """Add a chunk of an answer, and return the chunks that the client gets now."""
        self._prompt_scores = self._prompt_scores or chunk.prompt_scores
        self._kept.setdefault(chunk.choice_index, []).append(chunk)
        self._num_ended += chunk.finish_reason is not None
        return self._best() if self._num_ended == self._params.num_answers else []

    def _best(self) -> list[GenerateChunk]:
        answers = [_joined(chunks) for _, chunks in sorted(self._kept.items())]
        best = sorted(answers, key=lambda answer: -_mean(answer.scores))[: self._params.n]
        told = [self._told(replace(answer, choice_index=index)) for index, answer in enumerate(best)]
        return [replace(told[0], prompt_scores=self._prompt_scores), *told[1:]]

    def _told(self, answer: GenerateChunk) -> GenerateChunk:
        """Return the part of an answer that the client lacks. If it has any tokens of it, it has them all."""
        if not self._params.wants_scores:
            answer = replace(answer, scores=NO_SCORES)
        if self._resume_from.get(answer.choice_index):
            return replace(answer, text="", reasoning="", tool_calls=(), token_ids=(), scores=NO_SCORES)
        return answer


def _joined(chunks: list[GenerateChunk]) -> GenerateChunk:
    return replace(
        chunks[-1],
        prompt_scores=None,
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=joined_calls(call for chunk in chunks for call in chunk.tool_calls),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        scores=TokenScores.joined(chunk.scores for chunk in chunks),
    )


def _mean(scores: TokenScores) -> float:
    return sum(scores.logprobs) / len(scores) if scores else 0.0
