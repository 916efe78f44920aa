"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    r"""Cuts a stream of text before the first occurrence of any stop string.

    However the stream is split, what comes out is `text[:min(text.find(s) for s in stops)]`: the match that begins
    earliest wins. Text is held back only while it may be the beginning of a stop string.

        kept (given out)          held                    text not seen yet
        ──────────────────────────┬───────────────────────┬────────────────
        The capital of France is  \n\nUs                  er:          stops = ["\n\nUser:"]
    """

    def __init__(self, stops: Sequence[str] = (), includes_match: bool = False) -> None:
        """Args:
        includes_match: whether the stop string itself is given out.
        """
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._includes_match = includes_match
        self._held = ""
        self._num_deaf = 0
        """Characters that are held, and with which no stop string may end."""
        self.stopped = False
        self.num_kept = 0
        """Characters given out so far: once stopped, tokens whose text begins at or after it are not the answer's."""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def num_held(self) -> int:
        """Characters seen and not given out."""
        return len(self._held)

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """More text -> (text that is safe to give out, whether a stop string was found). Deaf once stopped.

        Args:
            may_stop: if not, a stop string that this text completes is text like any other.
        """
        if self.stopped:
            return "", True
        if not self._stops:
            return self._keep(text), False
        buffer = self._held + text
        if not may_stop:
            self._num_deaf = len(buffer)
        match, begin = self._first_match(buffer), self._first_beginning(buffer)
        if match is not None and match[0] <= begin:
            return self._stop(buffer, match), True
        # A match that begins after `begin` waits: what begins there may turn out to be an earlier one.
        self._held, self._num_deaf = buffer[begin:], max(0, self._num_deaf - begin)
        return self._keep(buffer[:begin]), False

    def flush(self) -> tuple[str, bool]:
        """The stream has ended -> (what was held back and is no part of a stop string, whether one was found)."""
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
        """Where the longest end of `buffer` starts that is a beginning of a stop string; len(buffer) if none is."""
        first = len(buffer)
        for stop in self._stops:
            i = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= i < first and not stop.startswith(buffer[i:]):
                i = buffer.find(stop[0], i + 1)
            if 0 <= i < first:
                first = i
        return first
