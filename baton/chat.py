"""One message of a chat, independent of its API, and all rules for its contents."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from baton.call_arguments import parsed_arguments
from baton.errors import InvalidRequest, Unsupported
from baton.images import image_in_url
from baton.nesting import check_levels

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")
_KNOWN = frozenset(FIELDS)
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ()}
"""Fields of OpenAI's messages that are not supported -> their neutral values.

Null is always neutral. A client sends a response back with all its fields.
"""
MAX_MESSAGES = 1024
MAX_NAME = 256
"""Maximum length in characters of a name or an id in a message."""
WITH_IMAGES = ("user", "tool")
"""Roles whose messages may have images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str
    """Text of the message; several text parts are joined by newlines, as in vLLM."""
    name: str = ""
    """The author's name, for templates that distinguish several users."""
    reasoning: str | None = None
    """Reasoning of an assistant before its response; None: unknown."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls of an assistant, in OpenAI's form."""
    tool_call_id: str = ""
    """Id of the call that a tool's message answers."""
    parts: tuple[str | bytes, ...] = dataclasses.field(default=(), repr=False)
    """Texts and images in their order, for a message with images; empty: `content` is all."""

    @staticmethod
    def parse(value: object, index: int) -> ChatMessage:
        """Parse a message in OpenAI's form.

        Args:
            value: a JSON value.
            index: the message's position in the chat, for the errors.

        Raises:
            InvalidRequest: a field has a wrong type, or its role does not have this field; `param` names it.
            Unsupported: a field or a part of the content is unknown or not supported.
        """
        where = f"messages[{index}]"
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{where} must be an object with role and content", where)
        for field in value.keys() - _KNOWN:
            if field not in NEUTRAL_FIELDS:
                raise unsupported_field(f"{where}.{field}")
            check_asks_for_nothing(f"{where}.{field}", value[field], NEUTRAL_FIELDS[field])
        set_fields: dict[str, Any] = {name: value[name] for name in FIELDS if value.get(name) is not None}
        calls = _calls_of(set_fields.pop("tool_calls", []), f"{where}.tool_calls")
        has_none = bool(calls) or value.get("role") in ("assistant", "tool", "function")
        content: Any = set_fields.pop("content", "" if has_none else None)
        parts: tuple[str | bytes, ...] = ()
        if isinstance(content, list):
            content, parts = content_of([_part_of(part, f"{where}.content[{i}]") for i, part in enumerate(content)])
        texts: dict[str, Any] = {"role": None, "content": content}
        for field, text in (texts | set_fields).items():
            if not isinstance(text, str):
                raise InvalidRequest(f"{where}.{field} must be a string", f"{where}.{field}")
        reasonings = {set_fields.pop(name) for name in ("reasoning", "reasoning_content") if name in set_fields}
        if len(reasonings) > 1:
            raise InvalidRequest(f"{where} has two different reasonings; send one of them", f"{where}.reasoning")
        message = ChatMessage(
            content=content, parts=parts, tool_calls=calls, reasoning=next(iter(reasonings), None), **set_fields
        )
        message.check(index)
        return message

    def check(self, index: int) -> None:
        """Raise InvalidRequest for an unknown role, or for a field that a message of this role cannot have.

        Args:
            index: the message's position in the chat.
        """
        where = f"messages[{index}]"
        if self.role not in ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}; got {self.role!r}.", where)
        if self.role != "assistant" and (self.tool_calls or self.reasoning is not None):
            name = "tool_calls" if self.tool_calls else "reasoning"
            raise InvalidRequest(f"{where}.{name} belongs to an assistant's message; remove it", f"{where}.{name}")
        if self.tool_call_id and self.role != "tool":
            raise InvalidRequest(f"{where}.tool_call_id belongs to a tool's message; remove it", where)
        if self.parts and self.role not in WITH_IMAGES:
            raise InvalidRequest(f"{where} of role {self.role} has an image; only users and tools send images", where)
        for name, text in (("name", self.name), ("tool_call_id", self.tool_call_id)):
            if len(text) > MAX_NAME:
                raise InvalidRequest(f"{where}.{name} is longer than {MAX_NAME} characters; shorten it", where)

    @property
    def num_characters(self) -> int:
        """Total length of all its texts."""
        calls = sum(len(call["function"]["arguments"]) + len(call["function"]["name"]) for call in self.tool_calls)
        return len(self.content) + len(self.reasoning or "") + calls

    def parsed_tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls with their arguments as objects: OpenAI sends JSON text, templates expect objects.

        Arguments that max_tokens has truncated are completed as far as possible. Arguments that are not an object
        become one argument named `arguments`.

        Raises:
            InvalidRequest: the arguments of a call are nested too deeply.
        """
        return [_with_parsed_arguments(call) for call in self.tool_calls]


def content_of(parts: Sequence[str | bytes]) -> tuple[str, tuple[str | bytes, ...]]:
    """Return the `content` and the `parts` of a message with these texts and images."""
    has_images = any(isinstance(part, bytes) for part in parts)
    return "\n".join(part for part in parts if isinstance(part, str)), tuple(parts) if has_images else ()


def tool_call(*, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a function call in OpenAI's form.

    Args:
        arguments: a JSON text.
    """
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_num_messages(num_messages: int) -> None:
    """Raise InvalidRequest for a chat with no or too many messages; call it before the messages are parsed."""
    if not 1 <= num_messages <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must have 1 to {MAX_MESSAGES} elements, got {num_messages}", "messages")


def check_one_end(*, begins: bool, continues: bool) -> None:
    """Raise InvalidRequest for a chat that both starts a new message and continues the last one."""
    if begins and continues:
        raise InvalidRequest(
            "add_generation_prompt starts a new message, but continue_final_message continues the last one; "
            "set only one of them",
            "continue_final_message",
        )


def check_asks_for_nothing(where: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise Unsupported unless the value of an unsupported field requests the default behaviour."""
    if not asks_for_nothing(value, neutral):
        raise unsupported_field(where)


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether the value of an unsupported field requests the default behaviour, like null and `neutral`."""
    return value is None or any(_is_same(value, each) for each in neutral)


def unsupported_field(where: str) -> Unsupported:
    """Return the error for a field that is not supported, by its path."""
    return Unsupported(
        f"{where.encode('ascii', 'backslashreplace').decode()} is not supported yet; leave it out", where
    )


def _part_of(part: Any, where: str) -> str | bytes:
    if isinstance(part, dict) and part.get("type") == "image_url":
        return _image_of(part, where)
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unsupported(f"{where} must be a part of text or an image; others are not supported yet", where)
    for name in part.keys() - {"type", "text"}:
        raise unsupported_field(f"{where}.{name}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    text: str = part["text"]
    return text


def _image_of(part: Mapping[str, Any], where: str) -> bytes:
    for name in part.keys() - {"type", "image_url"}:
        raise unsupported_field(f"{where}.{name}")
    where = f"{where}.image_url"
    return image_in_url(_object_of(part.get("image_url"), ("url",), where).get("url"), f"{where}.url")


def _calls_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list of calls", where)
    return tuple(_call_of(call, f"{where}[{i}]") for i, call in enumerate(value))


def _call_of(value: Any, where: str) -> dict[str, Any]:
    value = _object_of(value, ("id", "type", "index", "function"), where)
    if value.get("type", "function") != "function":
        raise unsupported_field(f"{where}.type")
    function = _object_of(value.get("function"), ("name", "arguments"), f"{where}.function")
    found = {"call_id": value.get("id"), **function, "arguments": _arguments_text(function.get("arguments"), where)}
    for name in ("call_id", "name", "arguments"):
        if not isinstance(found.get(name), str):
            raise InvalidRequest(f"{where}: the {name} of a call must be a string", where)
    if not 0 < len(found["name"]) <= MAX_NAME or len(found["call_id"]) > MAX_NAME:
        raise InvalidRequest(f"{where}: the name of a call must have 1 to {MAX_NAME} characters, its id no more", where)
    return tool_call(**found)


def _object_of(value: Any, names: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object with {', '.join(names)}", where)
    for name in value.keys() - set(names):
        raise unsupported_field(f"{where}.{name}")
    return value


def _arguments_text(value: Any, where: str) -> Any:
    """Return the arguments of a call as JSON text: some clients send the value, or null for no arguments."""
    if not isinstance(value, (Mapping, list, NoneType)):
        return value
    check_levels(value, where)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parsed_arguments(function["arguments"])
    check_levels(arguments, "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _is_same(value: Any, neutral: Any) -> bool:
    """Compare values, and distinguish False from 0: `logprobs: 0` requests the chosen token's log probability."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
