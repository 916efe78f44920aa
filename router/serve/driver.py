"""Serves the choices of a request on the workers: carries out the steps of their state machines.

    place -> admit -> calls to workers -> tokens for the client      one async generator for a request

`router.serve.machine` decides what happens, and this module does it: it chooses workers, makes their calls, and passes
the workers' messages to the machine as events. Choices need no tasks for that: their calls wake the loop when they have
a message, and so do the pools when they change.

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
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from baton.cluster import Worker
from baton.config import RouterConfig
from baton.errors import BatonError, Overloaded, WorkerDraining, WorkerFailed
from baton.messages import Fetched, NewTokens, PrefillReport, SequenceSpec, Ticket, Transferred
from baton.scores import NO_SCORES
from baton.tasks import Flag
from baton.telemetry.instruments import Instruments
from baton.telemetry.prometheus import NO_LABELS
from baton.trust import KeyFile
from router.admission import TTFT_DEADLINE_FACTOR, AnswerHistory, Gate, QueueEntry
from router.placement import Job, Mode, Placement, Prediction, Prompt
from router.placement.pool_view import HintTracker, PoolView
from router.serve.choice import Assignment, Choice, ChoiceGroup, Run
from router.serve.machine import (
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
    Leaves,
    NoRoom,
    NotePull,
    NoteTransfer,
    OpenDecode,
    OpenPrefill,
    Placed,
    PrepareMove,
    Reach,
    Refused,
    Stays,
    TimeUp,
    WorkerLeaves,
)
from router.serve.selector import WorkerSelector
from router.serve.waking import Waker
from router.serve.worker_client import WorkerClient, num_computed
from router.timeline import events as happened

logger = logging.getLogger(__name__)
MOVE_RETRY_S = 1.0
"""Mean time between two searches for a worker with room to which a choice can migrate."""
LONG_S = 5.0
"""A choice that waits longer for room on a worker makes the router disconnect stalled clients sooner."""


class ChoiceDriver:
    """Serves the choices of one model on its workers, for one router.

    Args:
        labels: labels of the model in metrics.
    """

    def __init__(
        self,
        *,
        pools: PoolView,
        client: WorkerClient,
        hints: HintTracker,
        config: RouterConfig,
        instruments: Instruments,
        waker: Waker,
        keys: KeyFile | None = None,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> None:
        self._labels = labels
        self._pools = pools
        self._waker = waker
        self._client = client
        self._config = config
        self._instruments = instruments
        self._history = AnswerHistory(config.expected_output_floor, config.expected_output_default)
        self._hints = hints
        self._selector = WorkerSelector(pools=pools, hints=hints, config=config, keys=keys)
        self._gate = Gate()
        self._waiting: dict[QueueEntry, Run] = {}
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
        return self._serve(group)

    @property
    def is_crowded(self) -> bool:
        """True if a choice has waited long for room on the worker that decodes it."""
        return bool(self._waits_long)

    def answered(self, choice: Choice, num_tokens: int) -> None:
        """Learn from a completed choice.

        Its length predicts the length of other answers. Its blocks count as seen, because the next prompt of a chat
        starts with this prompt and answer.

        Args:
            choice: ended by its end of sequence, its token limit or a stop string.
            num_tokens: length of the answer.
        """
        self._history.observe(choice.claim.tenant.id, num_tokens)
        known, token_ids = choice.block_keys, choice.spec.token_ids + tuple(choice.emitted[:num_tokens])
        new = choice.spec.block_keys(token_ids, known, block_size=self._pools.block_size)
        if new:
            self._instruments.prefixes.see((*known, *new))

    async def _serve(self, group: ChoiceGroup) -> AsyncGenerator[tuple[Choice, NewTokens]]:
        arrived = Flag()
        served = group.choices[:1] if group.is_search else group.choices  # one search draws all choices
        runs = [self._new_run(choice, group, arrived) for choice in served]
        try:
            while runs:
                arrived.clear()  # before the sources are read: a message that arrives meanwhile wakes the loop again
                answers: list[tuple[Choice, NewTokens]] = []
                failure: BatonError | None = None
                is_short = len(runs) == 1 and runs[0].awaits_tokens_alone
                active = [] if is_short else [run for run in runs if not run.is_silent]
                try:
                    if is_short:
                        self._step(runs[0], await runs[0].next_tokens(), group, answers)
                    else:
                        self._advance(active, group, answers)
                except BatonError as error:
                    failure = error
                passed_on_s = time.monotonic()
                for choice, tokens in answers:  # also before a failure: they came first
                    if not choice.is_answered:  # a step may emit twice, and the first tokens may have ended the answer
                        yield choice, tokens
                if failure is not None:
                    raise failure
                runs = [run for run in runs if not isinstance(run.choice.machine.then, End)]
                if runs and not answers and not is_short:
                    await self._wait(active, arrived)
                elif not is_short:
                    held_s = time.monotonic() - passed_on_s
                    for run in active:
                        run.extend(held_s)
        finally:
            for run in runs:
                run.count_unread()
                self._leave_calls(run)
                self._look_no_more(run)
                if run.moves_to is not None:  # between two attempts, this call belongs to none of them
                    run.moves_to.leave_old_call()

    def _advance(self, runs: Sequence[Run], group: ChoiceGroup, answers: list[tuple[Choice, NewTokens]]) -> None:
        """Handle the events of all choices until there are none. A choice pauses when it has tokens for the client.

        It takes no further events until the client has got these tokens. So if the client is slow, later tokens wait in
        the calls, which join them. If a stop string in these tokens ends the answer, no later event is handled.
        """
        held: set[Run] = set()
        is_idle = False
        while not is_idle:
            is_idle = True
            for run in runs:
                if run in held or isinstance(run.choice.machine.then, End) or (event := self._next(run)) is None:
                    continue
                is_idle, num_answers = False, len(answers)
                self._step(run, event, group, answers)
                if len(answers) > num_answers:
                    held.add(run)

    def _step(self, run: Run, event: Event, group: ChoiceGroup, answers: list[tuple[Choice, NewTokens]]) -> None:
        """Let the machine handle an event, and carry out its instructions."""
        choice = run.choice
        instructions, then = choice.machine.on(event)
        for instruction in instructions:
            if isinstance(instruction, Emit):
                answers += self._emitted(choice, group, instruction.tokens)
            else:
                self._do(instruction, run)
        run.time_up_s = math.inf
        match then:
            case End():
                choice.has_begun = True  # followers wait for this, also if no worker has begun to decode it
            case Await(_, timeout_s) if timeout_s is not None:
                run.time_up_s = time.monotonic() + timeout_s

    def _new_run(self, choice: Choice, group: ChoiceGroup, arrived: Flag) -> Run:
        spec = choice.spec
        expected = self._history.expect(choice.claim.tenant.id, spec.max_tokens, spec.sampling.ignore_eos)
        choice.machine.on(
            Begun(
                max_attempts=self._config.max_attempts,
                num_beams=len(group.choices) if group.is_search else 0,
                follows=choice.leader is not None,
                has_images=choice.images is not None,
            )
        )
        return Run(choice, expected, arrived)

    def _next(self, run: Run) -> Event | None:
        """Return the next event of a choice; None: it has none yet.

        Raises the error that ends the choice, unless the answer is already complete.
        """
        choice = run.choice
        if choice.is_answered:
            run.count_unread()
            return Answered()
        match choice.machine.then:
            case Await(sources):
                for source in sources:
                    if (event := run.take(source)) is not None:
                        self._has_room(run)
                        return event
                return self._time_up(run)
            case FindPlace(is_move):
                return self._place(run, run.moves_to if is_move else None)
            case GiveUp(error):
                raise error
            case End():
                return None

    def _time_up(self, run: Run) -> Event | None:
        now_s = time.monotonic()
        if run.is_preempted:
            return self._refused(run, "preempted in the queue by a tenant with less queued work")
        if now_s >= run.first_token_by_s:
            return self._refused(run, f"no first token within {self._first_token_timeout_s(run):.1f} s")
        return TimeUp() if now_s >= run.time_up_s else None

    @staticmethod
    async def _wait(runs: Sequence[Run], arrived: Flag) -> None:
        """Wait until a choice may have an event.

        Args:
            runs: all choices that have a time limit, and possibly others.
        """
        wakes_at_s = min((run.wakes_at_s for run in runs), default=math.inf)
        if wakes_at_s == math.inf:
            await arrived.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wakes_at_s - time.monotonic()):
                await arrived.wait()

    @staticmethod
    def _emitted(choice: Choice, group: ChoiceGroup, tokens: NewTokens) -> Sequence[tuple[Choice, NewTokens]]:
        """Record tokens, and return what the client gets of them. The beams of a search become choices at its end."""
        choice.timeline.num_computed += num_computed(tokens)
        if not group.is_search:
            choice.emitted += tokens.token_ids
            choice.finish_reason = tokens.finish_reason
            return ((choice, tokens),)
        if len(tokens.beams) < len(group.choices):
            return ()
        answers = []
        for each, beam in zip(group.choices, tokens.beams, strict=False):
            each.emitted, each.finish_reason = list(beam.token_ids), beam.finish_reason
            answer = NewTokens(token_ids=beam.token_ids, finish_reason=beam.finish_reason, scores=beam.scores)
            answers.append((each, answer))
        return answers

    def _refused(self, run: Run, reason: str) -> Refused:
        run.choice.timeline.add(happened.Refused(time.monotonic(), reason))
        retry_after_s = max(0.1, run.job.compute_s)
        return Refused(Overloaded(f"{reason}; try again later", retry_after_s=retry_after_s))

    def _do(self, instruction: Instruction, run: Run) -> None:
        choice = run.choice
        match instruction:
            case OpenDecode(await_kv):
                self._open_decode(run, await_kv)
            case OpenPrefill(ticket):
                self._open_prefill(run, ticket)
            case Computed(report):
                run.is_begun = True
                self._waits_no_more(run)
                self._pools.computed(run.job)
                self._computed(run, report)
            case HasKv():
                if run.prefill is not None:
                    choice.timeline.add(happened.Decoded(time.monotonic(), run.spec.attempt))
                choice.has_kv()
            case NoteTransfer(report):
                self._transferred(run, report)
            case Reach(hypotheses):
                choice.reach(hypotheses)
            case Leaves():
                assert run.decode is not None
                self._pools.leaves(run.decode.worker)
            case PrepareMove(unable, waits):
                self._prepare_move(run, unable, waits)
            case NotePull(result):
                self._note_pull(run, result)
            case KeepOldCall():
                # The next attempt owns the call, and starts before anything else happens. Tokens that still arrive on
                # the call are not read: the next worker computes them again, and draws the same ones.
                if run.decode is not None:
                    run.decode.on_arrival = None
                run.decode = None
            case LeaveCalls():
                self._leave_calls(run)
            case GoBack():
                choice.go_back()
            case WorkerLeaves(worker):
                self._worker_leaves(run, worker or run.assignment.decode)
            case LacksImages(worker):
                self._lacks_images(run, worker)
            case Failing(worker, error, is_last):
                self._failing(run, worker, error, is_last)

    # -- the calls of an attempt ---------------------------------------------------------------------------------------

    def _open_decode(self, run: Run, await_kv: bool) -> None:
        choice, assignment, entry, job = run.choice, run.assignment, run.entry, run.job
        run.accounting = contextlib.ExitStack()
        run.accounting.enter_context(self._pools.decoding(assignment.decode, job))
        run.accounting.enter_context(self._pools.computing(assignment.prefill or assignment.decode, job))
        if await_kv:
            stream = self._client.decode(assignment.decode, run.spec, await_kv=True, trace=choice.trace)
        else:
            stream = self._client.decode(
                assignment.decode,
                run.spec,
                await_kv=False,
                source=assignment.source,
                images=run.images,
                trace=choice.trace,
            )
        run.decode, stream.on_arrival = stream, run.arrived.set
        self._waiting[entry] = run
        timeout_s = self._first_token_timeout_s(run)
        if not (choice.emitted or choice.has_begun or choice.claim.was_held):
            run.first_token_by_s = choice.claim.arrived_s + timeout_s + run.held_s
        late_s = LONG_S + (0.0 if await_kv else job.compute_s)
        run.waits_for_room = asyncio.get_running_loop().call_later(late_s, self._lacks_room, run)

    def _open_prefill(self, run: Run, ticket: Ticket) -> None:
        assignment = run.assignment
        assert assignment.prefill is not None
        # A KV transfer needs no permit: the router names the receiver, by the address in its lease.
        run.ticket = replace(ticket, kv_address=assignment.decode.info.address)
        decode_worker = assignment.placement.decode_worker
        run.choice.timeline.add(happened.Reserved(time.monotonic(), run.spec.attempt, decode_worker))
        run.prefill = self._client.prefill(
            assignment.prefill,
            run.spec,
            run.ticket,
            source=assignment.source,
            images=run.images,
            trace=run.choice.trace,
        )
        run.prefill.on_arrival = run.arrived.set
        # In a migration the prefill worker is the one that leaves, and the old call decodes on it. The new call started
        # first, so that worker is never without a call, and cannot exit before it has sent the KV.
        assignment.leave_old_call()

    def _leave_calls(self, run: Run) -> None:
        """Cancel what an attempt holds; idempotent."""
        if run.accounting is None:
            return
        run.end_fetch()
        for stream in (run.prefill, run.decode):
            if stream is not None:
                stream.on_arrival = None
                stream.leave()
        run.accounting.close()
        run.assignment.leave_old_call()
        self._has_room(run)
        self._waits_no_more(run)
        run.reset()

    def _lacks_room(self, run: Run) -> None:
        """Record that the decode worker has sent nothing within the time limit.

        If its message has arrived and is unread because the client is slow, record nothing.
        """
        if run.decode is not None and not run.decode.has_message:
            self._waits_long.add(run.entry)

    def _has_room(self, run: Run) -> None:
        """Record that the decode worker has answered."""
        if run.waits_for_room is not None:
            run.waits_for_room.cancel()
            run.waits_for_room = None
            self._waits_long.discard(run.entry)

    def _waits_no_more(self, run: Run) -> None:
        """Record that the choice no longer waits for its first token."""
        run.first_token_by_s, run.is_preempted = math.inf, False  # a preemption that comes with the token is too late
        self._waiting.pop(run.entry, None)
        self._gate.left(run.entry)

    @staticmethod
    def _first_token_timeout_s(run: Run) -> float:
        """Return the time from the request's arrival within which the first token must come."""
        alone_s = run.job.compute_s if run.job.turn[1] else 0.0
        return TTFT_DEADLINE_FACTOR * (run.choice.claim.objective.ttft_s + alone_s)

    # -- migration -----------------------------------------------------------------------------------------------------

    def _prepare_move(self, run: Run, unable: frozenset[str], waits: bool) -> None:
        """Search for a worker to which the choice can migrate, and make it pull the KV that exists so far.

        Then the choice is placed again in disaggregated mode, with the leaving worker as its prefill worker. That
        worker caches all but the last few tokens, and transfers the KV that the next worker has not pulled yet as for
        any prompt.
        """
        if not waits:
            self._seek(run, unable)
            return
        # All choices of the leaving worker look for room at the same time: the jitter spreads them.
        delay_s = MOVE_RETRY_S * random.uniform(0.5, 1.5)
        run.seeks = asyncio.get_running_loop().call_later(delay_s, self._seek_again, run)

    def _seek_again(self, run: Run) -> None:
        assert run.decode is not None
        if self._pools.stays(run.decode.worker):
            run.found_none = Stays()
        else:
            self._seek(run, frozenset())
        run.arrived.set()

    def _seek(self, run: Run, unable: frozenset[str]) -> None:
        assert run.decode is not None
        choice, leaving, run.seeks = run.choice, run.decode.worker, None
        prompt_ids = run.spec.token_ids[: run.spec.num_prompt_tokens]
        spec = replace(run.spec, token_ids=prompt_ids + choice.known_ids, hypotheses=choice.hypotheses)
        found = self._selector.destination(choice, spec, unable)
        if found is None:
            run.found_none = NoRoom()
            return
        placement, prompt = found
        worker = self._pools.get(placement.decode_worker)
        job = Job(
            turn=run.entry.turn,
            compute_s=0.0,
            num_prompt_tokens=prompt.num_tokens,
            num_expected_tokens=prompt.num_expected_tokens,
        )
        source = self._selector.source(prompt, leaving, worker, len(spec.token_ids))
        placement = Placement(mode=Mode.DISAGGREGATED, decode_worker=worker.info.id, prefill_worker=leaving.info.id)
        run.moves_to = Assignment(
            placement=placement, decode=worker, prefill=leaving, source=None, hint=None, moves_from=run.decode
        )
        run.fetch_accounting.enter_context(self._pools.decoding(worker, job))
        run.fetch = self._client.fetch(worker, spec, source, trace=choice.trace)
        run.fetch.on_arrival = run.arrived.set

    def _note_pull(self, run: Run, result: Fetched | CallFailed) -> None:
        if isinstance(result, Fetched):
            self._instruments.migrations.add(1, {**self._labels, "pulled": str(result.num_tokens > 0).lower()})
            return
        worker, error = result.worker, result.error
        logger.warning("%s cannot migrate to %s: %s", run.spec.sequence_id, worker.info.label, error)
        if isinstance(error, WorkerDraining):
            self._pools.leaves(worker)

    # -- what workers report ------------------------------------------------------------------------------------------

    def _computed(self, run: Run, report: PrefillReport) -> None:
        """Record that the prompt is computed and the first token has arrived, and learn from the report."""
        hint, choice, now_s = run.assignment.hint, run.choice, time.monotonic()
        if report.prompt_scores is not NO_SCORES:
            if run.spec.sampling.prompt_logprobs is not None:
                choice.prompt_scores = report.prompt_scores
            report = replace(report, prompt_scores=NO_SCORES)
        if hint is None:
            return  # a migration has neither a wait in a queue nor a first token to record
        # Pulled blocks may be evicted before the worker looks the prefix up, so the difference may be negative.
        self._hints.settle(hint, max(0, report.num_cached_tokens - report.num_pulled_tokens))
        if report.num_pulled_tokens:
            self._selector.prices.pulled(report.num_pulled_tokens, report.pull_s)
        info, num_emitted = (run.assignment.prefill or run.assignment.decode).info, len(choice.emitted)
        choice.timeline.add(happened.Computed(now_s, run.spec.attempt, info.id, info.role, num_emitted, report))
        prediction = run.assignment.placement.prediction
        for what, predicted_s, measured_s in (
            ("ttft", prediction.ttft_s, now_s - run.began_s),
            ("compute", prediction.compute_s, report.prefill_s),
        ):
            if measured_s > 0:
                self._instruments.prediction_error.record(
                    abs(predicted_s - measured_s) / measured_s, {**self._labels, "of": what}
                )

    def _transferred(self, run: Run, report: Transferred) -> None:
        """Record the prefill worker's report of the KV transfer, and learn from it."""
        ticket = run.ticket
        decode_worker = run.assignment.placement.decode_worker
        run.choice.timeline.add(happened.KvTransferred(time.monotonic(), run.spec.attempt, decode_worker, report))
        self._selector.prices.transferred(ticket.num_tokens - ticket.skip_tokens, report.exposed_s)
        self._instruments.transfer_duration.record(report.transfer_s, self._labels)
        self._instruments.transfer_bytes.add(report.num_bytes, self._labels)

    # -- what has gone wrong -------------------------------------------------------------------------------------------

    def _worker_leaves(self, run: Run, worker: Worker) -> None:
        self._pools.leaves(worker)
        attempt, info = run.spec.attempt, worker.info
        run.choice.timeline.add(happened.Left(time.monotonic(), attempt, info.id, info.role))

    def _lacks_images(self, run: Run, worker: Worker) -> None:
        assert run.choice.images is not None
        run.choice.images.forget(worker)
        attempt, info = run.spec.attempt, worker.info
        run.choice.timeline.add(happened.LackedImages(time.monotonic(), attempt, info.id, info.role))

    def _failing(self, run: Run, worker: Worker, error: BatonError, is_last: bool) -> None:
        choice, spec, info, text = run.choice, run.spec, worker.info, happened.error_text(error)
        num_emitted = len(choice.emitted)
        choice.timeline.add(happened.Failed(time.monotonic(), spec.attempt, info.id, info.role, num_emitted, text))
        if isinstance(error, WorkerFailed):
            self._pools.suspect(worker)
        if not is_last:
            choice.timeline.retries += 1
            self._instruments.retries.add(1, {**self._labels, "error": type(error).__name__})
            logger.warning("%s is placed again after %d tokens: %s", spec.sequence_id, num_emitted, error)

    # -- placement -----------------------------------------------------------------------------------------------------

    def _place(self, run: Run, prepared: Assignment | None) -> Placed | None:
        """Place a choice, and admit it at its first attempt. Return None if no worker is ready for it yet.

        Args:
            prepared: the workers of the prepared migration; None: choose workers.

        Raises:
            Overloaded: its first token would come too late, or every worker's queue is full.
            Unsupported, NoWorker: no worker can serve it.
        """
        if run.place_by_s == math.inf:
            self._start_attempt(run, is_move=prepared is not None)
        now_s = time.monotonic()
        if prepared is None and self._pools.sleeps:
            run.place_by_s = self._waker.wait_until_s(run.began_s, run.place_by_s)
        if run.waits_for_change:
            if now_s < run.place_by_s:
                return None
            self._look_no_more(run)
        choice, assignment, is_admitted = run.choice, prepared, bool(run.choice.emitted)
        if assignment is None and choice.leader is not None and run.spec.attempt == 0:
            assignment = self._selector.beside(choice, run.spec, run.prompt, choice.leader)
            is_admitted = is_admitted or assignment is not None  # admitting the leader admitted its followers
        if assignment is None:
            prompt = run.prompt
            if choice.num_followers:
                num_expected = prompt.num_expected_tokens * (1 + choice.num_followers)
                prompt = replace(prompt, num_expected_tokens=num_expected)
            is_late = now_s >= run.place_by_s
            if is_late and self._pools.sleeps:
                raise self._waker.why_asleep()
            assignment = self._selector.place(choice, run.spec, prompt, is_late=is_late)
        if assignment is None:
            run.waits_for_change = True
            self._pools.on_change(run.look_again)
            return None
        run.place_by_s, run.moves_to = math.inf, None
        self._assign(run, assignment, is_move=prepared is not None, is_admitted=is_admitted)
        return Placed(assignment.placement)

    def _look_no_more(self, run: Run) -> None:
        """Record that the choice no longer waits for a change of the pools; idempotent."""
        if run.waits_for_change:
            run.waits_for_change = False
            self._pools.forget(run.look_again)

    def _start_attempt(self, run: Run, *, is_move: bool) -> None:
        choice, now_s = run.choice, time.monotonic()
        run.spec, run.began_s = choice.next_spec(now_s - run.held_s, run.num_expected_tokens), now_s
        run.place_by_s = now_s + self._config.worker_wait_s
        prompt = run.prompt = self._selector.prompt(run.spec)
        choice.block_keys = choice.block_keys or prompt.block_keys
        if run.spec.attempt == 0 and run.spec.choice_index == 0:
            self._see_prompt(choice, prompt)
        if not is_move:
            choice.timeline.add(happened.Attempted(now_s, run.spec.attempt, choice.timeline.last_token_s))

    def _assign(self, run: Run, assignment: Assignment, *, is_move: bool, is_admitted: bool) -> None:
        """Record the workers of an attempt. Raises Overloaded if the gate does not admit the choice."""
        choice, spec, placement = run.choice, run.spec, assignment.placement
        choice.sampler = assignment.decode.info.sampler
        claim = choice.claim
        entry = QueueEntry(tenant=claim.tenant, priority=claim.priority, ttft_s=spec.ttft_s, was_held=claim.was_held)
        entry.is_placed(placement)
        now_s = time.monotonic()
        if is_move:
            choice.timeline.add(happened.Migrated(now_s, spec.attempt, placement.decode_worker))
        else:
            is_first, waited_s = spec.attempt == 0, now_s - run.began_s
            prediction = self._predicted(entry, placement) if is_first else placement.prediction
            expected = spec.num_expected_tokens
            noted = placement if is_first else replace(placement, considered=())  # only the first one is explained
            choice.timeline.add(happened.Placed(now_s, spec.attempt, waited_s, noted, prediction, expected))
            if is_first and not is_admitted:
                self._admit(choice, entry, prediction)
        workers = {"prefill": placement.prefill_worker, "decode": placement.decode_worker}
        self._instruments.placements.add(1, {**self._labels, "mode": placement.mode, **workers})
        run.assignment, run.entry = assignment, entry
        run.job = Job(
            turn=entry.turn,
            compute_s=entry.compute_s,
            num_prompt_tokens=run.prompt.num_tokens,
            num_expected_tokens=run.prompt.num_expected_tokens,
        )
        run.images = self._carried(choice, spec, assignment) if choice.images is not None else ()

    def _admit(self, choice: Choice, entry: QueueEntry, prediction: Prediction) -> None:
        """Admit a choice, and end the wait of the choices that it preempts.

        Raises:
            Overloaded: its first token would come too late.
        """
        try:
            victims = self._gate.admit(entry, prediction)
        except Overloaded as refusal:
            choice.timeline.add(happened.Refused(time.monotonic(), str(refusal)))
            raise
        for victim in victims:
            self._instruments.shed.add(1, {**self._labels, "tenant": victim.tenant.id})
            if (run := self._waiting.get(victim)) is not None:
                run.preempt()

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

    def _see_prompt(self, choice: Choice, prompt: Prompt) -> None:
        num_seen = self._instruments.prefixes.see_prompt(prompt.block_keys)
        # A worker always computes at least the last token.
        num_reusable = (choice.spec.num_prompt_tokens - 1) // self._pools.block_size
        choice.timeline.num_seen_tokens = min(num_seen, num_reusable) * self._pools.block_size

    def _predicted(self, entry: QueueEntry, placement: Placement) -> Prediction:
        """Return the prediction of a placement.

        A prompt that would miss its objective even on an idle worker waits for all others, so its wait is longer.
        """
        if not entry.turn[1]:
            return placement.prediction
        wait_s = self._pools.wait_s(self._pools.get(entry.worker_id), entry.turn)
        return replace(placement.prediction, wait_s=wait_s)
