"""What the service knows of the served model, and of the address at which a request came."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api import ModelCard
from router.admission import ModelFacts
from router.answer import PLAIN, AnswerFormat
from router.prompt import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The served model, as the router needs it."""

    card: ModelCard
    tokenizer: Tokenizer
    format: AnswerFormat = PLAIN
    """How its answers to chats are marked."""
    content_id: str
    facts: ModelFacts
    """What requests are checked against."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """The server's address at which a request came, for its span."""

    address: str = ""
    """Host; empty: not known."""
    port: int = 0
    is_streamed: bool = True
    """True if the client reads the answer as it comes."""


UNKNOWN_INGRESS = Ingress()
