"""Decides which call writes the usage record of a request: one record over all calls and routers. Pure.

Several calls on several routers may serve a request, if the client's stream breaks and it continues with `resume_from`.
The record of the continuing call covers the client's whole answer, so earlier calls must not write one. The calls agree
through a mark under the request's id, which each call changes atomically from the value that it has read:

    placed   a call has its first token: it is the latest call, and a held record of an earlier call is void
    ended    the latest call writes its record. If its answer is incomplete, the mark holds the record, because the
             client may return within HOLD_S
    is due   the client did not return: the router that sees this first writes the held record

A call that another one has followed writes nothing. If the client returns after a record was written, the next record
has only the new tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from baton.api import Usage

HOLD_S = 15.0
"""Time within which the client of a broken stream may return."""
NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """A line of the usage log."""

    time_s: float
    """Unix time at which the last token was sent, or the call ended."""
    request_id: str
    tenant: str
    model: str
    usage: Usage
    finish_reasons: tuple[str, ...]
    """Finish reasons of the completed choices, in their order."""
    status: str
    """ok, error or cancelled."""
    is_resumption: bool
    """True if the call continued an earlier one."""

    def line(self) -> str:
        """Return the record as one line of JSON."""
        body = {
            "time": datetime.fromtimestamp(self.time_s, UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "tenant": self.tenant,
            "model": self.model,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "reasoning_tokens": self.usage.reasoning_tokens,
            "finish_reasons": self.finish_reasons,
            "status": self.status,
            "is_resumption": self.is_resumption,
        }
        return json.dumps(body)

    def beyond(self, recorded: Usage) -> UsageRecord | None:
        """Return the record without usage that is already recorded; None: nothing is new."""
        if recorded == NO_USAGE:
            return self
        new = Usage(
            *(max(0, count - known) for count, known in zip(_counts(self.usage), _counts(recorded), strict=True))
        )
        return replace(self, usage=new) if new.prompt_tokens or new.completion_tokens else None


class UsageCall(NamedTuple):
    """Identity of a call in marks."""

    token: str
    """Random token of this call."""
    digest: str
    """Digest of everything that determines the answer: another prompt under the same id is another request."""
    is_resumption: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMark:
    """Shared record by which routers agree on the call of a request that writes its usage record."""

    digest: str
    token: str
    """Token of the latest call."""
    recorded: Usage = NO_USAGE
    """Usage in records that were written."""
    held: UsageRecord | None = None
    """The latest call's record, which is written unless another call follows."""

    def encode(self) -> bytes:
        """Return the mark as bytes for the store."""
        held = self.held and {name: getattr(self.held, name) for name in UsageRecord.__slots__}
        if held:
            held["usage"] = _counts(held["usage"])
        return json.dumps([self.digest, self.token, _counts(self.recorded), held]).encode()

    @staticmethod
    def decode(found: bytes) -> UsageMark:
        """Decode a mark from the store.

        Raises:
            ValueError: the bytes are malformed.
        """
        try:
            digest, token, recorded, held = json.loads(found)
            if held is not None:
                usage, reasons = _usage(held.pop("usage")), tuple(map(str, held.pop("finish_reasons")))
                held = UsageRecord(usage=usage, finish_reasons=reasons, **_checked(held))
            return UsageMark(digest=str(digest), token=str(token), recorded=_usage(recorded), held=held)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"malformed usage mark: {error}") from error


class MarkStep(NamedTuple):
    """Result of a change of a mark."""

    mark: UsageMark | None
    """The new mark; None: it stays unchanged."""
    record: UsageRecord | None
    """The record to write now; None: none."""


def placed(mark: UsageMark | None, call: UsageCall) -> MarkStep:
    """Record a call's first token. If it continues an earlier call's answer, that call's held record is void."""
    if mark is not None and mark.digest == call.digest and call.is_resumption:
        return MarkStep(replace(mark, token=call.token, held=None), None)
    left = mark.held.beyond(mark.recorded) if mark is not None and mark.held is not None else None
    return MarkStep(UsageMark(digest=call.digest, token=call.token), left)


def ended(mark: UsageMark | None, call: UsageCall, record: UsageRecord) -> MarkStep:
    """Record the end of a call. Its record is written, or held if the client may return for the rest."""
    if mark is not None and mark.token != call.token:
        return MarkStep(None, None if mark.digest == call.digest else record)
    recorded = mark.recorded if mark is not None else NO_USAGE
    latest = UsageMark(digest=call.digest, token=call.token, recorded=recorded, held=record)
    return MarkStep(latest, None) if record.status != "ok" else is_due(latest)


def is_due(mark: UsageMark | None) -> MarkStep:
    """Return the step that writes the held record after the client has not returned in time."""
    if mark is None or mark.held is None:
        return MarkStep(None, None)
    covered = map(max, _counts(mark.recorded), _counts(mark.held.usage))
    return MarkStep(replace(mark, recorded=Usage(*covered), held=None), mark.held.beyond(mark.recorded))


def _counts(usage: Usage) -> tuple[int, int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens


def _usage(counts: list[Any]) -> Usage:
    if len(counts) != len(_counts(NO_USAGE)) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("malformed token counts")
    return Usage(*counts)


def _checked(held: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = {"time_s": float, "request_id": str, "tenant": str, "model": str, "status": str, "is_resumption": bool}
    if held.keys() != kinds.keys() or not all(type(held[name]) is kind for name, kind in kinds.items()):
        raise ValueError("malformed usage record")
    return held
