"""What a trace is: requests by time, whose prompts share blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    """Since the trace's start."""
    num_prompt_tokens: int
    num_output_tokens: int
    """At least one."""
    block_ids: tuple[int, ...]
    """Of the prompt's full blocks, in order. As with a chained hash, an id stands for its block and for all before it:
    two prompts whose nth ids are equal share their first n blocks."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    """In order of arrival."""

    @property
    def ceiling(self) -> float:
        """Share of prompt tokens that a cache without limit would serve."""
        seen: set[int] = set()
        num_hit = num_tokens = 0
        for request in self.requests:
            num_cached = next(
                (n for n, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids)
            )
            num_hit += num_cached * self.block_tokens
            num_tokens += request.num_prompt_tokens
            seen.update(request.block_ids)
        return num_hit / num_tokens if num_tokens else 0.0
