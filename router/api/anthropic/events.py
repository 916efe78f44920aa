"""Writes an answer as Anthropic's typed events, and assembles the whole answer from them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException

from baton.api import GenerateChunk, Usage
from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.sampling import FinishReason
from router.api.answering import PartBegin, PartEnd, PartEvent, PartKind, PartMore, Parts
from router.api.exchange import event

STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
WINDOW_IS_FULL = "model_context_window_exceeded"
"""Stop reason of an answer that filled the context window before it reached `max_tokens`."""
SIGNATURE = "unsigned"
"""Placeholder for the signature of a thinking block."""
INVALID_JSON = "INVALID_JSON"
"""Key that wraps arguments that are not a JSON object, as Anthropic asks of clients."""

MessageEvent = dict[str, Any]
_BLOCKS: dict[PartKind, dict[str, Any]] = {
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    PartKind.TEXT: {"type": "text", "text": ""},
    PartKind.CALL: {"type": "tool_use"},
}
_DELTAS = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
ERROR_NAME = "MessageError"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> error type. Other statuses are `invalid_request_error`, or `api_error` from 500 on."""
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"enum": ["invalid_request_error", "api_error", *KINDS.values()]},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}
THREAD = "thread"
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""Error details that make the tool loop of Anthropic's client retry without a thread."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Anthropic's format of an answer. See `router.api.answering.AnswerForm`."""

    id: str
    model: str
    request_id: str
    """Id that errors in a stream carry."""
    max_tokens: int
    """The client's limit. If an answer is cut off with fewer tokens, it has filled the context window."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        message = WholeMessage()
        async with contextlib.aclosing(chunks):
            async for each in self._typed(first, chunks):
                message.add(each)
        return message.body

    async def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(chunks):
            try:
                async for each in self._typed(first, chunks):
                    yield event(each, each["type"])
            except BatonError as error:
                yield self.broken(error)

    def broken(self, error: BatonError) -> bytes:
        return event(error_body(error, self.request_id), "error")

    async def _typed(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[MessageEvent]:
        """Yield the events of all chunks. The last event comes only if the answer is complete."""
        parts = Parts()
        usage = first.usage or Usage(0, 0, 0)
        yield self._start(usage)
        chunk: GenerateChunk | None = first
        last = first
        while chunk is not None:
            for part in parts.push(chunk):
                for each in _events_of(part):
                    yield each
            usage, last = chunk.usage or usage, chunk if chunk.finish_reason else last
            chunk = await anext(chunks, None)
        for part in parts.end():
            for each in _events_of(part):
                yield each
        yield _delta(last, usage, self.max_tokens)
        yield {"type": "message_stop"}

    def _start(self, usage: Usage) -> MessageEvent:
        message: MessageEvent = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {**_usage(usage), "output_tokens": 0},
        }
        return {"type": "message_start", "message": message}


class WholeMessage:
    """Whole answer, assembled from events as a client does it."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}
        self._arguments = ""

    def add(self, event: MessageEvent) -> None:
        """Add the next event."""
        match event:
            case {"type": "message_start", "message": message}:
                self.body = message
            case {"type": "content_block_start", "content_block": block}:
                self.body["content"].append(block)
                self._arguments = ""
            case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                self._arguments += text
            case {"type": "content_block_delta", "delta": {"type": _, **more}}:
                block = self.body["content"][-1]
                for name, text in more.items():
                    block[name] += text
            case {"type": "content_block_stop"} if self.body["content"][-1]["type"] == "tool_use":
                self.body["content"][-1]["input"] = input_of(self._arguments)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                self.body |= {**delta, "usage": usage}


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. If they were cut off, it holds what came before."""
    if not arguments:
        return {}
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
        json.dumps(value, allow_nan=False)  # a number may be too large for a float
    except (ValueError, RecursionError):
        return {INVALID_JSON: arguments}
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def _events_of(part: PartEvent) -> Iterator[MessageEvent]:
    match part:
        case PartBegin(index=index, kind=kind):
            called = {"id": part.call_id, "name": part.name, "input": {}} if kind is PartKind.CALL else {}
            yield {"type": "content_block_start", "index": index, "content_block": {**_BLOCKS[kind], **called}}
        case PartMore(index=index, kind=kind, text=text):
            name, field = _DELTAS[kind]
            yield {"type": "content_block_delta", "index": index, "delta": {"type": name, field: text}}
        case PartEnd(index=index, kind=kind):
            if kind is PartKind.REASONING:
                signed = {"type": "signature_delta", "signature": SIGNATURE}
                yield {"type": "content_block_delta", "index": index, "delta": signed}
            yield {"type": "content_block_stop", "index": index}


def _delta(last: GenerateChunk, usage: Usage, max_tokens: int) -> MessageEvent:
    """Return the event with the stop reason and the total usage."""
    reason = STOP_REASONS.get(last.finish_reason) if last.finish_reason else None
    if reason == "max_tokens" and usage.completion_tokens < max_tokens:
        reason = WINDOW_IS_FULL
    sequence = last.stop_reason if reason == "end_turn" and isinstance(last.stop_reason, str) else None
    ended = {
        "stop_reason": reason if sequence is None else "stop_sequence",
        "stop_sequence": sequence,
        "stop_details": None,
    }
    return {"type": "message_delta", "delta": ended, "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def error_body(error: BatonError | HTTPException, request_id: str) -> dict[str, Any]:
    """Return the body of an error response. The message starts with the name of the invalid field."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        status, message = error.http, str(error)
    if isinstance(error, (InvalidRequest, Unsupported)) and error.param:
        message = message if message.startswith(error.param) else f"{error.param}: {message}"
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": message}
    if isinstance(error, Unsupported) and error.param == THREAD:
        told["details"] = _NO_THREAD
    return {"type": "error", "error": told, "request_id": request_id}
