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
from router.answer.marks import BEGIN, BEHIND_CALL, MAX_HELD, CodeBlock, Mark
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
        is_forced: whether the answer consists of calls: what is none is the rest of one that was cut off, and no text.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], ids: CallIds, *, is_forced: bool = False) -> None:
        self._form = form
        self._tools = tools
        self._ids = ids
        self._is_forced = is_forced
        self._reader: JsonCalls | TagCalls | None = None
        """Reads the part in which the content is; None: it is in none."""
        self._closes: Mark | None = None
        """The mark behind the part that has ended, which may come; None: none may."""
        self._part_closes = form.closes
        """The one behind the part in which the content is."""
        self._before = BEGIN
        """The letter before what is held."""
        self._block = CodeBlock()
        """Whether the text that has been given out ends within a fence."""
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

    def flush(self, *, is_whole: bool = False) -> Parted:
        """Returns what was held back, now that the answer has ended.

        Args:
            is_whole: whether the model ended it: the arguments of its calls are closed; else they were cut off.
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
        shown = self._text(taken.text)
        if taken.rest is not None and taken.has_calls:
            self._before = BEHIND_CALL
        return shown

    def _closed(self, text: str, closes: Mark, *, is_end: bool) -> str | None:
        """Looks for the mark behind a part, and returns what is behind it; None: it may yet come."""
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
        """Looks for the mark before a part: text -> (what of it is text, what is behind the mark; None: none yet)."""
        found = self._form.opens.find(self._before + text, is_end=is_end, begin=1)
        found = found._replace(begin=found.begin - 1, end=None if found.end is None else found.end - 1)
        before = text[: found.begin].lstrip(" \t\r\n;" if self.num_calls else None)
        if self._form.only_at_begin and (self._has_text or before):
            return self._text(text), None
        if found.end is None:
            begin = 0 if self._form.only_at_begin else found.begin  # white space, and what separates calls
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
        """Returns what is given out of text: white space at its end waits for what follows."""
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
