"""Transfer errors as the text of a Nack or an Abort, and back, so that a failure keeps its type across the session."""

from __future__ import annotations

from baton.errors import TransferCorrupted, TransferError, TransferRefused, TransferTimeout

GAVE_UP = "the sender gave the transfer up"
"""Nothing failed: whoever wanted it does not any more."""
_BY_STATUS = {e.status: e for e in (TransferError, TransferRefused, TransferCorrupted, TransferTimeout)}


def to_reason(error: TransferError) -> str:
    return f"{error.status}: {error}"


def from_reason(reason: str) -> TransferError:
    status, _, text = reason.partition(": ")
    return from_status(status, text) or TransferError(reason)


def from_status(status: str, text: str) -> TransferError | None:
    """None: not the status of a transfer error."""
    cls = _BY_STATUS.get(status)
    return cls(text) if cls else None
