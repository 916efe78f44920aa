"""The parts of an answer in the order of its tokens: reasoning, text, tool calls.

A chunk carries the new text of each channel. `Parts` puts them into one sequence, for APIs whose answers are a list of
items. The sequence depends on the answer alone, however its tokens are grouped into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from baton.api import GenerateChunk
from baton.tools import ToolCallDelta


class PartKind(StrEnum):
    """Kind of a part."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class PartBegin:
    """Start of a part; all earlier parts are complete."""

    index: int
    """The part's position in the answer."""
    kind: PartKind
    call_id: str = ""
    name: str = ""
    """The tool's, if the part is a call."""


@dataclass(frozen=True, slots=True)
class PartMore:
    """More text of the part that started last."""

    index: int
    kind: PartKind
    text: str
    """New text; for a call, new text of its JSON arguments."""


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of the part that started last."""

    index: int
    kind: PartKind


PartEvent = PartBegin | PartMore | PartEnd


class Parts:
    """Splits the chunks of one choice into parts."""

    def __init__(self) -> None:
        self._open: PartBegin | None = None
        self._num_parts = 0
        self._num_characters = 0
        """Characters of the content so far."""

    def push(self, chunk: GenerateChunk) -> Iterator[PartEvent]:
        """Yield the events of a chunk. The iterator must be exhausted."""
        if chunk.reasoning:
            yield from self._more(PartKind.REASONING, chunk.reasoning)
        text, begin = chunk.text, self._num_characters
        self._num_characters += len(text)
        for call in chunk.tool_calls:
            if call.name:
                num_before = call.content_offset - begin
                if num_before > 0:
                    yield from self._more(PartKind.TEXT, text[:num_before])
                    text, begin = text[num_before:], call.content_offset
                yield from self._begin(PartKind.CALL, call)
            if call.arguments:
                yield from self._more(PartKind.CALL, call.arguments)
        if text:
            yield from self._more(PartKind.TEXT, text)

    def end(self) -> Iterator[PartEvent]:
        """Yield the end of the last part. The iterator must be exhausted."""
        if self._open is not None:
            yield PartEnd(self._open.index, self._open.kind)
            self._open = None

    def _more(self, kind: PartKind, text: str) -> Iterator[PartEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield PartMore(self._num_parts - 1, kind, text)

    def _begin(self, kind: PartKind, call: ToolCallDelta | None = None) -> Iterator[PartEvent]:
        yield from self.end()
        named = (call.call_id, call.name) if call else ()
        self._open = PartBegin(self._num_parts, kind, *named)
        self._num_parts += 1
        yield self._open
