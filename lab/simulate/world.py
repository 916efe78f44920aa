"""Cluster in virtual time: requests arrive, a policy places them, and engines execute steps.

    pulled       arrival -> the worker that computes reserves -> prefix transferred -> as below
    aggregated   arrival -> worker: queue, prefill, decode -> done
    disagg.      arrival -> decode worker reserves -> prefill worker: queue, prefill -> first token to the client
                         -> the part of the transfer not hidden behind the prefill -> decode worker decodes -> done

Pools may change (`Members`). A worker that leaves its pool gets no new work. Its existing work is handled as follows:

    waiting prompts           are placed again
    prompts in computation    are computed, and then transferred or migrated as usual
    responses in progress     reserve blocks on another decode worker -> KV transferred -> continue there

One heap holds the future events. This module makes no decisions: the policy places requests, the engine manages batches
and blocks.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.cluster import Role
from engine.core.sequence import Purpose, Status
from lab.simulate.flight import Flight, Served, spec_of
from lab.simulate.members import Members
from lab.simulate.scaler import Scaler, StartOrder
from lab.simulate.worker import BlocksReserved, PromptComputed, Tokens, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deploy.scaling.values import ScalingDecision
    from engine.core.outputs import Pin
    from engine.core.sequence import Sequence as EngineSequence
    from lab.simulate.costs import CostModel
    from lab.simulate.policy import Placer
    from lab.simulate.scaler import Scaling
    from lab.simulate.worker import SimulatedWorker, WorkerShape
    from lab.traces.trace import Trace, TraceRequest


class World:
    """One run of the simulator.

    Args:
        prefill, decode: initial numbers of workers. Without prefill workers the pool is aggregated.
        of_prefill: shape and costs of the prefill pool's workers; None: `shape` and `costs` are both pools'. Workers
            must not change their roles otherwise (`Scaling.may_flip`).
        scaling: the autoscaler, if there is one.
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
        of_prefill: tuple[WorkerShape, CostModel] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        if trace.block_tokens != shape.block_tokens:
            raise ValueError(
                f"the trace has blocks of {trace.block_tokens} tokens, and the workers have blocks of "
                f"{shape.block_tokens}"
            )
        self.members = Members(shape, costs, prefill, decode, of_prefill)
        self.served: list[Served] = []
        self.now = 0.0
        self._trace = trace
        self._placer = placer
        self._shape = shape
        self._costs = costs
        self._flights: dict[EngineSequence, Flight] = {}
        self._numbers, self._order = itertools.count(), itertools.count()
        self._scaler = Scaler(scaling, self.members) if scaling else None
        self._evacuating: set[int] = set()
        self._is_expecting = False
        self.num_moved = 0
        """Responses that migrated to another worker."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> list[Served]:
        """Run until every request is done, and return the outcomes in order of arrival."""
        arrivals = iter(self._trace.requests)
        self._expect(next(arrivals, None), arrivals)
        if self._scaler is not None:
            self._scale(self._scaler)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        for worker in self.workers:
            worker.engine.check()
        return self.served

    @property
    def workers(self) -> list[SimulatedWorker]:
        """All workers that ever existed, by index."""
        return [member.worker for member in self.members.all]

    @property
    def computing(self) -> list[SimulatedWorker]:
        """The workers whose main task is to compute prompts; with changing roles, all of them."""
        prefill = self.members.ready(Role.PREFILL)
        return prefill if prefill and self._scaler is None else self.workers

    @property
    def decisions(self) -> list[tuple[float, ScalingDecision]]:
        """Decisions that changed a pool, with their times."""
        return self._scaler.decisions if self._scaler else []

    # -- requests ----------------------------------------------------------------------------------------------------

    def _expect(self, request: TraceRequest | None, later: Iterator[TraceRequest]) -> None:
        self._is_expecting = request is not None
        if request is not None:
            placed_s = request.arrival_s + self._costs.request_overhead_s
            self._at(placed_s, lambda: self._arrive(request, later))

    def _arrive(self, request: TraceRequest, later: Iterator[TraceRequest]) -> None:
        self._expect(next(later, None), later)
        served = Served(request=request)
        self.served.append(served)
        self._place(served)

    def _place(self, served: Served) -> None:
        request = served.request
        keys = tuple(map(key_of, request.block_ids))
        prefill, decode = ([w.view(keys, request) for w in self.members.ready(role)] for role in Role)
        decision = self._placer.place(request, prefill, decode, self.now)
        if decision is None:
            served.is_refused = True
            if self._scaler is not None:
                self._scaler.refused()
            return
        computes, decodes = self.workers[decision.computes], self.workers[decision.decodes]
        cached = max(computes.num_cached_tokens(keys, request.num_prompt_tokens), decision.source_tokens)
        served.worker = computes.index
        uncached = request.num_prompt_tokens - cached
        waited_s = round(self.now - request.arrival_s - self._costs.request_overhead_s, 6)  # for a repeated placement
        flight = Flight(
            served=served,
            spec=spec_of(request, decision, next(self._numbers), waited_s),
            keys=keys,
            uncached=uncached,
            computes=computes,
            decodes=decodes,
        )
        computes.queued_tokens += uncached
        flight.book(1)
        if decision.source is None:
            self._begin(flight)
        else:
            self._pull(flight, self.workers[decision.source], decision.source_tokens)

    def _begin(self, flight: Flight) -> None:
        """Start on the worker that decodes: generate, or reserve room."""
        purpose = Purpose.GENERATE if flight.computes is flight.decodes else Purpose.RECEIVE
        self._flights[flight.decodes.add(flight.spec, purpose, flight.keys, self.now)] = flight
        self._wake(flight.decodes)

    def _pull(self, flight: Flight, source: SimulatedWorker, num_tokens: int) -> None:
        """Reserve room for a prefix; the rest follows when there is room."""
        spec = flight.spec.prefix(num_tokens)
        keys = flight.keys[: num_tokens // self._trace.block_tokens]
        flight.source = source, keys
        flight.pulling = flight.computes.add(spec, Purpose.RECEIVE, keys, self.now)
        self._flights[flight.pulling] = flight
        self._wake(flight.computes)

    def _pulled(
        self,
        flight: Flight,
        sequence: EngineSequence,
        num_tokens: int,
        pinned: tuple[SimulatedWorker, Pin],
    ) -> None:
        del self._flights[sequence]
        source, pin = pinned
        source.engine.unpin(pin)
        if num_tokens:
            flight.computes.engine.adopt(sequence, num_tokens)
        flight.computes.end(sequence)
        self._begin(flight)
        self._wake(source)
        self._wake(flight.computes)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _wake(self, worker: SimulatedWorker) -> None:
        """Handle new work on a worker: an idle one starts a step, a busy one may end earlier than expected."""
        if worker.index in self._evacuating:
            return
        if worker.ends_s is None:
            self._advance(worker)
        else:
            self._await(worker)

    def _await(self, worker: SimulatedWorker) -> None:
        ends_s = worker.ends_s
        if ends_s is not None:
            self._at(ends_s, lambda: self._step_ends(worker, ends_s))

    def _step_ends(self, worker: SimulatedWorker, ends_s: float) -> None:
        if worker.ends_s == ends_s:  # otherwise it was cut short
            self._advance(worker)

    def _advance(self, worker: SimulatedWorker) -> None:
        for happened in worker.finish(self.now):
            self._apply(worker, happened)
        if self.members.is_leaving(worker):
            self._evacuate(worker)
        if worker.ends_s is not None:  # the results of the step gave it new work
            return
        for admitted in worker.begin(self.now):
            self._apply(worker, admitted)
        self._await(worker)

    def _apply(self, worker: SimulatedWorker, happened: Tokens | PromptComputed | BlocksReserved) -> None:
        if isinstance(happened, Tokens):
            self._tokens_came(self._flights[happened.sequence], happened)
        elif isinstance(happened, BlocksReserved):
            flight = self._flights[happened.sequence]
            if happened.sequence is flight.pulling:
                self._send_prefix(flight, happened)
                return
            if happened.sequence is flight.moving:
                took_s = self._transfer_s(happened.sequence.num_tokens, happened.sequence.begins)
                self._at(self.now + took_s, lambda: self._taken_over(flight, happened.sequence))
                return
            flight.receiving, flight.began_s = happened.sequence, self.now
            flight.computing = flight.computes.add(flight.spec, Purpose.PREFILL, flight.keys, self.now)
            self._flights[flight.computing] = flight
            self._wake(flight.computes)
        else:
            self._computed(self._flights[happened.sequence], happened.sequence)

    def _send_prefix(self, flight: Flight, reserved: BlocksReserved) -> None:
        """Start the transfer of a prefix: the part that the source still has and the target lacks."""
        sequence, (source, keys) = reserved.sequence, flight.source
        pin = source.engine.pin_cached(keys)
        num_tokens = min(pin.num_tokens, sequence.num_tokens)
        if num_tokens <= reserved.num_cached_tokens:
            num_tokens, took_s = 0, self._costs.transfer_latency_s
        else:
            took_s = self._transfer_s(num_tokens, sequence.begins)
        self._at(self.now + took_s, lambda: self._pulled(flight, sequence, num_tokens, (source, pin)))

    def _computed(self, flight: Flight, sequence: EngineSequence) -> None:
        """Handle a prompt computed on a prefill worker: its first token is out, its KV follows."""
        self._first_token(flight, sequence)
        flight.held, flight.computing = sequence, None
        transfer_s = self._transfer_s(flight.served.request.num_prompt_tokens)
        hidden_s = min(self.now - flight.began_s, transfer_s - self._costs.transfer_s(0))  # the state comes last
        self._at(self.now + transfer_s - hidden_s, lambda: self._arrived(flight))

    def _transfer_s(self, num_tokens: int, begins: Sequence[int] = (0, 0)) -> float:
        """Return the duration of a transfer to a worker that has the first `begins` tokens of each layer group."""
        return self._costs.transfer_s(*self._shape.num_transferred(num_tokens, begins))

    def _arrived(self, flight: Flight) -> None:
        assert flight.held is not None
        assert flight.receiving is not None
        del self._flights[flight.held]
        flight.computes.end(flight.held)
        flight.book_on(flight.computes, -1)
        if flight.decodes.insert(flight.receiving, self.now):
            self._done(flight, flight.receiving)
        self._wake(flight.decodes)
        self._wake(flight.computes)

    def _tokens_came(self, flight: Flight, tokens: Tokens) -> None:
        served = flight.served
        first_s = self.now - (tokens.num_tokens - 1) * tokens.interval_s
        if not flight.has_first_token:
            self._first_token(flight, tokens.sequence)
        else:
            served.intervals.append((first_s - flight.last_token_s, 1))
        if tokens.num_tokens > 1:
            served.intervals.append((tokens.interval_s, tokens.num_tokens - 1))
        flight.last_token_s = self.now
        if tokens.finished:
            self._done(flight, tokens.sequence)

    def _first_token(self, flight: Flight, sequence: EngineSequence) -> None:
        flight.served.first_token_s = flight.last_token_s = self.now
        flight.served.num_cached_tokens = sequence.num_cached_tokens
        flight.computes.queued_tokens -= flight.uncached
        self._placer.computed(flight.served.request, self.now)

    def _done(self, flight: Flight, sequence: EngineSequence) -> None:
        flight.served.finished_s = flight.last_token_s
        flight.book_on(flight.decodes, -1)
        del self._flights[sequence]
        self._placer.finished(flight.served.request, self.now)
        if self._scaler is not None:
            self._scaler.finished(flight.served.ttft_s, flight.served.itl_s)

    # -- pools that change -------------------------------------------------------------------------------------------

    def _scale(self, scaler: Scaler) -> None:
        """Scale window after window until no request is left."""
        scaler.observe(self.now)
        self._carry_out(scaler)
        if self._flights or self._is_expecting:
            self._at(self.now + scaler.window_s, lambda: self._scale(scaler))

    def _carry_out(self, scaler: Scaler) -> None:
        """Carry out orders, one after the other."""
        while (order := scaler.next_order()) is not None:
            if isinstance(order, StartOrder):
                member = self.members.start(order.role, self.now)
                self._at(self.now + scaler.start_s, lambda member=member: self.members.is_up(member))  # type: ignore[misc]
            else:
                self.members.leave(order.member, order.then)
                self._vacate_soon(order.member.worker)

    def _vacate_soon(self, worker: SimulatedWorker) -> None:
        """Migrate the work of a leaving worker as soon as its step is done."""
        if worker.ends_s is None:
            self._advance(worker)
        else:
            worker.cut_short(self.now)
            self._await(worker)

    def _evacuate(self, worker: SimulatedWorker) -> None:
        """Migrate everything that a leaving worker holds; called between two of its steps."""
        self._evacuating.add(worker.index)
        for sequence, flight in list(self._flights.items()):
            if sequence not in self._flights or not flight.concerns(worker, sequence):
                continue
            waits = sequence.status is Status.WAITING
            if not flight.has_first_token:
                if waits or flight.may_be_withdrawn(sequence):
                    self._withdraw(flight)
            elif sequence is not flight.held and (waits or sequence.status is Status.RUNNING):
                self._move_on(flight, sequence, worker)
        self._evacuating.discard(worker.index)
        if self.members.try_to_leave(worker, self.now) and self._scaler is not None:
            self._carry_out(self._scaler)

    def _withdraw(self, flight: Flight) -> None:
        """Place a request again of whose prompt nothing is computed, as if it had just arrived."""
        for sequence in [sequence for sequence, other in self._flights.items() if other is flight]:
            del self._flights[sequence]
            flight.host(sequence).end(sequence)
        self._wake(flight.decodes)
        flight.computes.queued_tokens -= flight.uncached
        flight.book(-1)
        self._placer.withdrawn(flight.served.request, self.now)
        self._place(flight.served)

    def _move_on(self, flight: Flight, sequence: EngineSequence, worker: SimulatedWorker) -> None:
        """Migrate to the decode worker with the least KV in use, which computes tokens that are missing or lost."""
        pool = [other for other in self.members.ready(Role.DECODE) if other is not worker]
        target = min(pool, key=lambda other: (other.engine.blocks.in_use, other.index))
        token_ids, purpose = sequence.token_ids, Purpose.RECEIVE
        if sequence.status is Status.RUNNING and sequence.num_tokens - sequence.num_computed_tokens == 1:
            token_ids = token_ids[:-1]  # the last one comes with the KV
            self.members.await_transfer(worker, 1)
            flight.leaves = worker
        elif not sequence.awaits_kv:
            purpose = Purpose.GENERATE
        keys, spec = tuple(sequence.block_keys), replace(flight.spec, token_ids=tuple(token_ids))
        del self._flights[sequence]
        worker.end(sequence)
        for end, sign in ((worker, -1), (target, 1)):
            flight.book_on(end, sign)
        self._placer.moved(flight.served.request, target.index, self.now)
        self.num_moved += 1
        flight.decodes, flight.receiving = target, None
        moved = target.add(spec, purpose, keys[: len(token_ids) // self._trace.block_tokens], self.now)
        flight.moving = moved if purpose is Purpose.RECEIVE else None
        self._flights[moved] = flight
        self._wake(target)

    def _taken_over(self, flight: Flight, sequence: EngineSequence) -> None:
        """Continue a response whose KV has arrived on the new worker."""
        finished = flight.decodes.insert(sequence, self.now)
        assert not finished, "who has had its last token does not move"
        flight.moving = None
        if (left := flight.leaves) is not None:
            flight.leaves = None
            self.members.await_transfer(left, -1)
            self._wake(left)
        self._wake(flight.decodes)

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))
