"""Decode: reserves blocks, takes over what a prefill worker computed, and streams tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from opentelemetry.context import Context

from baton.engine.core.engine import Generated, Reserved
from baton.engine.core.loop import EngineLoop, SequenceHandle
from baton.engine.core.sequence import Purpose, Sequence
from baton.errors import TransferCorrupted, WorkerDraining
from baton.messages import (
    DecodeRequest,
    Fetched,
    FetchRequest,
    NewTokens,
    PrefillReport,
    PrefixSource,
    SequenceSpec,
    Ticket,
)
from baton.telemetry import tracing
from kvstore.transfer.endpoint import KvEndpoint


class DecodeService:
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

    async def decode(self, request: DecodeRequest, trace: Context) -> AsyncGenerator[Ticket | NewTokens]:
        """Serves one call, for as long as the generator is open.

        Raises:
            WorkerDraining: the worker takes no new work.
            TransferError: the KV did not come, or not with a token of the model's.
        """
        self._require_staying()
        spec = request.sequence
        span = tracing.start_span("decode", trace, {"baton.worker": self._worker_id})
        try:
            if request.await_kv:
                serve: AsyncGenerator[Ticket | NewTokens] = self._after_hand_over(spec)
            else:
                serve = self._aggregated(spec, request.source, tracing.context_of(span))
            async with contextlib.aclosing(serve) as events:
                async for event in events:
                    yield event
        finally:
            span.end()

    async def fetch(self, request: FetchRequest, trace: Context) -> AsyncGenerator[Fetched]:
        """Pulls a prefix of a sequence that will come here, so that little is missing when it does."""
        self._require_staying()
        num_tokens = await self._kv.prefixes.fetch(request.sequence, request.source, time.monotonic(), trace)
        self._require_staying()
        yield Fetched(num_tokens)

    def _require_staying(self) -> None:
        if self._is_draining():
            raise WorkerDraining(f"{self._worker_id} takes no new work")

    async def _aggregated(
        self, spec: SequenceSpec, source: PrefixSource | None, trace: Context
    ) -> AsyncGenerator[NewTokens]:
        """Prefills here, from a prefix pulled from `source` if there is one, and decodes here."""
        arrived_s = time.monotonic()
        began_s = time.monotonic()
        num_pulled = await self._kv.prefixes.fetch(spec, source, arrived_s, trace) if source else 0
        pull_s = time.monotonic() - began_s if num_pulled else 0.0
        async with (
            self._loop.sequence(spec, Purpose.GENERATE, arrived_s) as handle,
            contextlib.aclosing(self._tokens(handle)) as new,
        ):
            yield replace(await anext(new), report=_report(handle.sequence, num_pulled, pull_s))
            async for message in new:
                yield message

    async def _after_hand_over(self, spec: SequenceSpec) -> AsyncGenerator[Ticket | NewTokens]:
        """Reserves, answers with the ticket, waits for the KV, and decodes. The open call is the reservation."""
        async with self._loop.sequence(spec, Purpose.RECEIVE) as handle:
            reserved = await handle.next()
            assert isinstance(reserved, Reserved)
            sequence = reserved.sequence
            ticket = self._kv.receiver.expect(
                f"{sequence.sequence_id}@{self._worker_id}",
                sequence.num_tokens,
                reserved.skip_tokens,
                sequence.block_table,
                sequence.state_slot if sequence.state_slot >= 0 else None,
            )
            try:
                yield ticket
                arrival = await self._kv.receiver.wait_committed(ticket)
            finally:
                # Whatever happened, no transfer writes these blocks from here on: `insert` uses them, or leaving the
                # sequence's context frees them.
                await self._kv.receiver.release(ticket)
            # The router has the first token already, straight from the prefill worker, and its finish reason too.
            assert arrival.first_token is not None
            if arrival.first_token >= (vocab_size := self._loop.engine.runner.vocab_size):
                raise TransferCorrupted(f"token {arrival.first_token} came with the KV; the model has {vocab_size}")
            if self._loop.insert(sequence, arrival.first_token) is None:
                async with contextlib.aclosing(self._tokens(handle)) as messages:
                    async for message in messages:
                        yield message

    async def _tokens(self, handle: SequenceHandle) -> AsyncGenerator[NewTokens]:
        """All further tokens; those that are ready together travel together."""
        while True:
            outputs = [await handle.next(), *handle.take_ready()]
            generated = [output for output in outputs if isinstance(output, Generated)]
            token_ids = tuple(output.token_id for output in generated)
            finish_reason = generated[-1].finish_reason
            yield NewTokens(token_ids, finish_reason)
            if finish_reason is not None:
                return


def _report(sequence: Sequence, num_pulled: int, pull_s: float) -> PrefillReport:
    """Once the first token of a sequence is there, which was computed here."""
    return PrefillReport(
        num_cached_tokens=sequence.num_cached_tokens,
        queue_s=sequence.scheduled_s - sequence.arrival_s,
        prefill_s=sequence.first_token_s - sequence.scheduled_s,
        num_pulled_tokens=num_pulled,
        pull_s=pull_s,
        room_s=sequence.full_s,
    )
