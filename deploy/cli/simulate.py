"""`baton simulate`: replay a trace in virtual time."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from baton import config as baton_config
from deploy.cli.options import AsJson, console, options_from_fields
from lab.simulate.options import SimulateOptions
from lab.traces.shape import TraceOptions


@options_from_fields
def simulate(
    trace: TraceOptions,
    options: SimulateOptions,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Autoscale the pools, starting from the given sizes; see the BATON_AUTOSCALE_* settings.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a trace in virtual time, with Baton's placement policy and with baseline policies.

    Engines, schedulers and block pools are the production code. The cost of a step
    comes from the roofline of the profile, or from measurements on a real cluster:

    baton bench TRACE --scale 64 --json > bench.json

    baton simulate TRACE --scale 64 --costs bench.json --prefill 1 --decode 1
    """
    from lab.simulate.command import run

    scaling = baton_config.load().autoscale if autoscale else None
    run(dataclasses.replace(options, trace=trace, autoscale=scaling), as_json, console())
