"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from baton.api import Chat, PromptInput
from baton.chat import ChatMessage
from baton.errors import InvalidRequest
from router.api.openai.body import Body


class ChatBody(Body):
    """A chat to be continued."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompt(self) -> PromptInput:
        return chat_of(self.messages)

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs belongs to logprobs; set logprobs to true as well", "top_logprobs")
        return asked


def chat_of(messages: list[dict[str, Any]]) -> Chat:
    """The chat of these messages. Raises InvalidRequest and Unsupported as `ChatMessage.parse` does."""
    return Chat(tuple(ChatMessage.parse(message, index) for index, message in enumerate(messages)))
