"""Serves one choice on the workers: place, reserve, prefill, hand over, decode; and again when a worker fails.

    split         Decode(await_kv) --> ticket --> Prefill(ticket) --> first token --> KV handed over --> further tokens
                  `----- the open call is the reservation -------------------------------------------------- ... ---'
    aggregated    Decode --> all tokens

Whoever computes the prompt may be told a source: a worker with a longer prefix of it, from which it pulls first.

A choice is placed before it is let in: admission needs to know when its first token would come. What it is let in with
is a deadline for that token; when it has passed, or when the choice has to make way, the client is told at once.

A failure before the last token places the choice again, with the tokens emitted so far as part of its prompt. Tokens
are drawn by position, so the stream goes on as if nothing had happened. What survived of its KV, on whatever worker, is
found by placement as any prefix is.

A worker that leaves asks for its choices to be moved. While the tokens go on, the next worker pulls the KV; then the
choice is placed once more, split, with the leaving worker as the one that prefills: its cache has all but the last few
tokens, and what the next worker has not pulled yet is handed over as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from opentelemetry.context import Context

from baton import wire
from baton.blocks import block_keys
from baton.cluster import Role, Worker
from baton.config import RouterConfig
from baton.errors import (
    BatonError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferRefused,
    Unsupported,
    WorkerDraining,
    WorkerFailed,
)
from baton.messages import (
    Decoding,
    FirstToken,
    HandedOver,
    Migrate,
    NewTokens,
    PrefillReport,
    PrefixSource,
    SequenceSpec,
    Ticket,
)
from baton.tasks import cancel_and_wait
from baton.telemetry.instruments import Instruments
from router.admission import PATIENCE, AnswerHistory, Claim, Entry, Gate
from router.dispatch.decisions import Decision, DecisionLog
from router.dispatch.worker_client import WorkerCallError, WorkerCalls, WorkerStream
from router.placement import Job, Mode, Placement, Prediction, PriceFit, Prompt, place
from router.placement.pool_view import PoolView
from router.placement.stale_hints import Hint, HintBook
from router.slo import StageLog

logger = logging.getLogger(__name__)
HAND_OVER_REPORT_S = 1.0
"""How long a choice's last token waits for the prefill worker's report on the hand-over, which is there already, unless
that worker hangs."""
MAX_FAILED_TRANSFERS = 2
"""Failed hand-overs of a choice before the decode worker computes the prompt itself."""
PROGRESS_TOKENS = 16
"""After so many tokens without a failure, a choice's failures count no more: a long answer may outlive many workers.
Whatever kills every worker it comes to does not get so far."""
MOVE_RETRY_S = 1.0
"""A choice that has to move and finds no worker with room looks again after about so long."""
A = TypeVar("A")
B = TypeVar("B")


@dataclass(slots=True, kw_only=True)
class ChoiceRecord:
    """What happened to one choice, filled in as it happens."""

    began_s: float = 0.0
    """When the attempt began, on the monotonic clock."""
    stages: StageLog = field(default_factory=StageLog)
    """A move to another decode worker is a part of decoding."""
    num_cached_tokens: int | None = None
    """Of the first attempt: later ones find what it left behind."""
    num_seen_tokens: int = 0
    """Leading prompt tokens that came before: what a cache that forgets nothing would have had."""
    block_keys: tuple[bytes, ...] = ()
    """Of the prompt, as it was first placed."""
    prefill_worker: str = ""
    decode_worker: str = ""
    source: str = ""
    """Worker from which a prefix was to be pulled; empty: nobody."""
    mode: str = ""
    decision: Decision | None = None
    """Of the first attempt."""
    retries: int = 0
    emitted: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Lessons:
    """What the failed attempts of one choice mean for its next placement."""

    refused: set[str] = field(default_factory=set)
    """Workers whose queue was full, or which do not know what they were asked for."""
    unsupported: Unsupported | None = None
    """What the last of these said."""
    not_from: set[str] = field(default_factory=set)
    """Workers from which no prefix is pulled: sources of failed attempts, and whoever could not hand over."""
    doubted: set[str] = field(default_factory=set)
    """The other side of failed hand-overs: it may be gone, and its own stream not broken yet. Only for want of another
    is it tried again."""
    num_failed_transfers: int = 0
    failures: list[str] = field(default_factory=list)
    num_emitted: int = 0
    """Tokens that the choice had at the last of them."""

    def learn(self, failure: WorkerCallError, placement: Placement, num_emitted: int) -> None:
        self.num_emitted = num_emitted
        self.failures.append(f"{failure.worker.info.id}: {failure.error}")
        if isinstance(failure.error, Overloaded | Unsupported):
            self.refused.add(failure.worker.info.id)  # before anything was pulled: nothing speaks against the source
            self.unsupported = failure.error if isinstance(failure.error, Unsupported) else self.unsupported
            return
        self.not_from.add(placement.source)
        if isinstance(failure.error, TransferError):
            # Who does not fit will not fit the next time either.
            self.num_failed_transfers += MAX_FAILED_TRANSFERS if isinstance(failure.error, TransferRefused) else 1
            self.not_from.add(placement.prefill_worker)
            if not isinstance(failure.error, (TransferCorrupted, TransferRefused)):  # then the other side has answered
                self.doubted |= {placement.prefill_worker, placement.decode_worker} - {failure.worker.info.id}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Who is to serve: the workers as they were when that was decided, whatever becomes of their leases."""

    placement: Placement
    decode: Worker
    prefill: Worker | None
    source: PrefixSource | None
    hint: Hint | None
    """None: nothing was believed of the worker that computes the prompt."""
    moves_from: WorkerStream[Decoding] | None = None
    """The call that decodes until now. It is to be left when the next ones have begun, so that its worker waits."""

    def leave_the_old(self) -> None:
        if self.moves_from is not None:
            self.moves_from.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One placement of one choice."""

    spec: SequenceSpec
    claim: Claim
    plan: _Plan
    kept: list[WorkerStream[Decoding]]
    """Streams that stay open when the attempt ends: those that the choice moves from."""
    job: Job
    entry: Entry
    record: ChoiceRecord
    trace: Context


class _Leaving(Exception):
    """A worker asks for a choice to be moved that it has not begun to decode: there is nothing to move."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.info.id)
        self.worker = worker


class _Moved(Exception):
    """A choice goes on elsewhere; all is prepared."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__(plan.placement.decode_worker)
        self.plan = plan


class Dispatcher:
    def __init__(
        self,
        pools: PoolView,
        calls: WorkerCalls,
        hints: HintBook,
        decisions: DecisionLog,
        config: RouterConfig,
        instruments: Instruments,
    ) -> None:
        self._pools = pools
        self._calls = calls
        self._hints = hints
        self._decisions = decisions
        self._config = config
        self._instruments = instruments
        self._gate = Gate()
        self._history = AnswerHistory(config.expected_output_floor, config.expected_output_default)
        self._prices = PriceFit()
        self._patience: dict[Entry, asyncio.Timeout] = {}
        """Of the choices that wait for their first token."""

    async def run(
        self, spec: SequenceSpec, claim: Claim, record: ChoiceRecord, trace: Context
    ) -> AsyncGenerator[NewTokens]:
        """The tokens of one choice, as they come; the last message has the finish reason.

        Closing the generator early cancels the choice on every worker.

        Raises:
            Overloaded: its first token would come too late, or did not come in time.
            Unsupported: no worker knows all that is asked for.
            NoWorker, WorkerFailed, TransferError: `max_attempts` placements failed one after the other, and how.
        """
        expected = self._history.expect(claim.tenant.id, spec.max_tokens, spec.sampling.ignore_eos)
        lessons = _Lessons()
        plan: _Plan | None = None
        """Of a choice that moves."""
        kept: list[WorkerStream[Decoding]] = []
        try:
            for attempt in itertools.count():
                current = replace(
                    spec,
                    token_ids=spec.token_ids + tuple(record.emitted),
                    attempt=attempt,
                    priority=claim.priority,
                    itl_s=claim.objective.itl_s,
                    num_expected_tokens=expected,
                    ttft_s=max(0.0, claim.arrived_s + claim.objective.ttft_s - time.monotonic()),
                )
                mode = self._config.mode
                if mode == "auto" and lessons.num_failed_transfers >= MAX_FAILED_TRANSFERS:
                    mode = Mode.AGGREGATED  # slower perhaps, but nothing has to travel
                record.began_s = time.monotonic()
                prompt = self._prompt(current)
                record.block_keys = record.block_keys or prompt.block_keys
                if attempt == 0 and spec.choice_index == 0:
                    self._see_prompt(current, prompt, record)
                if plan is None:
                    record.stages.attempt(record.began_s)
                    plan = await self._place(current, claim, prompt, mode, lessons)
                placement = plan.placement
                try:
                    serve = self._attempt(current, claim, prompt, plan, kept, record, trace)
                    async with contextlib.aclosing(serve) as messages:
                        async for message in messages:
                            record.emitted += message.token_ids
                            yield message
                    return
                except _Moved as moved:
                    plan = moved.plan
                except _Leaving as leaving:
                    plan = None
                    self._pools.leaves(leaving.worker)
                except WorkerCallError as failure:
                    plan = None
                    if isinstance(failure.error, InvalidRequest):
                        raise failure.error from failure
                    if isinstance(failure.error, WorkerDraining):
                        self._pools.leaves(failure.worker)
                        continue
                    if isinstance(failure.error, WorkerFailed):
                        self._pools.suspect(failure.worker)
                    if len(record.emitted) - lessons.num_emitted >= PROGRESS_TOKENS:
                        lessons = _Lessons()
                    lessons.learn(failure, placement, len(record.emitted))
                    if len(lessons.failures) == self._config.max_attempts:
                        raise _given_up(failure.error, lessons.failures) from failure
                    record.retries += 1
                    self._instruments.retries.add(1, {"error": type(failure.error).__name__})
                    logger.warning(
                        "%s is placed again after %d tokens: %s",
                        current.sequence_id,
                        len(record.emitted),
                        failure.error,
                    )
        finally:
            for stream in kept:
                stream.leave()

    def answered(self, spec: SequenceSpec, claim: Claim, record: ChoiceRecord) -> None:
        """A choice has come to its end, by itself, its limit or a stop string: its length is what others' will be, and
        the next prompt may begin with it."""
        self._history.observe(claim.tenant.id, len(record.emitted))
        known, num_known = record.block_keys, len(record.block_keys) * self._pools.block_size
        num_answer = max(0, num_known - spec.num_prompt_tokens)
        rest = spec.token_ids[num_known:] + tuple(record.emitted[num_answer:])
        new = block_keys(known[-1] if known else spec.cache_seed, rest, self._pools.block_size)
        if new:
            self._instruments.prefixes.see((*known, *new))

    def _see_prompt(self, spec: SequenceSpec, prompt: Prompt, record: ChoiceRecord) -> None:
        num_seen = self._instruments.prefixes.see_prompt(prompt.block_keys)
        # A worker computes at least the last token.
        num_reusable = (spec.num_prompt_tokens - 1) // self._pools.block_size
        record.num_seen_tokens = min(num_seen, num_reusable) * self._pools.block_size

    async def _attempt(
        self,
        spec: SequenceSpec,
        claim: Claim,
        prompt: Prompt,
        plan: _Plan,
        kept: list[WorkerStream[Decoding]],
        record: ChoiceRecord,
        trace: Context,
    ) -> AsyncGenerator[NewTokens]:
        placement = plan.placement
        entry = Entry(tenant=claim.tenant, priority=claim.priority, ttft_s=spec.ttft_s)
        entry.is_placed(placement)
        if spec.attempt == 0:
            prediction = self._predicted(entry, placement)
            record.decision = self._decisions.note(spec, claim, placement, prediction)
            if not record.emitted:  # else another router has let it in
                self._let_in(entry, record.decision)
        record.decode_worker = placement.decode_worker
        if plan.moves_from is None:
            record.mode, record.source = placement.mode, placement.source
            record.prefill_worker = placement.prefill_worker
        self._instruments.placements.add(
            1, {"mode": placement.mode, "prefill": placement.prefill_worker, "decode": placement.decode_worker}
        )
        try:
            serve = self._split if placement.mode is Mode.SPLIT else self._aggregated
            attempt = _Attempt(
                spec=spec,
                claim=claim,
                plan=plan,
                kept=kept,
                job=Job(
                    turn=entry.turn,
                    compute_s=entry.compute_s,
                    num_prompt_tokens=prompt.num_tokens,
                    num_expected_tokens=prompt.num_expected_tokens,
                ),
                entry=entry,
                record=record,
                trace=trace,
            )
            async with contextlib.aclosing(serve(attempt)) as messages:
                async for message in messages:
                    yield message
        finally:
            plan.leave_the_old()
            self._gate.left(entry)

    def _predicted(self, entry: Entry, placement: Placement) -> Prediction:
        """Whoever cannot meet its objective even alone, waits for all others."""
        if not entry.turn[1]:
            return placement.prediction
        wait_s = self._pools.wait_s(self._pools.get(entry.worker_id), entry.turn)
        return replace(placement.prediction, wait_s=wait_s)

    def _let_in(self, entry: Entry, decision: Decision) -> None:
        """Raises Overloaded if its first token would come too late. Whoever has to go for it, is told at once."""
        try:
            victims = self._gate.admit(entry, decision.prediction)
        except Overloaded as refusal:
            decision.outcome = f"refused: {refusal}"
            raise
        for victim in victims:
            self._instruments.shed.add(1, {"tenant": victim.tenant.id})
            patience = self._patience.get(victim)
            if patience is not None and not patience.expired():
                patience.reschedule(0.0)

    async def _place(self, spec: SequenceSpec, claim: Claim, prompt: Prompt, mode: str, lessons: _Lessons) -> _Plan:
        """Waits, within bounds, until the workers for a request are there."""
        deadline = time.monotonic() + self._config.worker_wait_s
        decide = self._decider(claim, lessons.not_from)
        while True:
            unfit = self._pools.unfit(spec)
            excluded = lessons.refused | unfit.keys() | self._pools.too_short(spec)
            candidates = self._pools.candidates(prompt, (-claim.priority, False), excluded)
            undoubted = [c for c in candidates if c.worker_id not in lessons.doubted]
            placement = decide(prompt, undoubted, mode) or decide(prompt, candidates, mode)
            if placement is not None:
                believed = next(c.num_cached_tokens for c in candidates if c.worker_id == placement.computes)
                hint = self._hints.note(spec, prompt, self._pools.get(placement.computes), believed)
                prefill = self._pools.get(placement.prefill_worker) if placement.prefill_worker else None
                source = None
                if placement.source:
                    address = self._pools.get(placement.source).info.address
                    source = PrefixSource(placement.source, address, placement.source_tokens)
                return _Plan(
                    placement=placement,
                    decode=self._pools.get(placement.decode_worker),
                    prefill=prefill,
                    source=source,
                    hint=hint,
                )
            if lessons.refused:
                raise lessons.unsupported or Overloaded("every worker's queue is full; try again later")
            is_late = time.monotonic() >= deadline
            decodes = [worker.info.id for worker in self._pools.workers if worker.info.role is Role.DECODE]
            # Of a choice that has begun, somebody knew all of it and may be back.
            is_hopeless = spec.attempt == 0 and bool(decodes) and unfit.keys() >= set(decodes)
            if unfit and (is_late or is_hopeless):
                unknown = wire.named(set().union(*unfit.values()))
                raise Unsupported(f"no worker is ready that knows {unknown}; those that run are of an older release")
            if is_late:
                raise NoWorker(
                    f"no worker became ready within {self._config.worker_wait_s:g} s; `baton status` shows the pools"
                )
            await self._pools.wait_for_change(deadline - time.monotonic())

    def _prompt(self, spec: SequenceSpec) -> Prompt:
        keys = tuple(block_keys(spec.cache_seed, spec.token_ids, self._pools.block_size))
        num_emitted = len(spec.token_ids) - spec.num_prompt_tokens
        return Prompt(len(spec.token_ids), keys, max(1, spec.num_expected_tokens - num_emitted))

    def _decider(self, claim: Claim, not_from: Collection[str] = ()) -> Callable[..., Placement | None]:
        return partial(
            place,
            objective=claim.objective,
            weights=claim.weights,
            prices=self._prices.prices,
            pull_above_tokens=self._config.pull_above_tokens,
            not_from=not_from,
        )

    async def _aggregated(self, attempt: _Attempt) -> AsyncGenerator[NewTokens]:
        spec, job, trace = attempt.spec, attempt.job, attempt.trace
        worker, source = attempt.plan.decode, attempt.plan.source
        with self._pools.decoding(worker, job), contextlib.ExitStack() as queued:
            queued.enter_context(self._pools.computing(worker, job))
            async with self._calls.decode(worker, spec, await_kv=False, source=source, trace=trace) as stream:
                async with self._patient(attempt):
                    message = await _read_tokens(stream)
                queued.close()
                self._book_prefill(attempt, message.report or PrefillReport())
                async with contextlib.aclosing(self._rest(attempt, stream, message)) as messages:
                    async for message in messages:
                        yield message

    async def _split(self, attempt: _Attempt) -> AsyncGenerator[NewTokens]:
        spec, job, trace = attempt.spec, attempt.job, attempt.trace
        decode_worker, prefill_worker, source = attempt.plan.decode, attempt.plan.prefill, attempt.plan.source
        assert prefill_worker is not None
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._pools.decoding(decode_worker, job))
            queued = stack.enter_context(contextlib.ExitStack())
            queued.enter_context(self._pools.computing(prefill_worker, job))

            stages = attempt.record.stages
            stages.asks_for_room(time.monotonic())
            decode = await stack.enter_async_context(
                self._calls.decode(decode_worker, spec, await_kv=True, trace=trace)
            )
            async with self._patient(attempt):
                ticket = await decode.read()
                if isinstance(ticket, Migrate):
                    raise _Leaving(decode_worker)
                assert isinstance(ticket, Ticket)
                stages.has_room(time.monotonic())
                prefill = await stack.enter_async_context(
                    self._calls.prefill(prefill_worker, spec, ticket, source=source, trace=trace)
                )
                attempt.plan.leave_the_old()
                # The decode worker says nothing before the hand-over; it is read so that its death is noticed at once.
                computing, reading = await stack.enter_async_context(_both(prefill.read(), _read_tokens(decode)))
                await asyncio.wait((computing, reading), return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and _gave_up(reading):
                    # So it looks as well when the first token is the last, and its message is behind this one.
                    await asyncio.wait((computing,), timeout=HAND_OVER_REPORT_S)
                if not computing.done():
                    reading.result()
                first = await computing
            assert isinstance(first, FirstToken)
            queued.close()
            self._book_prefill(attempt, first.report)
            yield NewTokens(token_ids=(first.token_id,), finish_reason=first.finish_reason)
            if first.finish_reason is not None:
                return
            handing_over = await stack.enter_async_context(
                _cancelled_at_exit(asyncio.create_task(self._book_hand_over(prefill, ticket, attempt)))
            )
            message = await _first_after_hand_over(handing_over, reading)
            stages.decodes(time.monotonic())
            async with contextlib.aclosing(self._rest(attempt, decode, message)) as messages:
                async for message in messages:
                    if message.finish_reason is not None:
                        # The KV has arrived; a prefill worker that dies or stalls before it says so hurts nobody.
                        await asyncio.wait((handing_over,), timeout=HAND_OVER_REPORT_S)
                    yield message

    async def _rest(
        self, attempt: _Attempt, stream: WorkerStream[Decoding], message: Decoding
    ) -> AsyncGenerator[NewTokens]:
        """`message`, and all tokens that follow. When the worker leaves they come on, until another one is ready.

        Raises:
            _Moved: it is; `stream` stays open.
        """
        preparing: asyncio.Task[_Plan | None] | None = None
        try:
            while True:
                if isinstance(message, Migrate):
                    preparing = preparing or asyncio.create_task(self._prepare_move(attempt, stream))
                else:
                    assert isinstance(message, NewTokens)
                    yield message
                    if message.finish_reason is not None:
                        return
                if preparing is None:
                    message = await stream.read()
                    continue
                async with _cancelled_at_exit(asyncio.create_task(stream.read())) as reading:
                    await asyncio.wait((preparing, reading), return_when=asyncio.FIRST_COMPLETED)
                    if reading.done():
                        message = reading.result()
                        continue
                if plan := preparing.result():
                    stream.outlive_context()
                    attempt.kept.append(stream)
                    raise _Moved(plan)
                preparing, message = None, await stream.read()  # the worker has stayed after all
        finally:
            if preparing is not None:
                await cancel_and_wait([preparing])

    async def _prepare_move(self, attempt: _Attempt, stream: WorkerStream[Decoding]) -> _Plan | None:
        """Finds a worker with room, however long that takes, and has it pull the KV there is so far.

        Returns:
            None: meanwhile the worker that was to leave has stayed.
        """
        claim, record, first, leaving = attempt.claim, attempt.record, attempt.spec, stream.worker
        self._pools.leaves(leaving)
        decide = self._decider(claim)
        failed: set[str] = set()
        while True:
            placement = None
            spec = replace(first, token_ids=first.token_ids[: first.num_prompt_tokens] + tuple(record.emitted))
            excluded = failed | self._pools.unfit(spec).keys() | self._pools.too_short(spec)
            if with_room := self._pools.with_room(len(spec.token_ids), excluded):
                prompt = self._prompt(spec)
                candidates = self._pools.candidates(prompt, (-claim.priority, False))
                placement = decide(prompt, [c for c in candidates if c.worker_id in with_room], Mode.AGGREGATED)
            if placement is None or placement.prediction.room_s > 0:
                failed.clear()
                await asyncio.sleep(MOVE_RETRY_S * random.uniform(0.5, 1.5))
                if self._pools.stays(leaving):
                    return None
                continue
            worker = self._pools.get(placement.decode_worker)
            source = PrefixSource(leaving.info.id, leaving.info.address, len(spec.token_ids))
            job = Job(
                turn=attempt.entry.turn,
                compute_s=0.0,
                num_prompt_tokens=prompt.num_tokens,
                num_expected_tokens=prompt.num_expected_tokens,
            )
            try:
                with self._pools.decoding(worker, job):
                    async with self._calls.fetch(worker, spec, source, trace=attempt.trace) as fetching:
                        fetched = await fetching.read()
            except WorkerCallError as failure:
                logger.warning("%s does not move to %s: %s", spec.sequence_id, worker.info.id, failure.error)
                if isinstance(failure.error, WorkerDraining):
                    self._pools.leaves(worker)
                failed.add(worker.info.id)
                continue
            self._instruments.migrations.add(1, {"pulled": str(fetched.num_tokens > 0).lower()})
            split = Placement(mode=Mode.SPLIT, decode_worker=worker.info.id, prefill_worker=leaving.info.id)
            return _Plan(placement=split, decode=worker, prefill=leaving, source=None, hint=None, moves_from=stream)

    @contextlib.asynccontextmanager
    async def _patient(self, attempt: _Attempt) -> AsyncGenerator[None]:
        """The wait for a choice's first token.

        Raises:
            Overloaded: it did not come within PATIENCE times its objective, or the choice has to make way.
        """
        entry, record = attempt.entry, attempt.record
        alone_s = attempt.job.compute_s if attempt.job.turn[1] else 0.0
        patience_s = PATIENCE * (attempt.claim.objective.ttft_s + alone_s)
        left_s = attempt.claim.arrived_s + patience_s - time.monotonic()
        is_bound = not record.emitted and patience_s < math.inf
        try:
            async with asyncio.timeout(left_s if is_bound else None) as patience:
                self._patience[entry] = patience
                yield
        except TimeoutError:
            reason = f"no first token within {patience_s:.1f} s"
            if patience.when() == 0.0:
                reason = "the request had to make way for tenants with less in the queue"
            if record.decision is not None:
                record.decision.outcome = f"refused: {reason}"
            raise Overloaded(f"{reason}; try again later", retry_after_s=max(0.1, attempt.job.compute_s)) from None
        finally:
            self._patience.pop(entry, None)
            self._gate.left(entry)

    async def _book_hand_over(
        self, prefill: WorkerStream[FirstToken | HandedOver], ticket: Ticket, attempt: _Attempt
    ) -> None:
        """Returns once the prefill worker has reported.

        Raises:
            WorkerCallError: the hand-over failed, or that worker did.
        """
        handed_over = await prefill.read()
        assert isinstance(handed_over, HandedOver)
        if attempt.plan.moves_from is None:
            attempt.record.stages.handed_over(time.monotonic(), handed_over.exposed_s)
        self._prices.handed_over(ticket.num_tokens - ticket.skip_tokens, handed_over.exposed_s)
        self._instruments.transfer_duration.record(handed_over.transfer_s)
        self._instruments.transfer_bytes.add(handed_over.num_bytes)

    def _book_prefill(self, attempt: _Attempt, report: PrefillReport) -> None:
        if attempt.plan.hint is None:
            return  # it is a move: neither a prompt's queue nor a first token
        record, prediction = attempt.record, attempt.plan.placement.prediction
        # What was pulled may be gone again before the worker looked.
        self._hints.settle(attempt.plan.hint, max(0, report.num_cached_tokens - report.num_pulled_tokens))
        if record.num_cached_tokens is None and not record.emitted:
            record.num_cached_tokens = report.num_cached_tokens
        if report.num_pulled_tokens:
            self._prices.pulled(report.num_pulled_tokens, report.pull_s)
        now_s = time.monotonic()
        record.stages.computed(now_s, report.prefill_s, report.room_s)
        elapsed_s = now_s - record.began_s
        if record.decision is not None and attempt.spec.attempt == 0:
            record.decision.ttft_s = elapsed_s
        for what, predicted_s, measured_s in (
            ("ttft", prediction.ttft_s, elapsed_s),
            ("compute", prediction.compute_s, report.prefill_s),
        ):
            if measured_s > 0:
                self._instruments.prediction_error.record(abs(predicted_s - measured_s) / measured_s, {"of": what})


def _gave_up(reading: asyncio.Task[NewTokens]) -> bool:
    """Whether a decode worker's stream ended because the sender wanted its transfer no more."""
    failure = reading.exception()
    return isinstance(failure, WorkerCallError) and isinstance(failure.error, TransferCancelled)


async def _first_after_hand_over(handing_over: asyncio.Task[None], reading: asyncio.Task[NewTokens]) -> NewTokens:
    """The decode worker's first tokens. Whichever side sees the hand-over fail first, ends the wait at once."""
    await asyncio.wait((handing_over, reading), return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        handing_over.result()  # if it failed, nothing will come on the decode stream
    return await reading


def _given_up(error: BatonError, failures: list[str]) -> BatonError:
    """The last failure's kind, with all that happened."""
    if len(failures) == 1 or isinstance(error, Overloaded):
        return error
    return type(error)(f"{len(failures)} placements failed: {'; '.join(failures)}")


async def _read_tokens(stream: WorkerStream[Decoding]) -> NewTokens:
    """Raises _Leaving when the worker asks for the choice to be moved; its tokens come on."""
    message = await stream.read()
    if isinstance(message, Migrate):
        raise _Leaving(stream.worker)
    assert isinstance(message, NewTokens)
    return message


@contextlib.asynccontextmanager
async def _both(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]
) -> AsyncGenerator[tuple[asyncio.Task[A], asyncio.Task[B]]]:
    """Runs two coroutines as tasks that have ended when the block is left."""
    async with (
        _cancelled_at_exit(asyncio.create_task(first)) as one,
        _cancelled_at_exit(asyncio.create_task(second)) as other,
    ):
        yield one, other


@contextlib.asynccontextmanager
async def _cancelled_at_exit(task: asyncio.Task[A]) -> AsyncGenerator[asyncio.Task[A]]:
    try:
        yield task
    finally:
        await cancel_and_wait([task])
