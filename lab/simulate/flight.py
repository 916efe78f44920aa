"""A simulated request in progress, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from engine.core.sequence import Status
from router.placement import Mode, Placement
from router.serve.machine import ChoiceMachine, Source

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
class Attempt:
    """Workers of one placement of a request, and what it has there."""

    spec: SequenceSpec
    keys: tuple[bytes, ...]
    """Keys of the full blocks of the sequence's tokens."""
    decodes: SimulatedWorker
    prefills: SimulatedWorker | None = None
    """The worker that sends the KV; None: the one that decodes computes the prompt itself."""
    is_move: bool = False
    """True if the attempt is a migration in which the previous decode worker sends the KV, so no prompt is computed."""
    num_uncached_tokens: int = 0
    """Prompt tokens that count as queued on the worker that computes them."""
    source: tuple[SimulatedWorker, int] | None = None
    """The worker from which a prefix is pulled, and the length of the prefix."""
    counts_on: list[SimulatedWorker] = field(default_factory=list)
    """Workers of whose load it is a part."""
    decode: EngineSequence | None = None
    """The sequence on the decode worker."""
    prefill: EngineSequence | None = None
    """The sequence on the worker that computes the prompt: the prefix that is pulled there, and then the prompt."""
    began_s: float = 0.0
    """Time at which the prefill worker received the prompt."""

    @property
    def computes(self) -> SimulatedWorker:
        return self.prefills or self.decodes

    @property
    def placement(self) -> Placement:
        """The placement as a router's."""
        decode_worker = str(self.decodes.index)
        if self.prefills is None:
            return Placement(mode=Mode.AGGREGATED, decode_worker=decode_worker)
        return Placement(mode=Mode.DISAGGREGATED, decode_worker=decode_worker, prefill_worker=str(self.prefills.index))

    def begin(self) -> None:
        """Count on the workers."""
        for worker in [self.decodes] if self.is_move else dict.fromkeys((self.computes, self.decodes)):
            self.count(worker, 1)
        self.computes.queued_tokens += self.num_uncached_tokens

    def computed(self) -> None:
        """Count no longer as queued."""
        self.computes.queued_tokens -= self.num_uncached_tokens
        self.num_uncached_tokens = 0

    def end(self) -> None:
        """Count nowhere."""
        self.computed()
        for worker in tuple(self.counts_on):
            self.count(worker, -1)

    def count(self, worker: SimulatedWorker, sign: int) -> None:
        """Add the request to a worker's load if `sign` is 1, or remove it if `sign` is -1."""
        worker.num_requests += sign
        worker.reserved_tokens += sign * self.spec.num_prompt_tokens
        if sign > 0:
            self.counts_on.append(worker)
        else:
            self.counts_on.remove(worker)


@dataclass(slots=True, kw_only=True)
class Flight:
    """A request in progress: the state machine of its only choice, and the latest attempt."""

    served: Served
    keys: tuple[bytes, ...]
    machine: ChoiceMachine = field(default_factory=ChoiceMachine)
    attempt: Attempt = field(init=False)
    """Set by the first placement."""
    moves_to: Attempt | None = None
    """The next attempt, when a migration is prepared."""
    last_token_s: float = 0.0
    interval_s: float = 0.0
    """Time between two tokens of the latest message."""

    @property
    def has_first_token(self) -> bool:
        return self.served.first_token_s < float("inf")

    def interrupted(self, worker: SimulatedWorker, sequence: EngineSequence) -> Source | None:
        """Return the call of one of the request's sequences if a leaving worker interrupts it; None: it does not.

        A prompt in computation is computed, and its KV sent. A decode worker does not wait for a prompt whose
        computation has not started.
        """
        attempt, status = self.attempt, sequence.status
        decodes = sequence is attempt.decode or attempt.prefills is None
        if worker is not (attempt.decodes if decodes else attempt.prefills):
            return None
        if status is Status.WAITING:
            return Source.DECODE if decodes else Source.PREFILL
        if status is Status.RESERVED:
            prefill = attempt.prefill if decodes else None
            return Source.DECODE if prefill is not None and prefill.status is Status.WAITING else None
        return Source.DECODE if decodes and status is Status.RUNNING and self.has_first_token else None


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
