"""Prefill: computes a prompt's KV and its first token, and hands the blocks over while it computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from opentelemetry.context import Context

from baton.engine.core.engine import Admitted, Generated
from baton.engine.core.loop import EngineLoop, SequenceHandle
from baton.engine.core.sequence import Purpose
from baton.errors import TransferError, TransferRefused, WorkerDraining, WorkerFailed
from baton.messages import FirstToken, HandedOver, PrefillReport, PrefillRequest
from baton.telemetry import tracing
from kvstore.transfer.endpoint import KvEndpoint
from kvstore.transfer.sender import OutgoingTransfer


class PrefillService:
    """Args:
    is_draining: whether the worker leaves this role.
    """

    def __init__(
        self, worker_id: str, loop: EngineLoop, kv: KvEndpoint, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._worker_id = worker_id
        self._loop = loop
        self._kv = kv
        self._is_draining = is_draining

    async def prefill(self, request: PrefillRequest, trace: Context) -> AsyncGenerator[FirstToken | HandedOver]:
        """In order: offer, pull what another worker holds, compute and send side by side, first token, hand-over.

        Raises:
            WorkerDraining: the worker takes no new work. An answer that goes on elsewhere is none: its KV is here.
            TransferRefused: the ticket is not of this sequence, or its worker's KV is of another kind.
        """
        spec, ticket, source = request.sequence, request.ticket, request.source
        if ticket and ticket.num_tokens != len(spec.token_ids):
            raise TransferRefused(f"the ticket is for {ticket.num_tokens} tokens, the prompt has {len(spec.token_ids)}")
        if self._is_draining() and not spec.is_continued:
            raise WorkerDraining(f"{self._worker_id} takes no new work")
        labels: tracing.Attributes = {"baton.worker": self._worker_id}
        arrived_s = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            transfer = await stack.enter_async_context(self._kv.sender.transfer(ticket)) if ticket else None
            await self._kv.sender.wait_for_room(self._loop.max_waiting(spec))
            began_s = time.monotonic()
            num_pulled = await self._kv.prefixes.fetch(spec, source, arrived_s, trace) if source else 0
            pull_s = time.monotonic() - began_s if num_pulled else 0.0
            handle = await stack.enter_async_context(self._loop.sequence(spec, Purpose.PREFILL, arrived_s))
            admitted = await handle.next()
            assert isinstance(admitted, Admitted)
            if transfer is not None:
                await stack.enter_async_context(self._streaming(transfer, handle))
            output = await handle.next()
            assert isinstance(output, Generated)
            sequence = output.sequence
            queue_s = sequence.scheduled_s - sequence.arrival_s
            prefill_s = sequence.first_token_s - sequence.scheduled_s
            tracing.record_span("prefill.queue", trace, queue_s, labels, ended_s_ago=prefill_s)
            computed = {**labels, "baton.cached_tokens": sequence.num_cached_tokens}
            tracing.record_span("prefill.compute", trace, prefill_s, computed)
            # The first token goes out at once; the blocks stay held until the transfer is over.
            yield FirstToken(
                token_id=output.token_id,
                finish_reason=output.finish_reason,
                report=PrefillReport(
                    num_cached_tokens=sequence.num_cached_tokens,
                    queue_s=queue_s,
                    prefill_s=prefill_s,
                    num_pulled_tokens=num_pulled,
                    pull_s=pull_s,
                ),
            )
            if transfer is not None and output.finish_reason is None:
                handed_over = await _finished(transfer, output.token_id)
                sent = {
                    **labels,
                    "baton.transfer_id": transfer.ticket.transfer_id,
                    "baton.bytes": handed_over.num_bytes,
                    "baton.chunks": handed_over.num_chunks,
                    "baton.exposed_s": handed_over.exposed_s,
                }
                tracing.record_span("kv.transfer", trace, handed_over.transfer_s, sent)
                yield handed_over

    @contextlib.asynccontextmanager
    async def _streaming(self, transfer: OutgoingTransfer, handle: SequenceHandle) -> AsyncIterator[None]:
        """The transfer reads the sequence's blocks as they are computed, while the block is entered."""
        sequence = handle.sequence
        blocks = self._loop.pin(sequence)
        try:
            transfer.attach(blocks, sequence.state_slot if sequence.state_slot >= 0 else None)
            handle.watch(transfer.advance)
            yield
        finally:
            try:
                await transfer.close()  # the sequence's states, which cannot be pinned, are held until here
            finally:
                self._loop.unpin(blocks)


async def _finished(transfer: OutgoingTransfer, first_token: int) -> HandedOver:
    try:
        return await transfer.finish(first_token)
    except WorkerFailed as error:
        # It is the decode worker that failed; the router must not take this one for broken.
        raise TransferError(str(error)) from error
