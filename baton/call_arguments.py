"""Arguments of a tool call: JSON, or the start of a JSON text if max_tokens has truncated the call."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

MAX_OPEN = 128
"""Maximum number of open objects and lists in truncated arguments."""

MAX_TRIES = 4
"""Number of positions, from the end of a text, at which closing it is tried."""


def parsed_arguments(text: str) -> dict[str, Any]:
    """Return the arguments as an object.

    Truncated arguments are completed as far as possible. Arguments that are not an object become its member
    `arguments`; an empty text and null become an empty object.
    """
    found = _read(text) if text.strip() else None
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": found}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _begun(text)


def _begun(text: str) -> Any:
    """Return the truncated JSON value at the start of a text, closed at its end; the text itself if it is not JSON."""
    closing, in_string, is_escaped = list[str](), False, False
    closes_at = deque[tuple[int, str]](maxlen=MAX_TRIES)
    for place, letter in enumerate(text):
        if in_string:
            in_string = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[" and len(closing) < MAX_OPEN:
            closing.append("}" if letter == "{" else "]")
            closes_at.append((place + 1, "".join(reversed(closing))))
        elif letter == "," and closing:
            closes_at.append((place, "".join(reversed(closing))))
        elif letter in "}]" and closing and closing.pop() == letter:
            closes_at.append((place + 1, "".join(reversed(closing))))
    whole = text[:-1] if is_escaped else text
    tail = '"' * in_string + "".join(reversed(closing))
    tries = [whole + tail, *(text[:end] + rest for end, rest in reversed(closes_at))]
    for each in tries:
        try:
            return json.loads(each)
        except (ValueError, RecursionError):
            continue
    return text
