"""The chat that the items of a body make."""

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
    """Returns the chat.

    Args:
        functions: the body's.
        template: the model's.
        ignored: notes what has no effect.

    Raises:
        InvalidRequest: the input is empty, or two fields contradict each other.
    """
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    match body.input:
        case str(text):
            messages.append(ChatMessage(role="user", content=text))
        case []:
            raise InvalidRequest("input holds no item; send at least one", "input")
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
    """Returns the messages of a chat in which these items stand.

    A reasoning, a text and calls that follow each other are one message of the assistant, as they were one answer. What
    an answer says behind its calls is of the same message.
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
    """What an assistant has said, called and thought in one answer so far."""

    reasonings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, item: InputItem) -> bool:
        """Returns whether the item can be of the same answer."""
        match item:
            case ReasoningItem():
                return not (self.texts or self.calls)
            case MessageItem(role="assistant"):
                return bool(self.calls) or not self.texts
            case FunctionCallItem() | CustomCallItem():
                return True
        return False

    def message(self) -> list[ChatMessage]:
        """Returns the message, if there is anything in it."""
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
    """Returns the text of parts; several are joined by newlines, as those of chats are."""
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
