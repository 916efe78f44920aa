"""Writes a response as events. The last event contains the whole response."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.api import GenerateChunk, Timing, Usage
from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.sampling import FinishReason
from router.api.answering import PartBegin, PartEnd, PartKind, PartMore, Parts
from router.api.exchange import event
from router.api.openai import error_body

INCOMPLETE: Mapping[FinishReason | None, str] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}
"""Finish reason of an incomplete answer -> the reason in `incomplete_details`."""
_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
"""Prefixes of the ids of items."""
_TEXT_EVENTS = {PartKind.REASONING: "response.reasoning_text", PartKind.TEXT: "response.output_text"}
_NO_SCORES: Mapping[PartKind, dict[str, Any]] = {PartKind.REASONING: {}, PartKind.TEXT: {"logprobs": []}}
NO_PLACES: Mapping[str, tuple[str, str]] = {}
_ARGUMENTS = "response.function_call_arguments"

ResponseEvent = dict[str, Any]


class ResponseWriter:
    """Writer of the events of one response: call `begin`, `write` for each chunk, then `end` or `fail`.

    Each method returns an iterator of events, which must be exhausted.

    Args:
        head: the response without its output, status and usage.
        places: see `router.api.responses.tools.Functions`.
    """

    def __init__(self, head: Mapping[str, Any], places: Mapping[str, tuple[str, str]] = NO_PLACES) -> None:
        self._head, self._places = head, places
        self._parts = Parts()
        self._output: list[dict[str, Any]] = []
        """Complete items."""
        self._open: _OpenItem | None = None
        self._num_events = 0
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._timing: Timing | None = None

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the events before the first part of the answer."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def write(self, chunk: GenerateChunk) -> Iterator[ResponseEvent]:
        """Yield the events of a chunk."""
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage, self._timing = chunk.usage or self._usage, chunk.timing or self._timing
        for part in self._parts.push(chunk):
            yield from self._part(part, "completed")

    def end(self, completed_at: int) -> Iterator[ResponseEvent]:
        """Yield the events after the end of the choice. The last event contains the whole response.

        Args:
            completed_at: in seconds since 1970.
        """
        reason = INCOMPLETE.get(self._finish_reason)
        status = "incomplete" if reason else "completed"
        for part in self._parts.end():
            yield from self._part(part, status)
        response = self._response(status)
        if reason:
            response["incomplete_details"] = {"reason": reason}
        else:
            response["completed_at"] = completed_at
        yield self._event(f"response.{status}", response=response)

    def fail(self, error: BatonError) -> Iterator[ResponseEvent]:
        """Yield the events after an error: the incomplete response, then the error, which OpenAI's clients raise."""
        response = self._response("failed")
        response["output"] += [self._open.item("incomplete")] if self._open else []
        response["error"] = {"code": _code(error), "message": str(error)}
        yield self._event("response.failed", response=response)
        yield self._event("error", **error_fields(error))

    def _part(self, part: PartBegin | PartMore | PartEnd, status: str) -> Iterator[ResponseEvent]:
        match part:
            case PartBegin():
                item_id = f"{_PREFIXES[part.kind]}_{self._head['id'].removeprefix('resp_')}_{part.index}"
                namespace, name = self._places.get(part.name, ("", part.name))
                self._open = _OpenItem(begin=part, id=item_id, texts=[], namespace=namespace, name=name)
                yield from self._item_begins(self._open)
            case PartMore(text=text):
                assert self._open is not None
                self._open.texts.append(text)
                yield self._more(self._open, text)
            case PartEnd():
                assert self._open is not None
                yield from self._item_ends(self._open, status)
                self._output.append(self._open.item(status))
                self._open = None

    def _item_begins(self, item: _OpenItem) -> Iterator[ResponseEvent]:
        yield self._event("response.output_item.added", output_index=item.index, item=item.item("in_progress"))
        if item.kind is not PartKind.CALL:
            yield self._of_content("response.content_part.added", item, part=item.part())

    def _more(self, item: _OpenItem, text: str) -> ResponseEvent:
        if item.kind is PartKind.CALL:
            return self._of_item(f"{_ARGUMENTS}.delta", item, delta=text)
        return self._of_content(f"{_TEXT_EVENTS[item.kind]}.delta", item, delta=text, **_NO_SCORES[item.kind])

    def _item_ends(self, item: _OpenItem, status: str) -> Iterator[ResponseEvent]:
        if item.kind is PartKind.CALL:
            yield self._of_item(f"{_ARGUMENTS}.done", item, name=item.name, arguments=item.text)
        else:
            yield self._of_content(f"{_TEXT_EVENTS[item.kind]}.done", item, text=item.text, **_NO_SCORES[item.kind])
            yield self._of_content("response.content_part.done", item, part=item.part())
        yield self._event("response.output_item.done", output_index=item.index, item=item.item(status))

    def _of_content(self, kind: str, item: _OpenItem, **fields: Any) -> ResponseEvent:
        return self._of_item(kind, item, content_index=0, **fields)

    def _of_item(self, kind: str, item: _OpenItem, **fields: Any) -> ResponseEvent:
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        has_ended = status in ("completed", "incomplete")
        timing = {"timing": asdict(self._timing)} if has_ended and self._timing else {}
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "output": list(self._output),
            "usage": _usage(self._usage) if has_ended and self._usage else None,
            **timing,
        }


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """Item of the output that is not complete."""

    begin: PartBegin
    id: str
    texts: list[str]
    namespace: str
    name: str
    """The tool's, if the item is a call."""

    @property
    def index(self) -> int:
        return self.begin.index

    @property
    def kind(self) -> PartKind:
        return self.begin.kind

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """Return the content part with the text so far."""
        if self.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> dict[str, Any]:
        """Return the item so far. An item in progress has no content yet."""
        content = [] if status == "in_progress" else [self.part()]
        match self.kind:
            case PartKind.REASONING:
                own: dict[str, Any] = {"type": "reasoning", "summary": [], "content": content}
            case PartKind.TEXT:
                own = {"type": "message", "role": "assistant", "content": content}
            case PartKind.CALL:
                own = {"type": "function_call", "call_id": self.begin.call_id, "name": self.name}
                own |= {"namespace": self.namespace} if self.namespace else {}
                own["arguments"] = self.text
        return {"id": self.id, **own, "status": status}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_fields(error: BatonError) -> dict[str, Any]:
    """Return the fields of an `error` event, both flat as in this API and nested as in OpenAI's other APIs."""
    body = error_body(error)["error"]
    return {**{name: body[name] for name in ("code", "message", "param")}, "error": body}


def _code(error: BatonError) -> str:
    """Return the code of an error, one of those that the Responses API defines."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """Format of a response. See `router.api.answering.AnswerForm`."""

    head: Mapping[str, Any]
    """See `ResponseWriter`."""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """See `Functions`."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        writer = ResponseWriter(self.head, self.places)
        async with contextlib.aclosing(chunks):
            chunk: GenerateChunk | None = first
            while chunk is not None:
                deque(writer.write(chunk), maxlen=0)
                chunk = await anext(chunks, None)
        last = deque(writer.end(int(time.time())), maxlen=1).pop()
        response: dict[str, Any] = last["response"]
        return response

    async def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        writer = ResponseWriter(self.head, self.places)
        async with contextlib.aclosing(chunks):
            try:
                for each in _sent(writer.begin()):
                    yield each
                chunk: GenerateChunk | None = first
                while chunk is not None:
                    for each in _sent(writer.write(chunk)):
                        yield each
                    chunk = await anext(chunks, None)
            except BatonError as error:
                for each in _sent(writer.fail(error)):
                    yield each
                return
        for each in _sent(writer.end(int(time.time()))):
            yield each

    def broken(self, error: BatonError) -> bytes:
        return event({"type": "error", **error_fields(error)}, "error")


def _sent(events: Iterable[ResponseEvent]) -> Iterable[bytes]:
    return (event(each, each["type"]) for each in events)
