"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from baton.api import Chat, PromptInput, Text
from baton.chat import ChatMessage, check_num_messages, check_one_end
from baton.errors import InvalidRequest
from baton.tools import ANY_TOOL, Tool, ToolChoice
from router.api.openai.body import Body
from router.api.openai.tokens import TokenizeBody

_CHAT_FIELDS = (
    "tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class ChatBody(Body):
    """A chat to be continued."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """One of the template's variables."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    """Whether the reasoning comes with the answer; None: it does. It is computed in any case."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompt(self) -> PromptInput:
        return chat_of(self, ToolChoice.parse(self.tool_choice, self.parallel_tool_calls))

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        most = self.max_completion_tokens
        if most is not None and asked.setdefault("max_tokens", most) != most:
            raise InvalidRequest("max_tokens is the older name of max_completion_tokens; set one", "max_tokens")
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs belongs to logprobs; set logprobs to true as well", "top_logprobs")
        return asked


def chat_of(body: ChatBody | TokenizeBody, tool_choice: ToolChoice = ANY_TOOL) -> Chat:
    """The chat that a body has.

    Raises:
        InvalidRequest: two of its fields contradict each other; see `ChatMessage.parse` and `Tool.parse` too.
        Unsupported: see `ChatMessage.parse` and `Tool.parse`.
    """
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise InvalidRequest("chat_template_kwargs has another reasoning_effort; set one", "reasoning_effort")
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    check_one_end(begins=begins, continues=continues)
    messages = body.messages or ()
    check_num_messages(len(messages) or 1)
    return Chat(
        messages=tuple(ChatMessage.parse(message, index) for index, message in enumerate(messages)),
        tool_choice=tool_choice,
        tools=tuple(Tool.parse(tool, index) for index, tool in enumerate(body.tools or ())),
        documents=tuple(body.documents or ()),
        template_kwargs=variables,
        add_generation_prompt=begins,
        continue_final_message=continues,
        parse_special=bool(body.parse_special),
    )


def prompt_of(body: TokenizeBody) -> PromptInput:
    """The prompt that a body of /tokenize has: a text or a chat.

    Raises:
        InvalidRequest: it has none or both, or fields that belong to the other one; see `chat_of` too.
        Unsupported: see `chat_of`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("set either prompt or messages", "prompt")
    others = _CHAT_FIELDS if body.messages is None else ("add_special_tokens",)
    if unfit := next((name for name in others if getattr(body, name) is not None), None):
        raise InvalidRequest(f"{unfit} belongs to {'messages' if body.messages is None else 'a prompt'}", unfit)
    if body.messages is not None:
        return chat_of(body)
    return Text(body.prompt or "", bool(body.parse_special), body.add_special_tokens is not False)
