"""The served model."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api import ModelCard
from router.admission import ModelFacts
from router.answer import PLAIN, AnswerFormat
from router.prompt import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The served model with its tokenizer, answer format and limits."""

    card: ModelCard
    tokenizer: Tokenizer
    format: AnswerFormat = PLAIN
    """Markers of reasoning and tool calls in its answers to chats."""
    content_id: str
    release: str = ""
    """Name of its release in metrics."""
    facts: ModelFacts
    """Limits and defaults for validation."""
