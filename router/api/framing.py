"""Where the requests of a connection begin and end among its bytes.

The parser takes all that it is given, so that behind one request it would read thousands more that nobody has answered
yet. Here what a connection receives is cut where a head, a chunk or a body ends, and what belongs to no head and no
body is counted: lines between chunks, and trailers. Only the parser says what is valid.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_OVERLAP = len(_HEAD_END) - 1
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_SIZE_BYTES = 32
"""The begin of a chunk's line that is kept for its size."""
_CRLF = len("\r\n")


class _Stretch(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK = enum.auto()
    TRAILERS = enum.auto()


@dataclass(slots=True, kw_only=True)
class Framing:
    """The place of a connection's next byte in its request."""

    num_head: int = 0
    """Bytes of the head so far."""
    num_body: int = 0
    num_framing: int = 0
    """Bytes of a body in chunks that are none of its own."""
    num_trailers: int = 0
    _section: _Stretch = _Stretch.HEAD
    _left: int = 0
    """Bytes that are left of the body or the chunk."""
    _begun: bytes = b""
    """The end of what came of the head, or the begin of what came of a chunk's line."""

    @property
    def is_in_head(self) -> bool:
        """Whether the next byte is of a head, or in front of one."""
        return self._section is _Stretch.HEAD

    def end_of_piece(self, data: bytes, begin: int) -> int:
        """Takes the next piece of what has come, and returns where in `data` it ends; more than nothing is left."""
        match self._section:
            case _Stretch.HEAD:
                end = self._end_of_head(data, begin)
                self.num_head += end - begin
            case _Stretch.BODY:
                end = min(len(data), begin + self._left)
                self._left -= end - begin
                self.num_body += end - begin
            case _Stretch.CHUNK:
                end = min(len(data), begin + self._left)
                self._left -= end - begin
                self.num_body += end - begin
                if not self._left:
                    self._section, self._begun = _Stretch.CHUNK_LINE, b""
                    self.num_body -= _CRLF
                    self.num_framing += _CRLF
            case _Stretch.CHUNK_LINE:
                end = self._end_of_line(data, begin)
                self.num_framing += end - begin
            case _Stretch.TRAILERS:
                end = (data.find(b"\n", begin) + 1) or len(data)
                self.num_trailers += end - begin
        return end

    def head_ends(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The piece that was taken last has ended a head with these fields, whose names are in lower case."""
        self._begun = b""
        for name, value in headers:
            if name == b"transfer-encoding":
                self._section = _Stretch.CHUNK_LINE
                return
            if name == b"content-length":
                self._section, self._left = _Stretch.BODY, int(value)

    def request_ends(self) -> None:
        """The piece that was taken last has ended a request."""
        self._section, self._begun, self._left = _Stretch.HEAD, b"", 0
        self.num_head = self.num_body = self.num_framing = self.num_trailers = 0

    def _end_of_head(self, data: bytes, begin: int) -> int:
        around = self._begun + data[begin : begin + _OVERLAP]
        found = around.find(_HEAD_END)
        if found >= 0:
            end = begin + found + len(_HEAD_END) - len(self._begun)
        else:
            found = data.find(_HEAD_END, begin)
            end = len(data) if found < 0 else found + len(_HEAD_END)
        self._begun = (self._begun + data[max(begin, end - _OVERLAP) : end])[-_OVERLAP:]
        return end

    def _end_of_line(self, data: bytes, begin: int) -> int:
        end = data.find(b"\n", begin) + 1
        self._begun += data[begin : min(end or len(data), begin + _SIZE_BYTES - len(self._begun))]
        if not end:
            return len(data)
        size = _SIZE.match(self._begun)
        self._left = int(size[0], 16) if size else 0
        if self._left:
            self._section, self._left = _Stretch.CHUNK, self._left + _CRLF
        else:
            self._section = _Stretch.TRAILERS
        return end
