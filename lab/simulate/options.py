"""Options of `baton simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from baton.config import AutoscaleConfig
from lab.traces.shape import TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The runs to simulate. The annotated fields are options of the command; their help describes them."""

    trace: TraceOptions = field(default_factory=TraceOptions)
    prefill: Annotated[int, typer.Option(help="Number of prefill workers; 0: every worker does both.")] = 0
    decode: Annotated[int, typer.Option(help="Number of decode workers.")] = 8
    blocks: Annotated[int | None, typer.Option(help="KV blocks per worker.", show_default="5000, or as in --costs")] = (
        None
    )
    window: Annotated[int, typer.Option(help="Window of the layers that have one, in tokens; 0: there are none.")] = 0
    full_share: Annotated[
        float, typer.Option(help="Share of a token's KV in layers without a window. The others keep --window tokens.")
    ] = 1.0
    state_tokens: Annotated[
        float, typer.Option(help="Size of a sequence's states, in tokens whose KV is as large; 0: there are none.")
    ] = 0.0
    snapshot_tokens: Annotated[int, typer.Option(help="Tokens between two snapshots of states.")] = 1024
    profile: Annotated[str, typer.Option(help="Model and GPUs of a worker; `list` shows the available ones.")] = (
        "llama-3-70b@8xa100"
    )
    prefill_profile: Annotated[
        str, typer.Option(help="Profile of the prefill pool's workers.", show_default="as --profile")
    ] = ""
    prefill_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of each of the prefill pool's workers.", show_default="as --blocks")
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option(metavar="BENCH.json", help="Measured costs from `baton bench --json`, instead of --profile."),
    ] = None
    pools: Annotated[
        tuple[str, ...],
        typer.Option(metavar="P:D", help="Pool sizes instead of --prefill and --decode; may be repeated."),
    ] = ()
    policies: Annotated[
        tuple[str, ...],
        typer.Option("--policy", help="Placement policy; may be repeated. Default: all. `list` shows them."),
    ] = ()
    loads: Annotated[
        tuple[float, ...], typer.Option("--load", help="Arrival rate, as a multiple of --speed; may be repeated.")
    ] = ()
    max_output: Annotated[int, typer.Option(help="Maximum output length in tokens; 0: as in the trace.")] = 0
    ttft_ms: Annotated[float, typer.Option(help="Objective for the time to first token, in ms.")] = 5000.0
    itl_ms: Annotated[float, typer.Option(help="Objective for a request's mean inter-token latency, in ms.")] = 100.0
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.")] = 0
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for plots (PNG) of the results.")] = None
    tells_all: Annotated[
        bool, typer.Option("--tell-all", help="Report the objectives to workers under the other policies too.")
    ] = False
    error: Annotated[float, typer.Option(help="Factor by which this router's cost estimates are wrong; 1: exact.")] = (
        1.0
    )
    autoscale: AutoscaleConfig | None = None
    """Settings of the autoscaler; None: the pools stay as they are."""
    max_workers: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of workers with --autoscale; 0: the initial number.",
            show_default="autoscale.max_workers",
        ),
    ] = None
    start_s: Annotated[float, typer.Option(help="Seconds from a worker's start until it is ready.")] = 30.0
