"""Decode service: generates output from transferred KV, or after computing the prompt here (aggregated mode)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from opentelemetry.context import Context

from baton.errors import TransferCorrupted
from baton.messages import (
    DecodeRequest,
    Fetched,
    FetchRequest,
    NewTokens,
    PrefixSource,
    SequenceSpec,
    Ticket,
)
from baton.scores import TokenScores
from baton.telemetry import tracing
from engine.core.outputs import Generated, Reserved
from engine.core.sequence import Purpose
from engine.core.serving import ServedSequence
from kvstore.transfer.connection.reservations import Expected
from kvstore.transfer.endpoint import WorkerContext


class DecodeService:
    """Handlers of `DecodeRequest` and `FetchRequest`."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker

    async def decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Ticket | NewTokens]:
        """Serve one call while the generator is open.

        Raises:
            WorkerDraining: the worker takes no new work.
            TransferError: the KV did not arrive, or came with an invalid token.
        """
        if self._worker.is_draining:
            raise self._worker.refusal()
        spec = request.sequence
        span = tracing.start_span("decode", trace, {"baton.worker": self._worker.worker_id})
        try:
            if request.await_kv:
                serve: AsyncGenerator[Ticket | NewTokens] = self._after_kv_transfer(spec)
            else:
                serve = self._aggregated(spec, request.source, tracing.context_of(span), request.images)
                request = replace(request, images=())  # the engine keeps them; the answer may take long
            async with contextlib.aclosing(serve) as events:
                async for event in events:
                    yield event
        finally:
            span.end()

    async def fetch(self, request: FetchRequest, trace: Context) -> AsyncGenerator[Fetched]:
        """Pull a prefix of a sequence that will migrate to this worker, so that little is missing when it does."""
        if self._worker.is_draining:
            raise self._worker.refusal()
        num_tokens = await self._worker.kv.prefixes.fetch(request.sequence, request.source, time.monotonic(), trace)
        if self._worker.is_draining:
            raise self._worker.refusal()
        yield Fetched(num_tokens)

    async def _aggregated(
        self, spec: SequenceSpec, source: PrefixSource | None, trace: Context, images: tuple[bytes, ...] = ()
    ) -> AsyncGenerator[NewTokens]:
        """Prefill and decode here, starting with a prefix pulled from `source` if there is one."""
        arrived_s = time.monotonic()
        began_s = time.monotonic()
        num_pulled = await self._worker.kv.prefixes.fetch(spec, source, arrived_s, trace) if source else 0
        pull_s = time.monotonic() - began_s if num_pulled else 0.0
        if images:
            await self._worker.engine.keep_images(images, spec.cache_seed)
            images = ()
        async with (
            self._worker.engine.sequence(spec, Purpose.GENERATE, arrived_s) as sequence,
            contextlib.aclosing(_tokens(sequence)) as new,
        ):
            async for message in new:
                report = message.report and replace(message.report, num_pulled_tokens=num_pulled, pull_s=pull_s)
                yield replace(message, report=report) if report else message

    async def _after_kv_transfer(self, spec: SequenceSpec) -> AsyncGenerator[Ticket | NewTokens]:
        """Reserve blocks, respond with the ticket, wait for the KV, and decode. The open call is the reservation."""
        worker = self._worker
        async with worker.engine.sequence(spec, Purpose.RECEIVE) as sequence:
            reserved = await sequence.next()
            assert isinstance(reserved, Reserved)
            name = f"{spec.sequence_id}@{worker.worker_id}"
            # A state includes all tokens, so the last one cannot be recomputed here to sample the first token.
            expected = Expected.WITH_FIRST_TOKEN if worker.engine.spec.states else Expected.WHOLE
            ticket = worker.kv.receiver.expect(
                name,
                reserved.num_tokens,
                reserved.num_cached_tokens,
                reserved.block_ids,
                expected,
                begins=reserved.begins,
            )
            try:
                yield ticket
                arrival = await worker.kv.receiver.wait_committed(ticket)
            finally:
                # In any case no transfer writes these blocks from here on: `insert` uses them, or leaving the
                # sequence's context frees them.
                await worker.kv.receiver.release(ticket)
            first_token, vocab_size = arrival.first_token, worker.engine.vocab_size
            if first_token is not None and first_token >= vocab_size:
                raise TransferCorrupted(f"token {first_token} came with the KV; the model has {vocab_size}")
            sequence.insert(first_token, arrival.num_tokens)
            async with contextlib.aclosing(_tokens(sequence)) as messages:
                async for message in messages:
                    # The router already has the first token from the prefill worker, and its finish reason. If that
                    # ends the sequence, nothing is left to send.
                    if message.token_ids or message.beams or first_token is None:
                        yield message


async def _tokens(sequence: ServedSequence) -> AsyncGenerator[NewTokens]:
    """Yield all further tokens; tokens that are ready at the same time are sent together."""
    while True:
        outputs = [await sequence.next(), *sequence.take_ready()]
        generated = [output for output in outputs if isinstance(output, Generated)]
        if not generated:
            continue
        token_ids = tuple(token_id for output in generated for token_id in output.token_ids)
        finish_reason = generated[-1].finish_reason
        report = next((output.report for output in generated if output.report is not None), None)
        num_searched = sum(output.num_searched for output in generated)
        if token_ids or finish_reason is not None or report is not None or num_searched:
            scores = TokenScores.joined(output.scores for output in generated)
            yield NewTokens(
                token_ids=token_ids,
                finish_reason=finish_reason,
                report=report,
                scores=scores,
                beams=generated[-1].beams,
                num_searched=num_searched,
            )
        if finish_reason is not None:
            return
