"""Text of others, such as a model's or a client's, for a terminal or a log: control characters are shown, not obeyed.

A terminal that obeys them lets a text move the cursor, write into the clipboard, or show other words than it holds. A
line of a log that obeys a newline lets it add lines of its own. One character becomes one character, so that a sequence
is as harmless in pieces as it is whole.
"""

from __future__ import annotations

PICTURES = 0x2400
"""Where Unicode has a picture of each control character below U+0020."""
DELETE, DELETE_PICTURE = 0x7F, "\u2421"
HIDDEN = (
    *range(0x80, 0xA0),  # C1, of which U+009B begins a sequence as ESC [ does
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
    """Returns a text in which each control character but newline and tab is one that can be seen."""
    return text.translate(_VISIBLE)


def in_line(text: str) -> str:
    """Returns what `visible` does, with newlines, too, as a character that can be seen."""
    return text.translate(_IN_LINE)


def indented(text: str) -> str:
    """Returns what `visible` does, with each line indented: none of them begins as a line of a log does."""
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
