"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Any

from router.api.strict import StrictBody


class TokenizeBody(StrictBody):
    """A prompt to be tokenized."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether what the model wants around a text is added; None: yes."""
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """Tokens to be written as text."""

    model: str | None = None
    tokens: list[int]
