"""Converts a body of Anthropic's API into the chat that all APIs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.errors import InvalidRequest
from baton.nesting import check_levels
from baton.tools import ANY_TOOL, Tool, ToolChoice, ToolUse
from router.api.anthropic.blocks import (
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.anthropic.body import (
    AnyToolBody,
    AutoToolBody,
    CountTokensBody,
    NoToolBody,
    OneToolBody,
    ThinkingDisabledBody,
    ToolBody,
)
from router.api.efforts import Effort, set_effort, thinking_switch
from router.api.ignored import Ignored
from router.prompt import ChatTemplate

ERROR = "Error: "
"""Prefix of the result of a failed call, because chat templates have no other way to mark it."""


def chat_of(body: CountTokensBody, template: ChatTemplate, ignored: Ignored) -> Chat:
    """Return the chat of a body.

    Consecutive messages of one role are merged. If the last message is the assistant's, the answer continues it.

    Args:
        template: the model's template, which may have a variable that turns the reasoning on and off.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: a tool result has no call before it, a last call has no result, or a call's input is nested too
            deeply; `param` names the field.
    """
    messages = [ChatMessage(role="system", content=_text(body.system))] if body.system else []
    places = list(enumerate(body.messages))
    known_calls: set[str] = set()
    for role, group in groupby(places, key=lambda place: place[1].role):
        turn = list(group)
        if role == "assistant":
            messages.append(_assistants(turn, known_calls))
        elif role == "user":
            messages += _users(turn, known_calls)
        else:
            messages += [_systems(message) for _, message in turn]
    continues = bool(body.messages) and body.messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        where = f"messages[{len(places) - 1}]"
        raise InvalidRequest(f"{where} calls a tool; a message with the result must follow", where)
    return Chat(
        messages=tuple(messages),
        tools=tuple(map(_tool, body.tools or ())),
        tool_choice=_choice(body),
        template_kwargs=_variables(body, template, ignored),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _assistants(turn: Sequence[tuple[int, Any]], known_calls: set[str]) -> ChatMessage:
    thoughts, texts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for place, message in turn:
        content = message.content
        if isinstance(content, str):
            texts.append(content)
            continue
        for index, block in enumerate(content):
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case ToolUseBlock(id=call_id, name=name, input=arguments):
                    check_levels(arguments, f"messages[{place}].content[{index}].input")
                    written = json.dumps(arguments, ensure_ascii=False)
                    calls.append(tool_call(call_id=call_id, name=name, arguments=written))
                    known_calls.add(call_id)
    return ChatMessage(
        role="assistant",
        content="".join(texts),  # an answer is cut into blocks around each call
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )


def _users(turn: Sequence[tuple[int, Any]], known_calls: set[str]) -> list[ChatMessage]:
    """Return the messages of a user's turn: consecutive texts are one message, and each tool result is one."""
    messages: list[ChatMessage] = []
    texts: list[str] = []
    """Texts of the current message."""
    for place, message in turn:
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for index, block in enumerate(blocks):
            match block:
                case ToolResultBlock():
                    if block.tool_use_id not in known_calls:
                        where = f"messages[{place}].content[{index}].tool_use_id"
                        raise InvalidRequest(f"{where} does not match a tool call of an earlier message", where)
                    messages += _user(texts)
                    texts = []
                    written = f"{ERROR if block.is_error else ''}{_text(block.content)}"
                    messages.append(ChatMessage(role="tool", content=written, tool_call_id=block.tool_use_id))
                case TextBlock(text=text):
                    texts.append(text)
    messages += _user(texts)
    return messages or [ChatMessage(role="user", content="")]


def _user(texts: Sequence[str]) -> list[ChatMessage]:
    """Return a user message of consecutive texts; empty if there are none."""
    return [ChatMessage(role="user", content="\n".join(texts))] if texts else []


def _systems(message: Any) -> ChatMessage:
    return ChatMessage(role="system", content=_text(message.content))


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _tool(tool: ToolBody) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))


def _choice(body: CountTokensBody) -> ToolChoice:
    match body.tool_choice:
        case AutoToolBody(disable_parallel_tool_use=is_one):
            return ToolChoice(is_parallel=not is_one)
        case AnyToolBody(disable_parallel_tool_use=is_one):
            return ToolChoice(use=ToolUse.REQUIRED, is_parallel=not is_one)
        case OneToolBody(name=name, disable_parallel_tool_use=is_one):
            return ToolChoice(use=ToolUse.REQUIRED, name=name, is_parallel=not is_one)
        case NoToolBody():
            return ToolChoice(use=ToolUse.NONE)
    return ANY_TOOL


def _variables(body: CountTokensBody, template: ChatTemplate, ignored: Ignored) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    has_tools = bool(body.tools)
    effort = Effort(body.output_config.effort if body.output_config else None, "output_config.effort")
    set_effort(variables, effort, lambda: template, ignored, has_tools=has_tools)
    if body.thinking is not None and (switch := thinking_switch(template, has_tools=has_tools)) is not None:
        variables[switch] = not isinstance(body.thinking, ThinkingDisabledBody)
    return variables
