"""Prefill: computes a prompt's KV and its first token, and hands the blocks over."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from opentelemetry.context import Context

from baton import wire
from baton.engine.engine import Generated
from baton.engine.loop import EngineLoop
from baton.engine.sequence import Purpose, Sequence
from baton.errors import TransferError, WorkerFailed
from baton.messages import FirstToken, HandedOver, SequenceSpec, Ticket
from baton.telemetry import tracing
from baton.v1 import worker_pb2, worker_pb2_grpc
from kvstore.transfer.sender import KvSender


class PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker_id: str, loop: EngineLoop, sender: KvSender) -> None:
        self._worker_id = worker_id
        self._loop = loop
        self._sender = sender

    async def Prefill(  # noqa: N802 - the generated name
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        spec, ticket = wire.prefill_request_from_pb(request)
        trace = tracing.from_metadata(context.invocation_metadata())
        async with contextlib.aclosing(self._prefill(spec, ticket, trace)) as events:
            async for event in events:
                yield wire.prefill_response(event)

    async def _prefill(
        self, spec: SequenceSpec, ticket: Ticket | None, trace: Context
    ) -> AsyncGenerator[FirstToken | HandedOver]:
        labels: tracing.Attributes = {"baton.worker": self._worker_id}
        async with self._loop.sequence(spec, Purpose.PREFILL) as handle:
            output = await handle.next()
            assert isinstance(output, Generated)
            sequence = output.sequence
            queue_s = sequence.scheduled_s - sequence.arrival_s
            prefill_s = sequence.first_token_s - sequence.scheduled_s
            tracing.record_span("prefill.queue", trace, queue_s, labels, ended_s_ago=prefill_s)
            computed = {**labels, "baton.cached_tokens": sequence.num_cached_tokens}
            tracing.record_span("prefill.compute", trace, prefill_s, computed)
            # The first token goes out at once; the blocks stay held until the transfer is over.
            yield FirstToken(output.token_id, output.finish_reason, sequence.num_cached_tokens, queue_s, prefill_s)
            if ticket is not None and output.finish_reason is None:
                handed_over = await self._hand_over(ticket, sequence, output.token_id)
                sent = {**labels, "baton.transfer_id": ticket.transfer_id, "baton.bytes": handed_over.num_bytes}
                tracing.record_span("kv.transfer", trace, handed_over.transfer_s, sent)
                yield handed_over

    async def _hand_over(self, ticket: Ticket, sequence: Sequence, first_token: int) -> HandedOver:
        state_slot = sequence.state_slot if sequence.state_slot >= 0 else None
        try:
            return await self._sender.send(ticket, sequence.block_table, first_token, state_slot)
        except WorkerFailed as error:
            # It is the decode worker that failed; the router must not take this one for broken.
            raise TransferError(str(error)) from error
