"""Finds the tool calls in an answer's content and returns them as increments; the rest of the content stays text.

Plain state, fed text as it comes: the calls and the text are the same however it is split. A call is reported once its
name and the start of its arguments have come. Text that turns out not to be a call stays text. White space next to
calls is dropped, unless it is between other text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from baton.tools import Tool, ToolCallDelta
from router.answer.call_format import CallForm
from router.answer.call_readers import JsonCalls, Taken
from router.answer.marks import BEGIN, BEHIND_CALL, MAX_HELD, CodeBlock, Mark
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
