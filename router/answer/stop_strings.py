"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    r"""Filter that cuts a stream of text before the first occurrence of any stop string.

    However the stream is split, the output is `text[:min(text.find(s) for s in stops)]`: the match that starts earliest
    wins. Text is held back only while it may be the start of a stop string.

        kept (given out)          held                    text not seen yet
        ──────────────────────────┬───────────────────────┬────────────────
        The capital of France is  \n\nUs                  er:          stops = ["\n\nUser:"]
    """

    def __init__(self, stops: Sequence[str] = (), includes_match: bool = False) -> None:
        """Create a filter for these stop strings.

        Args:
            stops: the stop strings, none of them empty.
            includes_match: whether the stop string itself is given out.
        """
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._includes_match = includes_match
        self._held = ""
        self._num_deaf = 0
        """Number of held characters at which a stop string must not end."""
        self.stopped = False
        self.num_kept = 0
        """Characters given out so far. Once stopped, tokens whose text starts at or after it are not in the answer."""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def num_held(self) -> int:
        """Number of characters that were seen and not given out."""
        return len(self._held)

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Add text, and return (text that is safe to give out, whether a stop string was found).

        Once stopped, further text is ignored.

        Args:
            may_stop: if false, a stop string that this text completes is treated as normal text.
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
        # A match that starts after `begin` must wait: the text at `begin` may become an earlier match.
        self._held, self._num_deaf = buffer[begin:], max(0, self._num_deaf - begin)
        return self._keep(buffer[:begin]), False

    def flush(self) -> tuple[str, bool]:
        """End the stream, and return (held text outside of a stop string, whether a stop string was found)."""
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
        """Return the start of the longest suffix of `buffer` that is a prefix of a stop string; len(buffer) if none."""
        first = len(buffer)
        for stop in self._stops:
            i = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= i < first and not stop.startswith(buffer[i:]):
                i = buffer.find(stop[0], i + 1)
            if 0 <= i < first:
                first = i
        return first
