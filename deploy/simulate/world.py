"""A cluster in virtual time: requests arrive, a policy places them, engines step.

    pulled       arrival -> the worker that computes reserves -> the prefix moves -> as below
    aggregated   arrival -> worker: queue, prefill, decode -> done
    split        arrival -> decode worker reserves -> prefill worker: queue, prefill -> first token to the client
                         -> what the transfer did not hide behind the prefill -> decode worker decodes -> done

One heap holds what happens next. Nothing here decides: placement is the policy's, batches and blocks are the engine's.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton.engine.engine import Generated, Reserved
from baton.engine.sequence import Purpose
from baton.messages import SequenceSpec
from deploy.simulate.policy import WorkerView
from deploy.simulate.worker import SimulatedWorker, Tokens, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.engine.engine import Output
    from baton.engine.sequence import Sequence as EngineSequence
    from deploy.simulate.costs import CostModel
    from deploy.simulate.policy import Decision, Placer
    from deploy.simulate.trace import Trace, TraceRequest
    from deploy.simulate.worker import WorkerShape


@dataclass(slots=True)
class Served:
    """What became of a request. Seconds since the trace's start; infinite where it never happened."""

    request: TraceRequest
    worker: int = -1
    """That computed the prompt."""
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
        """Mean; 0 for a single token."""
        num_intervals = self.request.num_output_tokens - 1
        return (self.finished_s - self.first_token_s) / num_intervals if num_intervals else 0.0


@dataclass(slots=True)
class _Flight:
    """A request on its way through the workers."""

    served: Served
    spec: SequenceSpec
    keys: tuple[bytes, ...]
    uncached: int
    computes: SimulatedWorker
    decodes: SimulatedWorker
    began_s: float = 0.0
    """When the prefill worker got it."""
    last_token_s: float = 0.0
    held: EngineSequence | None = None
    """The prefill worker's, until its KV has moved."""
    receiving: EngineSequence | None = None
    """The decode worker's, until its KV has come."""
    pulling: EngineSequence | None = None
    source: tuple[SimulatedWorker, tuple[bytes, ...]] = field(init=False)
    """From where a prefix is pulled, and its keys."""


class World:
    """One run.

    Args:
        prefill, decode: numbers of workers. No prefill workers: the pool is aggregated.
    """

    def __init__(
        self,
        trace: Trace,
        placer: Placer,
        shape: WorkerShape,
        costs: CostModel,
        *,
        prefill: int = 0,
        decode: int = 1,
    ) -> None:
        if trace.block_tokens != shape.block_tokens:
            raise ValueError(
                f"the trace has blocks of {trace.block_tokens} tokens, the workers of {shape.block_tokens}"
            )
        self.workers = [
            SimulatedWorker(index, shape, costs.of_prefill() if index < prefill else costs)
            for index in range(prefill + decode)
        ]
        self.served: list[Served] = []
        self.now = 0.0
        self._prefill, self._decode = self.workers[:prefill], self.workers[prefill:]
        self.computing = self._prefill or self._decode
        """The workers that compute prompts first of all."""
        self._trace = trace
        self._placer = placer
        self._costs = costs
        self._flights: dict[EngineSequence, _Flight] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> list[Served]:
        """Until every request is done. In order of arrival."""
        arrivals = iter(self._trace.requests)
        self._expect(next(arrivals, None), arrivals)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        for worker in self.workers:
            worker.engine.check()
        return self.served

    # -- requests ----------------------------------------------------------------------------------------------------

    def _expect(self, request: TraceRequest | None, later: Iterator[TraceRequest]) -> None:
        if request is not None:
            placed_s = request.arrival_s + self._costs.request_overhead_s
            self._at(placed_s, lambda: self._arrive(request, later))

    def _arrive(self, request: TraceRequest, later: Iterator[TraceRequest]) -> None:
        self._expect(next(later, None), later)
        keys = tuple(map(key_of, request.block_ids))
        prefill, decode = ([self._view(w, keys, request) for w in pool] for pool in (self._prefill, self._decode))
        decision = self._placer.place(request, prefill, decode, self.now)
        if decision is None:
            self.served.append(Served(request, is_refused=True))
            return
        computes, decodes = self.workers[decision.computes], self.workers[decision.decodes]
        cached = max(computes.num_cached_tokens(keys, request.num_prompt_tokens), decision.source_tokens)
        served = Served(request, computes.index)
        self.served.append(served)
        uncached = request.num_prompt_tokens - cached
        flight = _Flight(served, self._spec(request, decision), keys, uncached, computes, decodes)
        computes.queued_tokens += uncached
        for worker in {computes.index: computes, decodes.index: decodes}.values():
            worker.num_requests += 1
            worker.booked_tokens += request.num_prompt_tokens
        if decision.source is None:
            self._begin(flight)
        else:
            self._pull(flight, self.workers[decision.source], decision.source_tokens)

    def _begin(self, flight: _Flight) -> None:
        """On the worker that decodes: to generate, or to reserve."""
        purpose = Purpose.GENERATE if flight.computes is flight.decodes else Purpose.RECEIVE
        self._flights[flight.decodes.add(flight.spec, purpose, flight.keys, self.now)] = flight
        self._wake(flight.decodes)

    def _pull(self, flight: _Flight, source: SimulatedWorker, num_tokens: int) -> None:
        """Reserves room for a prefix; the rest follows when there is."""
        spec = replace(
            flight.spec, token_ids=flight.spec.token_ids[:num_tokens], num_prompt_tokens=num_tokens, max_tokens=0
        )
        keys = flight.keys[: num_tokens // self._trace.block_tokens]
        flight.source = source, keys
        flight.pulling = flight.computes.add(spec, Purpose.RECEIVE, keys, self.now)
        self._flights[flight.pulling] = flight
        self._wake(flight.computes)

    def _pulled(
        self,
        flight: _Flight,
        sequence: EngineSequence,
        num_tokens: int,
        pinned: tuple[SimulatedWorker, tuple[int, ...]],
    ) -> None:
        del self._flights[sequence]
        source, blocks = pinned
        source.unpin(blocks)
        flight.computes.engine.adopt(sequence, num_tokens)
        flight.computes.end(sequence)
        self._begin(flight)
        self._wake(source)
        self._wake(flight.computes)

    @staticmethod
    def _view(worker: SimulatedWorker, keys: tuple[bytes, ...], request: TraceRequest) -> WorkerView:
        pool, scheduler = worker.engine.pool, worker.engine.scheduler
        return WorkerView(
            index=worker.index,
            num_cached_tokens=worker.num_cached_tokens(keys, request.num_prompt_tokens),
            queued_tokens=worker.queued_tokens,
            booked_tokens=worker.booked_tokens,
            num_requests=worker.num_requests,
            num_waiting=len(scheduler.waiting),
            used_blocks=pool.num_blocks - pool.num_available,
            num_blocks=pool.num_blocks,
            tokens_per_s=worker.costs.tokens_per_s,
            costs=worker.engine.scheduler.costs,
            chunk_tokens=worker.shape.max_num_batched_tokens,
            block_tokens=worker.shape.block_tokens,
        )

    def _spec(self, request: TraceRequest, decision: Decision) -> SequenceSpec:
        number = len(self.served)
        first = number % 2**14 << 18  # no two requests' last blocks and answers are equal; a token has 32 bits
        return SequenceSpec(
            str(number), 0, tuple(range(first, first + request.num_prompt_tokens)), request.num_prompt_tokens,
            request.num_output_tokens, 0.0, 0, 1.0, 0.0, 0, (), True, number.to_bytes(8, "little"),
            ttft_s=decision.ttft_s, itl_s=decision.itl_s, num_expected_tokens=decision.num_expected_tokens,
        )  # fmt: skip

    # -- workers -----------------------------------------------------------------------------------------------------

    def _wake(self, worker: SimulatedWorker) -> None:
        """Something is new on a worker: an idle one begins a step, a busy one may end earlier than was expected."""
        if worker.ends_s is None:
            self._advance(worker)
        else:
            self._await(worker)

    def _await(self, worker: SimulatedWorker) -> None:
        ends_s = worker.ends_s
        if ends_s is not None:
            self._at(ends_s, lambda: self._step_ends(worker, ends_s))

    def _step_ends(self, worker: SimulatedWorker, ends_s: float) -> None:
        if worker.ends_s == ends_s:  # else it was cut short
            self._advance(worker)

    def _advance(self, worker: SimulatedWorker) -> None:
        for happened in worker.advance(self.now):
            self._happen(worker, happened)
        self._await(worker)

    def _happen(self, worker: SimulatedWorker, happened: Tokens | Output) -> None:
        if isinstance(happened, Tokens):
            self._note(self._flights[happened.sequence], happened)
        elif isinstance(happened, Reserved):
            flight = self._flights[happened.sequence]
            if happened.sequence is flight.pulling:
                self._move(flight, happened)
                return
            flight.receiving, flight.began_s = happened.sequence, self.now
            self._flights[flight.computes.add(flight.spec, Purpose.PREFILL, flight.keys, self.now)] = flight
            self._wake(flight.computes)
        elif isinstance(happened, Generated):
            self._computed(self._flights[happened.sequence], happened.sequence)

    def _move(self, flight: _Flight, reserved: Reserved) -> None:
        """The prefix travels, as much of it as the source still has and the target lacks."""
        sequence, (source, keys) = reserved.sequence, flight.source
        blocks = source.pin(keys)
        num_there = min(len(blocks) * self._trace.block_tokens, sequence.num_tokens)
        num_tokens = max(num_there, reserved.skip_tokens)
        took_s = self._costs.transfer_s(num_tokens - reserved.skip_tokens)
        self._at(self.now + took_s, lambda: self._pulled(flight, sequence, num_tokens, (source, blocks)))

    def _computed(self, flight: _Flight, sequence: EngineSequence) -> None:
        """A prompt is computed on a prefill worker: its first token is out, its KV follows."""
        self._first_token(flight, sequence)
        flight.held = sequence
        transfer_s = self._costs.transfer_s(flight.served.request.num_prompt_tokens)
        hidden_s = min(self.now - flight.began_s, transfer_s - self._costs.transfer_latency_s)
        self._at(self.now + transfer_s - hidden_s, lambda: self._arrived(flight))

    def _arrived(self, flight: _Flight) -> None:
        assert flight.held is not None
        assert flight.receiving is not None
        del self._flights[flight.held]
        flight.computes.end(flight.held)
        flight.computes.num_requests -= 1
        flight.computes.booked_tokens -= flight.served.request.num_prompt_tokens
        if flight.decodes.insert(flight.receiving, self.now):
            self._done(flight, flight.receiving)
        self._wake(flight.decodes)
        self._wake(flight.computes)

    def _note(self, flight: _Flight, tokens: Tokens) -> None:
        served = flight.served
        first_s = self.now - (tokens.num_tokens - 1) * tokens.interval_s
        if served.first_token_s == float("inf"):
            self._first_token(flight, tokens.sequence)
        else:
            served.intervals.append((first_s - flight.last_token_s, 1))
        if tokens.num_tokens > 1:
            served.intervals.append((tokens.interval_s, tokens.num_tokens - 1))
        flight.last_token_s = self.now
        if tokens.finished:
            self._done(flight, tokens.sequence)

    def _first_token(self, flight: _Flight, sequence: EngineSequence) -> None:
        flight.served.first_token_s = flight.last_token_s = self.now
        flight.served.num_cached_tokens = sequence.num_cached_tokens
        flight.computes.queued_tokens -= flight.uncached
        self._placer.computed(flight.served.request, self.now)

    def _done(self, flight: _Flight, sequence: EngineSequence) -> None:
        flight.served.finished_s = flight.last_token_s
        flight.decodes.num_requests -= 1
        flight.decodes.booked_tokens -= flight.served.request.num_prompt_tokens
        del self._flights[sequence]
        self._placer.finished(flight.served.request, self.now)

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))
