"""Converts messages, tools and tool choices of other services' formats into OpenAI's format.

Some clients use one format for several services: OpenAI's older `function_call`, tools and parts of the Responses API,
tool choices of Mistral and Anthropic. With `router.strict` the router converts none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.chat import FIELDS, NEUTRAL_FIELDS
from router.api.fields import Ignored, is_empty

ALLOWED = "allowed_tools"
_TEXTS = ("input_text", "output_text")
_IMAGES = ("image_url", "input_image")
_THOUGHTS = ("thinking", "reasoning")
_OF_FUNCTION = ("name", "description", "parameters", "strict")
_MESSAGE = frozenset((*FIELDS, *NEUTRAL_FIELDS))
_PART = frozenset(("type", "text", "image_url"))
_IMAGE = frozenset(("url",))
_CALL = frozenset(("id", "type", "index", "function"))
_CALLED = frozenset(("name", "arguments"))
_TOOL = frozenset(("type", "function"))
_FUNCTION = frozenset(("name", "description", "parameters", "strict"))


def messages_in_form(messages: Iterable[Any]) -> None:
    """Convert messages, which are JSON values, into OpenAI's format in place. Unknown formats stay as they are."""
    waiting: list[str] = []
    """Ids of calls in the last assistant message that have no result yet."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        if isinstance(content := message.get("content"), list):
            message["content"] = _parts_in_form(message, content, is_assistant=role == "assistant")
        if role == "assistant":
            waiting = _assistant_in_form(message, index)
        elif role in ("tool", "function") and waiting and not message.get("tool_call_id"):
            message |= {"role": "tool", "tool_call_id": waiting.pop(0)}


def _assistant_in_form(message: dict[str, Any], index: int) -> list[str]:
    """Convert an assistant's refusal and calls into OpenAI's format, and return the ids of the calls."""
    if message.get("content") is None and isinstance(message.get("refusal"), str):
        message["content"] = message.pop("refusal")
    if message.get("function_call") and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    given = message.get("tool_calls")
    calls = [call for call in given if isinstance(call, dict)] if isinstance(given, list) else []
    for place, call in enumerate(calls):
        call["type"] = call.get("type") or "function"
        call["id"] = call.get("id") or f"call{index:03d}{place:02d}"  # nine characters, as Mistral's templates require
    return [call["id"] for call in calls]


def _parts_in_form(message: dict[str, Any], parts: list[Any], *, is_assistant: bool) -> list[Any]:
    thoughts: list[str] = []
    kept = []
    for part in parts:
        if isinstance(part, str):
            kept.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS or (isinstance(part, dict) and kind is None and "text" in part):
            part["type"] = "text"
        elif kind in _IMAGES and isinstance(part.get("image_url"), str):
            detail = {"detail": part.pop("detail")} if "detail" in part else {}
            part |= {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        elif is_assistant and kind == "refusal":
            part |= {"type": "text", "text": part.pop("refusal", None)}
        elif is_assistant and kind in _THOUGHTS and (thought := _thought(part)) is not None:
            thoughts.append(thought)
            continue
        kept.append(part)
    if thoughts and message.get("reasoning_content") is None and message.get("reasoning") is None:
        message["reasoning_content"] = "\n".join(thoughts)
    return kept


def _thought(part: dict[str, Any]) -> str | None:
    """Return the text of a reasoning part, which may itself consist of parts; None: its format is unknown."""
    found = next((value for name in (*_THOUGHTS, "text") if (value := part.get(name)) is not None), "")
    if isinstance(found, list):
        given = [each.get("text") if isinstance(each, dict) else each for each in found]
        texts = [each for each in given if isinstance(each, str)]
        found = "".join(texts) if len(texts) == len(given) else None
    return found if isinstance(found, str) else None


def tools_in_form(tools: Iterable[Any]) -> list[Any]:
    """Return tools, which are JSON values, in OpenAI's format and without duplicates."""
    kept: list[Any] = []
    known: dict[str, Any] = {}
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") in (None, "", "function"):
            if "function" not in tool and isinstance(tool.get("name"), str):
                tool["function"] = {name: tool.pop(name) for name in _OF_FUNCTION if name in tool}
            if isinstance(function := tool.get("function"), dict):
                tool["type"] = "function"
                name = function.get("name")
                if isinstance(name, str) and known.setdefault(name, tool) is not tool and known[name] == tool:
                    continue
        kept.append(tool)
    return kept


def choice_in_form(choice: Any) -> Any:
    """Return a tool choice in OpenAI's format, or unchanged if its format is not known."""
    match choice:
        case "any":
            return "required"
        case {"type": "any" | "required", **more} if not more:
            return "required"
        case {"type": "auto" | "none" as use, **more} if not more:
            return use
        case {"type": "tool" | "function", "name": str(name), **more} if not more:
            return {"type": "function", "function": {"name": name}}
        case {"function": {"name": str()} as function, **more} if not more:
            return {"type": "function", "function": function}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools), **more} if not more:
            return {"type": ALLOWED, ALLOWED: {"mode": mode, "tools": tools_in_form(tools)}}
    return choice


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
