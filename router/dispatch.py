"""Serves one choice on the workers: place, reserve, prefill, hand over, decode; and again when a worker fails.

    split         Decode(await_kv) --> ticket --> Prefill(ticket) --> first token --> KV handed over --> further tokens
                  `----- the open stream is the reservation ------------------------------------------------ ... ---'
    aggregated    Decode --> all tokens

A failure before the last token places the choice again, with the tokens emitted so far as part of its prompt. Tokens
are drawn by position, so the stream goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from opentelemetry.context import Context

from baton.blocks import GRANULE, block_keys
from baton.config import RouterConfig
from baton.errors import InvalidRequest, NoWorker, Overloaded, TransferError, WorkerFailed
from baton.messages import FirstToken, HandedOver, NewTokens, SequenceSpec, Ticket
from baton.telemetry.instruments import Instruments
from router.placement import Mode, Placement, Prompt, place
from router.pools import PoolView
from router.worker_calls import WorkerCallError, WorkerCalls, WorkerStream

logger = logging.getLogger(__name__)
HAND_OVER_REPORT_S = 0.05
"""How long the first decoded token waits for the prefill worker's report on the hand-over, which is there already."""
MAX_FAILED_TRANSFERS = 2
"""Failed hand-overs of a choice before the decode worker computes the prompt itself."""
A = TypeVar("A")
B = TypeVar("B")


@dataclass(slots=True)
class ChoiceRecord:
    """What happened to one choice, filled in as it happens. Seconds are of the attempt that was served."""

    began_s: float = 0.0
    """When the attempt began, on the monotonic clock."""
    num_cached_tokens: int | None = None
    """Of the first attempt: later ones find what it left behind."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    mode: str = ""
    retries: int = 0
    emitted: list[int] = field(default_factory=list)


class Dispatcher:
    def __init__(self, pools: PoolView, calls: WorkerCalls, config: RouterConfig, instruments: Instruments) -> None:
        self._pools = pools
        self._calls = calls
        self._config = config
        self._instruments = instruments

    async def run(self, spec: SequenceSpec, record: ChoiceRecord, trace: Context) -> AsyncGenerator[NewTokens]:
        """The tokens of one choice, as they come; the last message has the finish reason.

        Closing the generator early cancels the choice on every worker.

        Raises:
            Overloaded, NoWorker, WorkerFailed, TransferError: the choice could not be served within
                `max_attempts` placements.
        """
        refused: set[str] = set()
        num_failed_transfers = 0
        for attempt in range(self._config.max_attempts):
            current = replace(spec, token_ids=spec.token_ids + tuple(record.emitted), attempt=attempt)
            mode = self._config.mode
            if mode == "auto" and num_failed_transfers >= MAX_FAILED_TRANSFERS:
                mode = Mode.AGGREGATED  # slower perhaps, but nothing has to travel
            try:
                async with contextlib.aclosing(self._attempt(current, mode, refused, record, trace)) as messages:
                    async for message in messages:
                        record.emitted += message.token_ids
                        yield message
                return
            except WorkerCallError as failure:
                if isinstance(failure.error, InvalidRequest) or attempt == self._config.max_attempts - 1:
                    raise failure.error from failure
                if isinstance(failure.error, Overloaded):
                    refused.add(failure.worker.info.id)
                elif isinstance(failure.error, WorkerFailed):
                    self._pools.suspect(failure.worker)
                elif isinstance(failure.error, TransferError):
                    num_failed_transfers += 1
                record.retries += 1
                self._instruments.retries.add(1, {"error": type(failure.error).__name__})
                logger.warning(
                    "%s is placed again after %d tokens: %s", current.sequence_id, len(record.emitted), failure.error
                )

    async def _attempt(
        self, spec: SequenceSpec, mode: str, refused: set[str], record: ChoiceRecord, trace: Context
    ) -> AsyncGenerator[NewTokens]:
        record.began_s = time.monotonic()
        block_size = next((worker.info.block_size for worker in self._pools.workers), GRANULE)
        prompt = Prompt(len(spec.token_ids), tuple(block_keys(spec.cache_seed, spec.token_ids, block_size)))
        placement = await self._place(prompt, mode, refused)
        record.mode = placement.mode
        record.prefill_worker, record.decode_worker = placement.prefill_worker, placement.decode_worker
        self._instruments.placements.add(
            1, {"mode": placement.mode, "prefill": placement.prefill_worker, "decode": placement.decode_worker}
        )
        serve = self._split if placement.mode is Mode.SPLIT else self._aggregated
        async with contextlib.aclosing(serve(spec, prompt, placement, record, trace)) as messages:
            async for message in messages:
                yield message

    async def _place(self, prompt: Prompt, mode: str, refused: set[str]) -> Placement:
        """Waits, within bounds, until the workers for a request are there."""
        deadline = time.monotonic() + self._config.worker_wait_s
        while True:
            placement = place(
                prompt,
                self._pools.candidates(prompt, refused),
                mode,
                load_weight=self._config.load_weight,
                aggregate_below_tokens=self._config.aggregate_below_tokens,
            )
            if placement is not None:
                return placement
            if refused:
                raise Overloaded("every worker's queue is full; try again later")
            if time.monotonic() >= deadline:
                raise NoWorker(
                    f"no worker became ready within {self._config.worker_wait_s:g} s; `baton status` shows the pools"
                )
            await self._pools.wait_for_change(deadline - time.monotonic())

    async def _aggregated(
        self, spec: SequenceSpec, prompt: Prompt, placement: Placement, record: ChoiceRecord, trace: Context
    ) -> AsyncGenerator[NewTokens]:
        worker = self._pools.get(placement.decode_worker)
        with self._pools.working(worker, prompt.num_tokens):
            async with self._calls.decode(worker, spec, await_kv=False, trace=trace) as stream:
                message = await _read_tokens(stream)
                self._book_prefill(record, message.num_cached_tokens, message.prefill_s)
                yield message
                while message.finish_reason is None:
                    message = await _read_tokens(stream)
                    yield message

    async def _split(
        self, spec: SequenceSpec, prompt: Prompt, placement: Placement, record: ChoiceRecord, trace: Context
    ) -> AsyncGenerator[NewTokens]:
        decode_worker = self._pools.get(placement.decode_worker)
        prefill_worker = self._pools.get(placement.prefill_worker)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._pools.working(decode_worker, prompt.num_tokens))
            prefill_load = stack.enter_context(contextlib.ExitStack())
            prefill_load.enter_context(self._pools.working(prefill_worker, prompt.num_tokens))

            decode = await stack.enter_async_context(
                self._calls.decode(decode_worker, spec, await_kv=True, trace=trace)
            )
            ticket = await decode.read()
            assert isinstance(ticket, Ticket)
            prefill = await stack.enter_async_context(self._calls.prefill(prefill_worker, spec, ticket, trace=trace))
            first = await prefill.read()
            assert isinstance(first, FirstToken)
            prefill_load.close()
            self._book_prefill(record, first.num_cached_tokens, first.prefill_s)
            yield NewTokens((first.token_id,), first.finish_reason)
            if first.finish_reason is not None:
                return
            message = await self._first_after_hand_over(prefill, decode, record)
            yield message
            while message.finish_reason is None:
                message = await _read_tokens(decode)
                yield message

    async def _first_after_hand_over(
        self,
        prefill: WorkerStream[FirstToken | HandedOver],
        decode: WorkerStream[Ticket | NewTokens],
        record: ChoiceRecord,
    ) -> NewTokens:
        """The decode worker's first tokens. Whichever side sees the hand-over fail first, ends the wait at once."""
        async with _both(prefill.read(), _read_tokens(decode)) as (handing_over, reading):
            await asyncio.wait((handing_over, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                handing_over.result()  # if it failed, nothing will come on the decode stream
                await asyncio.wait((reading,))
            tokens = reading.result()
            # The KV has arrived; a prefill worker that dies or stalls before it says so hurts nobody.
            await asyncio.wait((handing_over,), timeout=HAND_OVER_REPORT_S)
            if handing_over.done() and handing_over.exception() is None:
                handed_over = handing_over.result()
                assert isinstance(handed_over, HandedOver)
                self._book_hand_over(record, handed_over)
        return tokens

    def _book_hand_over(self, record: ChoiceRecord, handed_over: HandedOver) -> None:
        record.transfer_s = handed_over.transfer_s
        self._instruments.transfer_duration.record(handed_over.transfer_s)
        self._instruments.transfer_bytes.add(handed_over.num_bytes)

    def _book_prefill(self, record: ChoiceRecord, num_cached_tokens: int, prefill_s: float) -> None:
        if record.num_cached_tokens is None:
            record.num_cached_tokens = num_cached_tokens
        record.prefill_s = prefill_s
        record.queue_s = max(0.0, time.monotonic() - record.began_s - prefill_s)
        self._instruments.queue_duration.record(record.queue_s)
        self._instruments.prefill_duration.record(prefill_s, {"mode": record.mode})


async def _read_tokens(stream: WorkerStream[Ticket | NewTokens]) -> NewTokens:
    message = await stream.read()
    assert isinstance(message, NewTokens)
    return message


@contextlib.asynccontextmanager
async def _both(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]
) -> AsyncGenerator[tuple[asyncio.Task[A], asyncio.Task[B]]]:
    """Runs two coroutines as tasks that have ended when the block is left."""
    tasks = (asyncio.create_task(first), asyncio.create_task(second))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
