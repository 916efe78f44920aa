"""Executes one attempt: reserve, prefill, transfer, decode. Tokens are yielded as the workers send them.

    disaggregated Decode(await_kv) --> ticket --> Prefill(ticket) --> first token --> KV transferred --> further tokens
                  `----- the open call is the reservation -------------------------------------------------- ... ---'
    aggregated    Decode --> all tokens

The call to the worker that computes the prompt may name a source: a worker that caches a longer prefix, from which it
pulls first. A deadline or a preemption ends the wait for the first token (`FirstTokenWait`). Closing the exchange early
cancels all its calls, which frees everything on the workers.
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
"""Timeout for the prefill worker's report on the KV transfer when everything else is complete. The report has usually
arrived by then, unless that worker hangs."""
FINISHED = Finished()
LONG_S = 5.0
"""A choice that waits longer for room on a worker makes the router disconnect stalled clients sooner."""


class FirstTokenWait:
    """Waits for first tokens on this router.

    The gate admits a choice to the wait. The first token, a deadline or a preemption ends it.
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
        """Context manager: counts a choice as waiting for room on a worker.

        Args:
            compute_s: time that the body takes in addition to the wait.
        """
        late = asyncio.get_running_loop().call_later(compute_s + LONG_S, self._waits_long.add, entry)
        try:
            yield
        finally:
            late.cancel()
            self._waits_long.discard(entry)

    def admit(self, entry: QueueEntry, decision: PlacementDecision) -> None:
        """Admit a choice, and end the wait of the choices that it preempts.

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
            # 0.0 lies in the past, so the victim's task is cancelled at the next iteration of the event loop. There,
            # the value 0.0 marks a preemption, unlike a deadline. `reschedule` raises if a timeout has expired already.
            timeout = self._timeouts.get(victim)
            if timeout is not None and not timeout.expired():
                timeout.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def wait_for_first_token(self, attempt: Attempt) -> AsyncGenerator[None]:
        """Context manager: bounds the wait for an attempt's first token.

        Raises:
            Overloaded: the token did not come within TTFT_DEADLINE_FACTOR times its objective, or the choice was
                preempted.
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
            if timeout.when() == 0.0:  # see `admit`
                reason = "preempted in the queue by a tenant with less queued work"
            if choice.decision is not None:
                choice.decision.outcome = f"refused: {reason}"
            raise Overloaded(f"{reason}; try again later", retry_after_s=max(0.1, attempt.job.compute_s)) from None
        finally:
            self._timeouts.pop(entry, None)
            self.gate.left(entry)


class _Held:
    """Context manager: owns the calls of an attempt and the tasks that read from them.

    On exit all tasks are cancelled first, then the calls.
    """

    def __init__(self) -> None:
        self._calls: list[WorkerStream[Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def call(self, stream: WorkerStream[E]) -> WorkerStream[E]:
        """Own a call from now on: it is cancelled with the attempt."""
        self._calls.append(stream)
        return stream

    def let_go(self, stream: WorkerStream[Any]) -> None:
        """Give up the ownership of a call: it outlives the attempt."""
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
            # The wait above may itself be cancelled. The calls hold reservations on workers: cancel them all the same.
            for stream in reversed(self._calls):
                stream.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KVTransfer:
    """A KV transfer that continues after the first token."""

    prefill: WorkerStream[FirstToken | Transferred]
    ticket: Ticket
    reading: asyncio.Task[Decoding]
    """Reads the first tokens of the decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """An attempt whose prompt is computed."""

    stream: WorkerStream[Decoding]
    """The call that decodes."""
    first: NewTokens
    """Empty if the decode worker draws the first token, after the KV transfer."""
    kv_transfer: _KVTransfer | None = None
    """None: the decode worker has computed the prompt itself."""


class Exchange:
    """Executes attempts, one `serve` each."""

    def __init__(
        self, *, client: WorkerClient, pools: PoolView, waits: FirstTokenWait, migration: Migration, reports: Reports
    ) -> None:
        self._client = client
        self._pools = pools
        self._waits = waits
        self._migration = migration
        self._reports = reports

    async def serve(self, attempt: Attempt) -> AsyncGenerator[NewTokens | Outcome]:
        """Yield the tokens of an attempt as they arrive, and its outcome as the last value.

        All its calls are cancelled before the outcome is yielded, except a call that the choice has migrated from.

        Raises:
            Overloaded: the first token did not come in time.
        """
        outcome: NewTokens | Outcome
        assignment, job = attempt.assignment, attempt.job
        computes = assignment.prefill or assignment.decode
        try:
            with self._pools.decoding(assignment.decode, job), self._pools.computing(computes, job):
                async with _Held() as held:
                    is_disaggregated = assignment.placement.mode is Mode.DISAGGREGATED
                    begin = self._begin_disaggregated if is_disaggregated else self._begin_aggregated
                    begun = await begin(attempt, held)
                    if isinstance(begun, WorkerLeaving):
                        outcome = begun
                    else:
                        rest = _Rest(attempt, begun, held, migration=self._migration, reports=self._reports)
                        try:
                            if num_computed(begun.first) or begun.first.finish_reason is not None:
                                yield begun.first
                            while isinstance(outcome := await rest.next(), NewTokens):
                                yield outcome
                        except (GeneratorExit, asyncio.CancelledError):
                            # The client left or has enough. The tokens that wait unread were computed for it, too.
                            attempt.choice.num_computed += begun.stream.num_unread
                            raise
        except WorkerCallError as failure:
            # The traceback's frames refer to `outcome`: without this the two would keep each other alive.
            outcome = AttemptFailed(failure.with_traceback(None))
        finally:
            assignment.leave_old_call()
            self._waits.gate.left(attempt.entry)
        # Only here: the consumer places the next attempt at once, and the accounting must no longer have this one.
        yield outcome

    async def _begin_aggregated(self, attempt: Attempt, held: _Held) -> _Begun | WorkerLeaving:
        worker, source = attempt.assignment.decode, attempt.assignment.source
        stream = held.call(
            self._client.decode(
                worker, attempt.spec, await_kv=False, source=source, images=attempt.images, trace=attempt.choice.trace
            )
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

    async def _begin_disaggregated(self, attempt: Attempt, held: _Held) -> _Begun | WorkerLeaving:
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
            # A KV transfer needs no permit: the router names the receiver, by the address in its lease.
            ticket = replace(ticket, kv_address=assignment.decode.info.address)
            self._reports.room(attempt)
            prefill = held.call(
                self._client.prefill(
                    assignment.prefill,
                    attempt.spec,
                    ticket,
                    source=assignment.source,
                    images=attempt.images,
                    trace=trace,
                )
            )
            # In a migration the prefill worker is the one that leaves, and the old call decodes on it. The new call
            # started first, so that worker is never without a call, and cannot exit before it has sent the KV.
            assignment.leave_old_call()
            # The decode worker sends nothing before the KV transfer. Reading now shows at once that it has died.
            computing = held.start(prefill.read())
            reading = held.start(decode.read())
            await asyncio.wait((computing, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and _gave_up(reading):
                # This is no failure if the first token is also the last: the prefill worker then cancels the transfer,
                # and its own message may arrive shortly after the decode worker's.
                await asyncio.wait((computing,), timeout=TRANSFER_REPORT_S)
            # `result` raises if the decode worker failed: a first token that has no worker to decode on is of no use.
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
    """The messages of an attempt after its first token.

    If the decode worker leaves its role, it continues to send tokens until another worker is ready.
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
        """Waits for the prefill worker's report."""
        self._preparing: asyncio.Task[Assignment | None] | None = None
        """Prepares a migration; None: the worker has asked for none."""

    async def next(self) -> NewTokens | Outcome:
        """Return the next tokens, or the outcome after the last ones or when the choice migrates.

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
            message = await (self._stream.read() if self._preparing is None else self._read_or_migrate(self._preparing))
        while isinstance(message, Migrate):
            message = await self._leave(message)
        if isinstance(message, Moved):
            return message
        assert isinstance(message, NewTokens)
        if message.finish_reason is not None:
            self._is_finished = True
            if self._transferring is not None:
                # The decode worker has the KV. A prefill worker that now dies or stalls must not fail the choice, so
                # this waits for its report with a timeout and ignores its errors.
                await asyncio.wait((self._transferring,), timeout=TRANSFER_REPORT_S)
        return message

    async def _leave(self, order: Migrate) -> Decoding | Moved:
        """Prepare a migration, and return the next message or, if it is ready earlier, the migration."""
        if self._attempt.spec.sampling.use_beam_search:
            if not order.hypotheses.running:
                return await self._stream.read()  # the search cannot migrate: its worker completes it
            self._attempt.choice.reach(order.hypotheses)
        if self._preparing is None:
            self._preparing = self._held.start(self._migration.prepare(self._attempt, self._stream))
        return await self._read_or_migrate(self._preparing)

    async def _first_decoded(self, kv_transfer: _KVTransfer) -> Decoding:
        """Return the decode worker's first message; fail as soon as either worker reports that the transfer failed."""
        report = self._reports.kv_transfer(kv_transfer.prefill, kv_transfer.ticket, self._attempt)
        self._transferring = self._held.start(report)
        await asyncio.wait((self._transferring, kv_transfer.reading), return_when=asyncio.FIRST_COMPLETED)
        if not kv_transfer.reading.done():
            # Raises if the transfer failed: nothing would come on the decode stream.
            self._transferring.result()
        return await kv_transfer.reading

    async def _read_or_migrate(self, preparing: asyncio.Task[Assignment | None]) -> Decoding | Moved:
        """Return the decode worker's next message or, if it is ready earlier, the migration."""
        stream = self._stream
        reading = asyncio.create_task(stream.read())
        try:
            await asyncio.wait((preparing, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():  # tokens go first: each one that is passed on now is one less to compute again
                return reading.result()
        finally:
            # A stream has one reader at a time. Cancelling loses nothing: `read` takes messages off the stream only in
            # the step in which it returns them.
            await cancel_and_wait((reading,))
        if (assignment := preparing.result()) is not None:
            # The old call must outlive this attempt, which would cancel it: see `Assignment.moves_from`. It is not read
            # any more. The next worker computes the tokens that still arrive on it again, and draws the same ones.
            self._held.let_go(stream)
            self._attempt.choice.superseded.append(stream)
            return Moved(assignment)
        self._preparing = None  # the worker stays after all
        return await stream.read()


def _gave_up(reading: asyncio.Task[Decoding]) -> bool:
    """Return whether a decode worker's stream ended because the prefill worker cancelled the transfer."""
    failure = reading.exception()
    return isinstance(failure, WorkerCallError) and isinstance(failure.error, TransferCancelled)
