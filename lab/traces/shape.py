"""Selection and scaling of traces. Each function returns a new trace with the same name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from baton.errors import ConfigError
from lab.traces.files import read_trace
from lab.traces.generator import Conversations, generate
from lab.traces.trace import Trace

DEFAULT_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Part, speed and scale of a trace. With equal options `bench` and `simulate` have equal requests.

    The fields are options of both commands; their help describes them.
    """

    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE", help="Mooncake .jsonl or Azure .csv, optionally .gz. Default: generated conversations."
        ),
    ] = None
    speed: Annotated[float, typer.Option(help="Arrival rate, as a multiple of the trace's own.")] = 1.0
    requests: Annotated[int, typer.Option(help="Number of requests, from the first on; 0: all.")] = 0
    from_s: Annotated[float, typer.Option("--from", help="Second of the trace at which to start.")] = 0.0
    seconds: Annotated[float, typer.Option(help="Seconds of the trace to replay, before --speed; 0: to its end.")] = 0.0
    scale: Annotated[int, typer.Option(help="Divisor of prompt and output lengths.")] = 1
    block: Annotated[
        int | None, typer.Option(help="Tokens per block of the trace, after --scale.", show_default="16")
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed; a new one gives prompts that no cache contains yet.")] = 0

    def __post_init__(self) -> None:
        if self.scale < 1:
            raise ConfigError(f"--scale must be more than 0, got {self.scale}")
        for option in ("requests", "from_s", "seconds"):
            if not getattr(self, option) >= 0:
                raise ConfigError(f"--{option.removesuffix('_s')} must be at least 0, got {getattr(self, option)}")

    def trace(self) -> Trace:
        """Return the requests. Raise ConfigError if the trace cannot be read or does not allow the options."""
        trace = read_trace(self.path, spread_seed=self.seed) if self.path else generate(Conversations(), self.seed)
        if self.from_s or self.seconds:
            trace = during(trace, self.from_s, self.from_s + (self.seconds or math.inf))
        if self.requests:
            trace = first(trace, self.requests)
        if self.scale != 1 or self.block is not None:
            trace = scaled(trace, self.scale, DEFAULT_BLOCK if self.block is None else self.block)
        return faster(trace, self.speed)

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("speed", "requests", "from_s", "seconds", "scale", "seed")}


def faster(trace: Trace, factor: float) -> Trace:
    """Return the requests at `factor` times their rate. Raise ConfigError unless it is more than 0."""
    if not factor > 0:
        raise ConfigError(f"a trace's speed must be more than 0, got {factor}")
    return replace(trace, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in trace.requests))


def first(trace: Trace, num_requests: int) -> Trace:
    """Return the first `num_requests`, or all if there are fewer. Raise ConfigError if that is less than 1."""
    if num_requests < 1:
        raise ConfigError(f"a trace needs at least 1 request, got {num_requests}")
    return replace(trace, requests=trace.requests[:num_requests])


def during(trace: Trace, start_s: float, end_s: float) -> Trace:
    """Return the requests that arrive from `start_s` on and before `end_s`; `start_s` becomes 0 s.

    Caches start empty, without the prefixes of earlier requests. Raises ConfigError if no request arrives in that time.
    """
    requests = tuple(
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in trace.requests
        if start_s <= request.arrival_s < end_s
    )
    if not requests:
        raise ConfigError(f"the trace {trace.name} has no requests between {start_s} and {end_s} s")
    return replace(trace, requests=requests)


def scaled(trace: Trace, divisor: int, block_tokens: int) -> Trace:
    """Return prompts and outputs of 1/`divisor` of their lengths, at least 1 token, in blocks of `block_tokens`.

    A new block covers one or several old ones and takes the id of the last, which identifies all before it as well:

        divisor 32, block_tokens 16 (one of 512)    [ 7 ][ 8 ][ 9 ]      ->  [7][8][9]
        divisor 64, block_tokens 16 (two of 512)    [ 7 ][ 8 ][ 9 ]      ->  [ 8  ]

    Raises ConfigError if new blocks would start or end inside old ones, for which the trace has no ids.
    """
    covered = divisor * block_tokens
    if covered < 1 or covered % trace.block_tokens:
        raise ConfigError(
            f"1/{divisor} of the lengths in blocks of {block_tokens} tokens: divisor times block must be a multiple "
            f"of the trace's own block of {trace.block_tokens} tokens"
        )
    num_merged = covered // trace.block_tokens
    requests = tuple(
        replace(
            request,
            num_prompt_tokens=max(request.num_prompt_tokens // divisor, 1),
            num_output_tokens=max(request.num_output_tokens // divisor, 1),
            block_ids=request.block_ids[num_merged - 1 :: num_merged],
        )
        for request in trace.requests
    )
    return replace(trace, block_tokens=block_tokens, requests=requests)
