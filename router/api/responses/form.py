"""Answers of /v1/responses: the events of a response, or only the response in the last event."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.api import GenerateChunk
from baton.errors import BatonError
from router.api.exchange import event
from router.api.responses.writer import ResponseEvent, ResponseWriter, error_fields


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
