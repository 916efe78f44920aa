"""The served model, and the address at which a request arrived."""

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
    facts: ModelFacts
    """Limits and defaults for validation."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """Server address at which a request arrived, for its span."""

    address: str = ""
    """Host; empty: unknown."""
    port: int = 0
    is_streamed: bool = True
    """True if the client reads the answer as it comes."""


UNKNOWN_INGRESS = Ingress()
