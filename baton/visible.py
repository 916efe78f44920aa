"""Untrusted text, such as a model's or a client's, for a terminal or a log: control characters are made visible.

Control characters let a text move the terminal's cursor, write to the clipboard, or show other words than it contains.
A newline lets it add lines to a log. One character becomes one character, so that a sequence is as harmless in pieces
as it is whole.
"""

from __future__ import annotations

PICTURES = 0x2400
"""Start of Unicode's pictures of the control characters below U+0020."""
DELETE, DELETE_PICTURE = 0x7F, "\u2421"
HIDDEN = (
    *range(0x80, 0xA0),  # C1, of which U+009B starts a sequence like ESC [
    *range(0x2028, 0x202F),  # line and paragraph separators; embeddings and overrides of the direction
    *range(0x2066, 0x206A),  # isolates of the direction
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_IN_LINE = {
    **{code: chr(PICTURES + code) for code in range(0x20) if chr(code) != "\t"},
    DELETE: DELETE_PICTURE,
    **dict.fromkeys(HIDDEN, REPLACEMENT),
}
_VISIBLE = {code: shown for code, shown in _IN_LINE.items() if chr(code) != "\n"}


def visible(text: str) -> str:
    """Return a text in which each control character but newline and tab is replaced by a visible one."""
    return text.translate(_VISIBLE)


def in_line(text: str) -> str:
    """Return the text as `visible` does, with visible newlines, too."""
    return text.translate(_IN_LINE)


def indented(text: str) -> str:
    """Return the text as `visible` does, with each line indented, so that none looks like a log line."""
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
