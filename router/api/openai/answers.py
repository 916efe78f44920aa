"""Writes an answer of the completions endpoints, whole or as events of a stream."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from starlette.exceptions import HTTPException

from baton.api import GenerateChunk, PromptScores, Timing, Usage
from baton.chat import tool_call
from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    Unauthenticated,
    UnknownField,
    Unsupported,
)
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.tools import ToolCallDelta, joined_calls
from router.api.exchange import event
from router.prompt import Tokenizer

NO_PROMPTS: Mapping[int, PromptScores] = {}
TIMING_NAMES = tuple(each.name for each in fields(Timing))
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
ERROR_NAME = "Error"
MINUTE_S = 60.0
_CAPITAL = re.compile("[A-Z]")
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Format of one answer of either endpoint. Its field `timing`, the time spent in each stage, is not OpenAI's."""

    id: str
    created: int
    model: str
    is_chat: bool
    continuous_usage: bool
    """Whether every event of a stream carries the usage so far."""
    tokenizer: Tokenizer
    num_choices: int = 1
    """Number of choices per prompt."""
    echo: tuple[str, ...] = ()
    """Text of each prompt that its choices start with; empty: no echo."""
    has_prompt_logprobs: bool = False
    """Whether whole answers have vLLM's field `prompt_logprobs`."""
    is_forced: bool = False
    """Whether answers consist of tool calls. Their content is null, even if they end before the first call."""
    prompt_ids: tuple[Sequence[int], ...] = ()
    """Token ids of each prompt, if the client wants the ids of prompt and answer; else empty."""
    is_scoring: bool = False
    """Whether the client gets only the prompt's scores, and no answer."""

    def shown(self, chunk: GenerateChunk) -> GenerateChunk:
        """Return the part of a chunk that the client gets."""
        if not self.is_scoring:
            return chunk
        return replace(
            chunk,
            text="",
            token_ids=(),
            scores=TokenScores(()),
            finish_reason=FinishReason.LENGTH if chunk.finish_reason else None,
            stop_reason=None,
            usage=replace(chunk.usage, completion_tokens=0, reasoning_tokens=0) if chunk.usage else None,
        )

    def whole(
        self,
        choices: Mapping[int, ChoiceAnswer],
        usage: Usage,
        timing: Timing,
        prompts: Mapping[int, PromptScores] = NO_PROMPTS,
    ) -> dict[str, Any]:
        """Return a whole answer.

        Args:
            prompts: scores of the prompts, if the request asks for them.
        """
        kind = "chat.completion" if self.is_chat else "text_completion"
        written = [self._choice(i, a, prompts.get(self.prompt_of(i))) for i, a in choices.items()]
        body = {**self._head(kind), "choices": written, "usage": _usage(usage), "timing": _timing(timing)}
        if prompts and self.has_prompt_logprobs:
            for holder in (body,) if self.is_chat else written:
                of = prompts[self.prompt_of(holder.get("index", 0))]
                holder["prompt_logprobs"] = of_prompt(of, self.tokenizer)
        if self.prompt_ids and self.is_chat:
            body["prompt_token_ids"] = self.prompt_ids[0]
        return body

    def prompt_of(self, index: int) -> int:
        """Return the index of the prompt that a choice answers."""
        return index // self.num_choices

    def chunk(
        self,
        index: int,
        chunk: GenerateChunk,
        is_first: bool,
        logprobs: CompletionLogprobs,
        prompt: PromptScores | None,
    ) -> dict[str, Any]:
        """Return an event of a stream.

        Args:
            index: index of the choice.
            chunk: the choice's new chunk.
            is_first: whether this is the choice's first event.
            logprobs: writer of the choice's log probabilities, which knows its tokens so far.
            prompt: scores of the choice's prompt, if the request asks for them.
        """
        choice: dict[str, Any] = {"index": index, "finish_reason": chunk.finish_reason}
        echoed = prompt if is_first else None
        choice["logprobs"] = self._logprobs(chunk.token_ids, chunk.scores, logprobs, echoed)
        if chunk.finish_reason:
            choice["stop_reason"] = chunk.stop_reason
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            has_other = chunk.reasoning or chunk.tool_calls
            content = {} if has_other and not chunk.text else {"content": chunk.text}
            calls = {"tool_calls": list(map(_call_delta, chunk.tool_calls))} if chunk.tool_calls else {}
            choice["delta"] = {**role, **_reasoning(chunk.reasoning), **content, **calls}
        else:
            choice["text"] = self._echoed(index) + chunk.text if is_first else chunk.text
        body = {**self._head("chat.completion.chunk" if self.is_chat else "text_completion"), "choices": [choice]}
        if self.prompt_ids:
            choice["token_ids"] = chunk.token_ids
            if is_first:
                (body if self.is_chat else choice)["prompt_token_ids"] = self.prompt_ids[self.prompt_of(index)]
        return {**body, "usage": _usage(chunk.usage)} if self.continuous_usage and chunk.usage else body

    def usage_chunk(self, usage: Usage, timing: Timing) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": _usage(usage), "timing": _timing(timing)}

    def _choice(self, index: int, answer: ChoiceAnswer, prompt: PromptScores | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        choice["logprobs"] = self._logprobs(
            answer.token_ids, TokenScores.joined(answer.scores), CompletionLogprobs(self.tokenizer), prompt
        )
        choice["stop_reason"] = answer.stop_reason
        if self.is_chat:
            calls = [tool_call(call_id=call.call_id, name=call.name, arguments=call.arguments)
                     for call in joined_calls(answer.tool_calls)]  # fmt: skip
            content = None if (calls or self.is_forced) and not answer.text else answer.text
            message = {"role": "assistant", "content": content, "refusal": None, **_reasoning(answer.reasoning)}
            choice["message"] = {**message, **({"tool_calls": calls} if calls else {})}
        else:
            choice["text"] = self._echoed(index) + answer.text
        if self.prompt_ids:
            choice["token_ids"] = answer.token_ids
            if not self.is_chat:
                choice["prompt_token_ids"] = self.prompt_ids[self.prompt_of(index)]
        return choice

    def _logprobs(
        self, token_ids: Sequence[int], scores: TokenScores, completion: CompletionLogprobs, prompt: PromptScores | None
    ) -> dict[str, Any] | None:
        echoes_scores = prompt is not None and bool(self.echo)
        if not scores and not (self.is_scoring and echoes_scores):
            return None
        if self.is_chat:
            return of_chat(token_ids, scores, self.tokenizer)
        echoed = [completion.prompt(prompt)] if prompt is not None and self.echo else []
        return joined(*echoed, completion.piece(token_ids, scores))

    def _echoed(self, index: int) -> str:
        return self.echo[self.prompt_of(index)] if self.echo else ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True, kw_only=True)
class ChoiceAnswer:
    """Whole answer of one choice."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM's field: the stop string or the id of the stop token that ended the answer."""


def _reasoning(text: str) -> dict[str, str]:
    """Return the fields of a reasoning, under DeepSeek's name, which most clients read, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """Return the new part of a call. The id and the name come once, with the first part of the arguments."""
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        **tool_call(call_id=delta.call_id, name=delta.name, arguments=delta.arguments),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _timing(timing: Timing) -> dict[str, Any]:
    return {name: getattr(timing, name) for name in TIMING_NAMES}


def of_chat(token_ids: Sequence[int], scores: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's choice."""
    content = []
    for index, token_id in enumerate(token_ids):
        top = [_token(top_id, logprob, tokenizer) for top_id, logprob in scores.top(index)]
        content.append({**_token(token_id, scores.logprobs[index], tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writer of the field `logprobs` of a completion's choice, piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder("replace")
        self._num_characters = 0

    def prompt(self, prompt: PromptScores) -> dict[str, list[Any]]:
        """Return the field for an echoed prompt. Call this before the first piece. The first token has no score."""
        first = self.piece(prompt.token_ids[:1], TokenScores((0.0,)))
        rest = self.piece(prompt.token_ids[1:], prompt.scores)
        return joined({**first, "token_logprobs": [None], "top_logprobs": [None]}, rest)

    def piece(self, token_ids: Sequence[int], scores: TokenScores) -> dict[str, list[Any]]:
        """Return the field for the tokens that follow the earlier pieces."""
        offsets, tops = [], []
        for index, token_id in enumerate(token_ids):
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            best = {self._key(top_id): logprob for top_id, logprob in reversed(scores.top(index))}
            tops.append({self._key(token_id): scores.logprobs[index], **best} if best else {})
        return {
            "text_offset": offsets,
            "token_logprobs": list(scores.logprobs),
            "tokens": [self._key(token_id) for token_id in token_ids],
            "top_logprobs": tops,
        }

    def _key(self, token_id: int) -> str:
        """Return a token in OpenAI's format; if it is not valid UTF-8 alone, its bytes in hexadecimal."""
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def joined(*pieces: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the field for the tokens of several pieces."""
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def of_prompt(prompt: PromptScores, tokenizer: Tokenizer) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's field `prompt_logprobs`.

    It has, for each token except the first, the token's log probability and those of the likeliest tokens.
    """
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for index, token_id in enumerate(prompt.token_ids[1:]):
        tops = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(prompt.scores.top(index), 1)}
        every = {token_id: (prompt.scores.logprobs[index], None)} | tops
        found.append(
            {
                str(each): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.decode([each])}
                for each, (logprob, rank) in every.items()
            }
        )
    return found


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    written = tokenizer.token_bytes(token_id)
    return {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """OpenAI's format of an answer. See `router.api.answering.AnswerForm`."""

    shape: Shape
    include_usage: bool
    """True if a stream ends with the usage."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        shape = self.shape
        answers: dict[int, ChoiceAnswer] = {}
        prompts: dict[int, PromptScores] = {}
        usage, timing = Usage(0, 0, 0), Timing()
        async with contextlib.aclosing(chunks):
            chunk: GenerateChunk | None = first
            while chunk is not None:
                chunk = shape.shown(chunk)
                answer = answers.setdefault(chunk.choice_index, ChoiceAnswer())
                answer.text += chunk.text
                answer.reasoning += chunk.reasoning
                answer.tool_calls += chunk.tool_calls
                answer.token_ids += chunk.token_ids
                answer.scores.append(chunk.scores)
                if chunk.finish_reason:
                    answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
                usage, timing = chunk.usage or usage, chunk.timing or timing
                if chunk.prompt_scores is not None:
                    prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
                chunk = await anext(chunks, None)
        return shape.whole(dict(sorted(answers.items())), usage, timing, prompts)

    async def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        shape = self.shape
        begun: dict[int, CompletionLogprobs] = {}
        prompts: dict[int, PromptScores] = {}
        usage, timing = None, Timing()
        async with contextlib.aclosing(chunks):
            try:
                chunk: GenerateChunk | None = first
                while chunk is not None:
                    chunk = shape.shown(chunk)
                    if chunk.prompt_scores is not None:
                        prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
                    index, is_first = chunk.choice_index, chunk.choice_index not in begun
                    is_new = bool(
                        chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason or chunk.scores
                    )
                    is_new = is_new or (bool(shape.prompt_ids) and bool(chunk.token_ids))
                    if is_new or is_first:
                        logprobs = begun.get(index) or begun.setdefault(index, CompletionLogprobs(shape.tokenizer))
                        scores = prompts.get(shape.prompt_of(index))
                        yield event(shape.chunk(index, chunk, is_first, logprobs, scores))
                    usage, timing = chunk.usage or usage, chunk.timing or timing
                    chunk = await anext(chunks, None)
            except BatonError as error:
                yield self.broken(error)
                return
        if self.include_usage and usage is not None:
            yield event(shape.usage_chunk(usage, timing))
        yield b"data: [DONE]\n\n"

    def broken(self, error: BatonError) -> bytes:
        return event(error_body(error))


def error_body(error: BatonError | HTTPException) -> dict[str, Any]:
    """Return the body of an error response; `param` names the invalid field."""
    if isinstance(error, HTTPException):
        return _body(str(error.detail), "invalid_request_error", None, None)
    is_clients_fault = isinstance(error, (InvalidRequest, Unauthenticated, Unsupported))
    kind = "invalid_request_error" if is_clients_fault else "server_error"
    if isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
    return _body(str(error), kind, param, code_of(error))


def code_of(error: BatonError) -> str:
    """Return the code of an error: OpenAI's code if there is one, else the name of the error's class."""
    match error:
        case ModelNotFound():
            return "model_not_found"
        case Unauthenticated():
            return "invalid_api_key"
        case Unsupported():
            return "unsupported_parameter"
        case QuotaExceeded(retry_after_s=retry_s) if retry_s > MINUTE_S:  # the day's limit is used up
            return "insufficient_quota"
        case Overloaded():
            return "rate_limit_exceeded"
        case ContextLengthExceeded():
            return "context_length_exceeded"
        case UnknownField():
            return "unknown_parameter"
        case InvalidRequest(param=None):
            return "invalid_request"
        case InvalidRequest() if type(error) is InvalidRequest:
            return "invalid_value"
    return _CAPITAL.sub(lambda found: f"_{found[0].lower()}", type(error).__name__).strip("_")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
