"""The calls of tools in the content of an answer, as increments; the rest of the content stays text.

Plain state, fed text as it comes: however that is split, the calls and the text are the same. A call comes when its
name and the begin of its arguments have; what turns out not to be a call before is text. White space next to calls is
text only between other text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from baton.tools import Tool, ToolCallDelta
from router.answer.call_format import CallForm
from router.answer.call_readers import JsonCalls, Taken
from router.answer.marks import MAX_HELD
from router.answer.tag_calls import TagCalls


class Parted(NamedTuple):
    """What new content adds to the text and to the calls of an answer."""

    text: str
    calls: tuple[ToolCallDelta, ...] = ()


class CallIds:
    """Ids of the calls of one choice: the same whenever it is written again.

    Args:
        num_letters: length of an id.
    """

    def __init__(self, request_id: str, choice_index: int, num_letters: int) -> None:
        self._of_choice = f"{request_id}\0{choice_index}"
        self._num_letters = num_letters

    def of(self, index: int) -> str:
        """The id of a call."""
        digest = hashlib.blake2b(f"{self._of_choice}\0{index}".encode()).hexdigest()
        return f"call_{digest}"[: self._num_letters] if self._num_letters > 9 else digest[: self._num_letters]


class Calls:
    """The calls in one answer's content.

    Args:
        tools: those that it may call, by name.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], ids: CallIds) -> None:
        self._form = form
        self._tools = tools
        self._ids = ids
        self._reader: JsonCalls | TagCalls | None = None
        """Reads the part in which the content is; None: it is in none."""
        self._is_behind = False
        """Whether the mark behind a part may come."""
        self._held = ""
        self._space = ""
        """White space that is text if more text follows, or no call."""
        self._has_text = False
        self._follows_call = False
        self._num_shown = 0
        """Characters of the text that have been given out."""
        self.num_calls = 0
        """Calls that have begun."""

    def push(self, text: str) -> Parted:
        """Takes more content."""
        return self._take(text, is_end=False)

    def flush(self) -> Parted:
        """Returns what was held back, now that the answer has ended."""
        found = self._take("", is_end=True)
        space, self._space = self._space, ""
        return found if self._follows_call else Parted(found.text + space, found.calls)

    def _take(self, text: str, *, is_end: bool) -> Parted:
        shown, calls = "", list[ToolCallDelta]()
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            if self._reader is not None:
                taken = self._reader.take(rest)
                if is_end and taken.rest is None:
                    shown += self._noted(taken, calls)
                    taken = self._reader.flush()
                shown += self._noted(taken, calls)
                rest = taken.rest
                if rest is not None:
                    self._reader, self._is_behind = None, self._form.closes is not None
            elif self._is_behind:
                rest = self._closed(rest, is_end=is_end)
            else:
                new, rest = self._opened(rest, is_end=is_end)
                shown += new
        return Parted(shown, tuple(calls))

    def _noted(self, taken: Taken, calls: list[ToolCallDelta]) -> str:
        """Notes the calls that a reader has found, and returns its text."""
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
        return self._text(taken.text)

    def _closed(self, text: str, *, is_end: bool) -> str | None:
        """Looks for the mark behind a part, and returns what is behind it; None: it may yet come."""
        assert self._form.closes is not None
        found = self._form.closes.find(text, is_end=is_end)
        is_next = not text[: found.begin].strip()
        if is_next and found.end is None and not is_end and len(text) <= MAX_HELD:
            self._held = text
            return None
        self._is_behind = False
        found = self._form.closes.find(text, is_end=True)
        is_next = not text[: found.begin].strip()
        return text[found.end :] if is_next and found.end is not None else text

    def _opened(self, text: str, *, is_end: bool) -> tuple[str, str | None]:
        """Looks for the mark before a part: text -> (what of it is text, what is behind the mark; None: none yet)."""
        found = self._form.opens.find(text, is_end=is_end)
        before = text[: found.begin].lstrip(" \t\r\n;" if self.num_calls else None)
        if self._form.only_at_begin and (self._has_text or before):
            return self._text(text), None
        if found.end is None:
            begin = 0 if self._form.only_at_begin else found.begin  # white space, and what separates calls
            end = len(text) if is_end else max(begin, len(text) - MAX_HELD)
            self._held = text[end:]
            return self._text(text[:end]), None
        begin = 0 if self._form.only_at_begin else found.begin
        self._reader = self._form.reader(text[begin : found.end], self._tools)
        return self._text(text[: begin if self._reader else found.end]), text[found.end :]

    def _text(self, text: str) -> str:
        """Returns what is given out of text: white space at its end waits for what follows."""
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
