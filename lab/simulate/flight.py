"""A simulated request in progress, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from engine.core.sequence import Status

if TYPE_CHECKING:
    from engine.core.sequence import Sequence as EngineSequence
    from lab.simulate.policy import RoutingDecision
    from lab.simulate.worker import SimulatedWorker
    from lab.traces.trace import TraceRequest


@dataclass(slots=True, kw_only=True)
class Served:
    """Outcome of a request. Times are seconds since the trace's start; infinite if the event never happened."""

    request: TraceRequest
    worker: int = -1
    """The worker that computed the prompt."""
    is_refused: bool = False
    num_cached_tokens: int = 0
    first_token_s: float = float("inf")
    finished_s: float = float("inf")
    intervals: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens, and how many such intervals came in a row."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def itl_s(self) -> float:
        """Mean inter-token latency; 0 for a single token."""
        num_intervals = self.request.num_output_tokens - 1
        return (self.finished_s - self.first_token_s) / num_intervals if num_intervals else 0.0


@dataclass(slots=True, kw_only=True)
class Flight:
    """A request in progress on the workers."""

    served: Served
    spec: SequenceSpec
    keys: tuple[bytes, ...]
    uncached: int
    computes: SimulatedWorker
    decodes: SimulatedWorker
    began_s: float = 0.0
    """Time at which the prefill worker received it."""
    last_token_s: float = 0.0
    held: EngineSequence | None = None
    """The prefill worker's sequence, until its KV has been transferred."""
    receiving: EngineSequence | None = None
    """The decode worker's sequence, until its KV has arrived."""
    pulling: EngineSequence | None = None
    computing: EngineSequence | None = None
    """The prefill worker's sequence, until its prompt is computed."""
    moving: EngineSequence | None = None
    """The sequence on the decode worker to which it migrates, until its KV has arrived."""
    leaves: SimulatedWorker | None = None
    source: tuple[SimulatedWorker, tuple[bytes, ...]] = field(init=False)
    """The worker from which a prefix is pulled, and the keys of the prefix."""

    @property
    def has_first_token(self) -> bool:
        return self.served.first_token_s < float("inf")

    def book(self, sign: int) -> None:
        """Record the request on its worker, or on both workers; with sign -1, remove it."""
        for worker in {self.computes.index: self.computes, self.decodes.index: self.decodes}.values():
            self.book_on(worker, sign)

    def book_on(self, worker: SimulatedWorker, sign: int) -> None:
        worker.num_requests += sign
        worker.reserved_tokens += sign * self.served.request.num_prompt_tokens

    def host(self, sequence: EngineSequence) -> SimulatedWorker:
        """Return the worker whose engine has this one of the request's sequences."""
        on_computing = sequence in (self.pulling, self.computing, self.held)
        return self.computes if on_computing else self.decodes

    def concerns(self, worker: SimulatedWorker, sequence: EngineSequence) -> bool:
        """Return whether the request is on that worker, or waits elsewhere for room before it is computed there."""
        is_to_come = self.computes is worker and self.computing is None and sequence.status is Status.WAITING
        return self.host(sequence) is worker or (is_to_come and not self.has_first_token)

    def may_be_withdrawn(self, sequence: EngineSequence) -> bool:
        """Return whether its room to decode is reserved and no worker has started to compute its prompt."""
        computing = self.computing
        return sequence is self.receiving and computing is not None and computing.status is Status.WAITING


def spec_of(request: TraceRequest, decision: RoutingDecision, number: int, waited_s: float) -> SequenceSpec:
    """Return the sequence that the workers receive for a request.

    Args:
        number: number of the placement. No two have equal last blocks and outputs; a token has 32 bits.
        waited_s: time since the first placement, by which the deadline of the first token is nearer.
    """
    first = number % 2**14 << 18
    return SequenceSpec(
        request_id=str(number),
        choice_index=0,
        token_ids=tuple(range(first, first + request.num_prompt_tokens)),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True),
        cache_seed=number.to_bytes(8, "little"),
        ttft_s=decision.ttft_s - waited_s,
        itl_s=decision.itl_s,
        num_expected_tokens=decision.num_expected_tokens,
    )
