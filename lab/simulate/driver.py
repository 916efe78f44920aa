"""Serves requests on the simulated workers: carries out the steps of the router's state machine in virtual time.

    policy places -> calls to workers -> their messages -> the machine -> ... -> the last token

`router.serve.machine` decides what happens, as in a router. This module places the request, adds its sequences to
workers, and passes their messages to the machine as events.

A migration is simpler than a router's: the worker that leaves stops decoding at once, and all of the KV is sent after
the next worker has reserved blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.cluster import Role
from baton.errors import WorkerDraining
from baton.messages import Fetched, FirstToken, Migrate, NewTokens, PrefillReport, Ticket, Transferred
from engine.core.sequence import Purpose, Status
from lab.simulate.flight import Attempt, Flight, Served, spec_of
from lab.simulate.views import PoolViews
from lab.simulate.worker import key_of
from router.serve.machine import (
    Await,
    Begun,
    CallFailed,
    Computed,
    Emit,
    End,
    Event,
    FindPlace,
    GoBack,
    HasKv,
    Instruction,
    KeepOldCall,
    LeaveCalls,
    Leaves,
    NotePull,
    NoteTransfer,
    OpenDecode,
    OpenPrefill,
    Placed,
    PrepareMove,
    Source,
    Then,
    WorkerLeaves,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.messages import SequenceSpec
    from engine.core.outputs import Pin
    from engine.core.sequence import Sequence as EngineSequence
    from lab.simulate.clock import Clock
    from lab.simulate.members import Members
    from lab.simulate.policy import Placer, WorkerView
    from lab.simulate.scaler import Scaler
    from lab.simulate.worker import Message, SimulatedWorker

KV_ARRIVED = NewTokens(token_ids=(), finish_reason=None)
"""The first message of a decode worker when the KV has arrived."""
NOTHING_COMPUTED = FirstToken(token_id=None, finish_reason=None, report=PrefillReport())
"""The answer of a leaving worker to the prefill call of a migration: the KV that it has is sent."""
PULLED_NOTHING = Fetched(num_tokens=0)
"""The answer of the next worker of a migration: the leaving worker sends all of the KV."""
TRANSFERRED = Transferred(num_bytes=0, num_chunks=0, transfer_s=0.0, exposed_s=0.0)


class Driver:
    """Serves the requests of one run.

    Args:
        scaler: counts the outcomes; None: the pools stay as they are.
        wake: handles new work on a worker.
    """

    def __init__(
        self,
        clock: Clock,
        members: Members,
        placer: Placer,
        scaler: Scaler | None,
        wake: Callable[[SimulatedWorker], None],
    ) -> None:
        self.num_moved = 0
        """Responses that migrated to another worker."""
        self._clock = clock
        self._members = members
        self._placer = placer
        self._shape, self._costs = members.shape, members.costs
        self._scaler = scaler
        self._wake = wake
        self._flights: dict[EngineSequence, Flight] = {}
        self._numbers = itertools.count()

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress."""
        return not self._flights

    def serve(self, served: Served) -> None:
        """Start to serve a request that has just arrived."""
        flight = Flight(served=served, keys=tuple(map(key_of, served.request.block_ids)))
        self._on(flight, Begun(max_attempts=1))

    def received(self, message: Message) -> None:
        """Handle a worker's message."""
        sequence, event = message.sequence, message.event
        flight = self._flights[sequence]
        if sequence is flight.attempt.prefill and isinstance(event, Ticket):
            self._send_prefix(flight, event)
            return
        flight.interval_s = message.interval_s
        self._on(flight, event)
        if isinstance(event, FirstToken) and event.finish_reason is None:
            self._send_kv(flight)

    def interrupt(self, worker: SimulatedWorker) -> None:
        """Interrupt the calls on a leaving worker that should continue elsewhere."""
        for sequence, flight in list(self._flights.items()):
            if sequence not in self._flights or (source := flight.interrupted(worker, sequence)) is None:
                continue
            if source is Source.DECODE:
                self._on(flight, Migrate())
            else:
                self._refuse(flight, worker)

    # -- the machine ---------------------------------------------------------------------------------------------------

    def _on(self, flight: Flight, event: Event | None) -> None:
        """Handle an event, and those that follow at once."""
        while event is not None:
            instructions, then = flight.machine.on(event)
            for instruction in instructions:
                self._do(flight, instruction)
            event = self._next(flight, then)

    def _next(self, flight: Flight, then: Then) -> Event | None:
        """Return the next event if it comes at once."""
        match then:
            case Await(sources):
                return PULLED_NOTHING if Source.MIGRATION in sources else None
            case FindPlace(is_move):
                return self._place(flight, is_move)
            case End():
                self._end(flight.served, flight.last_token_s)
                return None
        raise AssertionError(f"no simulated worker fails: {then}")

    def _do(self, flight: Flight, instruction: Instruction) -> None:
        match instruction:
            case Emit(tokens):
                self._emit(flight, tokens)
            case OpenDecode(await_kv):
                self._open_decode(flight, await_kv)
            case OpenPrefill(ticket):
                self._open_prefill(flight, ticket)
            case Computed(report):
                self._computed(flight, report)
            case LeaveCalls():
                self._leave_calls(flight)
            case PrepareMove():
                self._prepare_move(flight)
            case KeepOldCall():
                self._keep_old_call(flight)
            case WorkerLeaves():
                self._worker_leaves(flight)
            case HasKv() | NoteTransfer() | NotePull() | Leaves() | GoBack():
                pass  # the simulator records no transfers, and a request has one choice, which is no search
            case _:
                raise AssertionError(f"no simulated worker fails: {instruction}")

    def _emit(self, flight: Flight, tokens: NewTokens) -> None:
        served, num_tokens = flight.served, len(tokens.token_ids)
        first_s = self._clock.now - (num_tokens - 1) * flight.interval_s
        if flight.has_first_token:
            served.intervals.append((first_s - flight.last_token_s, 1))
        else:
            served.first_token_s = first_s
        if num_tokens > 1:
            served.intervals.append((flight.interval_s, num_tokens - 1))
        flight.last_token_s = self._clock.now

    def _computed(self, flight: Flight, report: PrefillReport) -> None:
        flight.attempt.computed()
        if not flight.has_first_token:
            flight.served.num_cached_tokens = report.num_cached_tokens
            self._placer.computed(flight.served.request, self._clock.now)

    def _keep_old_call(self, flight: Flight) -> None:
        """Keep a leaving worker until it has sent the KV, if it still has that."""
        assert flight.moves_to is not None
        if (leaving := flight.moves_to.prefills) is not None:
            self._members.await_transfer(leaving, 1)

    def _worker_leaves(self, flight: Flight) -> None:
        if not flight.has_first_token:
            self._placer.withdrawn(flight.served.request, self._clock.now)

    def _end(self, served: Served, finished_s: float) -> None:
        served.finished_s = finished_s
        self._placer.finished(served.request, self._clock.now)
        if self._scaler is not None:
            self._scaler.finished(served.ttft_s, served.itl_s)

    # -- placement -----------------------------------------------------------------------------------------------------

    def _place(self, flight: Flight, is_move: bool) -> Placed | None:
        """Choose workers. Return None if the policy rejects the request."""
        if flight.has_first_token:
            attempt = flight.moves_to if is_move else self._elsewhere(flight.attempt.spec, flight.attempt.keys)
            assert attempt is not None
            self._placer.moved(flight.served.request, attempt.decodes.index, self._clock.now)
            self.num_moved += 1
        elif (attempt := self._decided(flight)) is None:
            flight.served.is_refused = True
            if self._scaler is not None:
                self._scaler.refused()
            return None
        flight.attempt, flight.moves_to = attempt, None
        return Placed(attempt.placement)

    def _decided(self, flight: Flight) -> Attempt | None:
        """Return the policy's decision; None: it rejects the request."""
        served, request, keys = flight.served, flight.served.request, flight.keys
        members, now = self._members, self._clock.now
        prefill, decode = (self._views(members.ready(role), flight) for role in Role)
        decision = self._placer.place(request, prefill, decode, now)
        if decision is None:
            return None
        computes, decodes = members.worker(decision.computes), members.worker(decision.decodes)
        num_cached = max(computes.num_cached_tokens(keys, request.num_prompt_tokens), decision.source_tokens)
        served.worker = computes.index
        waited_s = round(now - request.arrival_s - self._costs.request_overhead_s, 6)  # for a repeated placement
        source = None if decision.source is None else (members.worker(decision.source), decision.source_tokens)
        return Attempt(
            spec=spec_of(request, decision, next(self._numbers), waited_s),
            keys=keys,
            decodes=decodes,
            prefills=None if computes is decodes else computes,
            num_uncached_tokens=request.num_prompt_tokens - num_cached,
            source=source,
        )

    def _views(self, workers: Sequence[SimulatedWorker], flight: Flight) -> Sequence[WorkerView]:
        request, keys = flight.served.request, flight.keys
        if self._members.mirror is not None:
            return PoolViews(workers, request, keys, self._members)
        return [worker.view(keys, request) for worker in workers]

    def _elsewhere(
        self, spec: SequenceSpec, keys: tuple[bytes, ...], leaving: SimulatedWorker | None = None
    ) -> Attempt:
        """Return an attempt on the decode worker with the least KV in use.

        Args:
            leaving: the worker that sends the KV of all tokens but the last; None: all are computed again.
        """
        target = min(self._members.ready(Role.DECODE), key=lambda worker: (worker.engine.blocks.in_use, worker.index))
        return Attempt(spec=spec, keys=keys, decodes=target, prefills=leaving, is_move=leaving is not None)

    def _prepare_move(self, flight: Flight) -> None:
        attempt, sequence = flight.attempt, flight.attempt.decode
        assert sequence is not None
        token_ids, leaving = sequence.token_ids, None
        if sequence.status is Status.RUNNING and sequence.num_tokens - sequence.num_computed_tokens == 1:
            token_ids, leaving = token_ids[:-1], attempt.decodes  # the last one comes with the KV
        keys = tuple(sequence.block_keys)[: len(token_ids) // self._shape.block_tokens]
        flight.moves_to = self._elsewhere(replace(attempt.spec, token_ids=tuple(token_ids)), keys, leaving)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _open_decode(self, flight: Flight, await_kv: bool) -> None:
        flight.attempt.begin()
        if await_kv:
            self._decode(flight, Purpose.RECEIVE)
        else:
            self._compute(flight)

    def _open_prefill(self, flight: Flight, ticket: Ticket) -> None:
        attempt = flight.attempt
        assert attempt.prefills is not None
        if attempt.is_move:
            self._on(flight, NOTHING_COMPUTED)
            took_s = self._transfer_s(ticket.num_tokens, ticket.begins or (ticket.skip_tokens,))
            self._clock.at(self._clock.now + took_s, lambda: self._arrived(flight))
        elif self._members.computes_prompts(attempt.prefills):
            self._compute(flight)
        else:
            self._refuse(flight, attempt.prefills)

    def _refuse(self, flight: Flight, worker: SimulatedWorker) -> None:
        """End the call on a prefill worker that takes no more work."""
        described = self._members.described(worker, self._clock.now)
        self._on(flight, CallFailed(Source.PREFILL, described, WorkerDraining(f"{worker.index} leaves its role")))

    def _leave_calls(self, flight: Flight) -> None:
        attempt = flight.attempt
        attempt.end()
        for worker, sequence in ((attempt.computes, attempt.prefill), (attempt.decodes, attempt.decode)):
            if sequence is not None:
                del self._flights[sequence]
                if sequence.status is not Status.FINISHED:
                    worker.end(sequence)
                    self._wake(worker)

    def _decode(self, flight: Flight, purpose: Purpose) -> None:
        """Start on the worker that decodes: generate, or reserve blocks."""
        attempt = flight.attempt
        attempt.decode = self._add(flight, attempt.decodes, attempt.spec, purpose, attempt.keys)
        self._wake(attempt.decodes)

    def _compute(self, flight: Flight) -> None:
        """Start on the worker that computes the prompt: pull its prefix, or compute all of it."""
        attempt = flight.attempt
        attempt.began_s = self._clock.now
        if (source := attempt.source) is not None:
            spec, keys = attempt.spec.prefix(source[1]), attempt.keys[: source[1] // self._shape.block_tokens]
            attempt.prefill = self._add(flight, attempt.computes, spec, Purpose.RECEIVE, keys)
        elif attempt.prefills is None:
            self._decode(flight, Purpose.GENERATE)
            return
        else:
            attempt.prefill = self._add(flight, attempt.prefills, attempt.spec, Purpose.PREFILL, attempt.keys)
        self._wake(attempt.computes)

    def _add(
        self,
        flight: Flight,
        worker: SimulatedWorker,
        spec: SequenceSpec,
        purpose: Purpose,
        keys: tuple[bytes, ...],
    ) -> EngineSequence:
        sequence = worker.add(spec, purpose, keys, self._clock.now)
        self._flights[sequence] = flight
        return sequence

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _transfer_s(self, num_tokens: int, begins: Sequence[int] = (0, 0)) -> float:
        """Return the seconds that a KV transfer takes.

        Args:
            num_tokens: length of the transferred sequence.
            begins: number of leading tokens that the receiver has, by layer group.
        """
        return self._costs.transfer_s(*self._shape.num_transferred(num_tokens, begins))

    def _send_prefix(self, flight: Flight, ticket: Ticket) -> None:
        """Start the transfer of a prefix: the part that the source still has and the target lacks."""
        assert flight.attempt.source is not None
        source, num_tokens = flight.attempt.source
        pin = source.engine.pin_cached(flight.attempt.keys[: num_tokens // self._shape.block_tokens])
        num_tokens = min(pin.num_tokens, ticket.num_tokens)
        if num_tokens <= ticket.skip_tokens:
            num_tokens, took_s = 0, self._costs.transfer_latency_s
        else:
            took_s = self._transfer_s(num_tokens, ticket.begins or (ticket.skip_tokens,))
        self._clock.at(self._clock.now + took_s, lambda: self._pulled(flight, num_tokens, source, pin))

    def _pulled(self, flight: Flight, num_tokens: int, source: SimulatedWorker, pin: Pin) -> None:
        """Go on with the rest of the prompt after the transfer of its prefix."""
        attempt = flight.attempt
        sequence, worker = attempt.prefill, attempt.computes
        assert sequence is not None
        del self._flights[sequence]
        source.engine.unpin(pin)
        if num_tokens:
            worker.adopt(sequence, num_tokens)
        worker.end(sequence)
        attempt.source = attempt.prefill = None
        self._compute(flight)
        self._wake(source)
        self._wake(worker)

    def _send_kv(self, flight: Flight) -> None:
        """Start the rest of a prompt's KV transfer: the part that did not overlap with computing the prompt."""
        transfer_s = self._transfer_s(flight.served.request.num_prompt_tokens)
        computing_s = self._clock.now - flight.attempt.began_s
        hidden_s = min(computing_s, transfer_s - self._costs.transfer_s(0))  # the state comes last
        self._clock.at(self._clock.now + transfer_s - hidden_s, lambda: self._arrived(flight))

    def _arrived(self, flight: Flight) -> None:
        """Start to decode where the KV has arrived."""
        attempt = flight.attempt
        sender, decode = attempt.prefills, attempt.decode
        assert sender is not None
        assert decode is not None
        if (prefill := attempt.prefill) is None:
            self._members.await_transfer(sender, -1)
        else:
            del self._flights[prefill]
            sender.end(prefill)
            attempt.prefill = None
            attempt.count(sender, -1)
        is_over = attempt.decodes.insert(decode, self._clock.now)
        assert not is_over, "the token that comes with the KV is not the last one"
        self._on(flight, KV_ARRIVED)
        self._on(flight, TRANSFERRED)
        self._wake(attempt.decodes)
        self._wake(sender)
