"""Selection of the part of a trace that a served model accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from lab.traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class FittedTrace:
    trace: Trace
    """The requests to send."""
    num_clipped: int
    """Number of these requests whose prompts were truncated at the end."""
    num_skipped: int
    """Number of requests that are left out."""


def plan_for(trace: Trace, max_model_len: int, max_output: int = 0) -> FittedTrace:
    """Return the trace for a model whose prompt and output have at most `max_model_len` tokens together.

    Outputs are limited to `max_output` tokens; 0: no limit. A prompt that leaves no room for its output is truncated at
    the end, so that it still shares its prefix. A request whose output alone is too long is skipped. Raises ConfigError
    if no request is left.
    """
    requests: list[TraceRequest] = []
    num_clipped = 0
    for request in trace.requests:
        num_output_tokens = min(request.num_output_tokens, max_output or request.num_output_tokens)
        room = max_model_len - num_output_tokens
        if room < 1:
            continue
        num_prompt_tokens = min(request.num_prompt_tokens, room)
        num_clipped += num_prompt_tokens < request.num_prompt_tokens
        requests.append(
            replace(
                request,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                block_ids=request.block_ids[: num_prompt_tokens // trace.block_tokens],
            )
        )
    if not requests:
        raise ConfigError(
            f"no request of {trace.name} fits the model's {max_model_len} tokens; divide the lengths with --scale, "
            "or limit outputs with --max-output"
        )
    return FittedTrace(replace(trace, requests=tuple(requests)), num_clipped, len(trace.requests) - len(requests))
