"""`baton bench`: replay a trace against a running cluster."""

from __future__ import annotations

import dataclasses

import typer

from deploy.cli.options import AsJson, console, options_from_fields
from deploy.operator.trust import TrustOptions
from lab.bench.options import BenchOptions
from lab.traces.shape import TraceOptions


@options_from_fields
def bench(trace: TraceOptions, trust: TrustOptions, options: BenchOptions, as_json: AsJson = False) -> None:
    """Replay a trace against a running cluster in real time, and report goodput and latencies.

    The report has the same figures as `baton simulate`. Prompts share tokens if
    the trace's prompts share blocks; an output has exactly the trace's length.
    Times are measured from the scheduled arrival of a request. Requests that
    exceed the model's context are truncated or skipped, and counted. Ctrl-C stops
    the replay and prints the results so far. Exit status 1: no request was served.

    baton bench conversation.jsonl.gz --scale 64 --seconds 60    suits a laptop

    With --json the report includes the costs of steps, for `baton simulate --costs`.
    """
    from lab.bench.command import run

    if not run(dataclasses.replace(options, trace=trace, trust=trust), as_json, console()):
        raise typer.Exit(1)
