"""The session of a request: it stays the same while a conversation grows.

A client may name it (header or metadata `x-session-id`). Otherwise it is the start of the prompt: the messages up to
the user's first one, or the first characters of a text. It decides which of several releases of one model serves a
request (`router.models.table`). Sessions of two tenants always differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from baton.v1 import inference_pb2

SESSION = "x-session-id"
FIRST_CHARACTERS = 256
"""Number of characters that identify a text without messages: a continuation of the text begins with them."""
MOST_CHARACTERS = 4096
"""Number of characters of a message that count."""
FIRST_TOKENS = 64
"""Number of token ids that identify a prompt of token ids."""


class NamesModel(Protocol):
    """Body that names a model."""

    @property
    def model(self) -> str | None: ...


def opening_of(body: NamesModel | Mapping[str, Any]) -> str:
    """Return the start of the prompt of any API's body, validated or as JSON."""
    instructions = _text(_field(body, "system") or _field(body, "instructions"))
    for name in ("messages", "input", "prompt", "text", "tokens"):
        if (found := _field(body, name)) is not None:
            return f"{instructions}\0{_start(found)}"
    return instructions


def opening_of_message(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> str:
    """Return the start of the prompt of a gRPC request."""
    if message.HasField("chat"):
        return _until_user((each.role, each.content) for each in message.chat.messages)
    if isinstance(message, inference_pb2.GenerateRequest) and message.HasField("token_ids"):
        return _start(message.token_ids.ids)
    return message.text[:FIRST_CHARACTERS]


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _start(prompt: Any) -> str:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return str(prompt)[:FIRST_CHARACTERS]
    if isinstance(prompt[0], int):
        return str(list(prompt[:FIRST_TOKENS]))
    if any(_field(each, "role") for each in prompt):
        return _until_user((str(_field(each, "role")), _text(_field(each, "content"))) for each in prompt)
    first = prompt[0]  # of several prompts
    if isinstance(first, Sequence):
        first = first[: FIRST_CHARACTERS if isinstance(first, str) else FIRST_TOKENS]
    return str(first)


def _text(content: Any) -> str:
    """Return the start of the text of a message, without its images, which may have many MB."""
    if isinstance(content, str):
        return content[:MOST_CHARACTERS]
    parts = content if isinstance(content, Sequence) else ()
    texts = (text for each in parts if isinstance(text := _field(each, "text"), str))
    return next(texts, "")[:MOST_CHARACTERS]


def _until_user(messages: Iterable[tuple[str, str]]) -> str:
    """Return the messages up to the first one of the user."""
    opening = []
    for role, content in messages:
        opening.append(f"{role}:{content}")
        if role == "user":
            break
    return "\0".join(opening)
