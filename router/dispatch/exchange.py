"""Carries one attempt out: reserve, prefill, transfer, decode; what the workers answer comes out as it comes.

    split         Decode(await_kv) --> ticket --> Prefill(ticket) --> first token --> KV transferred --> further tokens
                  `----- the open call is the reservation -------------------------------------------------- ... ---'
    aggregated    Decode --> all tokens

The worker that computes the prompt may be given a source: a worker with a longer prefix of it, from which it pulls
first. The wait for the first token has an end: a deadline, or a better claim (`FirstTokenWait`). Leaving the exchange
early leaves all its calls, which frees everything on the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from baton.errors import Overloaded, TransferCancelled
from baton.messages import Decoding, FirstToken, Migrate, NewTokens, PrefillReport, Ticket, Transferred
from baton.tasks import cancel_and_wait
from baton.telemetry.instruments import Instruments
from router.admission import TTFT_DEADLINE_FACTOR, Gate, QueueEntry
from router.dispatch.choice import Assignment, Attempt, AttemptFailed, Finished, Moved, Outcome, WorkerLeaving
from router.dispatch.decisions import PlacementDecision
from router.dispatch.migration import Migration
from router.dispatch.reports import Reports
from router.dispatch.worker_client import WorkerCallError, WorkerClient, WorkerStream, num_computed
from router.placement import Mode
from router.placement.pool_view import PoolView

T = TypeVar("T")
E = TypeVar("E")
TRANSFER_REPORT_S = 1.0
"""How long a choice's last token waits for the prefill worker's report on the KV transfer, which is there already,
unless
that worker hangs."""
FINISHED = Finished()
LONG_S = 5.0
"""Wait for room on a worker from which on others are asked whether they need theirs."""


class FirstTokenWait:
    """How long choices of this router wait for their first token: the gate admits them, and a deadline or a better
    claim ends the wait.
    """

    def __init__(self, instruments: Instruments) -> None:
        self.gate = Gate()
        self._instruments = instruments
        self._timeouts: dict[QueueEntry, asyncio.Timeout] = {}
        self._waits_long: set[QueueEntry] = set()

    @property
    def is_tried(self) -> bool:
        """True if a choice has waited long for room on the worker that decodes it."""
        return bool(self._waits_long)

    @contextlib.contextmanager
    def wait_for_room(self, entry: QueueEntry, compute_s: float = 0.0) -> Iterator[None]:
        """Record that a choice waits for room while the block is entered.

        Args:
            compute_s: what else the block takes.
        """
        late = asyncio.get_running_loop().call_later(compute_s + LONG_S, self._waits_long.add, entry)
        try:
            yield
        finally:
            late.cancel()
            self._waits_long.discard(entry)

    def admit(self, entry: QueueEntry, decision: PlacementDecision) -> None:
        """Lets a choice in, and ends the wait of the choices that have to make way for it.

        Raises:
            Overloaded: its first token would come too late.
        """
        try:
            victims = self.gate.admit(entry, decision.prediction)
        except Overloaded as refusal:
            decision.outcome = f"refused: {refusal}"
            raise
        for victim in victims:
            self._instruments.shed.add(1, {"tenant": victim.tenant.id})
            timeout = self._timeouts.get(victim)
            if timeout is not None and not timeout.expired():
                timeout.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def wait_for_first_token(self, attempt: Attempt) -> AsyncGenerator[None]:
        """Bound the wait for an attempt's first token while the block is entered.

        Raises:
            Overloaded: the token did not come within TTFT_DEADLINE_FACTOR times its objective, or the choice has to
            make way.
        """
        entry, choice = attempt.entry, attempt.choice
        alone_s = attempt.job.compute_s if attempt.job.turn[1] else 0.0
        timeout_s = TTFT_DEADLINE_FACTOR * (choice.claim.objective.ttft_s + alone_s)
        left_s = choice.claim.arrived_s + timeout_s - time.monotonic()
        is_bound = not (choice.emitted or choice.has_begun.is_set()) and timeout_s < math.inf
        try:
            async with asyncio.timeout(left_s if is_bound else None) as timeout:
                self._timeouts[entry] = timeout
                yield
        except TimeoutError:
            reason = f"no first token within {timeout_s:.1f} s"
            if timeout.when() == 0.0:
                reason = "the request had to make way for tenants with less in the queue"
            if choice.decision is not None:
                choice.decision.outcome = f"refused: {reason}"
            raise Overloaded(f"{reason}; try again later", retry_after_s=max(0.1, attempt.job.compute_s)) from None
        finally:
            self._timeouts.pop(entry, None)
            self.gate.left(entry)


class _Held:
    """The calls of an attempt, and the tasks that read from them: these end first, all together."""

    def __init__(self) -> None:
        self._calls: list[WorkerStream[Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def call(self, stream: WorkerStream[E]) -> WorkerStream[E]:
        """Take a call over: it is left with the attempt."""
        self._calls.append(stream)
        return stream

    def let_go(self, stream: WorkerStream[Any]) -> None:
        """Gives a call up: it outlives the attempt."""
        self._calls.remove(stream)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> _Held:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._tasks:
                await cancel_and_wait(self._tasks)
        finally:
            for stream in reversed(self._calls):
                stream.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KVTransfer:
    """A KV transfer that goes on behind the first token."""

    prefill: WorkerStream[FirstToken | Transferred]
    ticket: Ticket
    reading: asyncio.Task[Decoding]
    """The read of the decode worker's first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """An attempt whose prompt is computed."""

    stream: WorkerStream[Decoding]
    """The call that decodes."""
    first: NewTokens
    """Empty where the decode worker draws the first token, after the KV transfer."""
    kv_transfer: _KVTransfer | None = None
    """None: the worker that decodes has computed the prompt."""


class Exchange:
    """The calls of attempts to workers."""

    def __init__(
        self, *, client: WorkerClient, pools: PoolView, waits: FirstTokenWait, migration: Migration, reports: Reports
    ) -> None:
        self._client = client
        self._pools = pools
        self._waits = waits
        self._migration = migration
        self._reports = reports

    async def serve(self, attempt: Attempt) -> AsyncGenerator[NewTokens | Outcome]:
        """The tokens of an attempt, as they come. The last value is its outcome; by then all its calls are left, but
        for one that the choice has moved from.

        Raises:
            Overloaded: the first token did not come in time.
        """
        outcome: NewTokens | Outcome
        assignment, job = attempt.assignment, attempt.job
        computes = assignment.prefill or assignment.decode
        try:
            with self._pools.decoding(assignment.decode, job), self._pools.computing(computes, job):
                async with _Held() as held:
                    is_split = assignment.placement.mode is Mode.DISAGGREGATED
                    begun = await (self._begin_split if is_split else self._begin_aggregated)(attempt, held)
                    if isinstance(begun, WorkerLeaving):
                        outcome = begun
                    else:
                        rest = _Rest(attempt, begun, held, migration=self._migration, reports=self._reports)
                        try:
                            if num_computed(begun.first) or begun.first.finish_reason is not None:
                                yield begun.first
                            while isinstance(outcome := await rest.next(), NewTokens):
                                yield outcome
                        except (GeneratorExit, asyncio.CancelledError):  # nobody wants the others
                            attempt.choice.num_computed += begun.stream.num_unread
                            raise
        except WorkerCallError as failure:
            outcome = AttemptFailed(failure.with_traceback(None))  # whose frames have the outcome
        finally:
            assignment.leave_old_call()
            self._waits.gate.left(attempt.entry)
        yield outcome

    async def _begin_aggregated(self, attempt: Attempt, held: _Held) -> _Begun | WorkerLeaving:
        worker, source = attempt.assignment.decode, attempt.assignment.source
        stream = held.call(
            self._client.decode(worker, attempt.spec, await_kv=False, source=source, trace=attempt.choice.trace)
        )
        async with self._waits.wait_for_first_token(attempt):
            with self._waits.wait_for_room(attempt.entry, attempt.job.compute_s):
                message = await stream.read()
        if isinstance(message, Migrate):
            return WorkerLeaving(worker)
        assert isinstance(message, NewTokens)
        attempt.choice.has_kv()
        self._pools.computed(attempt.job)
        self._reports.prefill(attempt, message.report or PrefillReport())
        return _Begun(stream=stream, first=message)

    async def _begin_split(self, attempt: Attempt, held: _Held) -> _Begun | WorkerLeaving:
        assignment, stages, trace = attempt.assignment, attempt.choice.stages, attempt.choice.trace
        assert assignment.prefill is not None
        stages.asks_for_room(time.monotonic())
        decode = held.call(self._client.decode(assignment.decode, attempt.spec, await_kv=True, trace=trace))
        async with self._waits.wait_for_first_token(attempt):
            with self._waits.wait_for_room(attempt.entry):
                ticket = await decode.read()
            if isinstance(ticket, Migrate):
                return WorkerLeaving(assignment.decode)
            assert isinstance(ticket, Ticket)
            # A KV transfer needs no permit: the router names the receiver, who is where its lease says.
            ticket = replace(ticket, kv_address=assignment.decode.info.address)
            self._reports.room(attempt)
            prefill = held.call(
                self._client.prefill(assignment.prefill, attempt.spec, ticket, source=assignment.source, trace=trace)
            )
            assignment.leave_old_call()
            # The decode worker answers nothing before the KV transfer; it is read so that its death is noticed at once.
            computing = held.start(prefill.read())
            reading = held.start(decode.read())
            await asyncio.wait((computing, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and _gave_up(reading):
                # So it looks as well when the first token is the last, and its message is behind this one.
                await asyncio.wait((computing,), timeout=TRANSFER_REPORT_S)
            if not computing.done() and isinstance(reading.result(), Migrate):
                return WorkerLeaving(assignment.decode)
            first = await computing
        assert isinstance(first, FirstToken)
        self._pools.computed(attempt.job)
        self._reports.prefill(attempt, first.report)
        return _Begun(
            stream=decode,
            first=NewTokens(
                token_ids=() if first.token_id is None else (first.token_id,),
                finish_reason=first.finish_reason,
                scores=first.scores,
            ),
            kv_transfer=_KVTransfer(prefill=prefill, ticket=ticket, reading=reading),
        )


class _Rest:
    """What follows an attempt's first token, one message at a time.

    When the worker leaves its role, the tokens come on until another worker is ready.
    """

    def __init__(self, attempt: Attempt, begun: _Begun, held: _Held, *, migration: Migration, reports: Reports) -> None:
        self._attempt = attempt
        self._stream = begun.stream
        self._held = held
        self._migration = migration
        self._reports = reports
        self._is_finished = begun.first.finish_reason is not None
        self._kv_transfer = begun.kv_transfer
        self._transferring: asyncio.Task[None] | None = None
        """The wait for the prefill worker's report."""
        self._preparing: asyncio.Task[Assignment | None] | None = None
        """The preparation of a move; None: no move is asked for."""

    async def next(self) -> NewTokens | Outcome:
        """The next tokens; after the last ones, or where the choice goes on elsewhere, the outcome.

        Raises:
            WorkerCallError: a worker failed.
        """
        if self._is_finished:
            return FINISHED
        if self._kv_transfer is not None:
            kv_transfer, self._kv_transfer = self._kv_transfer, None
            message: Decoding | Moved = await self._first_decoded(kv_transfer)
            if isinstance(message, Migrate):
                return WorkerLeaving(self._stream.worker)
            self._attempt.choice.stages.decodes(time.monotonic())
            self._attempt.choice.has_kv()
        else:
            message = await (self._stream.read() if self._preparing is None else self._read_or_move(self._preparing))
        while isinstance(message, Migrate):
            message = await self._leave(message)
        if isinstance(message, Moved):
            return message
        assert isinstance(message, NewTokens)
        if message.finish_reason is not None:
            self._is_finished = True
            if self._transferring is not None:
                # The KV has arrived; a prefill worker that dies or stalls before it says so hurts nobody.
                await asyncio.wait((self._transferring,), timeout=TRANSFER_REPORT_S)
        return message

    async def _leave(self, order: Migrate) -> Decoding | Moved:
        """Prepare a move, and returns what comes first: the next message, or that the move is ready."""
        if self._attempt.spec.sampling.use_beam_search:
            if not order.hypotheses.running:
                return await self._stream.read()  # its state does not travel: its worker serves it to the end
            self._attempt.choice.hypotheses = order.hypotheses
        if self._preparing is None:
            self._preparing = self._held.start(self._migration.prepare(self._attempt, self._stream))
        return await self._read_or_move(self._preparing)

    async def _first_decoded(self, kv_transfer: _KVTransfer) -> Decoding:
        """The decode worker's first message. The side that sees the KV transfer fail first ends the wait at once."""
        report = self._reports.kv_transfer(kv_transfer.prefill, kv_transfer.ticket, self._attempt)
        self._transferring = self._held.start(report)
        await asyncio.wait((self._transferring, kv_transfer.reading), return_when=asyncio.FIRST_COMPLETED)
        if not kv_transfer.reading.done():
            self._transferring.result()  # if it failed, nothing will come on the decode stream
        return await kv_transfer.reading

    async def _read_or_move(self, preparing: asyncio.Task[Assignment | None]) -> Decoding | Moved:
        """The decode worker's next message, unless the move that is prepared is ready before."""
        stream = self._stream
        reading = asyncio.create_task(stream.read())
        try:
            await asyncio.wait((preparing, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
        finally:
            await cancel_and_wait((reading,))
        if (assignment := preparing.result()) is not None:
            self._held.let_go(stream)
            self._attempt.choice.superseded.append(stream)
            return Moved(assignment)
        self._preparing = None  # the worker has stayed after all
        return await stream.read()


def _gave_up(reading: asyncio.Task[Decoding]) -> bool:
    """Return whether a decode worker's stream ended because the sender no longer wants its transfer."""
    failure = reading.exception()
    return isinstance(failure, WorkerCallError) and isinstance(failure.error, TransferCancelled)
