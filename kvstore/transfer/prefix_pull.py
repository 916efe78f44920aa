"""Prefix pulls: a worker copies a prefix of a prompt from another worker's cache into its own.

A pulled prefix goes into the worker's prefix cache, where the engine finds it like any other. A pull that fails, or
finds less than expected, therefore costs only time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.blocks import HASH_BLOCK, num_pullable
from baton.errors import BatonError, TransferTimeout
from baton.messages import PrefixSource, Pull, SequenceSpec
from baton.rpc import from_rpc_error
from baton.rpc.member_auth import member_metadata
from baton.tasks import cancel_and_wait
from baton.telemetry import tracing
from baton.v1 import kv_pb2_grpc
from engine.core.outputs import Reserved
from engine.core.sequence import Purpose
from kvstore.transfer.connection.control_stream import open_channel
from kvstore.transfer.connection.reservations import Arrival, Expected

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from engine.core.serving import ServingEngine
    from kvstore.transfer.receiver import KvReceiver

logger = logging.getLogger(__name__)


class PrefixPuller:
    """Puller of prefixes into one worker's cache. For one event loop.

    Attributes:
        num_tokens: tokens pulled since the start.
        num_failed: pulls that failed since the start.
    """

    def __init__(self, worker_id: str, engine: ServingEngine, receiver: KvReceiver, timeout_s: float) -> None:
        self.num_tokens = 0
        self.num_failed = 0
        self._worker_id = worker_id
        self._engine = engine
        self._receiver = receiver
        self._timeout_s = timeout_s

    async def fetch(self, spec: SequenceSpec, source: PrefixSource, arrived_s: float, trace: Context) -> int:
        """Pull the part of a prompt that another worker has in its cache.

        Args:
            arrived_s: arrival time of the request, on the monotonic clock: the pull waits for blocks in the request's
                place.
            trace: the request's trace.

        Returns:
            The number of pulled tokens; 0 if the pull failed for any reason. The engine computes the rest.
        """
        if not self._engine.spec.supports_prefix_reuse or source.worker_id == self._worker_id:
            return 0
        block_size = self._receiver.layout.block_size
        num_tokens = num_pullable(len(spec.token_ids), source.num_tokens) // block_size * block_size
        if num_tokens <= 0:
            return 0
        prefix = spec.prefix(num_tokens)
        began_s = time.monotonic()
        num_pulled = 0
        try:
            keys = tuple(spec.block_keys(spec.token_ids, end=num_pullable(len(spec.token_ids), source.num_tokens)))
            num_pulled = await self._fetch(prefix, source, keys, arrived_s)
            self.num_tokens += num_pulled
        except BatonError as error:
            self.num_failed += 1
            logger.warning("the prefix of %s is computed, not pulled: %s", spec.sequence_id, error)
        labels: tracing.Attributes = {"baton.source": source.worker_id, "baton.pulled_tokens": num_pulled}
        tracing.record_span("kv.pull", trace, time.monotonic() - began_s, labels)
        return num_pulled

    async def _fetch(
        self, prefix: SequenceSpec, source: PrefixSource, keys: tuple[bytes, ...], arrived_s: float
    ) -> int:
        async with self._engine.sequence(prefix, Purpose.RECEIVE, arrived_s) as sequence:
            reserved = await sequence.next()
            assert isinstance(reserved, Reserved)
            num_tokens, skip_tokens = reserved.num_tokens, reserved.num_cached_tokens
            num_held = await self._num_held(reserved, keys)
            if num_held >= num_tokens:
                return 0
            name = f"{prefix.sequence_id}/prefix@{self._worker_id}"
            expected, tables = Expected.PREFIX, reserved.block_ids
            ticket = self._receiver.expect(name, num_tokens, skip_tokens, tables, expected, begins=reserved.begins)
            try:
                async with asyncio.timeout(self._timeout_s):
                    arrival = await self._pull(Pull(ticket, keys, source.permit), source)
            except TimeoutError:
                raise TransferTimeout(f"it did not arrive within {self._timeout_s:g} s") from None
            finally:
                await self._receiver.release(ticket)
            if arrival is None:
                return 0
            sequence.adopt(arrival.num_tokens)
            return arrival.num_tokens - num_held

    async def _num_held(self, reserved: Reserved, keys: tuple[bytes, ...]) -> int:
        """Return the length of the prefix after which the engine can continue without a pull.

        The engine may have more blocks, but lack the states or windows that belong to them.
        """
        if self._engine.spec.resumes_anywhere:
            return reserved.num_cached_tokens
        pin = await self._engine.pin_prefix(keys[: reserved.num_tokens // HASH_BLOCK])
        self._engine.unpin(pin)
        return pin.num_tokens

    async def _pull(self, pull: Pull, source: PrefixSource) -> Arrival | None:
        """Ask the source, and wait for the KV; returns None if the source has no more than this worker."""
        channel = open_channel(source.address, self._receiver.tls)
        try:
            stub: Any = kv_pb2_grpc.KvControlStub(channel)
            proof = member_metadata(self._receiver.keys, "/baton.v1.KvControl/Pull", source.incarnation)
            asked = asyncio.ensure_future(stub.Pull(wire.pull_to_pb(pull), metadata=proof))
            arriving = asyncio.create_task(self._receiver.wait_committed(pull.ticket))
            try:
                await asyncio.wait({asked, arriving}, return_when=asyncio.FIRST_COMPLETED)
                if arriving.done():
                    arriving.result()  # a failure ends the wait for the source, which may be dead
                response = await asked
                return await arriving if response.num_tokens else None
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, source.worker_id) from error
            finally:
                await cancel_and_wait((asked, arriving))
        finally:
            await channel.close()
