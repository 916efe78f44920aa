"""Output of `baton requests` and `baton status --explain`: a list of requests, and the timeline of one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from baton.api import Explanation, Option, PlacementSeconds
from baton.cluster import Role, with_role
from baton.errors import InvalidRequest
from baton.timelines import RequestSummary, RequestTimeline, TimelinePhase, summary_json, timeline_json
from deploy.operator.tables import new_table
from deploy.say import say
from deploy.terminal import Terminal

LINE = 160
"""Columns of the list of requests: ids are not truncated, so that they can be copied."""


def print_timelines(found: Sequence[RequestTimeline], request_id: str, as_json: bool) -> None:
    """Print the timeline of each call with this id, the latest first. Raises InvalidRequest if there is none."""
    if not found:
        raise InvalidRequest(
            f"the router does not know a request {request_id!r}; it keeps the latest that it has served. If there "
            "are several routers, name them all: --address HOST:PORT,HOST:PORT"
        )
    if as_json:
        say(json.dumps([timeline_json(each) for each in found], indent=2))
        return
    out = Terminal(soft_wrap=True)
    for each in found:
        for line in summary_lines(each.summary):
            out.print(line)
        out.print(event_table(each))
        out.print(phase_table(each.phases, each.summary.total_s))
        for placement in each.placements:
            _print_placement(out, placement)


def print_requests(found: Sequence[RequestSummary], as_json: bool) -> None:
    """Print a list of requests."""
    if as_json:
        say(json.dumps([summary_json(each) for each in found], indent=2))
        return
    out = Terminal(width=LINE)
    out.print(request_table(found))
    out.print("details of a request: baton status --explain REQUEST")


def request_table(found: Sequence[RequestSummary]) -> Table:
    """Return a table with one row per request: outcome, times, and the stage that is blamed or that took longest."""
    table = new_table("arrived", "outcome", "first (s)", "all (s)", "most of it in", "class", "tenant", "request")
    for each in found:
        spent_s = asdict(each.stages)
        stage = each.blamed_stage or max(spent_s, key=spent_s.__getitem__)
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(each.arrived_s)),
            each.outcome,
            "-" if each.ttft_s is None else f"{each.ttft_s:.3f}",
            f"{each.total_s:.3f}",
            f"{stage} {spent_s[stage]:.3f} s",
            each.slo_class or "-",
            Text(each.tenant),
            Text(each.request_id),
        )
    return table


def summary_lines(summary: RequestSummary) -> list[str]:
    """Return lines with the outcome, the objectives, the token counts and the times of a request."""
    outcome = summary.outcome
    if summary.blamed_stage:
        outcome += f" because of {summary.blamed_stage}"
    if summary.error:
        outcome += f" ({summary.error})"
    ttft = "none yet" if summary.ttft_s is None else f"{summary.ttft_s:.3f} s"
    asked = {
        "first token": summary.ttft_objective_s,
        "between tokens": summary.itl_objective_s,
        "answer": summary.e2e_objective_s,
    }
    objectives = [f"{name} {seconds:g} s" for name, seconds in asked.items() if seconds < math.inf]
    itl = "" if summary.itl_s is None else f", {summary.itl_s:.3f} s between tokens"
    return [
        f"{summary.request_id}: {outcome}",
        f"tenant {summary.tenant}, class {summary.slo_class or 'none'}, priority {summary.priority}; objectives: "
        f"{', '.join(objectives) or 'none'}",
        f"{summary.num_prompt_tokens} prompt tokens, {summary.num_cached_tokens} of them cached; {summary.num_tokens} "
        f"tokens of answer; choices: {summary.num_choices}; retries: {summary.retries}",
        f"first token after {ttft}{itl}, {summary.total_s:.3f} s in all",
    ]


def event_table(timeline: RequestTimeline) -> Table:
    """Return a table of a request's events, in chronological order."""
    table = new_table("at (s)", "what happened")
    has_several = timeline.summary.num_choices > 1
    for event in timeline.events:
        named = f"[{event.choice_index}] " if has_several and event.what not in ("arrived", "admitted", "ended") else ""
        table.add_row(f"{event.at_s:.3f}", Text(named + event.text))
    if timeline.num_events_left_out:
        table.add_row("", f"({timeline.num_events_left_out} events in the middle are left out)")
    return table


def phase_table(phases: Sequence[TimelinePhase], total_s: float) -> Table:
    """Return a table of a request's phases in order, with their share of the total time."""
    table = new_table("from (s)", "to (s)", "seconds", "share", "stage")
    rows = [(f"{each.begin_s:.3f}", f"{each.end_s:.3f}", each.end_s - each.begin_s, each.stage) for each in phases]
    rows.append(("", "", sum(seconds for _, _, seconds, _ in rows), f"in all, of {total_s:.3f} s"))
    for begin, end, seconds, stage in rows:
        table.add_row(begin, end, f"{seconds:.3f}", f"{seconds / total_s:.1%}" if total_s else "", stage)
    return table


def _print_placement(out: Terminal, placed: Explanation) -> None:
    by_role = {Role.PREFILL: placed.prefill_worker, Role.DECODE: placed.decode_worker}
    workers = " -> ".join(with_role(worker_id, role) for role, worker_id in by_role.items() if worker_id)
    pulled = f", pulls {placed.source_tokens} tokens from {placed.source}" if placed.source else ""
    measured = f"{placed.measured_ttft_s:.3f} s" if placed.measured_ttft_s else "not yet"
    name = f"{placed.request_id}/{placed.choice_index}"
    out.print(f"{name}: {placed.mode} on {workers}{pulled}; {placed.outcome}")
    out.print(f"{placed.num_prompt_tokens} prompt tokens, room for {placed.num_expected_tokens} tokens of answer")
    out.print(f"first token: predicted {placed.predicted_ttft_s:.3f} s, measured {measured}")
    out.print(seconds_table(placed.predicted, placed.measured))
    if placed.options:
        out.print(option_table(placed.options))


def seconds_table(predicted: PlacementSeconds, measured: PlacementSeconds) -> Table:
    """Return a table of the predicted and the measured times of a placement, in milliseconds."""
    table = new_table("(ms)", "wait", "room", "pull", "compute", "exposed", "step")
    for name, each in (("predicted", predicted), ("measured", measured)):
        seconds = (each.wait_s, each.room_s, each.pull_s, each.compute_s, each.exposed_s, each.step_s)
        table.add_row(name, *("-" if value is None else f"{value * 1e3:.1f}" for value in seconds))
    return table


def option_table(options: Sequence[Option]) -> Table:
    """Return a table of the candidate workers, those with the earliest first token first."""
    table = new_table("worker (ms)", "role", "cached", "wait", "pull", "compute", "cost", "room", "exposed", "step")
    table.collapse_padding = True  # otherwise the table is wider than 80 columns
    for option in options:
        seconds = (option.wait_s, option.pull_s, option.compute_s, option.cost_s)
        decoding = (option.room_s, option.exposed_s, option.step_s)
        table.add_row(
            option.worker_id,
            option.role,
            str(option.num_cached_tokens),
            *(f"{value * 1e3:.1f}" for value in seconds),
            *(f"{value * 1e3:.1f}" if option.role == Role.DECODE else "" for value in decoding),
        )
    return table
