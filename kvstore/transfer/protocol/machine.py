"""Parts that the two state machines of a transfer share: common instructions, and the check of a transition."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import BatonError

Message = TypeVar("Message", covariant=True)
Phase = TypeVar("Phase", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Send(Generic[Message]):
    """Send a message on a control stream."""

    message: Message
    connection: int = 0
    """Number of the connection; 0 if a machine has only one connection."""


@dataclass(frozen=True, slots=True)
class TransferCommitted:
    """The transfer is complete: every chunk is verified and in place at the receiver."""

    generation: int
    first_token: int | None = None
    """First token after the prompt, at the receiver. None if none arrived, and at the sender."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer has failed with this error."""

    generation: int
    error: BatonError


def checked_move(legal: Mapping[Phase, frozenset[Phase]], old: Phase, new: Phase) -> Phase:
    """Return `new`; raises AssertionError if the machine has no transition from `old` to it."""
    assert new in legal[old], f"{old} -> {new}"
    return new
