"""Serves the choices of a request on the workers: place, attempt, learn, and retry when a worker fails.

A choice is placed before it is admitted, because admission needs the predicted time of its first token. It is admitted
with a deadline for that token. If the deadline passes, or the choice is preempted, the client gets the error at once.

If a worker fails before the last token, the choice is placed again with the tokens emitted so far as part of its
prompt. Tokens are drawn by position, so the stream continues unchanged on any worker with the same sampler. Placement
finds the KV that survived as it finds any cached prefix.

A worker that leaves its role asks the router to migrate its choices (`router.dispatch.migration`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from baton.cluster import Role, Worker, with_role
from baton.config import RouterConfig
from baton.errors import ImagesMissing, InvalidRequest, WorkerDraining, WorkerFailed
from baton.messages import NewTokens, SequenceSpec
from baton.tasks import cancel_and_wait
from baton.telemetry.instruments import Instruments
from baton.trust import KeyFile
from router.admission import AnswerHistory, QueueEntry
from router.dispatch.choice import (
    Assignment,
    Attempt,
    AttemptFailed,
    Choice,
    ChoiceGroup,
    Finished,
    Moved,
    Outcome,
    WorkerLeaving,
)
from router.dispatch.decisions import DecisionLog
from router.dispatch.events import EventKind, failed_text, placed_text
from router.dispatch.exchange import FINISHED, Exchange, FirstTokenWait
from router.dispatch.migration import Migration
from router.dispatch.reports import Reports
from router.dispatch.retry import Failure, consecutive, given_up, is_used_up, to_avoid
from router.dispatch.selector import WorkerSelector
from router.dispatch.worker_client import WorkerCallError, WorkerClient, num_computed
from router.placement import Job, Placement, Prediction, Prompt
from router.placement.pool_view import PoolView
from router.placement.stale_hints import HintTracker

logger = logging.getLogger(__name__)


class Dispatcher:
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
        self._decisions = decisions
        self._config = config
        self._instruments = instruments
        self._history = AnswerHistory(config.expected_output_floor, config.expected_output_default)
        self._selector = WorkerSelector(pools=pools, hints=hints, config=config, keys=keys)
        self._waits = FirstTokenWait(instruments)
        self._exchange = Exchange(
            client=client,
            pools=pools,
            waits=self._waits,
            migration=Migration(client=client, selector=self._selector, instruments=instruments),
            reports=Reports(hints=hints, prices=self._selector.prices, instruments=instruments),
        )

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
        return self._waits.is_tried

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
        claim, spec = choice.claim, choice.spec
        expected = self._history.expect(claim.tenant.id, spec.max_tokens, spec.sampling.ignore_eos)
        prepared: Assignment | None = None
        outcome: NewTokens | Outcome = FINISHED
        try:
            while True:
                attempt = await self._begin(choice, choice.next_spec(time.monotonic(), expected), prepared)
                # `aclosing` cancels the attempt's calls here and now. A generator that is only dropped would keep its
                # places on the workers until the garbage collector finds it.
                async with contextlib.aclosing(self._exchange.serve(attempt)) as messages:
                    async for outcome in messages:
                        if isinstance(outcome, NewTokens):
                            choice.emitted += outcome.token_ids
                            choice.num_computed += num_computed(outcome)
                            choice.finish_reason = outcome.finish_reason
                            yield choice, outcome
                            if choice.is_answered:
                                return
                choice.num_attempts += 1
                prepared = None
                match outcome:
                    case Finished():
                        return
                    case Moved(assignment):
                        prepared = assignment
                        choice.go_back()
                    case WorkerLeaving(worker):
                        self._leaves(choice, worker, attempt)
                    case AttemptFailed(failure):
                        self._learn(choice, failure, attempt)
        finally:
            # Followers wait for this flag, so it is also set if the choice was refused, failed or was cancelled.
            choice.has_begun.set()
            choice.leave_superseded()

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
                self._waits.admit(entry, choice.decision)
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
        if choice.carries_images:
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

    def _leaves(self, choice: Choice, worker: Worker, attempt: Attempt) -> None:
        """Record that a worker leaves before it has computed anything of the choice."""
        self._pools.leaves(worker)
        worker_id = worker.info.id
        text = f"{worker.info.label} leaves its role: placed again"
        choice.events.note(time.monotonic(), EventKind.LEAVING, text, attempt.spec.attempt, worker_id)

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

    def _learn(self, choice: Choice, failure: WorkerCallError, attempt: Attempt) -> None:
        """Record a failed attempt, for the next placement of this choice and for later choices.

        Raises:
            InvalidRequest: the worker rejected the request; the other workers would, too.
            BatonError: the attempts are used up.
        """
        error, worker = failure.error, failure.worker
        if isinstance(error, InvalidRequest):
            raise error from failure
        if isinstance(error, WorkerDraining):
            self._leaves(choice, worker, attempt)
            return
        choice.go_back()
        has_carried, choice.carries_images = choice.carries_images, choice.images is not None
        if isinstance(error, ImagesMissing) and choice.images is not None and not has_carried:
            choice.images.forget(worker)
            text = f"{worker.info.label} no longer holds the images: placed again with their bytes"
            choice.events.note(time.monotonic(), EventKind.IMAGES, text, attempt.spec.attempt, worker.info.id)
            return
        text = failed_text(worker.info, error, len(choice.emitted))
        choice.events.note(time.monotonic(), EventKind.FAILED, text, attempt.spec.attempt, worker.info.id)
        if isinstance(error, WorkerFailed):
            self._pools.suspect(worker)
        failed = Failure(
            worker=worker.info,
            error=error,
            placement=attempt.assignment.placement,
            num_emitted=len(choice.emitted),
        )
        choice.failures = consecutive(choice.failures, failed)
        if is_used_up(choice.failures, self._config.max_attempts):
            raise given_up(choice.failures) from failure
        choice.avoid = to_avoid(choice.failures)
        choice.retries += 1
        self._instruments.retries.add(1, {"error": type(error).__name__})
        logger.warning("%s is placed again after %d tokens: %s", attempt.spec.sequence_id, len(choice.emitted), error)
