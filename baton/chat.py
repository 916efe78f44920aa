"""One message of a chat, whatever API it came by, and all rules for what may be in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "reasoning": (), "reasoning_content": (), "refusal": (),
    "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip
"""Fields of OpenAI's messages that are not built yet -> the values that ask for nothing, as null always does: a client
sends an answer back with all its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str
    """The text; several parts of text are joined by newlines, as vLLM joins them."""
    name: str = ""
    """The author's name, for templates that distinguish several users."""
    reasoning: str | None = None
    """What an assistant thought before it answered; None: it is not known."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The calls that an assistant asked for, in OpenAI's form."""
    tool_call_id: str = ""
    """The call that a tool's message answers."""

    @staticmethod
    def from_fields(*, role: str, content: str, name: str, has_tool_calls: bool) -> ChatMessage:
        """Takes a message whose fields have their types already, as those of `inference.proto` have.

        Raises:
            Unsupported: it holds tool calls, or answers one.
        """
        check_no_tools(has_tool_calls)
        return ChatMessage(role=role, content=content, name=name)

    @staticmethod
    def parse(value: object, index: int) -> ChatMessage:
        """Reads a message in OpenAI's form.

        Args:
            value: a JSON value.
            index: the message's place in the chat, for the errors.

        Raises:
            InvalidRequest: a field has another type than it should; `param` names it.
            Unsupported: a field or a part of the content is unknown or not built yet.
        """
        where = f"messages[{index}]"
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{where} must be an object with role and content", where)
        for field in value.keys() - {"role", "content", "name"}:
            if field not in NEUTRAL_FIELDS:
                raise unsupported_field(f"{where}.{field}")
            check_asks_for_nothing(f"{where}.{field}", value[field], NEUTRAL_FIELDS[field])
        content: Any = value.get("content")
        if isinstance(content, list):
            content = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
        author = "" if value.get("name") is None else value["name"]
        for field, text in (("role", value.get("role")), ("content", content), ("name", author)):
            if not isinstance(text, str):
                raise InvalidRequest(f"{where}.{field} must be a string", f"{where}.{field}")
        return ChatMessage(role=value["role"], content=content, name=author)

    def check_role(self, index: int) -> None:
        """Raises InvalidRequest for a role that no chat has.

        Args:
            index: the message's place in the chat.
        """
        if self.role not in ROLES:
            where = f"messages[{index}]"
            raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}; got {self.role!r}.", where)

    def parsed_tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls with their arguments as values: OpenAI sends them as JSON text, templates expect the object.

        Raises:
            InvalidRequest: a call has no function, or its arguments are not JSON.
        """
        return [_with_parsed_arguments(call) for call in self.tool_calls]


def check_no_tools(has_tools: bool) -> None:
    """Raises Unsupported for a chat with tools or tool calls."""
    if has_tools:
        raise Unsupported("tools and tool calls in a chat are not supported yet; leave them out", "tools")


def check_asks_for_nothing(where: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raises Unsupported unless the value of a field that is not built yet asks for what happens anyway."""
    if value is not None and not any(_is_same(value, each) for each in neutral):
        raise unsupported_field(where)


def unsupported_field(where: str) -> Unsupported:
    """The refusal of a field that is not built yet, by its path."""
    return Unsupported(
        f"{where.encode('ascii', 'backslashreplace').decode()} is not supported yet; leave it out", where
    )


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unsupported(f"{where} must be a part of text; others are not supported yet", where)
    for name in part.keys() - {"type", "text"}:
        raise unsupported_field(f"{where}.{name}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    text: str = part["text"]
    return text


def _with_parsed_arguments(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest("Each of tool_calls must be an object with a function.", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequest(f"The arguments of a tool call are not valid JSON: {error}.", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes False from 0: `logprobs: 0` asks for the chosen token's."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
