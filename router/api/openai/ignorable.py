"""Removes the ignored parts of messages and tools: fields that change no answer, and tools that cannot run here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.chat import FIELDS, NEUTRAL_FIELDS
from router.api.ignored import Ignored, is_empty

_MESSAGE = frozenset((*FIELDS, *NEUTRAL_FIELDS))
_PART = frozenset(("type", "text", "image_url"))
_IMAGE = frozenset(("url",))
_CALL = frozenset(("id", "type", "index", "function"))
_CALLED = frozenset(("name", "arguments"))
_TOOL = frozenset(("type", "function"))
_FUNCTION = frozenset(("name", "description", "parameters", "strict"))


def strip_messages(messages: Iterable[Any], ignored: Ignored) -> None:
    """Remove the fields that change no answer from messages, which are JSON values, and from their parts and calls."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        _strip(message, _MESSAGE, ignored)
        for name in NEUTRAL_FIELDS.keys() & message.keys():
            if message[name] is not None and (is_empty(message[name]) or name == "annotations"):
                ignored.drop_from(message, (name,))
        content = message.get("content")
        if content is None and message.get("role") in ("assistant", "tool", "function") and "content" in message:
            message["content"] = ""
        for part in content if isinstance(content, list) else ():
            _strip(part, _PART, ignored)
            if isinstance(part, dict) and isinstance(image := part.get("image_url"), dict):
                if isinstance(image.get("detail"), str):
                    ignored.note("detail")  # the model's own image processor decides
                    del image["detail"]
                _strip(image, _IMAGE, ignored)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            _strip(call, _CALL, ignored)
            _strip(call.get("function") if isinstance(call, dict) else None, _CALLED, ignored)


def strip_tools(tools: Iterable[Any], ignored: Ignored) -> list[Any]:
    """Return the function tools among tools, which are JSON values, without the fields that change no answer."""
    kept = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("", "function") and not ignored.is_strict:
            ignored.note(kind)
            continue
        kept.append(tool)
        _strip(tool, _TOOL, ignored)
        function = tool.get("function") if isinstance(tool, dict) else None
        _strip(function, _FUNCTION, ignored)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if isinstance(parameters, dict):
            for name in ("properties", "required"):
                if name in parameters and parameters[name] is None:
                    ignored.drop_from(parameters, (name,))
    return kept


def _strip(fields: Any, known: frozenset[str], ignored: Ignored) -> None:
    if isinstance(fields, dict) and (unknown := fields.keys() - known):
        ignored.drop_from(fields, sorted(unknown))
