"""Inputs of a routing policy, and its decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.costs import PRIOR, StepCosts
from router.placement import NO_OBJECTIVE, Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.traces.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker at the time of a decision, as seen by a router with perfect information."""

    index: int
    num_cached_tokens: int
    """Leading tokens of the request's prompt that it holds, in whole blocks."""
    queued_tokens: int
    """Prompt tokens sent there and neither computed yet nor cached."""
    reserved_tokens: int
    """All prompt tokens of requests sent there: on a prefill worker until the prompt is computed, on a decode worker
    until the request is done."""
    num_requests: int
    """Requests sent there and not done."""
    num_waiting: int
    """Requests among them that are not admitted yet."""
    used_blocks: int
    num_blocks: int
    tokens_per_s: float
    """Prompt tokens per second at full speed."""
    costs: StepCosts = PRIOR
    """Costs of its steps, as it has fitted them."""
    chunk_tokens: int = 2048
    block_tokens: int = 512

    @property
    def kv_use(self) -> float:
        return self.used_blocks / self.num_blocks


class Policy(Protocol):
    """A routing policy. An instance serves one run and may remember its decisions. Workers are in order of index."""

    @property
    def name(self) -> str: ...

    def choose(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        """Return the index of the worker that computes the prompt. In an aggregated pool it decodes as well."""

    def choose_decode(self, request: TraceRequest, workers: Sequence[WorkerView]) -> int:
        """Return the index of the worker that decodes, if the pools are disaggregated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDecision:
    """Decision for a request, as indices of workers."""

    computes: int
    decodes: int
    """Equal to `computes` in an aggregated pool, and if a decode worker computes the prompt itself."""
    source: int | None = None
    """Worker from which a prefix is pulled before the prompt is computed; None: none is pulled."""
    source_tokens: int = 0
    """Leading prompt tokens to pull, unless they are already there."""
    ttft_s: float = math.inf
    """Objectives that the workers receive with a request: first token, mean inter-token latency, and the output length
    for which to reserve room (0: as in their settings). Other routers pass none of them."""
    itl_s: float = math.inf
    num_expected_tokens: int = 0


class Placer(Protocol):
    """Makes all decisions for a request."""

    @property
    def name(self) -> str: ...

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision | None:
        """Return the decision; None: the request is rejected. `prefill` is empty in an aggregated pool."""

    def computed(self, request: TraceRequest, now_s: float) -> None:
        """Report a request's first token."""

    def finished(self, request: TraceRequest, now_s: float) -> None:
        """Report a request's last token."""

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        """Report that a request's worker leaves before the first token; the request is placed again at once."""

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        """Report that the worker that decoded a request leaves, and worker `decodes` continues."""


class TwoLegs:
    """A policy of another stack: it never pulls, and disaggregates every request if there are two pools.

    Args:
        objective: objective sent to workers with every request; other routers send none.
    """

    def __init__(self, policy: Policy, objective: Objective = NO_OBJECTIVE) -> None:
        self._policy = policy
        self._objective = objective
        self.name = policy.name

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision:
        prefill, decode = list(prefill), list(decode)  # each view is taken once
        if not prefill:
            worker = self._policy.choose(request, decode)
            return self._decision(worker, worker)
        decodes = self._policy.choose_decode(request, decode)
        return self._decision(self._policy.choose(request, prefill), decodes)

    def _decision(self, computes: int, decodes: int) -> RoutingDecision:
        return RoutingDecision(
            computes=computes, decodes=decodes, ttft_s=self._objective.ttft_s, itl_s=self._objective.itl_s
        )

    def computed(self, request: TraceRequest, now_s: float) -> None:
        pass

    def finished(self, request: TraceRequest, now_s: float) -> None:
        pass

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        pass

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        pass
