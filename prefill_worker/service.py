"""Prefill service: computes a prompt's KV and its first token, and transfers the blocks meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from opentelemetry.context import Context

from baton.errors import TransferError, TransferRefused, WorkerFailed
from baton.messages import FirstToken, PrefillReport, PrefillRequest, Ticket, Transferred
from baton.telemetry import tracing
from engine.core.outputs import Admitted, Generated
from engine.core.sequence import Purpose
from engine.core.serving import ServedSequence
from kvstore.transfer.endpoint import WorkerContext
from kvstore.transfer.sender import OutgoingTransfer


class PrefillService:
    """Handler of `PrefillRequest`."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker

    async def prefill(self, request: PrefillRequest, trace: Context) -> AsyncGenerator[FirstToken | Transferred]:
        """Offer, pull the prefix that another worker holds, then compute and send concurrently.

        Raises:
            WorkerDraining: the worker takes no new work. A migrated response is accepted, because its KV is here.
            TransferRefused: the ticket is for another sequence, or its worker's KV is of another kind.
        """
        worker, spec, ticket, source = self._worker, request.sequence, request.ticket, request.source
        if ticket is not None:
            _require_fitting(ticket, len(spec.token_ids))
        if worker.is_draining and not spec.is_continued:
            raise worker.refusal()
        arrived_s = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            transfer = await stack.enter_async_context(worker.kv.sender.transfer(ticket)) if ticket else None
            await worker.kv.sender.wait_for_room(worker.engine.max_waiting(spec))
            began_s = time.monotonic()
            num_pulled = await worker.kv.prefixes.fetch(spec, source, arrived_s, trace) if source else 0
            pull_s = time.monotonic() - began_s if num_pulled else 0.0
            if request.images:
                await worker.engine.keep_images(request.images, spec.cache_seed)
                request = replace(request, images=())  # the engine has them; the KV transfer may take long
            sequence = await stack.enter_async_context(worker.engine.sequence(spec, Purpose.PREFILL, arrived_s))
            admitted = await sequence.next()
            assert isinstance(admitted, Admitted)
            if transfer is not None:
                await stack.enter_async_context(self._streaming(transfer, sequence))
            output = await _computed(sequence)
            assert output.report is not None
            # Room is reported by the decode worker; here the next prompt waits for the previous transfer.
            report = replace(output.report, num_pulled_tokens=num_pulled, pull_s=pull_s, room_s=0.0)
            self._record(report, trace)
            # The first token is sent at once; the blocks stay held until the transfer is over.
            first_token = output.token_ids[0] if output.token_ids else None
            yield FirstToken(
                token_id=first_token, finish_reason=output.finish_reason, report=report, scores=output.scores
            )
            if transfer is not None and output.finish_reason is None:
                transferred = await _finished(transfer, first_token)
                sent: tracing.Attributes = {
                    "baton.worker": worker.worker_id,
                    "baton.transfer_id": transfer.ticket.transfer_id,
                    "baton.bytes": transferred.num_bytes,
                    "baton.chunks": transferred.num_chunks,
                    "baton.exposed_s": transferred.exposed_s,
                }
                tracing.record_span("kv.transfer", trace, transferred.transfer_s, sent)
                yield transferred

    def _record(self, report: PrefillReport, trace: Context) -> None:
        labels: tracing.Attributes = {"baton.worker": self._worker.worker_id}
        tracing.record_span("prefill.queue", trace, report.queue_s, labels, ended_s_ago=report.prefill_s)
        computed = {**labels, "baton.cached_tokens": report.num_cached_tokens}
        tracing.record_span("prefill.compute", trace, report.prefill_s, computed)

    @contextlib.asynccontextmanager
    async def _streaming(self, transfer: OutgoingTransfer, sequence: ServedSequence) -> AsyncIterator[None]:
        """Context manager: streams the sequence's KV blocks to the peer while they are being computed."""
        pin = await sequence.pin()
        try:
            transfer.extend(pin.block_ids)
            sequence.watch(transfer.on_progress)
            yield
        finally:
            try:
                await transfer.close()
            finally:
                self._worker.engine.unpin(pin)


def _require_fitting(ticket: Ticket, num_tokens: int) -> None:
    """Refuse a ticket of another sequence.

    The receiver may compute the prompt's last token itself, unless the KV comes with a state, which covers all tokens.
    """
    least = num_tokens if ticket.layout.states else num_tokens - 1
    if not least <= ticket.num_tokens <= num_tokens:
        raise TransferRefused(f"the ticket is for {ticket.num_tokens} tokens, the prompt has {num_tokens}")


async def _computed(sequence: ServedSequence) -> Generated:
    """Wait until the prompt is computed; the output has the first token if the engine samples it here.

    Raises:
        TransferError: the engine has preempted the prompt and recomputes its KV into other blocks.
    """
    output = await sequence.next()
    if not isinstance(output, Generated):
        raise TransferError(f"the prompt lost its blocks while it was transferred: {type(output).__name__}")
    return output


async def _finished(transfer: OutgoingTransfer, first_token: int | None) -> Transferred:
    try:
        return await transfer.finish(first_token)
    except WorkerFailed as error:
        # The decode worker failed; the router must not consider this worker broken.
        raise TransferError(str(error)) from error
