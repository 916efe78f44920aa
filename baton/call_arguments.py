"""The arguments of a call of a tool: JSON, or its beginning if max_tokens has cut the call off."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

MAX_OPEN = 128
"""Objects and lists that may be open at once in arguments that were cut off."""

MAX_TRIES = 4
"""Places of a text, from its end, at which it is closed."""


def parsed_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments as an object.

    Of arguments that were cut off it has what came of them. Those that are no object are in its member `arguments`,
    and there are none in an empty text or null.
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
    """Returns what a text begins of JSON, closed where it ends; the text itself if it begins none."""
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
