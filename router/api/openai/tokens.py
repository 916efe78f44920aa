"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Any

from router.api.openai.body import StrictBody


class TokenizeBody(StrictBody):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: list[int]
