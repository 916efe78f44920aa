"""Splits an answer's text into its channels: content, reasoning and tool calls.

Plain state, fed text as it comes. The state after a number of tokens depends on these tokens alone, so a resumed stream
can be replayed, and the whole answer is the sum of its increments. `router.answer.format` finds a model's marks.

Separates the reasoning at the start of an answer from its content.

Plain state, fed text as it comes: the result is the same however it is split. Text that may start a mark is held back
until it is known. Marks, and white space next to them, belong to neither part.

Finds the tool calls in an answer's content and returns them as increments; the rest of the content stays text.

Plain state, fed text as it comes: the calls and the text are the same however it is split. A call is reported once its
name and the start of its arguments have come. Text that turns out not to be a call stays text. White space next to
calls is dropped, unless it is between other text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from baton.tools import Tool, ToolCallDelta, joined_calls
from router.answer.call_format import CallForm
from router.answer.call_readers import JsonCalls, Taken
from router.answer.marks import BEGIN, BEHIND_CALL, MAX_HELD, CodeBlock, Mark, Reasoning
from router.answer.tag_calls import TagCalls


class Parted(NamedTuple):
    """Increment of an answer's text and calls from new content."""

    text: str
    calls: tuple[ToolCallDelta, ...] = ()


class CallIds:
    """Ids of the calls of one choice. They are the same whenever the choice is replayed.

    Args:
        num_letters: length of an id, in characters.
    """

    def __init__(self, request_id: str, choice_index: int, num_letters: int) -> None:
        self._of_choice = f"{request_id}\0{choice_index}"
        self._num_letters = num_letters

    def of(self, index: int) -> str:
        """Return the id of a call."""
        digest = hashlib.blake2b(f"{self._of_choice}\0{index}".encode()).hexdigest()
        return f"call_{digest}"[: self._num_letters] if self._num_letters > 9 else digest[: self._num_letters]


class Calls:
    """Parser of the calls in one answer's content.

    Args:
        form: format of the model's calls.
        tools: tools that the answer may call, by name.
        ids: ids for the calls.
        is_forced: whether the answer consists of calls. Then other text is the rest of a cut-off call, and dropped.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], ids: CallIds, *, is_forced: bool = False) -> None:
        self._form = form
        self._tools = tools
        self._ids = ids
        self._is_forced = is_forced
        self._reader: JsonCalls | TagCalls | None = None
        """Reader of the current part; None: outside of parts with calls."""
        self._closes: Mark | None = None
        """Closing mark of the last part, which may still come; None: no closing mark is expected."""
        self._part_closes = form.closes
        """Closing mark of the current part."""
        self._before = BEGIN
        """The character before the held text."""
        self._block = CodeBlock()
        """Markdown state at the end of the text that was given out."""
        self._held = ""
        self._space = ""
        """White space that becomes text if more text follows, or if no call does."""
        self._has_text = False
        self._follows_call = False
        self._num_shown = 0
        """Number of characters of text that have been given out."""
        self.num_calls = 0
        """Number of calls that have started."""

    def push(self, text: str) -> Parted:
        """Add content, and return its increment."""
        return self._take(text, is_end=False)

    def flush(self, *, is_whole: bool = False) -> Parted:
        """Return the held content after the end of the answer.

        Args:
            is_whole: whether the model ended the answer. Then open arguments are closed; else they were cut off.
        """
        found = self._take("", is_end=True, is_whole=is_whole)
        space, self._space = self._space, ""
        return found if self._follows_call else Parted(found.text + space, found.calls)

    def _take(self, text: str, *, is_end: bool, is_whole: bool = False) -> Parted:
        shown, calls = "", list[ToolCallDelta]()
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            if self._reader is not None:
                taken = self._reader.take(rest)
                if is_end and taken.rest is None:
                    shown += self._noted(taken, calls)
                    taken = self._reader.flush(is_whole=is_whole)
                shown += self._noted(taken, calls)
                rest = taken.rest
                if rest is not None:
                    self._reader, self._closes = None, self._part_closes if taken.has_calls else None
            elif self._closes is not None:
                rest = self._closed(rest, self._closes, is_end=is_end)
            else:
                new, rest = self._opened(rest, is_end=is_end)
                shown += new
        return Parted(shown, tuple(calls))

    def _noted(self, taken: Taken, calls: list[ToolCallDelta]) -> str:
        """Append the calls that a reader has found to `calls`, and return its text."""
        for name, arguments in taken.calls:
            if name:
                self._follows_call = True
                if not self._has_text:
                    self._space = ""
                calls.append(
                    ToolCallDelta(
                        index=self.num_calls,
                        arguments=arguments,
                        call_id=self._ids.of(self.num_calls),
                        name=name,
                        content_offset=self._num_shown,
                    )
                )
                self.num_calls += 1
            elif arguments:
                calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))
        shown = self._text(taken.text)
        if taken.rest is not None and taken.has_calls:
            self._before = BEHIND_CALL
        return shown

    def _closed(self, text: str, closes: Mark, *, is_end: bool) -> str | None:
        """Look for the closing mark of a part, and return the text behind it; None: the mark may still come."""
        found = closes.find(text, is_end=is_end)
        is_next = not text[: found.begin].strip()
        if is_next and found.end is None and not is_end and len(text) <= MAX_HELD:
            self._held = text
            return None
        self._closes = None
        found = closes.find(text, is_end=True)
        is_next = not text[: found.begin].strip()
        return text[found.end :] if is_next and found.end is not None else text

    def _opened(self, text: str, *, is_end: bool) -> tuple[str, str | None]:
        """Look for an opening mark, and return (text before it, text behind it; None: there is no mark yet)."""
        found = self._form.opens.find(self._before + text, is_end=is_end, begin=1)
        found = found._replace(begin=found.begin - 1, end=None if found.end is None else found.end - 1)
        before = text[: found.begin].lstrip(" \t\r\n;" if self.num_calls else None)
        if self._form.only_at_begin and (self._has_text or before):
            return self._text(text), None
        if found.end is None:
            begin = 0 if self._form.only_at_begin else found.begin  # holds white space and separators of calls, too
            end = len(text) if is_end else max(begin, len(text) - MAX_HELD)
            self._held = text[end:]
            return self._text(text[:end]), None
        if found.is_bare and self._block.behind(text[: found.begin]).is_open:
            return self._text(text[: found.end + 1]), text[found.end + 1 :]
        begin = 0 if self._form.only_at_begin else found.begin
        raw = text[begin : found.end]
        self._reader = self._form.reader(raw, found, self._tools)
        self._part_closes = self._form.closes_fence if "```" in raw and self._form.closes_fence else self._form.closes
        return self._text(text[: begin if self._reader else found.end]), text[found.end :]

    def _text(self, text: str) -> str:
        """Return the part of a text that can be given out. White space at its end waits for the following text."""
        self._before = text[-1:] or self._before
        self._block = self._block.behind(text)
        if self._is_forced:
            return ""
        if self.num_calls and not self._has_text:
            text = text.lstrip()
        bare = text.rstrip()
        if not bare:
            self._space += text
            return ""
        self._has_text, self._follows_call = True, False
        shown, self._space = self._space + bare, text[len(bare) :]
        self._num_shown += len(shown)
        return shown


class Split(NamedTuple):
    """Increment of an answer's content and reasoning."""

    content: str = ""
    reasoning: str = ""


class _At(Enum):
    BEFORE = auto()
    """Only white space has come, or a part of the opening mark."""
    INSIDE = auto()
    """The reasoning is open."""
    BEHIND = auto()
    """The reasoning has ended, and no content has come."""
    CONTENT = auto()


class ReasoningReader:
    """Reader of one answer, which starts with a reasoning or has none.

    Args:
        reasoning: marks of the reasoning.
        is_open: whether the answer starts inside the reasoning.
    """

    def __init__(self, reasoning: Reasoning, *, is_open: bool = False) -> None:
        self._reasoning = reasoning
        self._place = _At.INSIDE if is_open else _At.BEFORE
        self._held = ""
        """Text that may be part of a mark."""
        self._space = ""
        """White space that belongs to the reasoning if more of it follows."""
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._place is _At.INSIDE

    def push(self, text: str) -> Split:
        """Add text, and return its increment."""
        return self._take(text, is_end=False)

    def flush(self) -> Split:
        """Return the held text after the end of the answer."""
        return self._take("", is_end=True)

    def _take(self, text: str, *, is_end: bool) -> Split:
        content, reasoning = "", ""
        text = self._held + text
        self._held = ""
        if self._place is _At.BEFORE:
            text, content = self._opened(text, is_end=is_end)
        if self._place is _At.INSIDE:
            text, reasoning = self._closed(text, is_end=is_end)
        if self._place is _At.BEHIND and (text := text.lstrip()):
            self._place = _At.CONTENT
        return Split(content + text, reasoning) if self._place is _At.CONTENT else Split("", reasoning)

    def _opened(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Look for the start of the reasoning, and return (text behind the mark, content of an answer without one)."""
        found = self._reasoning.opens.find(text, is_end=is_end)
        if text[: found.begin].strip() or ((is_end or len(text) > MAX_HELD) and found.end is None):
            self._place = _At.CONTENT
            return "", text
        if found.end is None:
            self._held = text
            return "", ""
        self._place = _At.INSIDE
        return text[found.end :], ""

    def _closed(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Look for the end of the reasoning, and return (text behind the mark, text of the reasoning)."""
        found = self._reasoning.closes.find(text, is_end=is_end)
        if found.end is not None:
            self._place = _At.BEHIND
            return text[found.end :], self._reasoned(text[: found.begin])
        end = len(text) if is_end else max(found.begin, len(text) - MAX_HELD)
        self._held = text[end:]
        return "", self._reasoned(text[:end])

    def _reasoned(self, text: str) -> str:
        """Return the part of a reasoning's text that can be given out, without white space at its start and end."""
        text = self._space + text
        if not self._has_reasoned:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_reasoned = self._has_reasoned or bool(shown)
        return shown


class Delta(NamedTuple):
    """Increment of an answer's channels."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Return the sum of several increments, with one delta per call."""
        if len(deltas) == 1 and len(deltas[0].calls) < 2:
            return deltas[0]
        calls = [call for delta in deltas for call in delta.calls]
        return Delta(
            "".join([delta.text for delta in deltas]),
            "".join([delta.reasoning for delta in deltas]),
            joined_calls(calls) if len(calls) > 1 else tuple(calls),
        )


class Channels:
    """Channels of one answer.

    Args:
        reasoning: reads the reasoning; None: the answer has none.
        calls: reads the calls in the content; None: the answer has none.
        shown_ids: special tokens in the model's marks.
    """

    def __init__(
        self, reasoning: ReasoningReader | None, calls: Calls | None = None, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.shown_ids = shown_ids
        """Special tokens whose text must be passed to `push`."""

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def has_calls(self) -> bool:
        """True if a call has started."""
        return self._calls is not None and self._calls.num_calls > 0

    def push(self, text: str) -> Delta:
        """Add text, and return its increment."""
        content, reasoning = (text, "") if self._reasoning is None else self._reasoning.push(text)
        if self._calls is None:
            return Delta(content, reasoning)
        found = self._calls.push(content)
        return Delta(found.text, reasoning, found.calls)

    def flush(self, *, is_whole: bool = False) -> Delta:
        """Return the held text after the end of the answer.

        Args:
            is_whole: whether the model ended the answer; else it was cut off.
        """
        content, reasoning = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._calls is None:
            return Delta(content, reasoning)
        found, rest = self._calls.push(content), self._calls.flush(is_whole=is_whole)
        return Delta(found.text + rest.text, reasoning, found.calls + rest.calls)
