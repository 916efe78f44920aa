"""What is billed of a request, and who writes it: one record, however many calls and routers served it. Pure.

A request may be served by several calls, on several routers: its client's stream breaks, and it goes on by
`resume_from`. The record of the call that goes on covers the client's whole answer, so the calls before it must write
none. They agree by a mark under the request's id, which each call changes as one step, from what it has read:

    placed   a call has its first token: it is the latest, and what an earlier one left to be written is void
    ended    the latest call writes its record; or, if its answer is not whole, leaves it to be written later, as the
             client may come back within HOLD_S
    is due   nobody came back: the router that looks first writes what was left

A call that another one has followed writes nothing. Where a record was written and the client comes back all the same,
the next record has only what is new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from baton.api import Usage

HOLD_S = 15.0
"""How long the client of a broken stream may take to come back."""
NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """A line of the usage log."""

    time_s: float
    """When the last token left, or the call ended: seconds since 1970."""
    request_id: str
    tenant: str
    model: str
    usage: Usage
    finish_reasons: tuple[str, ...]
    """Why choices ended, in their order; one that did not come to its end has none."""
    status: str
    """ok, error or cancelled."""
    is_resumption: bool
    """True if the call continued an earlier one."""

    def line(self) -> str:
        """The record as one line of JSON."""
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
        """Return the record without what records have already; None: nothing is new."""
        if recorded == NO_USAGE:
            return self
        new = Usage(
            *(max(0, count - known) for count, known in zip(_counts(self.usage), _counts(recorded), strict=True))
        )
        return replace(self, usage=new) if new.prompt_tokens or new.completion_tokens else None


class UsageCall(NamedTuple):
    """A call that serves a request, as marks name it."""

    token: str
    """Drawn for this call."""
    digest: str
    """Digest of everything that determines the answer: another prompt under the same id is another request."""
    is_resumption: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMark:
    """What routers know of the calls of a request."""

    digest: str
    token: str
    """The latest call's."""
    recorded: Usage = NO_USAGE
    """What records have of the request."""
    held: UsageRecord | None = None
    """The latest call's record, which is to be written unless another call follows."""

    def encode(self) -> bytes:
        """The mark as the store has it."""
        held = self.held and {name: getattr(self.held, name) for name in UsageRecord.__slots__}
        if held:
            held["usage"] = _counts(held["usage"])
        return json.dumps([self.digest, self.token, _counts(self.recorded), held]).encode()

    @staticmethod
    def decode(found: bytes) -> UsageMark:
        """Raise ValueError for what is no mark."""
        try:
            digest, token, recorded, held = json.loads(found)
            if held is not None:
                usage, reasons = _usage(held.pop("usage")), tuple(map(str, held.pop("finish_reasons")))
                held = UsageRecord(usage=usage, finish_reasons=reasons, **_checked(held))
            return UsageMark(digest=str(digest), token=str(token), recorded=_usage(recorded), held=held)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"no mark of a request's usage: {error}") from error


class MarkStep(NamedTuple):
    """What a call makes of a mark."""

    mark: UsageMark | None
    """None: it stays as it is."""
    record: UsageRecord | None
    """The record that is to be written now."""


def placed(mark: UsageMark | None, call: UsageCall) -> MarkStep:
    """A call has begun to answer: an earlier one's record is void if this call goes on with its answer."""
    if mark is not None and mark.digest == call.digest and call.is_resumption:
        return MarkStep(replace(mark, token=call.token, held=None), None)
    left = mark.held.beyond(mark.recorded) if mark is not None and mark.held is not None else None
    return MarkStep(UsageMark(digest=call.digest, token=call.token), left)


def ended(mark: UsageMark | None, call: UsageCall, record: UsageRecord) -> MarkStep:
    """A call has ended: its record is written, or held if the client may come back for the rest."""
    if mark is not None and mark.token != call.token:
        return MarkStep(None, None if mark.digest == call.digest else record)
    recorded = mark.recorded if mark is not None else NO_USAGE
    latest = UsageMark(digest=call.digest, token=call.token, recorded=recorded, held=record)
    return MarkStep(latest, None) if record.status != "ok" else is_due(latest)


def is_due(mark: UsageMark | None) -> MarkStep:
    """Nobody has come back: what is held is written."""
    if mark is None or mark.held is None:
        return MarkStep(None, None)
    covered = map(max, _counts(mark.recorded), _counts(mark.held.usage))
    return MarkStep(replace(mark, recorded=Usage(*covered), held=None), mark.held.beyond(mark.recorded))


def _counts(usage: Usage) -> tuple[int, int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens


def _usage(counts: list[Any]) -> Usage:
    if len(counts) != len(_counts(NO_USAGE)) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("these are no counts of tokens")
    return Usage(*counts)


def _checked(held: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = {"time_s": float, "request_id": str, "tenant": str, "model": str, "status": str, "is_resumption": bool}
    if held.keys() != kinds.keys() or not all(type(held[name]) is kind for name, kind in kinds.items()):
        raise ValueError("this is no usage record")
    return held
