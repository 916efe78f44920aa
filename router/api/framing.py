"""Finds the boundaries of a connection's requests in its byte stream.

The parser consumes all that it is fed, so it would read thousands of pipelined requests before the first is answered.
This module cuts the received bytes at the end of each head, chunk and body. It also counts the bytes that belong to
neither a head nor a body: the lines between chunks, and trailers. Only the parser decides what is valid.
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
"""Leading bytes of a chunk's line that are kept to read its size."""
_CRLF = len("\r\n")


class _Stretch(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_LINE = enum.auto()
    CHUNK = enum.auto()
    TRAILERS = enum.auto()


@dataclass(slots=True, kw_only=True)
class Framing:
    """Position of a connection's next byte within its request."""

    num_head: int = 0
    """Bytes of the head so far."""
    num_body: int = 0
    num_framing: int = 0
    """Bytes of a chunked body that are framing: size lines and line ends."""
    num_trailers: int = 0
    _section: _Stretch = _Stretch.HEAD
    _left: int = 0
    """Bytes of the body or the chunk that have not come yet."""
    _begun: bytes = b""
    """Last bytes of the head so far, or first bytes of a chunk's line."""

    @property
    def is_in_head(self) -> bool:
        """True if the next byte belongs to a head, or precedes one."""
        return self._section is _Stretch.HEAD

    def end_of_piece(self, data: bytes, begin: int) -> int:
        """Consume the next piece of `data` from `begin` on, and return its end there. `data` must have bytes left."""
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
        """Record that the last piece completed a head with these fields. Their names are in lower case."""
        self._begun = b""
        for name, value in headers:
            if name == b"transfer-encoding":
                self._section = _Stretch.CHUNK_LINE
                return
            if name == b"content-length":
                self._section, self._left = _Stretch.BODY, int(value)

    def request_ends(self) -> None:
        """Record that the last piece completed a request."""
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
