"""The body of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.api import Chat, PromptInput, Text
from baton.chat import ChatMessage, check_num_messages, check_one_end
from baton.errors import InvalidRequest
from baton.tools import ANY_TOOL, Tool, ToolChoice
from router.api.efforts import Template, set_effort, set_switch, variables_of
from router.api.ignored import Ignored
from router.api.openai.body import Body
from router.api.openai.forms import ALLOWED, choice_in_form, messages_in_form, tools_in_form
from router.api.openai.ignorable import strip_messages, strip_tools
from router.api.openai.thinking import ThinkingFields
from router.api.openai.tokens import TokenizeBody
from router.api.strict import Listed

_CHAT_FIELDS = (
    "tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class ChatBody(Body, ThinkingFields):
    """Request to answer a chat."""

    messages: Listed[dict[str, Any]]
    tools: Listed[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompt(self, template: Template, ignored: Ignored) -> PromptInput:
        """Return the chat. See `chat_of` and `ToolChoice.parse`."""
        choice, allowed = _allowed(self.tool_choice if ignored.is_strict else choice_in_form(self.tool_choice))
        chat = chat_of(self, template, ignored, ToolChoice.parse(choice, self.parallel_tool_calls))
        return chat if allowed is None else with_allowed(chat, allowed)

    def written(self) -> dict[str, str]:
        found = super().written() | {"logprobs": "top_logprobs"}
        return found | ({"max_tokens": "max_completion_tokens"} if self.max_tokens is None else {})

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        most = self.max_completion_tokens
        if most is not None and asked.setdefault("max_tokens", most) != most:
            raise InvalidRequest("max_tokens is the older name of max_completion_tokens; set one of them", "max_tokens")
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        return asked


def chat_of(
    body: ChatBody | TokenizeBody, template: Template, ignored: Ignored, tool_choice: ToolChoice = ANY_TOOL
) -> Chat:
    """Return the chat of a body. Changes the body's messages and tools in place.

    Args:
        template: returns the model's template.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: two fields contradict each other; see `ChatMessage.parse` and `Tool.parse` too.
        Unsupported: see `ChatMessage.parse` and `Tool.parse`.
    """
    messages, given = body.messages or [], body.tools or []
    check_num_messages(len(messages) or 1)
    if not ignored.is_strict:
        messages_in_form(messages)
        given = tools_in_form(given)
    tools = strip_tools(given, ignored)
    strip_messages(messages, ignored)
    variables = variables_of(body.chat_template_kwargs, template, ignored, has_tools=bool(tools))
    set_effort(variables, body.effort(), template, ignored, has_tools=bool(tools))
    set_switch(variables, body.switch(), template, ignored, has_tools=bool(tools))
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    check_one_end(begins=begins, continues=continues)
    return Chat(
        messages=tuple(ChatMessage.parse(message, index) for index, message in enumerate(messages)),
        tool_choice=tool_choice,
        tools=tuple(Tool.parse(tool, index) for index, tool in enumerate(tools)),
        documents=tuple(body.documents or ()),
        template_kwargs=variables,
        add_generation_prompt=begins,
        continue_final_message=continues,
        parse_special=bool(body.parse_special),
    )


def _allowed(choice: Any) -> tuple[Any, frozenset[str] | None]:
    """Split a tool choice into the choice itself and the names of the allowed tools; None: all are allowed.

    Raises:
        InvalidRequest: the choice does not have OpenAI's format.
    """
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return choice, None
    match choice.get(ALLOWED):
        case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
            named = [tool["function"].get("name") if _is_function(tool) else None for tool in tools]
            names = [name for name in named if isinstance(name, str)]
            if names and all(name is not None or _is_hosted(tool) for name, tool in zip(named, tools, strict=True)):
                return mode, frozenset(names)
    raise InvalidRequest(
        "tool_choice.allowed_tools must have a mode, auto or required, and tools, a list of at least one function",
        "tool_choice",
    )


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function"


def with_allowed(chat: Chat, names: frozenset[str]) -> Chat:
    """Return the chat with only the named tools. Raises InvalidRequest if a name is unknown."""
    if unknown := sorted(names - {tool.name for tool in chat.tools}):
        raise InvalidRequest(f"tool_choice allows {unknown[0][:80]!a}, which is not in tools", "tool_choice")
    return replace(chat, tools=tuple(tool for tool in chat.tools if tool.name in names))


def prompt_of(body: TokenizeBody, template: Template, ignored: Ignored) -> PromptInput:
    """Return the prompt of a body of /tokenize: a text or a chat. See `chat_of`.

    Raises:
        InvalidRequest: the body has none or both, or fields that belong to the other one; see `chat_of` too.
        Unsupported: see `chat_of`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("set either prompt or messages", "prompt")
    others = _CHAT_FIELDS if body.messages is None else ("add_special_tokens",)
    if unfit := next((name for name in others if getattr(body, name) is not None), None):
        needed, given = ("messages", "prompt") if body.messages is None else ("prompt", "messages")
        raise InvalidRequest(f"{unfit} needs {needed} and cannot be combined with {given}; unset it", unfit)
    if body.messages is not None:
        return chat_of(body, template, ignored)
    return Text(body.prompt or "", bool(body.parse_special), body.add_special_tokens is not False)
