"""Converts the items of a body into a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.errors import InvalidRequest
from router.api.efforts import Effort, Template, set_effort, variables_of
from router.api.ignored import Ignored
from router.api.responses.body import InputBody
from router.api.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputTextPart,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    RefusalPart,
)
from router.api.responses.tools import Functions, tools_of


def chat_of(body: InputBody, functions: Functions, template: Template, ignored: Ignored) -> Chat:
    """Return the chat of a body.

    Args:
        functions: the functions of the body.
        template: returns the model's template.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: the input is empty, or two fields contradict each other.
    """
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    match body.input:
        case str(text):
            messages.append(ChatMessage(role="user", content=text))
        case []:
            raise InvalidRequest("input is empty; send at least one item", "input")
        case list(items):
            messages += messages_of(items, functions)
    tools, choice = tools_of(functions, body.tool_choice, body.parallel_tool_calls)
    variables = variables_of(body.chat_template_kwargs, template, ignored, has_tools=bool(tools))
    effort = Effort(body.reasoning.effort if body.reasoning else None, "reasoning.effort")
    set_effort(variables, effort, template, ignored, has_tools=bool(tools))
    return Chat(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        template_kwargs=variables,
        parse_special=bool(body.parse_special),
    )


def messages_of(items: Sequence[InputItem], functions: Functions) -> list[ChatMessage]:
    """Return the messages of a chat with these items.

    Consecutive reasoning, text and calls were one answer, so they become one message of the assistant. Text behind the
    calls belongs to the same message.
    """
    messages: list[ChatMessage] = []
    turn = _AssistantTurn()
    for item in items:
        if not turn.takes(item):
            messages += turn.message()
            turn = _AssistantTurn()
        match item:
            case MessageItem(role="assistant", content=content):
                turn.texts.append(_text(content))
            case ReasoningItem():
                turn.reasonings += [part.text for part in item.content or item.summary or ()]
            case FunctionCallItem(call_id=call_id, name=own, arguments=arguments):
                name = functions.name_of(item.namespace, own)
                turn.calls.append(tool_call(call_id=call_id, name=name, arguments=arguments))
            case CustomCallItem(call_id=call_id, name=name, input=text):
                written = json.dumps({"input": text}, ensure_ascii=False)
                turn.calls.append(tool_call(call_id=call_id, name=name, arguments=written))
            case FunctionCallOutputItem(call_id=call_id, output=output):
                messages.append(ChatMessage(role="tool", content=_text(output), tool_call_id=call_id))
            case MessageItem(role=role, content=content):
                messages.append(ChatMessage(role=role, content=_text(content)))
    return [*messages, *turn.message()]


@dataclass(slots=True)
class _AssistantTurn:
    """Texts, calls and reasoning of one answer of the assistant so far."""

    reasonings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, item: InputItem) -> bool:
        """Return whether the item can belong to the same answer."""
        match item:
            case ReasoningItem():
                return not (self.texts or self.calls)
            case MessageItem(role="assistant"):
                return bool(self.calls) or not self.texts
            case FunctionCallItem() | CustomCallItem():
                return True
        return False

    def message(self) -> list[ChatMessage]:
        """Return the message in a list; empty if the answer has no content."""
        if not (self.reasonings or self.texts or self.calls):
            return []
        return [
            ChatMessage(
                role="assistant",
                content="".join(self.texts),
                reasoning="\n".join(self.reasonings) if self.reasonings else None,
                tool_calls=tuple(self.calls),
            )
        ]


def _text(content: str | Sequence[InputTextPart | OutputTextPart | RefusalPart]) -> str:
    """Return the text of parts, joined by newlines as in chat completions."""
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
