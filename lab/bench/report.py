"""Report of a replay: the simulator's figures as clients measured them, and counts that only a real cluster has."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.simulate.report import Figures, figure_table, quantiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from lab.bench.replay import Replay, ReplayedRequest
    from lab.traces.fit_to_model import FittedTrace
    from router.placement import Objective

LATE_S = 0.01
"""Delay, in seconds, after which a request counts as sent late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Figures):
    """Figures of a replay. Cancelled and unsent requests are excluded; `num_requests` counts the others.

    Hits, imbalance and times are those of served requests. All others have missed their objective.
    """

    ceiling: float
    """Share of these requests' prompt tokens that an initially empty cache without limit would serve."""
    num_served: int
    num_rejected: int
    """Requests refused for lack of capacity (RESOURCE_EXHAUSTED)."""
    num_failed: int
    num_cancelled: int
    """Requests cancelled by Ctrl-C."""
    num_unsent: int
    """Requests not sent because of Ctrl-C."""
    num_clipped: int
    num_skipped: int
    num_late: int
    """Requests sent more than LATE_S after they were due."""
    latest_s: float
    lasted_s: float
    """Time from the first request's due time to the last token."""
    output_tokens_per_s: float
    tokens_per_message: float
    """Mean over messages with tokens; every further token of a message is an interval of 0."""
    modes: dict[str, int]
    """Requests served by mode: disaggregated and aggregated."""
    num_retries: int
    """Number of placements after the first."""
    computed_tokens: dict[str, int]
    """Prompt tokens that each worker computed."""
    errors: dict[str, dict[str, Any]]
    """Number of requests and an example message, by kind of error."""
    interrupted: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(
    replay: Replay, plan: FittedTrace, workers: Mapping[str, Sequence[str]], objective: Objective
) -> BenchReport:
    """Return the report of a replay.

    Args:
        workers: worker ids by role, so that idle workers count in the imbalance; empty: only the workers of the
            requests count.
    """
    judged = [one for one in replay.observed if one.outcome != "cancelled"]
    served = [one for one in judged if one.outcome == "served"]
    usages = [one.usage for one in served if one.usage]
    timings = [one.timing for one in served if one.timing]
    outcomes = Counter(one.outcome for one in replay.observed)
    token_times = [entry for one in served for entry in one.token_times]
    num_tokens = sum(count for _, count in token_times)
    lasted_s = max((one.token_times[-1][0] for one in served), default=0.0)
    arrived_s = max((one.request.arrival_s for one in judged), default=0.0) or lasted_s
    num_good = sum(one.ttft_s <= objective.ttft_s and one.itl_s <= objective.itl_s for one in served)
    lates = [one.late_s for one in replay.observed if one.late_s > LATE_S]
    computed = _computed(served)
    return BenchReport(
        num_requests=len(judged),
        hit_rate=sum(u.cached_tokens for u in usages) / max(1, sum(u.prompt_tokens for u in usages)),
        imbalance=_imbalance(computed, workers),
        ttft_s=quantiles((one.ttft_s, 1) for one in served),
        itl_s=quantiles(interval for one in served for interval in one.intervals),
        goodput_per_s=num_good / arrived_s if arrived_s else 0.0,
        good_share=num_good / max(1, len(judged)),
        ceiling=replace(plan.trace, requests=tuple(one.request for one in judged)).ceiling,
        num_served=len(served),
        num_rejected=outcomes["rejected"],
        num_failed=outcomes["failed"],
        num_cancelled=outcomes["cancelled"],
        num_unsent=len(plan.trace.requests) - len(replay.observed),
        num_clipped=plan.num_clipped,
        num_skipped=plan.num_skipped,
        num_late=len(lates),
        latest_s=max(lates, default=0.0),
        lasted_s=lasted_s,
        output_tokens_per_s=num_tokens / lasted_s if lasted_s else 0.0,
        tokens_per_message=num_tokens / max(1, len(token_times)),
        modes=dict(sorted(Counter(timing.mode for timing in timings).items())),
        num_retries=sum(timing.retries for timing in timings),
        computed_tokens={worker: num for by_worker in computed.values() for worker, num in sorted(by_worker.items())},
        errors=_errors(judged),
        interrupted=replay.interrupted,
    )


def _computed(served: Sequence[ReplayedRequest]) -> dict[str, Counter[str]]:
    """Return the number of computed prompt tokens, by role and id of the worker."""
    computed: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
    for one in served:
        assert one.usage
        assert one.timing
        role = "prefill" if one.timing.prefill_worker else "decode"
        worker = one.timing.prefill_worker or one.timing.decode_worker
        computed[role][worker] += one.usage.prompt_tokens - one.usage.cached_tokens
    return computed


def _imbalance(computed: Mapping[str, Counter[str]], workers: Mapping[str, Sequence[str]]) -> float:
    """Return the imbalance of the pool that computes prompts.

    That is the prefill workers, or the decode workers if no prompt went to a prefill worker. Short prompts on decode
    workers are ignored.
    """
    role = "prefill" if computed["prefill"] else "decode"
    shares = Counter(dict.fromkeys(workers.get(role, ()), 0))
    shares.update(computed[role])
    return max(shares.values(), default=0) * len(shares) / max(1, shares.total())


def _errors(judged: Sequence[ReplayedRequest]) -> dict[str, dict[str, Any]]:
    errors: dict[str, dict[str, Any]] = {}
    for one in judged:
        if one.error is not None:
            kind = errors.setdefault(type(one.error).__name__, {"count": 0, "example": str(one.error)})
            kind["count"] += 1
    return errors


def table_of(title: str, result: BenchReport) -> Table:
    """Return a table of one row, with the simulator's columns."""
    table = figure_table(title, result.ceiling, "")
    table.add_row("measured", *result.cells())
    return table


def notes_of(result: BenchReport) -> list[str]:
    """Return a line for each result that is not in the table."""
    notes = [
        f"{result.num_requests} requests in {result.lasted_s:.1f} s: {result.num_served} served, "
        f"{result.num_rejected} rejected for lack of capacity, {result.num_failed} failed"
    ]
    if result.interrupted:
        notes.append(
            f"interrupted: {result.num_cancelled} requests cancelled, {result.num_unsent} not sent; not in the figures"
        )
    notes += [f"{error['count']} {kind}, such as: {error['example']}" for kind, error in result.errors.items()]
    modes = ", ".join(f"{count} {mode}" for mode, count in result.modes.items()) or "none"
    notes.append(
        f"served: {modes}; {result.num_retries} retries; {result.output_tokens_per_s:.1f} tokens/s, "
        f"{result.tokens_per_message:.2f} a message"
    )
    if result.num_clipped or result.num_skipped:
        notes.append(
            f"too long for the model: {result.num_clipped} prompts cut, {result.num_skipped} requests left out"
        )
    notes.append(
        f"sent late, by more than {LATE_S * 1e3:.0f} ms: {result.num_late}, at most {result.latest_s * 1e3:.0f} ms; "
        "times count from when requests were due"
    )
    return notes
