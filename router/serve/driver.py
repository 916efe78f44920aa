"""Serves the choices of a request on the workers: carries out the steps of their state machines.

    place -> admit -> calls to workers -> tokens for the client          one async generator for each choice

`router.serve.machine` decides what happens, and this module does it: it chooses workers, makes their calls, and passes
the workers' messages to the machine as events. A choice needs no task for that: its calls wake it when they have a
message.

A choice is placed before it is admitted, because admission needs the predicted time of its first token. It is admitted
with a deadline for that token. If the deadline passes, or the choice is preempted, the client gets the error at once.

If a worker fails before the last token, the choice is placed again with the tokens emitted so far as part of its
prompt. Tokens are drawn by position, so the stream continues unchanged on any worker with the same sampler. Placement
finds the KV that survived as it finds any cached prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from baton.cluster import Role, Worker, with_role
from baton.config import RouterConfig
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerFailed
from baton.messages import Decoding, FirstToken, NewTokens, SequenceSpec, Ticket, Transferred
from baton.tasks import Flag, cancel_and_wait
from baton.telemetry.instruments import Instruments
from baton.trust import KeyFile
from router.admission import TTFT_DEADLINE_FACTOR, AnswerHistory, Gate, QueueEntry
from router.placement import Job, Placement, Prediction, Prompt
from router.placement.pool_view import HintTracker, PoolView
from router.serve.choice import Assignment, Attempt, Choice, ChoiceGroup
from router.serve.decisions import DecisionLog, PlacementDecision
from router.serve.events import EventKind, failed_text, placed_text
from router.serve.machine import (
    AWAIT_DECODE,
    Answered,
    Await,
    Begun,
    CallFailed,
    Computed,
    Emit,
    End,
    Event,
    Failing,
    FindPlace,
    GiveUp,
    GoBack,
    HasKv,
    Instruction,
    KeepOldCall,
    LacksImages,
    LeaveCalls,
    MoveReady,
    NoteTransfer,
    OpenDecode,
    OpenPrefill,
    Placed,
    PrepareMove,
    Reach,
    Refused,
    Source,
    Stays,
    TimeUp,
    WorkerLeaves,
)
from router.serve.migration import Migration
from router.serve.reports import Reports
from router.serve.selector import WorkerSelector
from router.serve.worker_client import WorkerCallError, WorkerClient, WorkerStream, num_computed

logger = logging.getLogger(__name__)
LONG_S = 5.0
"""A choice that waits longer for room on a worker makes the router disconnect stalled clients sooner."""


class _Run:
    """Resources of one attempt of a choice: its calls, its accounting, and the wait for its first token."""

    def __init__(self, choice: Choice, num_expected_tokens: int) -> None:
        self.choice = choice
        self.num_expected_tokens = num_expected_tokens
        self.arrived = Flag()
        """Set when a source may have an event."""
        self.moves_to: Assignment | None = None
        """The workers of a migration that is prepared."""
        self.ticket: Ticket
        self._attempt: Attempt | None = None
        self.reset()

    @property
    def attempt(self) -> Attempt:
        """The latest attempt; there is one."""
        assert self._attempt is not None
        return self._attempt

    def reset(self) -> None:
        """Hold nothing."""
        self.decode: WorkerStream[Decoding] | None = None
        self.prefill: WorkerStream[FirstToken | Transferred] | None = None
        self.moving: asyncio.Task[Assignment | None] | None = None
        self.accounting: contextlib.ExitStack | None = None
        """The attempt counts on its workers; None: nothing is held."""
        self.is_begun = False
        """The prompt is computed."""
        self.first_token_by_s = math.inf
        """Deadline of the first token, on the monotonic clock."""
        self.waits_for_room: asyncio.TimerHandle | None = None
        """The decode worker has not answered yet."""
        self.is_preempted = False

    def take_up(self, attempt: Attempt) -> None:
        """Begin an attempt, which owns the old call of a migration from now on."""
        self._attempt, self.moves_to = attempt, None

    def wake_by(self, sources: Sequence[Source]) -> None:
        """Let the calls among the sources wake this choice."""
        self.arrived.clear()
        for source in sources:
            if source is not Source.MIGRATION:
                self._stream(source).on_arrival = self.arrived.set

    def preempt(self) -> None:
        """End the wait for the first token."""
        self.is_preempted = True
        self.arrived.set()

    def take(self, source: Source) -> Event | None:
        """Return the next event of a source; None: it has none yet."""
        if source is Source.MIGRATION:
            return self._moved()
        try:
            event: Event | None = self._stream(source).take()
        except WorkerCallError as failure:
            return CallFailed(source, failure.worker, failure.error)
        return event

    def _stream(self, source: Source) -> WorkerStream[Any]:
        stream: WorkerStream[Any] | None = self.decode if source is Source.DECODE else self.prefill
        assert stream is not None
        return stream

    async def next_tokens(self) -> Event:
        """Return the next event of the decode worker's call, when nothing else is awaited."""
        assert self.decode is not None
        self.decode.on_arrival = None
        try:
            return await self.decode.read()
        except WorkerCallError as failure:
            return CallFailed(Source.DECODE, failure.worker, failure.error)

    def _moved(self) -> Event | None:
        assert self.moving is not None
        if not self.moving.done():
            return None
        self.moves_to, self.moving = self.moving.result(), None
        return Stays() if self.moves_to is None else MoveReady()

    def count_unread(self) -> None:
        """Count the tokens that wait unread on a call that is left: they were computed for the client, too."""
        if self.is_begun and self.decode is not None:
            self.choice.num_computed += self.decode.num_unread


class ChoiceDriver:
    """Serves choices on the workers for one router."""

    def __init__(
        self,
        *,
        pools: PoolView,
        client: WorkerClient,
        hints: HintTracker,
        decisions: DecisionLog,
        config: RouterConfig,
        instruments: Instruments,
        keys: KeyFile | None = None,
    ) -> None:
        self._pools = pools
        self._client = client
        self._decisions = decisions
        self._config = config
        self._instruments = instruments
        self._history = AnswerHistory(config.expected_output_floor, config.expected_output_default)
        self._selector = WorkerSelector(pools=pools, hints=hints, config=config, keys=keys)
        self._migration = Migration(client=client, selector=self._selector, instruments=instruments)
        self._reports = Reports(hints=hints, prices=self._selector.prices, instruments=instruments)
        self._gate = Gate()
        self._waiting: dict[QueueEntry, _Run] = {}
        """Choices that wait for their first token."""
        self._waits_long: set[QueueEntry] = set()

    def run(self, group: ChoiceGroup) -> AsyncGenerator[tuple[Choice, NewTokens]]:
        """Yield the tokens of a request's choices as they arrive; the last message of a choice has the finish reason.

        Closing the generator early cancels all choices on every worker. To cancel a single choice, set its
        `is_answered` before asking for the next message. The first refusal or failure ends all choices.

        Raises:
            Overloaded: a first token would come too late, or did not come in time.
            Unsupported: no worker supports all requested fields.
            NoWorker, WorkerFailed, TransferError: `max_attempts` consecutive placements failed; the message lists them.
        """
        if group.is_search:
            return self._serve_search(group.choices)
        return self._serve(group.choices[0]) if len(group.choices) == 1 else self._serve_all(group.choices)

    @property
    def is_crowded(self) -> bool:
        """True if a choice has waited long for room on the worker that decodes it."""
        return bool(self._waits_long)

    def answered(self, choice: Choice, num_tokens: int) -> None:
        """Learn from a completed choice: its length predicts that of others, and the next prompt may start with it.

        Args:
            choice: ended by its end of sequence, its token limit or a stop string.
            num_tokens: length of the answer.
        """
        self._history.observe(choice.claim.tenant.id, num_tokens)
        known, token_ids = choice.block_keys, choice.spec.token_ids + tuple(choice.emitted[:num_tokens])
        new = choice.spec.block_keys(token_ids, known, block_size=self._pools.block_size)
        if new:
            self._instruments.prefixes.see((*known, *new))

    async def _serve(self, choice: Choice) -> AsyncGenerator[tuple[Choice, NewTokens]]:
        if choice.leader is not None:
            # The leader's attempt computes the prompt. Placed earlier, this choice would compute it a second time.
            await choice.leader.has_begun.wait()
        spec, machine = choice.spec, choice.machine
        expected = self._history.expect(choice.claim.tenant.id, spec.max_tokens, spec.sampling.ignore_eos)
        run = _Run(choice, expected)
        event: Event = Begun(
            max_attempts=self._config.max_attempts,
            is_search=spec.sampling.use_beam_search,
            has_images=choice.images is not None,
        )
        try:
            while True:
                instructions, then = machine.on(event)
                for instruction in instructions:
                    if isinstance(instruction, Emit):
                        tokens = instruction.tokens
                        choice.emitted += tokens.token_ids
                        choice.num_computed += num_computed(tokens)
                        choice.finish_reason = tokens.finish_reason
                        yield choice, tokens
                        if choice.is_answered:
                            break
                    elif isinstance(instruction, LeaveCalls):
                        await self._leave_calls(run)
                    else:
                        self._do(instruction, run)
                if choice.is_answered and not isinstance(event, Answered):
                    run.count_unread()
                    event = Answered()
                    continue
                if then is AWAIT_DECODE and run.is_begun:
                    event = await run.next_tokens()  # nearly every event
                    continue
                match then:
                    case Await():
                        event = await self._next(run, then)
                    case FindPlace(is_move):
                        event = await self._place(run, run.moves_to if is_move else None)
                    case GiveUp(error):
                        raise error
                    case End():
                        return
        except (GeneratorExit, asyncio.CancelledError):
            run.count_unread()
            raise
        finally:
            # Followers wait for this flag, so it is also set if the choice was refused, failed or was cancelled.
            choice.has_begun.set()
            await self._leave_calls(run)

    async def _next(self, run: _Run, wanted: Await) -> Event:
        """Return the next event, of the first source that has one."""
        time_up_s = math.inf if wanted.timeout_s is None else time.monotonic() + wanted.timeout_s
        while True:
            run.wake_by(wanted.sources)
            for source in wanted.sources:
                if (event := run.take(source)) is not None:
                    self._has_room(run)
                    return event
            if run.is_preempted:
                return self._refused(run, "preempted in the queue by a tenant with less queued work")
            now_s, limit_s = time.monotonic(), min(time_up_s, run.first_token_by_s)
            if now_s >= run.first_token_by_s:
                return self._refused(run, f"no first token within {self._first_token_timeout_s(run.attempt):.1f} s")
            if now_s >= time_up_s:
                return TimeUp()
            if limit_s == math.inf:
                await run.arrived.wait()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s - now_s):
                    await run.arrived.wait()

    def _refused(self, run: _Run, reason: str) -> Refused:
        choice, job = run.choice, run.attempt.job
        if choice.decision is not None:
            choice.decision.outcome = f"refused: {reason}"
        return Refused(Overloaded(f"{reason}; try again later", retry_after_s=max(0.1, job.compute_s)))

    def _do(self, instruction: Instruction, run: _Run) -> None:
        choice = run.choice
        match instruction:
            case OpenDecode(await_kv):
                self._open_decode(run, await_kv)
            case OpenPrefill(ticket):
                self._open_prefill(run, ticket)
            case Computed(report):
                run.is_begun = True
                self._waits_no_more(run)
                self._pools.computed(run.attempt.job)
                self._reports.prefill(run.attempt, report)
            case HasKv():
                if run.prefill is not None:
                    choice.stages.decodes(time.monotonic())
                choice.has_kv()
            case NoteTransfer(report):
                self._reports.kv_transfer(run.ticket, run.attempt, report)
            case Reach(hypotheses):
                choice.reach(hypotheses)
            case PrepareMove():
                assert run.decode is not None
                run.moving = asyncio.create_task(self._migration.prepare(run.attempt, run.decode))
                run.moving.add_done_callback(lambda _: run.arrived.set())
            case KeepOldCall():
                # The next attempt owns it, and begins before anything else happens. It is not read any more: the next
                # worker computes the tokens that still arrive on it again, and draws the same ones.
                run.decode = None
            case GoBack():
                choice.go_back()
            case WorkerLeaves(worker):
                self._worker_leaves(run, worker or run.attempt.assignment.decode)
            case LacksImages(worker):
                self._lacks_images(run, worker)
            case Failing(worker, error, is_last):
                self._failing(run, worker, error, is_last)

    # -- the calls of an attempt ---------------------------------------------------------------------------------------

    def _open_decode(self, run: _Run, await_kv: bool) -> None:
        attempt, choice = run.attempt, run.choice
        assignment, entry, job = attempt.assignment, attempt.entry, attempt.job
        run.accounting = contextlib.ExitStack()
        run.accounting.enter_context(self._pools.decoding(assignment.decode, job))
        run.accounting.enter_context(self._pools.computing(assignment.prefill or assignment.decode, job))
        if await_kv:
            choice.stages.asks_for_room(time.monotonic())
            stream = self._client.decode(assignment.decode, attempt.spec, await_kv=True, trace=choice.trace)
        else:
            stream = self._client.decode(
                assignment.decode,
                attempt.spec,
                await_kv=False,
                source=assignment.source,
                images=attempt.images,
                trace=choice.trace,
            )
        run.decode = stream
        self._waiting[entry] = run
        timeout_s = self._first_token_timeout_s(attempt)
        if not (choice.emitted or choice.has_begun.is_set()):
            run.first_token_by_s = choice.claim.arrived_s + timeout_s
        late_s = LONG_S + (0.0 if await_kv else job.compute_s)
        run.waits_for_room = asyncio.get_running_loop().call_later(late_s, self._waits_long.add, entry)

    def _open_prefill(self, run: _Run, ticket: Ticket) -> None:
        attempt, assignment = run.attempt, run.attempt.assignment
        assert assignment.prefill is not None
        # A KV transfer needs no permit: the router names the receiver, by the address in its lease.
        run.ticket = replace(ticket, kv_address=assignment.decode.info.address)
        self._reports.room(attempt)
        run.prefill = self._client.prefill(
            assignment.prefill,
            attempt.spec,
            run.ticket,
            source=assignment.source,
            images=attempt.images,
            trace=run.choice.trace,
        )
        # In a migration the prefill worker is the one that leaves, and the old call decodes on it. The new call started
        # first, so that worker is never without a call, and cannot exit before it has sent the KV.
        assignment.leave_old_call()

    async def _leave_calls(self, run: _Run) -> None:
        """Cancel what an attempt holds; idempotent."""
        if run.accounting is None:
            return
        try:
            if run.moving is not None:
                await cancel_and_wait([run.moving])
        finally:
            # The wait above may itself be cancelled. The calls hold reservations on workers: cancel them all the same.
            for stream in (run.prefill, run.decode):
                if stream is not None:
                    stream.on_arrival = None
                    stream.leave()
            run.accounting.close()
            run.attempt.assignment.leave_old_call()
            self._has_room(run)
            self._waits_no_more(run)
            run.reset()

    def _has_room(self, run: _Run) -> None:
        """Record that the decode worker has answered."""
        if run.waits_for_room is not None:
            run.waits_for_room.cancel()
            run.waits_for_room = None
            self._waits_long.discard(run.attempt.entry)

    def _waits_no_more(self, run: _Run) -> None:
        """Record that the choice no longer waits for its first token."""
        run.first_token_by_s, run.is_preempted = math.inf, False  # a preemption that comes with the token is too late
        self._waiting.pop(run.attempt.entry, None)
        self._gate.left(run.attempt.entry)

    @staticmethod
    def _first_token_timeout_s(attempt: Attempt) -> float:
        """Return the time from the request's arrival within which the first token must come."""
        alone_s = attempt.job.compute_s if attempt.job.turn[1] else 0.0
        return TTFT_DEADLINE_FACTOR * (attempt.choice.claim.objective.ttft_s + alone_s)

    # -- what has gone wrong -------------------------------------------------------------------------------------------

    def _worker_leaves(self, run: _Run, worker: Worker) -> None:
        self._pools.leaves(worker)
        text = f"{worker.info.label} leaves its role: placed again"
        run.choice.events.note(time.monotonic(), EventKind.LEAVING, text, run.attempt.spec.attempt, worker.info.id)

    def _lacks_images(self, run: _Run, worker: Worker) -> None:
        assert run.choice.images is not None
        run.choice.images.forget(worker)
        text = f"{worker.info.label} no longer holds the images: placed again with their bytes"
        run.choice.events.note(time.monotonic(), EventKind.IMAGES, text, run.attempt.spec.attempt, worker.info.id)

    def _failing(self, run: _Run, worker: Worker, error: BatonError, is_last: bool) -> None:
        choice, spec = run.choice, run.attempt.spec
        text = failed_text(worker.info, error, len(choice.emitted))
        choice.events.note(time.monotonic(), EventKind.FAILED, text, spec.attempt, worker.info.id)
        if isinstance(error, WorkerFailed):
            self._pools.suspect(worker)
        if not is_last:
            self._instruments.retries.add(1, {"error": type(error).__name__})
            logger.warning("%s is placed again after %d tokens: %s", spec.sequence_id, len(choice.emitted), error)

    # -- several choices -----------------------------------------------------------------------------------------------

    async def _serve_search(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, NewTokens]]:
        """Serve the choices of a beam search: the first one runs the search, whose beams become all the choices.

        Raises:
            InvalidRequest: the search found fewer beams than the request has choices.
        """
        async with contextlib.aclosing(self._serve(choices[0])) as messages:
            async for _, message in messages:
                if message.finish_reason is None:
                    continue
                beams = {choice: message.beams[choice.index] for choice in choices if choice.index < len(message.beams)}
                if len(beams) < len(choices):
                    raise InvalidRequest(
                        f"n is {len(choices)}, but the beam search found only {len(message.beams)} answers that the "
                        "request allows; lower n",
                        "n",
                    )
                for choice, beam in beams.items():
                    choice.emitted, choice.finish_reason = list(beam.token_ids), beam.finish_reason
                    yield (
                        choice,
                        NewTokens(token_ids=beam.token_ids, finish_reason=beam.finish_reason, scores=beam.scores),
                    )

    async def _serve_all(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, NewTokens]]:
        """Serve several choices concurrently, one task each."""
        # The bound makes the tasks wait for a slow client. What they do not read is then joined into larger messages.
        queue: asyncio.Queue[tuple[Choice, NewTokens | Exception | None]] = asyncio.Queue(maxsize=len(choices))

        async def pump(choice: Choice) -> None:
            try:
                async with contextlib.aclosing(self._serve(choice)) as messages:
                    async for item in messages:
                        await queue.put(item)
                await queue.put((choice, None))
            except Exception as error:
                # Raised by the reader of the queue, so the client first gets the tokens that came before the error.
                await queue.put((choice, error))

        running = {choice: asyncio.create_task(pump(choice)) for choice in choices}
        try:
            while running:
                choice, item = await queue.get()
                if choice not in running:
                    continue  # it was cancelled below, with this item in the queue already
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    del running[choice]
                    continue
                yield choice, item
                if choice.is_answered:
                    # Waiting for the task's end also waits until its calls are cancelled on the workers.
                    await cancel_and_wait((running.pop(choice),))
        finally:
            await cancel_and_wait(running.values())

    # -- placement -----------------------------------------------------------------------------------------------------

    async def _place(self, run: _Run, prepared: Assignment | None) -> Placed:
        """Place the choice, and admit it if this is its first attempt. Raises the errors of `_begin`."""
        choice = run.choice
        spec = choice.next_spec(time.monotonic(), run.num_expected_tokens)
        attempt = await self._begin(choice, spec, prepared)
        run.take_up(attempt)
        return Placed(attempt.assignment.placement)

    def _admit(self, entry: QueueEntry, decision: PlacementDecision) -> None:
        """Admit a choice, and end the wait of the choices that it preempts.

        Raises:
            Overloaded: its first token would come too late.
        """
        try:
            victims = self._gate.admit(entry, decision.prediction)
        except Overloaded as refusal:
            decision.outcome = f"refused: {refusal}"
            raise
        for victim in victims:
            self._instruments.shed.add(1, {"tenant": victim.tenant.id})
            if (run := self._waiting.get(victim)) is not None:
                run.preempt()

    async def _begin(self, choice: Choice, spec: SequenceSpec, prepared: Assignment | None) -> Attempt:
        """Place a choice, and admit it if this is its first attempt.

        Args:
            prepared: the workers of a choice that migrates; None: place it.

        Raises:
            Overloaded: its first token would come too late, or every worker's queue is full.
            Unsupported, NoWorker: no worker can serve it.
        """
        choice.began_s = time.monotonic()
        prompt = self._selector.prompt(spec)
        choice.block_keys = choice.block_keys or prompt.block_keys
        if spec.attempt == 0 and spec.choice_index == 0:
            self._see_prompt(choice, prompt)
        assignment, is_admitted = prepared, bool(choice.emitted)  # with tokens, another router has admitted it
        if assignment is None:
            choice.stages.attempt(choice.began_s)
            if choice.leader is not None and spec.attempt == 0:
                assignment = self._selector.beside(choice, spec, prompt, choice.leader)
                is_admitted = is_admitted or assignment is not None  # admitting the leader admitted its followers
        if assignment is None:
            group = prompt
            if choice.num_followers:
                group = replace(prompt, num_expected_tokens=prompt.num_expected_tokens * (1 + choice.num_followers))
            assignment = await self._selector.place(choice, spec, group)
        placement = assignment.placement
        choice.sampler = assignment.decode.info.sampler
        entry = QueueEntry(tenant=choice.claim.tenant, priority=choice.claim.priority, ttft_s=spec.ttft_s)
        entry.is_placed(placement)
        if spec.attempt == 0:
            prediction = self._predicted(entry, placement)
            choice.decision = self._decisions.note(spec, choice.claim, placement, prediction)
            if not is_admitted:
                self._admit(entry, choice.decision)
        choice.decode_worker = placement.decode_worker
        if prepared is None:
            choice.mode, choice.source = placement.mode, placement.source
            choice.prefill_worker = placement.prefill_worker
        self._instruments.placements.add(
            1, {"mode": placement.mode, "prefill": placement.prefill_worker, "decode": placement.decode_worker}
        )
        self._note_placed(choice, spec, placement, is_move=prepared is not None)
        job = Job(
            turn=entry.turn,
            compute_s=entry.compute_s,
            num_prompt_tokens=prompt.num_tokens,
            num_expected_tokens=prompt.num_expected_tokens,
        )
        images = self._carried(choice, spec, assignment) if choice.images is not None else ()
        return Attempt(choice=choice, spec=spec, assignment=assignment, job=job, entry=entry, images=images)

    def _carried(self, choice: Choice, spec: SequenceSpec, assignment: Assignment) -> tuple[bytes, ...]:
        """Return the encoded images that an attempt carries to the worker that computes the prompt."""
        assert choice.images is not None
        worker = assignment.prefill or assignment.decode
        if choice.machine.carries_images:
            return choice.images.all(worker)
        if assignment.moves_from is not None:  # the worker has the KV of the whole prompt
            return ()
        believed = assignment.hint.num_tokens if assignment.hint is not None else 0
        return choice.images.lacking(worker, spec, max(believed, assignment.placement.source_tokens))

    def _note_placed(self, choice: Choice, spec: SequenceSpec, placement: Placement, *, is_move: bool) -> None:
        now_s, decode_worker = time.monotonic(), placement.decode_worker
        kind, text = EventKind.MOVED, f"continues on {with_role(decode_worker, Role.DECODE)}, which now has its KV"
        if not is_move:
            kind, text = EventKind.PLACED, placed_text(placement, now_s - choice.began_s)
        choice.events.note(now_s, kind, text, spec.attempt, decode_worker)

    def _see_prompt(self, choice: Choice, prompt: Prompt) -> None:
        num_seen = self._instruments.prefixes.see_prompt(prompt.block_keys)
        # A worker always computes at least the last token.
        num_reusable = (choice.spec.num_prompt_tokens - 1) // self._pools.block_size
        choice.num_seen_tokens = min(num_seen, num_reusable) * self._pools.block_size

    def _predicted(self, entry: QueueEntry, placement: Placement) -> Prediction:
        """Return the prediction; a prompt that misses its objective even on an idle worker waits for all others."""
        if not entry.turn[1]:
            return placement.prediction
        wait_s = self._pools.wait_s(self._pools.get(entry.worker_id), entry.turn)
        return replace(placement.prediction, wait_s=wait_s)
