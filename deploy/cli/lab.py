"""Commands of the lab: the benchmark and the simulator, over the same traces."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from baton import config as baton_config
from deploy.cli.options import AsJson, console, options_from_fields
from deploy.lab.bench.options import BenchOptions
from deploy.lab.simulate.options import SimulateOptions
from deploy.lab.traces.shape import TraceOptions
from deploy.operator.trust import TrustOptions


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
    from deploy.lab.bench.command import run

    if not run(dataclasses.replace(options, trace=trace, trust=trust), as_json, console):
        raise typer.Exit(1)


@options_from_fields
def simulate(
    trace: TraceOptions,
    options: SimulateOptions,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="Size the pools, from the given ones on; see BATON_AUTOSCALE_* settings."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a trace in virtual time, under this router's placement and under those of others.

    Engines, schedulers and block pools are the production's. Steps cost what the
    profile's roofline says, or what they have cost on a real cluster:

    baton bench TRACE --scale 64 --json > bench.json

    baton simulate TRACE --scale 64 --costs bench.json --prefill 1 --decode 1
    """
    from deploy.lab.simulate.command import run

    scaling = baton_config.load().autoscale if autoscale else None
    run(dataclasses.replace(options, trace=trace, autoscale=scaling), as_json, console)
