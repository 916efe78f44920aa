"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Any

from router.api.openai.strict import StrictBody


class TokenizeBody(StrictBody):
    """A prompt to be tokenized."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(StrictBody):
    """Tokens to be written as text."""

    model: str | None = None
    tokens: list[int]
