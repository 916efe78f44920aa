"""Workers over any engine, and what a router does with two of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from opentelemetry.context import Context

from baton.config import TransferConfig
from baton.messages import DecodeRequest, FirstToken, NewTokens, PrefillRequest, SequenceSpec, Ticket, Transferred
from decode_worker.service import DecodeService
from engine.core.serving import ServingEngine
from kvstore.transfer.endpoint import KvEndpoint, WorkerContext
from prefill_worker.service import PrefillService
from tests.unit.kvstore.transfer.peers import local_worker, served, with_link

SMALL = with_link("tcp", slot_bytes=1024, span_tokens=16)
"""Chunks of a few tokens, for tiny caches."""


@contextlib.asynccontextmanager
async def serving(engine: ServingEngine, name: str, transfer: TransferConfig = SMALL) -> AsyncIterator[WorkerContext]:
    """A worker with this engine, whose `run` the caller sees to."""
    kv = KvEndpoint(local_worker(name, 1, engine.caches), engine, transfer)
    async with served(kv) as (address, _):
        kv.receiver.kv_address = address
        try:
            yield WorkerContext(name, engine, kv)
        finally:
            await kv.close()


async def aggregated(worker: WorkerContext, spec: SequenceSpec) -> list[NewTokens]:
    calls = DecodeService(worker).decode(DecodeRequest(spec, False), Context())
    return [message async for message in calls if isinstance(message, NewTokens)]


async def split(
    prefill: WorkerContext, decode: WorkerContext, spec: SequenceSpec, on_ticket: Callable[[Ticket], None] | None = None
) -> list[int]:
    """What a router does with two workers. Returns all tokens."""
    async with contextlib.aclosing(DecodeService(decode).decode(DecodeRequest(spec, True), Context())) as answers:
        ticket = await anext(answers)
        assert isinstance(ticket, Ticket)
        if on_ticket is not None:
            on_ticket(ticket)
        computing = PrefillService(prefill).prefill(PrefillRequest(spec, ticket), Context())
        events = [event async for event in computing]
        assert [type(event) for event in events] == [FirstToken, Transferred]
        tokens = [e.token_id for e in events if isinstance(e, FirstToken) and e.token_id is not None]
        async for message in answers:
            assert isinstance(message, NewTokens)
            tokens += message.token_ids
    return tokens
