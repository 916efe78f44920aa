"""Transfer errors as text of the session, and back, so that a failure keeps its type from one worker to the other."""

from __future__ import annotations

from baton.errors import (
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferExpired,
    TransferRefused,
    TransferTimeout,
)

_BY_NAME = {
    cls.__name__: cls
    for cls in (TransferError, TransferCancelled, TransferRefused, TransferCorrupted, TransferTimeout, TransferExpired)
}


def to_reason(error: TransferError) -> str:
    return f"{type(error).__name__}: {error}"


def from_reason(reason: str) -> TransferError:
    name, _, text = reason.partition(": ")
    cls = _BY_NAME.get(name)
    return cls(text) if cls else TransferError(reason)
