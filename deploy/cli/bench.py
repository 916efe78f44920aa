"""`baton bench`: a trace against a running cluster."""

from __future__ import annotations

import dataclasses

import typer

from deploy.cli.options import AsJson, console, options_from_fields
from deploy.operator.trust import TrustOptions
from lab.bench.options import BenchOptions
from lab.traces.shape import TraceOptions


@options_from_fields
def bench(trace: TraceOptions, trust: TrustOptions, options: BenchOptions, as_json: AsJson = False) -> None:
    """Replay a trace against a running cluster, in real time, and report what its clients saw.

    The figures are those of `baton simulate`. Prompts share tokens where the
    trace's share blocks; an answer has exactly the trace's length. Times count
    from when a request was due. Requests that do not fit the model are cut or
    left out, and counted. Ctrl-C ends it and shows what was measured until then.
    Exit status 1: no request was served.

    baton bench conversation.jsonl.gz --scale 64 --seconds 60    suits a laptop

    With --json it also reports the costs of steps, for `baton simulate --costs`.
    """
    from lab.bench.command import run

    if not run(dataclasses.replace(options, trace=trace, trust=trust), as_json, console()):
        raise typer.Exit(1)
