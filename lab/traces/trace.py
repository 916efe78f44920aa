"""Trace: requests in order of arrival, whose prompts share blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    """Time since the trace's start, in seconds."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Length of the output, at least one token."""
    block_ids: tuple[int, ...]
    """Ids of the prompt's full blocks, in order. Like a chained hash, an id identifies its block and all before it: two
    prompts whose nth ids are equal share their first n blocks."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    """The requests, in order of arrival."""

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
